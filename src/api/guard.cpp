// The size rules of the C ABI's structs.
#include "api/guard.hpp"

#include <algorithm>

namespace kvx::boundary {
namespace {

// No struct of this ABI will ever be larger. The limit keeps an uninitialised size from being read
// as a tail of gigabytes.
constexpr uint32_t kMostBytes = 4096;

Error too_large(std::string_view name, uint32_t size, uint32_t known_bytes) {
  return {ErrorCode::kIncompatible,
          fmt::format("{}.size is {}; this library supports {} bytes and the rest is not zero",
                      name, size, known_bytes)};
}

Status check_not_too_small(uint32_t size, uint32_t known_bytes, std::string_view name) {
  if (size >= known_bytes) return {};
  return invalid_argument("{}.size is {}; expected {}", name, size, known_bytes);
}

// Bytes behind those of this library's struct are accepted when they are zero.
Status check_tail(const void* object, uint32_t size, uint32_t known_bytes, std::string_view name) {
  if (size > kMostBytes) return too_large(name, size, known_bytes);
  if (size <= known_bytes) return {};
  const auto* bytes = static_cast<const uint8_t*>(object);
  const bool tail_is_zero =
      std::all_of(bytes + known_bytes, bytes + size, [](uint8_t byte) { return byte == 0; });
  return tail_is_zero ? Status() : too_large(name, size, known_bytes);
}

uint32_t size_of(const void* object) {
  uint32_t size;
  memcpy(&size, object, sizeof size);
  return size;
}

}  // namespace

Status check_top_level_size(const void* object, uint32_t known_bytes, std::string_view name) {
  const uint32_t size = size_of(object);
  KVX_RETURN_IF_ERROR(check_not_too_small(size, known_bytes, name));
  return check_tail(object, size, known_bytes, name);
}

Status check_nested_size(uint32_t size, uint32_t known_bytes, std::string_view name) {
  KVX_RETURN_IF_ERROR(check_not_too_small(size, known_bytes, name));
  if (size == known_bytes) return {};
  return Error{ErrorCode::kIncompatible,
               fmt::format("{}.size is {}; a struct inside another has exactly {} bytes", name,
                           size, known_bytes)};
}

Status copy_struct(const void* object, void* copy, uint32_t known_bytes, uint32_t alignment,
                   std::string_view name) {
  const uint32_t size = size_of(object);
  constexpr uint32_t kLeast = 8;  // size and the first field
  if (size < kLeast || (size < known_bytes && size % alignment != 0)) {
    return invalid_argument("{}.size is {}; expected {}", name, size, known_bytes);
  }
  KVX_RETURN_IF_ERROR(check_tail(object, size, known_bytes, name));
  memcpy(copy, object, std::min(size, known_bytes));
  return {};
}

}  // namespace kvx::boundary
