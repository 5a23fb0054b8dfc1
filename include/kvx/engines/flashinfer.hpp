// Layers and tables of FlashInfer's paged caches (0.6).
#pragma once

#include "kvx/engines/tensor.hpp"

namespace kvx::api::flashinfer {

enum class KvLayout { kNhd, kHnd };

// K and V, [pages, page_size, heads, head_dim] or [pages, heads, page_size, head_dim] each.
inline Result<Layer> layer(const engines::Tensor& k, const engines::Tensor& v, KvLayout kv_layout,
                           const float* k_scale = nullptr, const float* v_scale = nullptr) {
  return engines::two_tensors(k, v, kv_layout == KvLayout::kHnd, k_scale, v_scale);
}

// One tensor [pages, 2, ...] of K and V.
inline Result<Layer> layer(const engines::Tensor& paged_kv_cache, KvLayout kv_layout,
                           const float* k_scale = nullptr, const float* v_scale = nullptr) {
  auto strides = engines::detail::byte_strides(paged_kv_cache, 5, "paged_kv_cache");
  if (!strides) return strides.failure();
  if (paged_kv_cache.shape[1] != 2) {
    return engines::detail::bad("paged_kv_cache has " + std::to_string(paged_kv_cache.shape[1]) +
                                " sides; expected 2, K and V");
  }
  const int64_t item = engines::detail::bytes_of(paged_kv_cache.dtype);
  engines::Tensor k = paged_kv_cache;
  k.shape.erase(k.shape.begin() + 1);
  k.stride.clear();
  for (size_t i : {0, 2, 3, 4}) k.stride.push_back((*strides)[i] / item);
  engines::Tensor v = k;
  v.data = static_cast<uint8_t*>(k.data) + (*strides)[1];
  return layer(k, v, kv_layout, k_scale, v_scale);
}

// Tokens of each sequence, for kvx_seq_lens_t: FlashInfer has pages and the last page's tokens.
inline std::vector<int32_t> seq_lens(const std::vector<int32_t>& kv_page_indptr,
                                     const std::vector<int32_t>& kv_last_page_len,
                                     int32_t page_size) {
  std::vector<int32_t> lengths;
  for (size_t s = 0; s < kv_last_page_len.size() && s + 1 < kv_page_indptr.size(); ++s) {
    const int32_t pages = kv_page_indptr[s + 1] - kv_page_indptr[s];
    lengths.push_back(pages < 1 ? 0 : (pages - 1) * page_size + kv_last_page_len[s]);
  }
  return lengths;
}

}  // namespace kvx::api::flashinfer
