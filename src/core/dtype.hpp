// DType names the float types that callers hand over and receive: f32, f16 and bf16.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvx {

enum class DType : uint8_t { kF32, kF16, kBF16 };

constexpr int bytes_of(DType type) {
  return type == DType::kF32 ? 4 : 2;
}

constexpr std::string_view name_of(DType type) {
  switch (type) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "?";
}

}  // namespace kvx
