// Layers of vLLM's caches (0.32): docs/engines.md has the layouts.
//
//   auto layer = kvx::api::vllm::layer({{data, KVX_DTYPE_BF16, {blocks, heads, tokens, 2 * dim},
//                                        strides}});
#pragma once

#include "kvx/engines/tensor.hpp"

namespace kvx::api::vllm {

struct Cache {
  // [blocks, heads, tokens, K's head_dim and V's]: the logical shape; strides say NHD or HND.
  engines::Tensor kv_cache;
  const float* k_scale = nullptr;  // of F8 caches, where the cache lies
  const float* v_scale = nullptr;
};

inline Result<Layer> layer(const Cache& cache) {
  const engines::Tensor& tensor = cache.kv_cache;
  auto strides = engines::detail::byte_strides(tensor, 4, "kv_cache");
  if (!strides) return strides.failure();
  if (tensor.shape[3] % 2 != 0) {
    return engines::detail::bad("kv_cache has " + std::to_string(tensor.shape[3]) +
                                " numbers a token; expected an even number, K's and V's");
  }
  const int64_t head_dim = tensor.shape[3] / 2;
  const std::array<int64_t, 3> by_place = {(*strides)[0], (*strides)[2], (*strides)[1]};
  auto k = engines::detail::float_side(tensor, "kv_cache", head_dim, 0, by_place, cache.k_scale);
  if (!k) return k.failure();
  auto v = engines::detail::float_side(tensor, "kv_cache", head_dim,
                                       head_dim * engines::detail::bytes_of(tensor.dtype), by_place,
                                       cache.v_scale);
  if (!v) return v.failure();
  return Layer(engines::detail::layer_shape(tensor.shape[0], tensor.shape[2], tensor.shape[1]), *k,
               *v);
}

}  // namespace kvx::api::vllm
