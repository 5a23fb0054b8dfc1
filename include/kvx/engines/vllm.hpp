// Layers of vLLM's caches (0.32): docs/engines.md has the layouts.
//
//   auto layer = kvx::api::vllm::layer({{data, KVX_DTYPE_BF16, {blocks, heads, tokens, 2 * dim},
//                                        strides}});
#pragma once

#include "kvx/engines/nvfp4.hpp"
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

// A cache of `int8_per_token_head` or `fp8_per_token_head`: a row is [K: head_dim codes][scale:
// f32] [V: head_dim codes][scale: f32].
//
// kv_cache: U8 [blocks, heads, tokens, 2 * (head_dim + 4)]; strides say NHD or HND.
// format:   KVX_FORMAT_INT8, of heads of 32, 64 or 128, or KVX_FORMAT_FP8_E4M3
inline Result<Layer> per_token_head_layer(const engines::Tensor& kv_cache, kvx_format_t format) {
  auto strides = engines::detail::byte_strides(kv_cache, 4, "kv_cache");
  if (!strides) return strides.failure();
  const int64_t side_bytes = kv_cache.shape[3] / 2;
  const int64_t head_dim = side_bytes - static_cast<int64_t>(sizeof(float));
  if (kv_cache.dtype != KVX_DTYPE_U8 || kv_cache.shape[3] % 2 != 0 || head_dim < 1 ||
      !engines::detail::is_contiguous(kv_cache)) {
    return engines::detail::bad("kv_cache has rows of " + std::to_string(kv_cache.shape[3]) +
                                " numbers of dtype " + std::to_string(kv_cache.dtype) +
                                "; expected 2 * (head_dim + 4) contiguous bytes, U8");
  }
  const bool is_int8 = format == KVX_FORMAT_INT8;
  if (!is_int8 && format != KVX_FORMAT_FP8_E4M3) {
    return engines::detail::bad("format is " + std::to_string(format) +
                                "; expected KVX_FORMAT_INT8 or KVX_FORMAT_FP8_E4M3");
  }
  const auto side_at = [&](int64_t offset) {
    Side side;
    side.format.format = format;
    side.format.scale_type = KVX_SCALE_TYPE_F32;
    if (is_int8) {
      side.format.group_size = static_cast<uint32_t>(head_dim);
    } else {
      side.format.scale_source = KVX_SCALE_SOURCE_COMPUTED;
    }
    side.head_dim = static_cast<uint32_t>(head_dim);
    side.codes = static_cast<uint8_t*>(kv_cache.data) + offset;
    side.scales = static_cast<uint8_t*>(side.codes) + head_dim;
    side.code_block_stride = side.scale_block_stride = (*strides)[0];
    side.code_head_stride = side.scale_head_stride = (*strides)[1];
    side.code_token_stride = side.scale_token_stride = (*strides)[2];
    side.scale_group_stride = sizeof(float);
    return side;
  };
  return Layer(
      engines::detail::layer_shape(kv_cache.shape[0], kv_cache.shape[2], kv_cache.shape[1]),
      side_at(0), side_at(side_bytes));
}

// A cache of `nvfp4` or `nvfp4_4over6`: a page is [K codes][K scales][V codes][V scales], each by
// heads (HND) or by tokens (NHD).
struct Nvfp4Cache {
  // U8 [blocks, K's heads and V's, tokens, head_dim / 2 + head_dim / 16], dense pages
  engines::Tensor kv_cache;
  int64_t head_dim = 0;
  const float* k_scales = nullptr;  // tensor scales [heads], where the cache lies; null: 1
  const float* v_scales = nullptr;
};

namespace detail {

struct Nvfp4Page {
  int64_t heads = 0, row_bytes = 0, code_bytes = 0;  // code_bytes: of one side
  bool is_hnd = false;
  engines::nvfp4::Scales k, v;

  std::array<int64_t, 3> code_strides() const {
    if (is_hnd) return {k.block_stride, row_bytes, k.tokens * row_bytes};
    return {k.block_stride, heads * row_bytes, row_bytes};
  }
};

inline Result<Nvfp4Page> nvfp4_page(const Nvfp4Cache& cache) {
  const engines::Tensor& tensor = cache.kv_cache;
  auto strides = engines::detail::byte_strides(tensor, 4, "kv_cache");
  if (!strides) return strides.failure();
  auto head_dim = engines::nvfp4::detail::checked_head_dim(tensor, "kv_cache", cache.head_dim);
  if (!head_dim) return head_dim.failure();
  const int64_t groups = *head_dim / engines::nvfp4::kGroup, whole = *head_dim / 2 + groups;
  const int64_t sides = tensor.shape[1], tokens = tensor.shape[2];
  if (sides % 2 != 0 || tensor.shape[3] != whole) {
    return engines::detail::bad(
        "kv_cache has " + std::to_string(sides) + " heads of " + std::to_string(tensor.shape[3]) +
        " bytes; expected those of K, then as many of V, of " + std::to_string(whole));
  }
  Nvfp4Page page;
  page.heads = sides / 2;
  page.row_bytes = *head_dim / 2;
  page.code_bytes = page.heads * tokens * page.row_bytes;
  page.is_hnd = (*strides)[1] == tokens * whole && (*strides)[2] == whole;
  const bool is_nhd = (*strides)[1] == whole && (*strides)[2] == sides * whole;
  if ((*strides)[3] != 1 || (!page.is_hnd && !is_nhd)) {
    return engines::detail::bad("kv_cache has gaps in a page; expected dense pages");
  }
  auto* data = static_cast<uint8_t*>(tensor.data) + page.code_bytes;
  page.k = {data, tensor.shape[0], page.heads, tokens, groups, (*strides)[0]};
  page.k.head_stride = page.is_hnd ? tokens * groups : groups;
  page.k.token_stride = page.is_hnd ? groups : page.heads * groups;
  page.v = page.k;
  page.v.data += page.heads * tokens * whole;
  return page;
}

}  // namespace detail

// The layer reads and writes linear scales of V, as vLLM's FA2 kernels do; engines::nvfp4 turns
// what trtllm-gen reads. kvx chooses a group's scale as "nvfp4" does.
inline Result<Layer> nvfp4_layer(const Nvfp4Cache& cache) {
  auto page = detail::nvfp4_page(cache);
  if (!page) return page.failure();
  const auto side = [&page](const engines::nvfp4::Scales& scales, const float* tensor_scales) {
    return engines::nvfp4::detail::side(scales.data - page->code_bytes, page->code_strides(),
                                        scales, tensor_scales);
  };
  return Layer(engines::detail::layer_shape(page->k.blocks, page->k.tokens, page->heads),
               side(page->k, cache.k_scales), side(page->v, cache.v_scales));
}

// Where the cache has V's scales, for engines::nvfp4::linear_scales and swizzled_scales.
inline Result<engines::nvfp4::Scales> nvfp4_v_scales(const Nvfp4Cache& cache) {
  auto page = detail::nvfp4_page(cache);
  if (!page) return page.failure();
  return page->v;
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
