// Reads the precision that a caller requests.
#pragma once

#include "core/result.hpp"
#include "kvx/kvx_abi.h"
#include "ops/attend/precision.hpp"

namespace kvx::boundary {

inline Result<ops::Precision> read_precision(uint32_t precision) {
  if (precision == KVX_PRECISION_ACCURATE) return ops::Precision::kAccurate;
  if (precision == KVX_PRECISION_FAST) return ops::Precision::kFast;
  return invalid_argument("args.precision is {}; expected {} (accurate) or {} (fast)", precision,
                          static_cast<int>(KVX_PRECISION_ACCURATE),
                          static_cast<int>(KVX_PRECISION_FAST));
}

}  // namespace kvx::boundary
