// fit: a layer's tables from statistics.
#pragma once

#include "kv/plan/layer_plan.hpp"
#include "kv/plan/layer_tables.hpp"
#include "tune/statistics.hpp"

namespace kvx::tune {

// Where a head's tensor scale comes from.
enum class TensorScaleRule {
  kNone,
  kAmaxBy448,     // amax / 448: what vLLM, FlashInfer and TensorRT-LLM keep for KV caches
  kAmaxBy6By448,  // amax / (6 * 448): Model-Optimizer's for weights
};

// FitOptions names the tables that are fitted for a layer.
struct FitOptions {
  bool k_mean = false;
  bool v_mean = false;
  bool k_block_offset = false;  // K's mean before RoPE, turned block by block
  bool k_factor = false;        // K times what q is divided by, so that channels are of one size
  bool k_feedback = false;      // roundings that spare what queries look at
  TensorScaleRule tensor_scales = TensorScaleRule::kNone;
  bool given_scales = false;  // of sides whose recipe reads given scales
  // Magnitudes above this percentile of a group are clipped by given scales; 100 clips none.
  double percentile = 100;

  bool has_scales() const { return given_scales || tensor_scales != TensorScaleRule::kNone; }

  friend bool operator==(const FitOptions&, const FitOptions&) = default;
};

// INVALID_ARGUMENT: percentile is not above 0 and at most 100.
Status check_percentile(double percentile);

// All but the scales. Requires: statistics.check_complete(), and config().rope for block offsets.
Result<kv::LayerCalibration> fit_tables(const Statistics& statistics, int layer,
                                        const FitOptions& options, const kv::LayerPlan& plan);

// The scales. transformed: statistics of rows after the transform that the tables and the plan
// make, since that is what is quantised. A step is amax / the format's largest code (a power of two
// where the format's scales are); a group that was all zero gets a step of 1.
Status fit_scales(const Statistics& transformed, int layer, const FitOptions& options,
                  const kv::LayerPlan& plan, kv::LayerCalibration& tables);

// The step of a group whose magnitudes reach amax, as the format would compute it.
float step_for(const format::FormatSpec& spec, float tensor_scale, double amax);

}  // namespace kvx::tune
