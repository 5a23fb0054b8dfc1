// Lists of slots as the verbs take them: 64 bits each.
#pragma once

#include <string_view>
#include <vector>

#include "core/result.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// INVALID_ARGUMENT: not an index type, an impossible count, or null with a count. The vector keeps
// its memory from call to call.
inline Status read_slots(uint32_t dtype, const void* slots, int64_t count, std::string_view name,
                         std::vector<int64_t>& result) {
  if (dtype != KVX_DTYPE_S32 && dtype != KVX_DTYPE_S64) {
    return invalid_argument("args.slot_dtype is {}; expected S32 6 or S64 7", dtype);
  }
  constexpr int64_t kMost = int64_t{1} << 48;  // their bytes still fit 64-bit addresses
  if (count < 0 || count > kMost) {
    return invalid_argument("args.num_tokens is {}; expected 0 to {}", count, kMost);
  }
  if (slots == nullptr && count != 0) {
    return invalid_argument("args.{} is null; expected {} entries", name, count);
  }
  if (dtype == KVX_DTYPE_S64) {
    const auto* first = static_cast<const int64_t*>(slots);
    result.assign(first, first + count);
  } else {
    const auto* first = static_cast<const int32_t*>(slots);
    result.assign(first, first + count);
  }
  return {};
}

}  // namespace kvx::boundary
