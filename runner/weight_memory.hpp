// WeightMemory allocates the memory of packed weights: many small matrices on huge pages.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/pool/memory.hpp"
#include "core/result.hpp"

namespace kvx::runner {

// Decoding reads every weight once a token. On pages of 4 KiB the address translation of that walk
// costs a third of the time (docs/decisions/0002-matrix-products.md), and one matrix of a small
// model is smaller than a huge page: so the matrices of a model share chunks.
class WeightMemory {
 public:
  // Zeroed, beginning on 64 bytes; lives as long as this object. OUT_OF_RANGE: the machine does
  // not have that much memory.
  Result<uint8_t*> take(int64_t bytes);

 private:
  std::vector<cache::Region> chunks_;
  int64_t used_ = 0;  // bytes of the last chunk
};

}  // namespace kvx::runner
