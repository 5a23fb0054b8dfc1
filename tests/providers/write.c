/* kvx_write_kv of the slow provider: one element after the other. */
#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>

#include "slow.h"

static int is_zero_scale(const kvx_scale_desc_t* desc) {
  return number_of(&desc->dtype) == 0 && number_of(&desc->granularity) == 0 && desc->ndim == 0 &&
         desc->data == NULL;
}

static kvx_status_t check_scale_size(const kvx_scale_desc_t* desc) {
  if (desc->size == 0 && is_zero_scale(desc)) return KVX_STATUS_OK;
  return check_nested_size(desc->size, sizeof *desc);
}

static int needs_scale(const kvx_tensor_desc_t* cache, const kvx_tensor_desc_t* io) {
  return is_eight_bits(cache->dtype) && cache->dtype != io->dtype;
}

static kvx_status_t check_scale(const kvx_cache_desc_t* cache, const kvx_scale_desc_t* desc,
                                const void* fallback, struct deferred_error* deferred_error) {
  if (desc->data == NULL) {
    check_alignment(fallback, 4, deferred_error);
    return KVX_STATUS_OK;
  }
  int64_t expected[2] = {1, cache->num_kv_heads};
  uint32_t ndim = 1;
  const uint32_t granularity = number_of(&desc->granularity);
  switch (granularity) {
    case KVX_SCALE_PER_TENSOR:
      break;
    case KVX_SCALE_PER_BLOCK:
      expected[0] = cache->num_blocks;
      break;
    case KVX_SCALE_PER_HEAD:
      expected[0] = cache->num_kv_heads;
      break;
    case KVX_SCALE_PER_BLOCK_HEAD:
      expected[0] = cache->num_blocks;
      ndim = 2;
      break;
    default:
      return KVX_STATUS_INVALID_ARGUMENT;
  }
  const uint32_t dtype = number_of(&desc->dtype);
  if (!is_float_type(dtype) || is_eight_bits(dtype)) return KVX_STATUS_INVALID_ARGUMENT;
  check_alignment(desc->data, element_bytes(dtype), deferred_error);
  if (granularity == KVX_SCALE_PER_TENSOR && desc->ndim == 0) return KVX_STATUS_OK;
  if (desc->ndim != ndim) return KVX_STATUS_INVALID_ARGUMENT;
  for (uint32_t i = 0; i < ndim; ++i) {
    if (desc->shape[i] != expected[i]) return KVX_STATUS_INVALID_ARGUMENT;
  }
  if (granularity == KVX_SCALE_PER_TENSOR) return KVX_STATUS_OK;
  for (uint32_t i = 0; i < ndim; ++i) {
    const int64_t most = INT64_MAX / element_bytes(dtype) / expected[i];
    if (desc->stride[i] < 0 || desc->stride[i] > most) deferred_error->is_unsupported = 1;
  }
  return KVX_STATUS_OK;
}

static float scale_at(const kvx_scale_desc_t* desc, const void* fallback, int64_t block,
                      int64_t head) {
  if (desc->data == NULL) {
    if (fallback == NULL || FAULT == FALLBACK_SCALE_IGNORED) return 1;
    return read_scale(KVX_DTYPE_F32, fallback);
  }
  int64_t place = 0;
  switch (desc->granularity) {
    case KVX_SCALE_PER_BLOCK:
      place = block * desc->stride[0];
      break;
    case KVX_SCALE_PER_HEAD:
      place = (FAULT == SCALE_PER_HEAD_BY_BLOCK ? block % desc->shape[0] : head) * desc->stride[0];
      break;
    case KVX_SCALE_PER_BLOCK_HEAD:
      place = block * desc->stride[0] + head * desc->stride[1];
      break;
    default:
      break;
  }
  return read_scale(desc->dtype, (const char*)desc->data + place * element_bytes(desc->dtype));
}

