// LayerStore: one layer of the cache as the verbs see it: views of its packed and its wide blocks,
// its transform, and the calibrated tables that those point into.
#pragma once

#include <memory>
#include <vector>

#include "cache/block_layout.hpp"
#include "kv/layer_plan.hpp"
#include "ops/cache_view.hpp"
#include "ops/transform.hpp"

namespace kvx::kv {

// Calibrated numbers that a recipe may need; an empty vector means none. Scales are steps: value =
// code * scale.
struct StaticScales {
  // For source=given: [num_kv_heads, groups of the head's format]. fp8 has one group a head,
  // and 1.0 when this is empty.
  std::vector<float> group_scales;
  std::vector<float> tensor_scales;  // [num_kv_heads], nvfp4's second level; 1.0 when empty
};

struct LayerCalibration {
  StaticScales k;
  StaticScales v;
  std::vector<float> k_mean, v_mean;      // [num_kv_heads, head_dim]
  std::vector<float> k_factor, v_factor;  // [num_kv_heads, head_dim], positive and finite
  std::vector<float> k_block_offset;      // [num_offset_blocks, num_kv_heads, k_head_dim]
};

// Row sizes of a layer, for cache::layout_block.
cache::LayerBytes packed_bytes(const CacheGeometry& geometry, const LayerPlan& plan);
cache::LayerBytes wide_bytes(const CacheGeometry& geometry, const format::FormatSpec& wide);

// Where a layer's blocks lie: base is the address of block 0 of its class.
struct LayerMemory {
  uint8_t* base = nullptr;
  int64_t num_blocks = 0;
  const cache::BlockLayout* layout = nullptr;
  int layer_in_group = 0;
};

// Views point into the store: it stays where it is.
class LayerStore {
 public:
  // wide.layout is null without wide ends. INVALID_ARGUMENT names the table of the calibration that
  // is missing, has another length than expected or holds a number that is not positive and finite.
  static Result<std::unique_ptr<LayerStore>> create(const CacheGeometry& geometry, int layer,
                                                    const LayerPlan& plan,
                                                    const format::FormatSpec& wide_spec,
                                                    const LayerCalibration& calibration,
                                                    const LayerMemory& packed,
                                                    const LayerMemory& wide);

  const ops::LayerView& packed() const { return packed_; }
  const ops::LayerView& wide() const { return wide_; }
  const ops::LayerTransform& transform() const { return transform_; }

 private:
  LayerStore() = default;

  LayerCalibration calibration_;
  std::vector<std::vector<uint8_t>> given_scales_;  // [K and V of each run], in their stored type
  std::vector<ops::HeadRun> packed_runs_;
  std::vector<ops::HeadRun> wide_runs_;
  ops::LayerView packed_;
  ops::LayerView wide_;
  ops::LayerTransform transform_;
};

}  // namespace kvx::kv
