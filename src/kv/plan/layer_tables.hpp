// LayerTables: a layer's calibrated numbers, checked, and in the types that views and transforms
// point to.
#pragma once

#include <vector>

#include "cache/pool/memory.hpp"
#include "kv/plan/layer_plan.hpp"
#include "kv/plan/rope_offsets.hpp"
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
  // [num_kv_heads, k_head_dim, k_head_dim], as feedback_table.hpp makes it: weights above the
  // diagonal and 0 elsewhere. Heads in 16 bits ignore theirs.
  std::vector<float> k_feedback;
  // Instead of k_block_offset, which with_block_offsets() makes of it for any length.
  std::vector<float> k_rope_mean;  // [num_kv_heads, k_head_dim], the mean of K before RoPE
  Rope k_rope;                     // with a k_rope_mean
};

// The calibration with k_block_offset for `num_tokens` positions in place of a k_rope_mean; as it
// is without one. INVALID_ARGUMENT: both are given, or the mean or the rope has another length than
// expected or holds a number that is not finite.
Result<LayerCalibration> with_block_offsets(const CacheGeometry& geometry, int layer,
                                            int block_size, int64_t num_tokens,
                                            LayerCalibration calibration);

// Its tables stay where they are when it is moved.
class LayerTables {
 public:
  // INVALID_ARGUMENT names the table of the calibration that is missing, has another length than
  // expected or holds a number that is not positive and finite.
  // With rows in segments, K's tables are of their first one, [num_kv_heads, v_head_dim].
  static Result<LayerTables> create(const CacheGeometry& of_rows, int layer, const LayerPlan& plan,
                                    const LayerCalibration& calibration);

  // Copies them to a device's memory: transform() and views attached from now on point there.
  // OUT_OF_RANGE: it has no room.
  Status place_in(cache::Memory& device);

  LayerTables() = default;
  LayerTables(LayerTables&&) = default;
  LayerTables& operator=(LayerTables&&) = default;

  const ops::LayerTransform& transform() const { return transform_; }

  // Points the view of the plan's run at its tensor scales, given scales and error feedback.
  void attach(size_t run, ops::HeadRun& view) const;

 private:
  // Where one side's scales lie. Null, or empty: there are none.
  struct ScalesPlace {
    const float* tensor = nullptr;
    std::vector<const uint8_t*> given;  // [run]
  };
  static void attach_side(const ScalesPlace& scales, size_t run, int first_head,
                          ops::SideView& side);

  LayerCalibration calibration_;
  ops::LayerTransform transform_;
  const float* k_feedback_ = nullptr;
  ScalesPlace k_scales_;
  ScalesPlace v_scales_;
  // [run], in their stored type; empty where scales are not given.
  std::vector<std::vector<uint8_t>> given_k_;
  std::vector<std::vector<uint8_t>> given_v_;
  std::vector<cache::Region> on_device_;  // empty: all of the above lies where it is
};

}  // namespace kvx::kv
