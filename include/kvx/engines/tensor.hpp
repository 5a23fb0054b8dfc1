// Tensors of engines, and K and V in them, for the headers of this folder.
#pragma once

#include <array>

#include "kvx/kvx.hpp"

namespace kvx::api::engines {

// stride: elements; empty: dense.
struct Tensor {
  void* data = nullptr;
  kvx_dtype_t dtype = KVX_DTYPE_INVALID;
  std::vector<int64_t> shape;
  std::vector<int64_t> stride = {};
};

namespace detail {

inline Failure bad(std::string text) {
  return {KVX_STATUS_INVALID_ARGUMENT, std::move(text)};
}

inline int64_t bytes_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F32:
      return 4;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
      return 2;
    case KVX_DTYPE_F8_E4M3:
    case KVX_DTYPE_F8_E5M2:
    case KVX_DTYPE_U8:
      return 1;
    default:
      return 0;
  }
}

// Byte strides of a tensor of so many dimensions. name: the engine's own, for the message.
inline Result<std::vector<int64_t>> byte_strides(const Tensor& tensor, size_t num_dimensions,
                                                 const std::string& name) {
  const int64_t item = bytes_of(tensor.dtype);
  if (item == 0) {
    return bad(name + " has dtype " + std::to_string(tensor.dtype) +
               "; expected F32, F16, BF16, F8_E4M3, F8_E5M2 or U8");
  }
  if (tensor.data == nullptr) return bad(name + " is null");
  if (tensor.shape.size() != num_dimensions) {
    return bad(name + " has " + std::to_string(tensor.shape.size()) + " dimensions; expected " +
               std::to_string(num_dimensions));
  }
  if (!tensor.stride.empty() && tensor.stride.size() != num_dimensions) {
    return bad(name + " has " + std::to_string(tensor.stride.size()) + " strides; expected " +
               std::to_string(num_dimensions) + ", or none of a dense tensor");
  }
  std::vector<int64_t> strides(num_dimensions);
  int64_t dense = item;
  for (size_t i = num_dimensions; i-- > 0;) {
    if (tensor.shape[i] < 1) {
      return bad(name + " has a dimension of " + std::to_string(tensor.shape[i]) +
                 "; expected 1 or more");
    }
    strides[i] = tensor.stride.empty() ? dense : tensor.stride[i] * item;
    dense *= tensor.shape[i];
  }
  return strides;
}

// The innermost dimension must be contiguous.
inline bool is_contiguous(const Tensor& tensor) {
  return tensor.stride.empty() || tensor.shape.back() == 1 || tensor.stride.back() == 1;
}

// scale: of an F8 tensor, where the tensor lies; value = code * scale.
inline Result<Side> float_side(const Tensor& tensor, const std::string& name, int64_t head_dim,
                               int64_t offset, const std::array<int64_t, 3>& strides,
                               const float* scale) {
  const bool is_f8 = tensor.dtype == KVX_DTYPE_F8_E4M3 || tensor.dtype == KVX_DTYPE_F8_E5M2;
  if (tensor.dtype == KVX_DTYPE_U8) return bad(name + " is U8; expected floats");
  if (is_f8 != (scale != nullptr)) {
    return bad(name + (is_f8 ? " is F8 and has no scale; expected the address of one float"
                             : " has a scale; only F8 tensors have one"));
  }
  if (!is_contiguous(tensor)) {
    return bad(name + "'s last dimension has a stride other than 1; expected contiguous rows");
  }
  Side side;
  side.head_dim = static_cast<uint32_t>(head_dim);
  side.codes = static_cast<uint8_t*>(tensor.data) + offset;
  side.code_block_stride = strides[0];
  side.code_token_stride = strides[1];
  side.code_head_stride = strides[2];
  if (is_f8) {
    side.format.format =
        tensor.dtype == KVX_DTYPE_F8_E4M3 ? KVX_FORMAT_FP8_E4M3 : KVX_FORMAT_FP8_E5M2;
    side.format.scale_source = KVX_SCALE_SOURCE_GIVEN;
    side.scales = const_cast<float*>(scale);
  } else {
    side.format.format = tensor.dtype == KVX_DTYPE_F32   ? KVX_FORMAT_F32
                         : tensor.dtype == KVX_DTYPE_F16 ? KVX_FORMAT_F16
                                                         : KVX_FORMAT_BF16;
  }
  return side;
}

inline LayerShape layer_shape(int64_t blocks, int64_t tokens, int64_t heads) {
  return {blocks, static_cast<uint32_t>(tokens), static_cast<uint32_t>(heads)};
}

}  // namespace detail

// K and V in two tensors [blocks, tokens, heads, head_dim], or with is_hnd [blocks, heads, tokens,
// head_dim].
inline Result<Layer> two_tensors(const Tensor& k, const Tensor& v, bool is_hnd,
                                 const float* k_scale, const float* v_scale) {
  const size_t token = is_hnd ? 2 : 1;
  const size_t head = is_hnd ? 1 : 2;
  auto k_strides = detail::byte_strides(k, 4, "k");
  if (!k_strides) return k_strides.failure();
  auto v_strides = detail::byte_strides(v, 4, "v");
  if (!v_strides) return v_strides.failure();
  if (!std::equal(k.shape.begin(), k.shape.begin() + 3, v.shape.begin())) {
    return detail::bad("k and v have other blocks, tokens or heads; expected the same");
  }
  const auto side = [&](const Tensor& tensor, const std::vector<int64_t>& strides, const char* name,
                        const float* scale) {
    return detail::float_side(tensor, name, tensor.shape[3], 0,
                              {strides[0], strides[token], strides[head]}, scale);
  };
  auto k_side = side(k, *k_strides, "k", k_scale);
  if (!k_side) return k_side.failure();
  auto v_side = side(v, *v_strides, "v", v_scale);
  if (!v_side) return v_side.failure();
  return Layer(detail::layer_shape(k.shape[0], k.shape[token], k.shape[head]), *k_side, *v_side);
}

}  // namespace kvx::api::engines
