// Layers of Text Generation Inference's caches (3.x): a tuple (K, V) a layer.
#pragma once

#include "kvx/engines/tensor.hpp"

namespace kvx::api::tgi {

// flashdecoding, flashdecoding-ipex and flashinfer: [blocks, tokens, heads, head_dim].
inline Result<Layer> flash_layer(const engines::Tensor& k, const engines::Tensor& v,
                                 const float* k_scale = nullptr, const float* v_scale = nullptr) {
  return engines::two_tensors(k, v, false, k_scale, v_scale);
}

// ipex, on the CPU: [blocks, heads, tokens, head_dim].
inline Result<Layer> ipex_layer(const engines::Tensor& k, const engines::Tensor& v) {
  return engines::two_tensors(k, v, true, nullptr, nullptr);
}

// paged: K [blocks, heads, head_dim / x, tokens, x], V [blocks, heads, head_dim, tokens]. Rows lie
// in fragments.
inline Result<Layer> paged_layer(const engines::Tensor& k, const engines::Tensor& v) {
  auto k_strides = engines::detail::byte_strides(k, 5, "k");
  if (!k_strides) return k_strides.failure();
  auto v_strides = engines::detail::byte_strides(v, 4, "v");
  if (!v_strides) return v_strides.failure();
  const int64_t x = k.shape[4];
  const int64_t head_dim = k.shape[2] * x;
  if (v.shape != std::vector<int64_t>{k.shape[0], k.shape[1], head_dim, k.shape[3]}) {
    return engines::detail::bad(
        "v has another shape than k; expected [blocks, heads, head_dim, tokens]");
  }
  engines::Tensor v_rows = v;  // its last dimension is the token
  v_rows.stride.clear();
  auto k_side = engines::detail::float_side(
      k, "k", head_dim, 0, {(*k_strides)[0], (*k_strides)[3], (*k_strides)[1]}, nullptr);
  if (!k_side) return k_side.failure();
  auto v_side = engines::detail::float_side(
      v_rows, "v", head_dim, 0, {(*v_strides)[0], (*v_strides)[3], (*v_strides)[1]}, nullptr);
  if (!v_side) return v_side.failure();
  const int64_t item = engines::detail::bytes_of(k.dtype);
  k_side->code_fragment_bytes = static_cast<uint32_t>(x * item);
  k_side->code_fragment_stride = (*k_strides)[2];
  v_side->code_fragment_bytes = static_cast<uint32_t>(engines::detail::bytes_of(v.dtype));
  v_side->code_fragment_stride = (*v_strides)[2];
  return Layer(engines::detail::layer_shape(k.shape[0], k.shape[3], k.shape[1]), *k_side, *v_side);
}

}  // namespace kvx::api::tgi
