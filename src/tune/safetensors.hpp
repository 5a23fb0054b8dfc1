// safetensors: a container of named tensors behind a JSON header, as Hugging Face defined it.
//
//   file = [u64 header_bytes][header: JSON, padded with blanks][data]          little-endian
//   header = {"__metadata__": {name: text, ...}, tensor: {"dtype", "shape", "data_offsets"}, ...}
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::tune {

enum class TensorType : uint8_t { kF32, kF64 };

struct Tensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;  // of all its numbers, the last dimension contiguous
};

struct Safetensors {
  std::map<std::string, std::string> metadata;
  std::vector<Tensor> tensors;
};

// The largest header that is read or written; libraries for this container have a limit too.
inline constexpr int64_t kMaxHeaderBytes = 16 << 20;

// The same bytes whatever the tensors' order: those of 8 bytes a number come first, then by name.
// Requires: no two tensors of one name.
std::vector<uint8_t> encode_safetensors(const Safetensors& file);

// The tensors point into `bytes`. INVALID_ARGUMENT names what is wrong: bytes that are missing or
// left over, a header that is no JSON or holds a name twice, a dtype other than F32 and F64,
// offsets that overlap, leave a hole or are not those of the shape.
Result<Safetensors> parse_safetensors(std::span<const uint8_t> bytes);

}  // namespace kvx::tune