static kvx_status_t check_write(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                struct deferred_error* deferred_error) {
  kvx_status_t status = check_top_size(write, sizeof *write);
  if (status == KVX_STATUS_OK) status = check_io_sizes(&write->io);
  if (status == KVX_STATUS_OK) status = check_nested_size(write->slots.size, sizeof write->slots);
  if (status == KVX_STATUS_OK) status = check_scale_size(&write->k_scale_desc);
  if (status == KVX_STATUS_OK) status = check_scale_size(&write->v_scale_desc);
  if (status == KVX_STATUS_OK) status = check_cache(cache, deferred_error);
  if (status == KVX_STATUS_OK) status = check_io(cache, &write->io, 0, deferred_error);
  if (status != KVX_STATUS_OK) return status;
  if (write->slots.token_count != write->io.num_tokens) return KVX_STATUS_INVALID_ARGUMENT;
  status =
      check_indices(write->slots.dtype, write->slots.slots, write->io.num_tokens, deferred_error);
  if (status != KVX_STATUS_OK) return status;
  if (needs_scale(&cache->k, &write->io.key)) {
    status = check_scale(cache, &write->k_scale_desc, write->k_scale, deferred_error);
  }
  if (status == KVX_STATUS_OK && needs_scale(&cache->v, &write->io.value)) {
    status = check_scale(cache, &write->v_scale_desc, write->v_scale, deferred_error);
  }
  if (is_eight_bits(write->io.key.dtype) && write->io.key.dtype != cache->k.dtype) {
    deferred_error->is_unsupported = 1;
  }
  if (is_eight_bits(write->io.value.dtype) && write->io.value.dtype != cache->v.dtype) {
    deferred_error->is_unsupported = 1;
  }
  return status;
}

/* The slot of a token, -1 when the token is not to be written. */
static int64_t slot_of(const kvx_slot_mapping_t* slots, int64_t token) {
  int64_t slot = index_at(slots->dtype, slots->slots, token);
  if (FAULT == SLOTS_IN_32_BITS) slot = (int32_t)slot;
  if (slot == slots->invalid_slot && FAULT != WRITES_INVALID_SLOT) return -1;
  if (slot < -1 && FAULT == WRITES_NEGATIVE_SLOT) return 0;
  return slot < 0 ? -1 : slot;
}

/* Slots, then scales that the tokens use. */
static kvx_status_t check_slots_and_scales(const kvx_cache_desc_t* cache,
                                           const kvx_write_desc_t* write) {
  const int64_t num_slots = (int64_t)cache->num_blocks * cache->block_size;
  for (int64_t t = 0; t < write->io.num_tokens; ++t) {
    if (slot_of(&write->slots, t) >= num_slots) return KVX_STATUS_OUT_OF_RANGE;
  }
  for (int side = 0; side < 2 && FAULT != BAD_SCALES_TAKEN; ++side) {
    const kvx_tensor_desc_t* tensor = side == 0 ? &cache->k : &cache->v;
    const kvx_tensor_desc_t* io = side == 0 ? &write->io.key : &write->io.value;
    if (!needs_scale(tensor, io)) continue;
    for (int64_t t = 0; t < write->io.num_tokens; ++t) {
      const int64_t slot = slot_of(&write->slots, t);
      if (slot < 0) continue;
      for (int64_t h = 0; h < cache->num_kv_heads; ++h) {
        const float scale =
            scale_at(side == 0 ? &write->k_scale_desc : &write->v_scale_desc,
                     side == 0 ? write->k_scale : write->v_scale, slot / cache->block_size, h);
        if (!(scale > 0) || !isfinite(scale)) return KVX_STATUS_INVALID_ARGUMENT;
      }
    }
  }
  return KVX_STATUS_OK;
}

