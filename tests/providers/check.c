/* What descriptors must be, in the order of the specification. */
#include <stddef.h>
#include <string.h>

#include "slow.h"

uint32_t number_of(const void* enum_field) {
  uint32_t number;
  memcpy(&number, enum_field, sizeof number);
  return number;
}

kvx_status_t check_top_size(const void* object, uint32_t known_bytes) {
  const uint32_t size = number_of(object);
  if (size < known_bytes) return KVX_STATUS_INVALID_ARGUMENT;
  if (size > 4096) return KVX_STATUS_INCOMPATIBLE; /* no struct will ever be larger */
  for (uint32_t i = known_bytes; i < size; ++i) {
    if (((const unsigned char*)object)[i] != 0) return KVX_STATUS_INCOMPATIBLE;
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_nested_size(uint32_t size, uint32_t known_bytes) {
  if (FAULT == SIZES_UNCHECKED) return KVX_STATUS_OK;
  if (size < known_bytes) return KVX_STATUS_INVALID_ARGUMENT;
  return size == known_bytes ? KVX_STATUS_OK : KVX_STATUS_INCOMPATIBLE;
}

void check_alignment(const void* data, int bytes, struct deferred_error* deferred_error) {
  if ((uintptr_t)data % (uintptr_t)bytes != 0) deferred_error->is_unsupported = 1;
}

static kvx_status_t check_memory(const kvx_memory_type_t* memory,
                                 struct deferred_error* deferred_error) {
  switch (number_of(memory)) {
    case KVX_MEMORY_HOST:
      return KVX_STATUS_OK;
    case KVX_MEMORY_DEVICE:
    case KVX_MEMORY_UNIFIED:
      deferred_error->is_unsupported = 1;
      return KVX_STATUS_OK;
    default:
      return KVX_STATUS_INVALID_ARGUMENT;
  }
}

/* Canonical strides or multiples of 16 bytes. */
static void check_stride_rule(const kvx_tensor_desc_t* tensor, int bytes,
                              struct deferred_error* deferred_error) {
  full_precision canonical = 1;
  for (uint32_t i = tensor->ndim; i-- > 0;) {
    if (tensor->stride[i] != canonical && (full_precision)tensor->stride[i] * bytes % 16 != 0) {
      deferred_error->is_unsupported = 1;
    }
    /* Larger than any stride can be; the product must not wrap around. */
    if (canonical < (full_precision)1 << 64) canonical *= tensor->shape[i];
  }
}

/* In elements. Axes from the smallest stride up: each must step over all that lies inside it, or
 * two elements might share an address. INVALID_ARGUMENT: larger than memory. */
static kvx_status_t check_span(const kvx_tensor_desc_t* tensor, int bytes,
                               struct deferred_error* deferred_error) {
  int is_done[KVX_MAX_TENSOR_DIMS] = {0};
  full_precision span = 1;
  for (uint32_t n = 0; n < tensor->ndim; ++n) {
    int next = -1;
    for (uint32_t i = 0; i < tensor->ndim; ++i) {
      if (!is_done[i] && (next < 0 || tensor->stride[i] < tensor->stride[next])) next = (int)i;
    }
    is_done[next] = 1;
    if (tensor->shape[next] == 1) continue;
    if (tensor->stride[next] < span) {
      deferred_error->is_unsupported = 1;
      return KVX_STATUS_OK;
    }
    span += (full_precision)(tensor->shape[next] - 1) * tensor->stride[next];
    if (span > INT64_MAX) return KVX_STATUS_INVALID_ARGUMENT;
  }
  return span * bytes > INT64_MAX ? KVX_STATUS_INVALID_ARGUMENT : KVX_STATUS_OK;
}

int64_t tensor_bytes(const kvx_tensor_desc_t* tensor) {
  int64_t last = 0;
  for (uint32_t i = 0; i < tensor->ndim; ++i) {
    if (tensor->shape[i] > 1) last += (tensor->shape[i] - 1) * tensor->stride[i];
  }
  return (last + 1) * element_bytes(number_of(&tensor->dtype));
}

int overlaps(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  return (const char*)a < (const char*)b + b_bytes && (const char*)b < (const char*)a + a_bytes;
}

static kvx_status_t check_cache_tensor(const kvx_cache_desc_t* cache,
                                       const kvx_tensor_desc_t* tensor,
                                       struct deferred_error* deferred_error) {
  const uint32_t dtype = number_of(&tensor->dtype);
  const uint32_t layout = number_of(&tensor->layout);
  const int64_t blocks = cache->num_blocks, tokens = cache->block_size;
  const int64_t heads = cache->num_kv_heads, dims = cache->head_dim;
  const int64_t* shape = tensor->shape;
  if (!is_float_type(dtype)) return KVX_STATUS_INVALID_ARGUMENT;
  int has_pack = 0;
  switch (layout) {
    case KVX_LAYOUT_BLOCK_NHD:
    case KVX_LAYOUT_BLOCK_HND:
      break;
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      has_pack = 1;
      break;
    case KVX_LAYOUT_BLOCK_CUSTOM:
      has_pack = tensor->ndim == 5;
      break;
    default:
      return KVX_STATUS_INVALID_ARGUMENT;
  }
  if (tensor->ndim != (has_pack ? 5u : 4u)) return KVX_STATUS_INVALID_ARGUMENT;
  int fits;
  if (has_pack) {
    fits = shape[4] >= 1 && dims % shape[4] == 0 && shape[0] == blocks && shape[1] == heads &&
           shape[2] == dims / shape[4] && shape[3] == tokens;
  } else if (layout == KVX_LAYOUT_BLOCK_HND) {
    fits = shape[0] == blocks && shape[1] == heads && shape[2] == tokens && shape[3] == dims;
  } else {
    fits = shape[0] == blocks && shape[1] == tokens && shape[2] == heads && shape[3] == dims;
  }
  if (!fits || tensor->data == NULL) return KVX_STATUS_INVALID_ARGUMENT;
  if (check_memory(&tensor->memory, deferred_error) != KVX_STATUS_OK)
    return KVX_STATUS_INVALID_ARGUMENT;
  const int bytes = element_bytes(dtype);
  if (layout != KVX_LAYOUT_BLOCK_CUSTOM) check_stride_rule(tensor, bytes, deferred_error);
  check_alignment(tensor->data, bytes, deferred_error);
  if (FAULT == UNSUPPORTED_BEFORE_INVALID && deferred_error->is_unsupported)
    return KVX_STATUS_UNSUPPORTED;
  return check_span(tensor, bytes, deferred_error);
}

static int is_zero_pool(const kvx_pool_desc_t* pool) {
  return number_of(&pool->memory) == 0 && pool->bytes_per_block == 0 && pool->primary == NULL &&
         pool->secondary == NULL;
}

kvx_status_t check_cache_sizes(const kvx_cache_desc_t* cache) {
  kvx_status_t status = check_top_size(cache, sizeof *cache);
  if (status == KVX_STATUS_OK) status = check_nested_size(cache->k.size, sizeof cache->k);
  if (status == KVX_STATUS_OK) status = check_nested_size(cache->v.size, sizeof cache->v);
  if (status != KVX_STATUS_OK) return status;
  if (cache->pool.size == 0 && is_zero_pool(&cache->pool)) return KVX_STATUS_OK;
  return check_nested_size(cache->pool.size, sizeof cache->pool);
}

kvx_status_t check_cache(const kvx_cache_desc_t* cache, struct deferred_error* deferred_error) {
  kvx_status_t status = check_cache_sizes(cache);
  if (status != KVX_STATUS_OK) return status;
  if (cache->pool.primary != NULL || cache->pool.secondary != NULL) {
    status = check_memory(&cache->pool.memory, deferred_error);
    if (status != KVX_STATUS_OK) return status;
  }
  if (cache->num_blocks == 0 || cache->block_size == 0 || cache->num_kv_heads == 0 ||
      cache->head_dim == 0 || number_of(&cache->k.layout) != number_of(&cache->v.layout)) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  status = check_cache_tensor(cache, &cache->k, deferred_error);
  return status != KVX_STATUS_OK ? status : check_cache_tensor(cache, &cache->v, deferred_error);
}

kvx_status_t check_io_sizes(const kvx_kv_io_desc_t* io) {
  kvx_status_t status = check_nested_size(io->size, sizeof *io);
  if (status == KVX_STATUS_OK) status = check_nested_size(io->key.size, sizeof io->key);
  if (status == KVX_STATUS_OK) status = check_nested_size(io->value.size, sizeof io->value);
  return status;
}

static kvx_status_t check_io_tensor(const kvx_kv_io_desc_t* io, const kvx_tensor_desc_t* tensor,
                                    int64_t sequences, struct deferred_error* deferred_error) {
  const uint32_t dtype = number_of(&tensor->dtype);
  if (!is_float_type(dtype)) return KVX_STATUS_INVALID_ARGUMENT;
  if (tensor->ndim != 3 && tensor->ndim != 4) return KVX_STATUS_INVALID_ARGUMENT;
  const int64_t* shape = tensor->shape;
  if (tensor->ndim == 4) {
    if (shape[0] < 0 || shape[1] < 0) return KVX_STATUS_INVALID_ARGUMENT;
    if ((full_precision)shape[0] * shape[1] != io->num_tokens) return KVX_STATUS_INVALID_ARGUMENT;
    if (sequences > 0 && shape[0] != sequences) return KVX_STATUS_INVALID_ARGUMENT;
  } else if (shape[0] != io->num_tokens) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  const int last = (int)tensor->ndim - 1;
  if (shape[last - 1] != io->num_kv_heads || shape[last] != io->head_dim) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  if (check_memory(&tensor->memory, deferred_error) != KVX_STATUS_OK)
    return KVX_STATUS_INVALID_ARGUMENT;
  if (io->num_tokens == 0) return KVX_STATUS_OK;
  if (tensor->data == NULL) return KVX_STATUS_INVALID_ARGUMENT;
  const int bytes = element_bytes(dtype);
  check_stride_rule(tensor, bytes, deferred_error);
  if (shape[last] > 1 && tensor->stride[last] != 1) deferred_error->is_unsupported = 1;
  check_alignment(tensor->data, bytes, deferred_error);
  return check_span(tensor, bytes, deferred_error);
}

kvx_status_t check_io(const kvx_cache_desc_t* cache, const kvx_kv_io_desc_t* io, int64_t sequences,
                      struct deferred_error* deferred_error) {
  if (io->num_kv_heads != cache->num_kv_heads || io->head_dim != cache->head_dim) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  const kvx_status_t status = check_io_tensor(io, &io->key, sequences, deferred_error);
  return status != KVX_STATUS_OK ? status
                                 : check_io_tensor(io, &io->value, sequences, deferred_error);
}

kvx_status_t check_indices(kvx_dtype_t dtype, const void* data, int64_t count,
                           struct deferred_error* deferred_error) {
  if (dtype != KVX_DTYPE_S32 && dtype != KVX_DTYPE_S64) return KVX_STATUS_INVALID_ARGUMENT;
  if (data == NULL && count != 0) return KVX_STATUS_INVALID_ARGUMENT;
  check_alignment(data, dtype == KVX_DTYPE_S64 ? 8 : 4, deferred_error);
  return KVX_STATUS_OK;
}

int64_t index_at(kvx_dtype_t dtype, const void* data, int64_t i) {
  if (dtype == KVX_DTYPE_S64) return ((const int64_t*)data)[i];
  return ((const int32_t*)data)[i];
}

int64_t cache_place(const kvx_cache_desc_t* cache, const kvx_tensor_desc_t* tensor, int64_t block,
                    int64_t token, int64_t head, int64_t dim) {
  const int64_t* stride = tensor->stride;
  if (tensor->ndim == 5) {
    const int64_t pack = FAULT == V_PACK_OF_K ? cache->k.shape[4] : tensor->shape[4];
    return block * stride[0] + head * stride[1] + dim / pack * stride[2] + token * stride[3] +
           dim % pack * stride[4];
  }
  const int is_hnd = tensor->layout == KVX_LAYOUT_BLOCK_HND && FAULT != HND_AS_NHD;
  if (FAULT == IGNORES_STRIDES) {
    const int64_t tokens = cache->block_size, heads = cache->num_kv_heads, dims = cache->head_dim;
    if (is_hnd) return ((block * heads + head) * tokens + token) * dims + dim;
    return ((block * tokens + token) * heads + head) * dims + dim;
  }
  if (is_hnd) return block * stride[0] + head * stride[1] + token * stride[2] + dim * stride[3];
  return block * stride[0] + token * stride[1] + head * stride[2] + dim * stride[3];
}

char* io_element(const kvx_tensor_desc_t* tensor, int64_t token, int64_t head, int64_t dim) {
  const int64_t* stride = tensor->stride;
  int64_t place;
  if (tensor->ndim == 3) {
    place = token * stride[0] + head * stride[1] + dim * stride[2];
  } else {
    const int64_t each = tensor->shape[1];
    place =
        token / each * stride[0] + token % each * stride[1] + head * stride[2] + dim * stride[3];
  }
  return (char*)tensor->data + place * element_bytes(tensor->dtype);
}
