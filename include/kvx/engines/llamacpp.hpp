// Layers of llama.cpp's KV cache: a stream of places is a block, a slot is stream * kv_size +
// place.
#pragma once

#include "kvx/engines/tensor.hpp"

namespace kvx::api::llamacpp {

enum class Type { kF32, kF16, kBF16, kQ8_0, kQ4_0 };

struct Cache {
  void* k = nullptr;
  void* v = nullptr;
  Type type_k = Type::kF16;
  Type type_v = Type::kF16;
  int64_t num_kv_heads = 0;
  int64_t head_dim_k = 0;
  int64_t head_dim_v = 0;
  int64_t kv_size = 0;  // places of a stream
  int64_t num_streams = 1;
  bool v_trans = false;  // V is [embd, kv_size], as without flash attention
};

namespace detail {

// Blocks of 32 values: q8_0's [float16 scale][32 int8], q4_0's [float16 scale][16 bytes, two codes
// each].
constexpr int64_t kBlockValues = 32;
constexpr int64_t kScaleBytes = 2;

inline Result<Side> side(const Cache& cache, void* data, Type type, int64_t head_dim,
                         bool is_transposed, const char* name) {
  if (data == nullptr) return engines::detail::bad(std::string(name) + " is null");
  const bool is_q4_0 = type == Type::kQ4_0;
  const bool is_quantised = is_q4_0 || type == Type::kQ8_0;
  if (is_quantised && (is_transposed || head_dim % kBlockValues != 0)) {
    return Failure{KVX_STATUS_UNSUPPORTED,
                   std::string(name) + " is " + (is_q4_0 ? "q4_0" : "q8_0") +
                       "; expected head_dim in whole blocks of 32, not transposed"};
  }
  Side result;
  result.head_dim = static_cast<uint32_t>(head_dim);
  result.codes = data;
  const int64_t code_bytes = is_q4_0 ? kBlockValues / 2 : kBlockValues;
  const int64_t block = kScaleBytes + code_bytes;
  const int64_t item = type == Type::kF32 ? 4 : 2;
  const int64_t head = is_quantised ? head_dim / kBlockValues * block : head_dim * item;
  const int64_t row = head * cache.num_kv_heads;
  result.code_block_stride = row * cache.kv_size;
  result.code_token_stride = is_transposed ? item : row;
  result.code_head_stride = is_transposed ? head * cache.kv_size : head;
  if (is_transposed) {
    result.code_fragment_bytes = static_cast<uint32_t>(item);
    result.code_fragment_stride = item * cache.kv_size;
  }
  if (!is_quantised) {
    result.format.format = type == Type::kF32   ? KVX_FORMAT_F32
                           : type == Type::kF16 ? KVX_FORMAT_F16
                                                : KVX_FORMAT_BF16;
    return result;
  }
  result.format.format = is_q4_0 ? KVX_FORMAT_INT4 : KVX_FORMAT_INT8;
  result.format.group_size = kBlockValues;
  result.format.scale_type = KVX_SCALE_TYPE_F16;
  result.flags = is_q4_0 ? uint32_t{KVX_SIDE_Q4_0_BLOCKS} : 0;
  result.codes = static_cast<uint8_t*>(data) + kScaleBytes;
  result.code_fragment_bytes = static_cast<uint32_t>(code_bytes);
  result.code_fragment_stride = block;
  result.scales = data;
  result.scale_block_stride = result.code_block_stride;
  result.scale_token_stride = row;
  result.scale_head_stride = head;
  result.scale_group_stride = block;
  return result;
}

}  // namespace detail

inline Result<Layer> layer(const Cache& cache) {
  if (cache.kv_size < 1 || cache.num_streams < 1 || cache.num_kv_heads < 1) {
    return engines::detail::bad(
        "kv_size, num_streams and num_kv_heads are counts; expected 1 or more");
  }
  auto k = detail::side(cache, cache.k, cache.type_k, cache.head_dim_k, false, "k");
  if (!k) return k.failure();
  auto v = detail::side(cache, cache.v, cache.type_v, cache.head_dim_v, cache.v_trans, "v");
  if (!v) return v.failure();
  return Layer(engines::detail::layer_shape(cache.num_streams, cache.kv_size, cache.num_kv_heads),
               *k, *v);
}

}  // namespace kvx::api::llamacpp
