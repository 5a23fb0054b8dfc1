// Dequantises the bytes of a GGUF tensor: ggml's block types to f32.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvx::runner {

// The numbers are the file's.
enum class TensorType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};
constexpr std::string_view kTensorTypeNames =
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K";

// Empty for a type that we do not read.
std::optional<TensorType> tensor_type_from(uint32_t number);

int block_elements(TensorType type);
int block_bytes(TensorType type);

// Requires: elements is a multiple of block_elements(type).
inline int64_t bytes_of_row(TensorType type, int64_t elements) {
  return elements / block_elements(type) * block_bytes(type);
}

// blocks: [elements / block_elements, block_bytes]; out: [elements].
// Requires: elements is a multiple of block_elements(type).
void dequantize(TensorType type, const uint8_t* blocks, int64_t elements, float* out);

}  // namespace kvx::runner
