// The fingerprint of a cache: all that decides the bytes of a block beside its tokens, as text, one
// fact a line. Blocks of caches with equal fingerprints may take each other's places.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv/plan/group_plan.hpp"
#include "kv/plan/layer_tables.hpp"

namespace kvx::kv {

// How a block lies in memory (cache/block_layout.hpp), by name.
constexpr std::string_view block_order_name(cache::BlockOrder order) {
  return order == cache::BlockOrder::kTurbomind ? "turbomind" : "layer,head,k,k_scales,v,v_scales";
}

struct FingerprintFacts {
  const CacheGeometry* geometry = nullptr;
  std::span<const LayerPlan> layers;
  std::span<const LayerCalibration> calibration;  // [num_layers], or empty
  cache::FullPrecisionWindow full_precision_window;
  const format::FormatSpec* full_precision_spec = nullptr;
  int block_size = 0;
  std::string_view model;  // the caller's name or hash of what computes K and V
  cache::BlockOrder order = cache::BlockOrder::kHeads;
};

std::string fingerprint_of(const FingerprintFacts& facts);

// What stands for a calibration in a fingerprint: a hash of its tables, or "none".
std::string calibration_name(std::span<const LayerCalibration> layers);

// What a fingerprint contains of its cache: all that is needed to read the cache's blocks, but for
// the calibrated tables themselves.
struct StoredCache {
  CacheGeometry geometry;
  std::vector<LayerPlan> layers;
  cache::FullPrecisionWindow full_precision_window;
  format::FormatSpec full_precision_spec;  // bf16 where there are no full-precision window
  int block_size = 0;
  cache::BlockOrder order = cache::BlockOrder::kHeads;
  std::string calibration;  // calibration_name()
  std::string model;
};

// INVALID_ARGUMENT: a fact that is missing, is no number where one must stand, or names what this
// library has not.
Result<StoredCache> parse_fingerprint(std::string_view text);

// Why blocks with the fingerprint `found` are not read as they lie by a cache with the fingerprint
// `expected`: the first line in which the two differ, as "num_layers is 2; expected 4". Empty when
// they may be read. A shorter full-precision window is no reason: its sequences are as one of this
// cache that was cut, with fewer blocks in full precision until the window has grown again.
std::string reason_not_to_load(std::string_view found, std::string_view expected);

}  // namespace kvx::kv
