// The size rules of the C ABI's structs: how much older or newer a caller's struct may be.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/result.hpp"

namespace kvx::boundary {

// Returns the number in a caller's enum field. Reading the field as its enum would be undefined for
// a number outside the enum.
template <class Enum>
uint32_t number_of(const Enum& field) {
  static_assert(sizeof(Enum) == sizeof(uint32_t));
  uint32_t number;
  memcpy(&number, &field, sizeof number);
  return number;
}

// Checks a v1 struct that a call received by pointer. A size below v1.1's is INVALID_ARGUMENT. A
// larger size is accepted when the bytes behind known_bytes are zero, and INCOMPATIBLE otherwise.
Status check_top_level_size(const void* object, uint32_t known_bytes, std::string_view name);

// Checks a v1 struct inside another. It cannot grow, because the next member follows it, so its
// size must be known_bytes.
Status check_nested_size(uint32_t size, uint32_t known_bytes, std::string_view name);

template <class Struct>
Status check_top_level(const Struct* object, std::string_view name) {
  if (object == nullptr) return invalid_argument("{} is null", name);
  return check_top_level_size(object, sizeof(Struct), name);
}

template <class Struct>
Status check_nested(const Struct& object, std::string_view name) {
  return check_nested_size(object.size, sizeof(Struct), name);
}

// Copies a struct that 1.2 or later added into this library's version of it, `copy`; fields that
// the caller's struct lacks stay zero. INVALID_ARGUMENT: a size that no header gives a struct of
// this alignment, which might end inside a pointer. INCOMPATIBLE: a non-zero tail behind
// known_bytes.
Status copy_struct(const void* object, void* copy, uint32_t known_bytes, uint32_t alignment,
                   std::string_view name);

template <class Struct>
Result<Struct> read_struct(const Struct* object, std::string_view name) {
  if (object == nullptr) return invalid_argument("{} is null", name);
  Struct copy{};
  KVX_RETURN_IF_ERROR(copy_struct(object, &copy, sizeof copy, alignof(Struct), name));
  return copy;
}

}  // namespace kvx::boundary
