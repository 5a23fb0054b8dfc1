// The size rules of the C ABI's structs: how old or new a caller's struct may be.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/result.hpp"

namespace kvx::boundary {

// A number that a caller wrote into an enum field, whatever it is: reading it as the enum would be
// undefined for a number that the enum has not.
template <class Enum>
uint32_t number_of(const Enum& field) {
  static_assert(sizeof(Enum) == sizeof(uint32_t));
  uint32_t number;
  memcpy(&number, &field, sizeof number);
  return number;
}

// A v1 struct that a call received by pointer. Below v1.1's size: INVALID_ARGUMENT. Above it: a
// tail of zeros asks for nothing; any other is INCOMPATIBLE.
Status check_top_level_size(const void* object, uint32_t known_bytes, std::string_view name);

// A v1 struct inside another: its tail would be its neighbour, so its size is known_bytes.
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

// A struct that 1.2 or later added, as this library knows it: what the caller's has not is zero.
// INVALID_ARGUMENT: a size that no header's struct of this alignment has had, which might end
// inside a pointer. INCOMPATIBLE: a tail that asks for what is unknown here.
Status copy_args(const void* object, void* args, uint32_t known_bytes, uint32_t alignment,
                 std::string_view name);

template <class Struct>
Result<Struct> read_struct(const Struct* object, std::string_view name) {
  if (object == nullptr) return invalid_argument("{} is null", name);
  Struct args{};
  KVX_RETURN_IF_ERROR(copy_args(object, &args, sizeof args, alignof(Struct), name));
  return args;
}

}  // namespace kvx::boundary
