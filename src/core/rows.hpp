// FloatRows: a caller's [num_tokens, num_heads, head_dim] tensor of floats, any strides but a
// contiguous head_dim.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"

namespace kvx {

// Element (t, h, d) lies at data + (t * token_stride + h * head_stride + d) * bytes_of(dtype).
template <class Byte>
struct BasicFloatRows {
  Byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t token_stride = 0;  // elements
  int64_t head_stride = 0;   // elements

  Byte* row(int64_t token, int head) const {
    return data + (token * token_stride + head * head_stride) * bytes_of(dtype);
  }
};

// The same rows from number `first` on.
template <class Byte>
BasicFloatRows<Byte> numbers_from(BasicFloatRows<Byte> rows, int first) {
  if (rows.data != nullptr) rows.data += first * bytes_of(rows.dtype);
  return rows;
}

using FloatRows = BasicFloatRows<const uint8_t>;
using MutableFloatRows = BasicFloatRows<uint8_t>;

// Dense [num_tokens, num_heads, head_dim].
inline FloatRows dense_rows(const void* data, DType dtype, int num_heads, int head_dim) {
  return {static_cast<const uint8_t*>(data), dtype, int64_t{num_heads} * head_dim, head_dim};
}
inline MutableFloatRows dense_rows(void* data, DType dtype, int num_heads, int head_dim) {
  return {static_cast<uint8_t*>(data), dtype, int64_t{num_heads} * head_dim, head_dim};
}

}  // namespace kvx
