// Layers of SGLang's token pools (August 2026): slots of page_size tokens a page, slot 0 a dummy.
#pragma once

#include "kvx/engines/tensor.hpp"

namespace kvx::api::sglang {

namespace detail {

inline Result<engines::Tensor> in_pages(const engines::Tensor& buffer, int64_t page_size,
                                        const char* name) {
  auto strides = engines::detail::byte_strides(buffer, 3, name);
  if (!strides) return strides.failure();
  if (page_size < 1 || buffer.shape[0] % page_size != 0) {
    return engines::detail::bad("page_size is " + std::to_string(page_size) +
                                "; expected a divisor of the " + std::to_string(buffer.shape[0]) +
                                " slots of " + name);
  }
  const int64_t item = engines::detail::bytes_of(buffer.dtype);
  const int64_t slot = (*strides)[0] / item;
  return engines::Tensor{buffer.data,
                         buffer.dtype,
                         {buffer.shape[0] / page_size, page_size, buffer.shape[1], buffer.shape[2]},
                         {slot * page_size, slot, (*strides)[1] / item, (*strides)[2] / item}};
}

}  // namespace detail

// k_buffer, v_buffer: [slots, heads, head_dim] of floats, or of F8 with their scales.
inline Result<Layer> layer(const engines::Tensor& k_buffer, const engines::Tensor& v_buffer,
                           int64_t page_size, const float* k_scale = nullptr,
                           const float* v_scale = nullptr) {
  auto k = detail::in_pages(k_buffer, page_size, "k_buffer");
  if (!k) return k.failure();
  auto v = detail::in_pages(v_buffer, page_size, "v_buffer");
  if (!v) return v.failure();
  return engines::two_tensors(*k, *v, false, k_scale, v_scale);
}

// The FP4 pool: U8 [slots, heads, head_dim / 2] and E8M0 scales, U8 [slots, heads * head_dim / 16].
inline Result<Layer> fp4_layer(const engines::Tensor& k_buffer, const engines::Tensor& v_buffer,
                               const engines::Tensor& k_scale_buffer,
                               const engines::Tensor& v_scale_buffer, int64_t page_size) {
  const auto side = [page_size](const engines::Tensor& buffer, const engines::Tensor& scales,
                                const char* name) -> Result<Side> {
    auto codes = detail::in_pages(buffer, page_size, name);
    if (!codes) return codes.failure();
    auto strides = engines::detail::byte_strides(scales, 2, "a scale buffer");
    if (!strides) return strides.failure();
    const int64_t head_dim = 2 * buffer.shape[2];
    const int64_t groups = head_dim / 16;
    if (head_dim % 16 != 0 || scales.shape[0] != buffer.shape[0] ||
        scales.shape[1] != buffer.shape[1] * groups) {
      return engines::detail::bad(std::string(name) +
                                  "'s scale buffer has another shape than [slots, heads * head_dim "
                                  "/ 16]");
    }
    Side result;
    result.format.format = KVX_FORMAT_MXFP4_G16;
    result.head_dim = static_cast<uint32_t>(head_dim);
    result.codes = codes->data;
    result.code_block_stride = codes->stride[0];
    result.code_token_stride = codes->stride[1];
    result.code_head_stride = codes->stride[2];
    result.scales = scales.data;
    result.scale_token_stride = (*strides)[0];
    result.scale_block_stride = (*strides)[0] * page_size;
    result.scale_head_stride = groups;
    result.scale_group_stride = 1;
    return result;
  };
  auto k = side(k_buffer, k_scale_buffer, "k_buffer");
  if (!k) return k.failure();
  auto v = side(v_buffer, v_scale_buffer, "v_buffer");
  if (!v) return v.failure();
  return Layer(
      engines::detail::layer_shape(k_buffer.shape[0] / page_size, page_size, k_buffer.shape[1]), *k,
      *v);
}

}  // namespace kvx::api::sglang
