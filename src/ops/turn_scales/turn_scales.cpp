// The turn of scales on the host.
#include "ops/turn_scales/turn_scales.hpp"

namespace kvx::ops {

void turn_scales(const ScaleRows& scales, bool makes_linear) {
  const int num_bytes = ScaleRows::kTokens * scales.num_groups;
  uint8_t bytes[ScaleRows::kTokens * ScaleRows::kMaxGroups];
  for (int64_t i = 0; i < scales.num_fours(); ++i) {
    uint8_t* const rows = scales.four(i);
    for (int b = 0; b < num_bytes; ++b) bytes[b] = rows[scales.byte(b)];
    for (int b = 0; b < num_bytes; ++b) {
      rows[scales.byte(b)] = bytes[scales.source(b, makes_linear)];
    }
  }
}

}  // namespace kvx::ops
