// Structs that a call fills, up to the size that the caller gives them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/result.hpp"
#include "kvx/kvx_abi.h"
#include "ops/cache_view.hpp"

namespace kvx::boundary {

// Checks an out struct. INVALID_ARGUMENT: null, or a size below 8.
template <class Struct>
Status check_out_struct(const Struct* caller, std::string_view name) {
  if (caller == nullptr) return invalid_argument("{} is null", name);
  constexpr uint32_t kLeast = 8;  // size and the first field
  if (caller->size >= kLeast) return {};
  return invalid_argument("{}.size is {}; expected {}", name, caller->size, sizeof(Struct));
}

// Writes at most the caller's size of bytes to an out struct and sets its size to the bytes
// written. Errors as check_out_struct().
template <class Struct>
Status write_struct(Struct answer, Struct* caller, std::string_view name) {
  KVX_RETURN_IF_ERROR(check_out_struct(caller, name));
  answer.size = std::min<uint32_t>(caller->size, sizeof answer);
  memcpy(caller, &answer, answer.size);
  return {};
}

// A side that is filled must have the fields of 1.2's first release, and those of channels where it
// gets some.
inline Status check_side_room(const kvx_side_t* side, std::string_view name,
                              bool has_channels = false) {
  const uint32_t least = has_channels ? sizeof(kvx_side_t) : offsetof(kvx_side_t, flags);
  if (side == nullptr) return invalid_argument("{} is null", name);
  if (side->size >= least) return {};
  return invalid_argument("{}.size is {}; expected at least {}", name, side->size, least);
}

// A side of the library's as its caller describes one. spec: view's format, which the caller keeps.
inline kvx_side_t side_of(const ops::SideView& view, const kvx_format_spec_t* spec,
                          uint32_t flags = 0) {
  kvx_side_t side{};
  side.size = sizeof side;
  side.head_dim = static_cast<uint32_t>(view.head_dim);
  side.spec = spec;
  side.codes = view.codes.base;
  side.code_block_stride = view.codes.block_stride;
  side.code_token_stride = view.codes.token_stride;
  side.code_head_stride = view.codes.head_stride;
  side.scales = view.scales.base;
  side.scale_block_stride = view.scales.block_stride;
  side.scale_token_stride = view.scales.token_stride;
  side.scale_head_stride = view.scales.head_stride;
  side.scale_group_stride = view.scales.group_stride;
  side.tensor_scales = view.tensor_scales;
  side.flags = flags;
  return side;
}

// Writes as many bytes as the caller's struct has.
inline void fill_side(kvx_side_t answer, kvx_side_t* side) {
  answer.size = std::min<uint32_t>(side->size, sizeof answer);
  memcpy(side, &answer, answer.size);
}

}  // namespace kvx::boundary
