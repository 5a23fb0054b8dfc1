// Precision: how exact a caller wants attention to be.
#pragma once

#include <cstdint>

namespace kvx::ops {

// The relative root mean square error against double precision over the stored numbers, for scores
// of the usual size (decision 4 has the measurements):
//   kAccurate  at most 1e-5 where K and V have 16 bits and more, 3e-4 elsewhere
//   kFast      at most 8e-3: where it saves time, queries have 8 bits
enum class Precision : uint8_t { kAccurate, kFast };

}  // namespace kvx::ops
