// Checks of a v1 cache descriptor and of the key and value tensors beside it.
#include "api/checks/check_cache.hpp"

#include <array>

#include "api/call.hpp"
#include "api/checks/check_tensor.hpp"
#include "api/checks/device_memory.hpp"
#include "api/checks/memory_range.hpp"
#include "api/guard.hpp"
#include "core/checked.hpp"

namespace kvx::boundary {
namespace {

// An absent pool is all zero; a described one has its size.
Status check_pool(const kvx_pool_desc_t& pool, DeferredErrors& deferred_errors) {
  if (pool.size == 0) {
    if (number_of(pool.memory) == 0 && pool.bytes_per_block == 0 && pool.primary == nullptr &&
        pool.secondary == nullptr) {
      return {};
    }
    return invalid_argument("cache.pool.size is 0 but other fields are set; expected {}",
                            sizeof(kvx_pool_desc_t));
  }
  KVX_RETURN_IF_ERROR(check_nested(pool, "cache.pool"));
  const bool is_used = pool.primary != nullptr || pool.secondary != nullptr;
  return is_used ? check_memory(number_of(pool.memory), "cache.pool", deferred_errors) : Status();
}

Status check_counts(const kvx_cache_desc_t& cache) {
  struct Count {
    const char* name;
    uint32_t value;
  };
  const Count counts[] = {{"num_blocks", cache.num_blocks},
                          {"block_size", cache.block_size},
                          {"num_kv_heads", cache.num_kv_heads},
                          {"head_dim", cache.head_dim}};
  for (const Count& count : counts) {
    if (count.value == 0) return invalid_argument("cache.{} is 0; expected at least 1", count.name);
  }
  return {};
}

// Which dimensions of a cache tensor are tokens and heads.
struct AxisOrder {
  int ndim;
  int token;
  int head;
};

Result<AxisOrder> order_of(const kvx_tensor_desc_t& tensor, std::string_view name) {
  constexpr AxisOrder kNhd = {4, 1, 2};
  constexpr AxisOrder kHnd = {4, 2, 1};
  constexpr AxisOrder kHndPacked = {5, 3, 1};
  switch (number_of(tensor.layout)) {
    case KVX_LAYOUT_BLOCK_NHD:
      return kNhd;
    case KVX_LAYOUT_BLOCK_HND:
      return kHnd;
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      return kHndPacked;
    case KVX_LAYOUT_BLOCK_CUSTOM:
      if (tensor.ndim != 4 && tensor.ndim != 5) {
        return invalid_argument(
            "{}.ndim is {}; a CUSTOM layout has 4 (block, token, head, dim) or "
            "5 (block, head, dim / pack, token, pack)",
            name, tensor.ndim);
      }
      return tensor.ndim == 4 ? kNhd : kHndPacked;
    default:
      return invalid_argument(
          "{}.layout is {}; expected BLOCK_NHD 1, BLOCK_HND 2, "
          "BLOCK_HND_PACKED 3 or BLOCK_CUSTOM 15",
          name, number_of(tensor.layout));
  }
}

Status check_cache_shape(const kvx_tensor_desc_t& tensor, const CacheView& cache,
                         const AxisOrder& order, std::string_view name) {
  std::array<int64_t, KVX_MAX_TENSOR_DIMS> expected = {cache.num_blocks};
  expected[order.token] = cache.block_size;
  expected[order.head] = cache.num_heads;
  if (order.ndim == 4) {
    expected[3] = cache.head_dim;
  } else {
    const int64_t pack = tensor.shape[4];
    if (tensor.ndim == 5 && (pack < 1 || cache.head_dim % pack != 0)) {
      return invalid_argument("{}.shape[4] (pack) is {}; expected a divisor of head_dim {}", name,
                              pack, cache.head_dim);
    }
    expected[2] = tensor.ndim == 5 ? cache.head_dim / pack : 0;
    expected[4] = pack;
  }
  return check_shape(tensor, std::span(expected).first(order.ndim), name);
}

// Requires: checked strides. The stride of an axis of one element may be any number, so 0 is
// returned.
int64_t stride_bytes(const kvx_tensor_desc_t& tensor, int axis, int element_bytes) {
  return tensor.shape[axis] == 1 ? 0 : tensor.stride[axis] * element_bytes;
}

// Requires: checked strides. Runs without a gap between them become one run.
RowShape row_shape(const kvx_tensor_desc_t& tensor, const AxisOrder& order, int element_bytes) {
  const int last = order.ndim - 1;
  const auto one_run = [element_bytes](int64_t length, int64_t stride) {
    return RowShape{1, length, 0, length == 1 ? element_bytes : stride};
  };
  const int64_t run_length = tensor.shape[last];
  const int64_t element_stride = stride_bytes(tensor, last, element_bytes);
  if (order.ndim == 4) return one_run(run_length, element_stride);
  const int64_t num_runs = tensor.shape[2];
  const int64_t run_stride = stride_bytes(tensor, 2, element_bytes);
  if (num_runs == 1) return one_run(run_length, element_stride);
  if (run_length == 1) return one_run(num_runs, run_stride);
  if (run_stride == run_length * element_stride) {
    return one_run(num_runs * run_length, element_stride);
  }
  return {num_runs, run_length, run_stride, element_stride};
}

// Fills `side`, which is unspecified when deferred_errors has an error.
Status check_side(const kvx_tensor_desc_t& tensor, const CacheView& cache, std::string_view name,
                  CacheSide& side, DeferredErrors& deferred_errors) {
  KVX_ASSIGN_OR_RETURN(side.element, check_element(tensor, name));
  KVX_ASSIGN_OR_RETURN(const AxisOrder order, order_of(tensor, name));
  KVX_RETURN_IF_ERROR(check_cache_shape(tensor, cache, order, name));
  KVX_RETURN_IF_ERROR(check_memory(number_of(tensor.memory), name, deferred_errors));
  if (tensor.data == nullptr) return invalid_argument("{}.data is null", name);
  const bool is_custom = number_of(tensor.layout) == KVX_LAYOUT_BLOCK_CUSTOM;
  const int bytes = bytes_of(side.element);
  KVX_ASSIGN_OR_RETURN(
      side.total_bytes,
      check_strides(tensor, is_custom ? StrideRule::kFree : StrideRule::kCanonicalOr16Bytes, bytes,
                    name, deferred_errors));
  check_alignment(tensor.data, bytes, name, deferred_errors);
  side.memory = memory_type(number_of(tensor.memory));
  if (!deferred_errors.status().ok()) return {};
  side.data = static_cast<uint8_t*>(tensor.data);
  side.block_stride = stride_bytes(tensor, 0, bytes);
  side.token_stride = stride_bytes(tensor, order.token, bytes);
  side.head_stride = stride_bytes(tensor, order.head, bytes);
  side.row = row_shape(tensor, order, bytes);
  side.block_bytes = side.total_bytes - (cache.num_blocks - 1) * side.block_stride;
  return {};
}

Status check_io_tensor(const kvx_tensor_desc_t& tensor, const kvx_kv_io_desc_t& io,
                       int64_t num_sequences, std::string_view name, IoSide& side,
                       DeferredErrors& deferred_errors) {
  KVX_ASSIGN_OR_RETURN(side.element, check_element(tensor, name));
  const int64_t num_tokens = io.num_tokens;
  const bool is_padded = tensor.ndim == 4;
  std::array<int64_t, 4> expected = {num_tokens, io.num_kv_heads, io.head_dim};
  if (is_padded) {
    const int64_t* shape = tensor.shape;
    if ((CheckedSize(shape[0]) * CheckedSize(shape[1])).get() != num_tokens) {
      return invalid_argument("{}.shape begins {} x {}; expected io.num_tokens {} in all", name,
                              shape[0], shape[1], num_tokens);
    }
    expected = {num_sequences > 0 ? num_sequences : shape[0], shape[1], io.num_kv_heads,
                io.head_dim};
  }
  KVX_RETURN_IF_ERROR(check_shape(tensor, std::span(expected).first(is_padded ? 4 : 3), name));
  KVX_RETURN_IF_ERROR(check_memory(number_of(tensor.memory), name, deferred_errors));
  side.memory = memory_type(number_of(tensor.memory));
  if (num_tokens == 0) return {};
  if (tensor.data == nullptr) return invalid_argument("{}.data is null", name);

  const int bytes = bytes_of(side.element);
  KVX_ASSIGN_OR_RETURN(side.total_bytes, check_strides(tensor, StrideRule::kCanonicalOr16Bytes,
                                                       bytes, name, deferred_errors));
  const int last = static_cast<int>(tensor.ndim) - 1;
  if (tensor.stride[last] != 1 && tensor.shape[last] > 1) {
    deferred_errors.add(unsupported("{}.stride[{}] is {}; rows of IO tensors are contiguous", name,
                                    last, tensor.stride[last]));
  }
  check_alignment(tensor.data, bytes, name, deferred_errors);
  if (!deferred_errors.status().ok()) return {};
  side.data = static_cast<uint8_t*>(tensor.data);
  side.head_stride = stride_bytes(tensor, last - 1, bytes);
  side.token_stride = stride_bytes(tensor, last - 2, bytes);
  side.tokens_per_fragment = num_tokens;
  if (is_padded && stride_bytes(tensor, 0, bytes) != tensor.shape[1] * side.token_stride) {
    side.tokens_per_fragment = tensor.shape[1];
    side.fragment_stride = stride_bytes(tensor, 0, bytes);
  }
  return {};
}

}  // namespace

Result<CacheView> check_cache(const kvx_cache_desc_t* cache, DeferredErrors& deferred_errors) {
  KVX_RETURN_IF_ERROR(check_top_level(cache, "cache"));
  KVX_RETURN_IF_ERROR(check_nested(cache->k, "cache.k"));
  KVX_RETURN_IF_ERROR(check_nested(cache->v, "cache.v"));
  KVX_RETURN_IF_ERROR(check_pool(cache->pool, deferred_errors));
  KVX_RETURN_IF_ERROR(check_counts(*cache));
  const uint32_t k_layout = number_of(cache->k.layout);
  const uint32_t v_layout = number_of(cache->v.layout);
  if (k_layout != v_layout) {
    return invalid_argument("cache.v.layout is {}; expected cache.k's {}", v_layout, k_layout);
  }
  CacheView view = {.num_blocks = cache->num_blocks,
                    .block_size = cache->block_size,
                    .num_heads = cache->num_kv_heads,
                    .head_dim = cache->head_dim,
                    .k = {},
                    .v = {}};
  KVX_RETURN_IF_ERROR(check_side(cache->k, view, "cache.k", view.k, deferred_errors));
  KVX_RETURN_IF_ERROR(check_side(cache->v, view, "cache.v", view.v, deferred_errors));
  return view;
}

Status check_io_sizes(const kvx_kv_io_desc_t& io) {
  KVX_RETURN_IF_ERROR(check_nested(io, "io"));
  KVX_RETURN_IF_ERROR(check_nested(io.key, "io.key"));
  return check_nested(io.value, "io.value");
}

Result<IoView> check_io(const kvx_kv_io_desc_t& io, int64_t num_sequences, const CacheView& cache,
                        DeferredErrors& deferred_errors) {
  if (io.num_kv_heads != cache.num_heads) {
    return invalid_argument("io.num_kv_heads is {}; the cache has {}", io.num_kv_heads,
                            cache.num_heads);
  }
  if (io.head_dim != cache.head_dim) {
    return invalid_argument("io.head_dim is {}; the cache has {}", io.head_dim, cache.head_dim);
  }
  IoView view = {.num_tokens = io.num_tokens, .k = {}, .v = {}};
  KVX_RETURN_IF_ERROR(
      check_io_tensor(io.key, io, num_sequences, "io.key", view.k, deferred_errors));
  KVX_RETURN_IF_ERROR(
      check_io_tensor(io.value, io, num_sequences, "io.value", view.v, deferred_errors));
  return view;
}

Status check_apart(const IoView& io, const void* begin, int64_t bytes, std::string_view name) {
  for (const IoSide* side : {&io.k, &io.v}) {
    if (!share_memory({side->data, side->total_bytes}, {begin, bytes})) continue;
    return invalid_argument("io.{} overlaps {}; expected memory apart from the cache",
                            side == &io.k ? "key" : "value", name);
  }
  return {};
}

Status check_apart(const IoView& io, const CacheView& cache) {
  KVX_RETURN_IF_ERROR(check_apart(io, cache.k.data, cache.k.total_bytes, "cache.k"));
  return check_apart(io, cache.v.data, cache.v.total_bytes, "cache.v");
}

}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    kvx::boundary::DeferredErrors deferred_errors;
    KVX_ASSIGN_OR_RETURN(const kvx::boundary::CacheView view,
                         kvx::boundary::check_cache(cache, deferred_errors));
    const kvx::boundary::CallAddress addresses[] = {{"cache.k", view.k.data, view.k.memory},
                                                    {"cache.v", view.v.data, view.v.memory}};
    kvx::boundary::check_one_place(addresses, deferred_errors);
    KVX_RETURN_IF_ERROR(deferred_errors.status());
    if (view.k.memory == kvx::boundary::MemoryType::kHost) return {};
    KVX_RETURN_IF_ERROR(kvx::boundary::find_device(addresses));
    return {};
  });
}
