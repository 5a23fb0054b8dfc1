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

// kv_cache: U8 [blocks, tokens, 656], the rows of `fp8_ds_mla` and of FlashMLA's fp8 cache: 512
// E4M3 codes, an f32 scale for each 128 of them, 64 rotary numbers in BF16. The latent numbers are
// V.
inline Result<Layer> fp8_ds_mla_layer(const engines::Tensor& kv_cache) {
  constexpr int kLatent = 512, kRotary = 64, kScaleBytes = 16;
  constexpr int kRowBytes = kLatent + kScaleBytes + 2 * kRotary;
  auto strides = engines::detail::byte_strides(kv_cache, 3, "kv_cache");
  if (!strides) return strides.failure();
  if (kv_cache.dtype != KVX_DTYPE_U8 || kv_cache.shape[2] != kRowBytes ||
      !engines::detail::is_contiguous(kv_cache)) {
    return engines::detail::bad("kv_cache has rows of " + std::to_string(kv_cache.shape[2]) +
                                " numbers of dtype " + std::to_string(kv_cache.dtype) +
                                "; expected 656 contiguous bytes, U8");
  }
  auto* row = static_cast<uint8_t*>(kv_cache.data);
  Side latent;
  latent.format.format = KVX_FORMAT_FP8_E4M3;
  latent.format.group_size = 128;
  latent.format.scale_source = KVX_SCALE_SOURCE_COMPUTED;
  latent.head_dim = kLatent;
  latent.codes = row;
  latent.scales = row + kLatent;
  latent.scale_group_stride = sizeof(float);
  Side rotary;
  rotary.format.format = KVX_FORMAT_BF16;
  rotary.head_dim = kRotary;
  rotary.codes = row + kLatent + kScaleBytes;
  for (Side* side : {&latent, &rotary}) {
    side->code_block_stride = (*strides)[0];
    side->code_token_stride = side->code_head_stride = (*strides)[1];
  }
  latent.scale_block_stride = (*strides)[0];
  latent.scale_token_stride = latent.scale_head_stride = (*strides)[1];
  Side value;
  value.head_dim = kLatent;
  value.flags = KVX_SIDE_PREFIX_OF_K;
  return Layer(engines::detail::layer_shape(kv_cache.shape[0], kv_cache.shape[1], 1),
               {HeadRun{1, latent, value, rotary}});
}

}  // namespace kvx::api::vllm
