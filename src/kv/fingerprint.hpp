// The fingerprint of a cache: all that decides the bytes of a block beside its tokens, as text, one
// fact a line. Blocks of caches with equal fingerprints may take each other's places.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "kv/group_plan.hpp"
#include "kv/layer_tables.hpp"

namespace kvx::kv {

struct FingerprintFacts {
  const CacheGeometry* geometry = nullptr;
  std::span<const LayerPlan> layers;
  std::span<const LayerCalibration> calibration;  // [num_layers], or empty
  cache::WideEnds wide_ends;
  const format::FormatSpec* wide_spec = nullptr;
  int block_size = 0;
  std::string_view model;  // the caller's name or hash of what computes K and V
};

std::string fingerprint_of(const FingerprintFacts& facts);

// The first line in which two fingerprints differ, as "num_layers is 2; expected 4". Empty when
// they are equal.
std::string first_difference(std::string_view found, std::string_view expected);

}  // namespace kvx::kv
