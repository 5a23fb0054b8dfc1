// format_kernels<Format, Parts>() is one format's entry of a KernelTable, for the level being
// compiled. Parts: what the level encodes rows with (encode_rows.hpp).
#pragma once

#include "ops/append/encode_rows.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/cpu/level.hpp"
#include "ops/gather/decode_rows.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

template <class Format, class Parts = NoPartEncoders>
constexpr FormatKernels format_kernels() {
  return {
      .encode_rows = encode_rows<Format, Parts>,
      .decode_rows = decode_rows<Format>,
  };
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
