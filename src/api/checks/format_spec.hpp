// Formats as the C ABI names them.
#pragma once

#include <string_view>

#include "core/result.hpp"
#include "format/spec.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// Reads a caller's format. INVALID_ARGUMENT names the field and the values that the format allows.
Result<format::FormatSpec> read_format(const kvx_format_spec_t* spec, std::string_view name);

// The other way.
kvx_format_spec_t spec_of(const format::FormatSpec& spec);

}  // namespace kvx::boundary
