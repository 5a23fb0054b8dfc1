// open_component_library: a component (docs/decisions/0006-components.md), opened by its name.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/result.hpp"

namespace kvx {

// What kvx_NAME_functions() of libkvx_NAME.so.1 returns. The dynamic loader looks beside the
// library or program that this is linked into (its runpath), then in the system's folders.
// UNSUPPORTED: it is not there, or lacks a library of its own.
Result<const void*> component_functions(std::string_view name);

// Functions: a struct that begins with `int32_t version`. UNSUPPORTED also: another version.
template <class Functions>
Result<const Functions*> open_component_library(std::string_view name, int32_t version) {
  KVX_ASSIGN_OR_RETURN(const void* found, component_functions(name));
  const auto* const functions = static_cast<const Functions*>(found);
  if (functions->version == version) return functions;
  return unsupported("libkvx_{}.so.1 has version {}; expected {}, that of the same build as libkvx",
                     name, functions->version, version);
}

}  // namespace kvx