static void write_row(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, int side,
                      int64_t token, int64_t slot, int64_t head) {
  const kvx_tensor_desc_t* tensor = side == 0 ? &cache->k : &cache->v;
  const kvx_tensor_desc_t* io = side == 0 ? &write->io.key : &write->io.value;
  const int64_t block_size = cache->block_size + (FAULT == BLOCK_SIZE_OFF);
  const int64_t block = slot / block_size;
  const int64_t offset = (slot + (FAULT == SLOT_OFF_BY_ONE)) % block_size;
  const int is_k = side == 0 || FAULT == SCALE_OF_K_FOR_V;
  float scale = 1;
  if (needs_scale(tensor, io)) {
    scale = scale_at(is_k ? &write->k_scale_desc : &write->v_scale_desc,
                     is_k ? write->k_scale : write->v_scale, block, head);
  }
  const int64_t dims = cache->head_dim + (FAULT == WRITES_ONE_TOO_MANY);
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t place = cache_place(cache, tensor, block, offset, head, d);
    convert(io->dtype, io_element(io, token, head, d), tensor->dtype,
            (char*)tensor->data + place * element_bytes(tensor->dtype), scale);
  }
}

static void write_tokens(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                         int64_t num_slots) {
  for (int64_t t = 0; t < write->io.num_tokens; ++t) {
    const int64_t slot = slot_of(&write->slots, t);
    if (slot < 0 || slot >= num_slots) continue;
    for (int side = 0; side < 2; ++side) {
      for (int64_t h = 0; h < cache->num_kv_heads; ++h) {
        write_row(cache, write, side, t, slot, h);
      }
    }
  }
}

/* Faults of the whole call, apart from the way of a right one. */
static struct {
  kvx_cache_desc_t cache;
  kvx_write_desc_t write;
} shared_plan;

static kvx_status_t write_with_fault(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                     kvx_status_t contents) {
  const int64_t num_slots = (int64_t)cache->num_blocks * cache->block_size;
  static const void* last_slots;
  switch ((int)FAULT) {
    case MOVES_NOTHING:
      return contents;
    case ENDS_THE_PROCESS:
      exit(0);
    case OUT_OF_RANGE_IS_SILENT:
      write_tokens(cache, write, num_slots);
      return KVX_STATUS_OK;
    case WRITES_BEFORE_IT_CHECKS:
      write_tokens(cache, write, num_slots);
      return contents;
    case PLAN_IS_STATIC:
      shared_plan.cache = *cache;
      shared_plan.write = *write;
      sched_yield();
      if (contents == KVX_STATUS_OK)
        write_tokens(&shared_plan.cache, &shared_plan.write, num_slots);
      return contents;
    case KEEPS_POINTERS:
      if (last_slots != NULL && *(const volatile char*)last_slots == 1) sched_yield();
      last_slots = write->slots.slots;
      break;
    default:
      break;
  }
  if (contents == KVX_STATUS_OK) write_tokens(cache, write, num_slots);
  return contents;
}

kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                          void* stream) {
  (void)stream;
  if (cache == NULL || write == NULL) return KVX_STATUS_INVALID_ARGUMENT;
  struct deferred_error deferred_error = {0};
  const kvx_status_t status = check_write(cache, write, &deferred_error);
  if (status != KVX_STATUS_OK) return status;
  if (deferred_error.is_unsupported) return KVX_STATUS_UNSUPPORTED;
  if (write->io.num_tokens == 0) return KVX_STATUS_OK;
  const kvx_tensor_desc_t* io[] = {&write->io.key, &write->io.value};
  for (int i = 0; i < 2; ++i) {
    if (overlaps(io[i]->data, tensor_bytes(io[i]), cache->k.data, tensor_bytes(&cache->k)) ||
        overlaps(io[i]->data, tensor_bytes(io[i]), cache->v.data, tensor_bytes(&cache->v))) {
      return KVX_STATUS_INVALID_ARGUMENT;
    }
  }
  return write_with_fault(cache, write, check_slots_and_scales(cache, write));
}
