// Means, factors, feedback and scales, each by one short rule.
#include "tune/fit.hpp"

#include <algorithm>
#include <cmath>

#include "format/list.hpp"
#include "kv/plan/feedback_table.hpp"

namespace kvx::tune {
namespace {

template <class Codec>
constexpr float largest_code() {
  if constexpr (requires { Codec::kQmax; }) {
    return Codec::kQmax;
  } else {
    return 1;
  }
}

float largest_code_of(format::FormatId id) {
  switch (id) {
#define KVX_LARGEST_CODE(Format)  \
  case format::Format::kFacts.id: \
    return largest_code<format::Format::Codec>();
    KVX_FOR_EACH_FORMAT(KVX_LARGEST_CODE)
#undef KVX_LARGEST_CODE
  }
  return 1;
}

// SmoothQuant's exponent 0.5 with keys in the part of activations and queries in that of weights:
// f_d = sqrt(rms of q_d / max of k_d). The factors of a head have the geometric mean 1, which keeps
// its numbers where they were on average.
std::vector<float> smoothing_factors(const Statistics& statistics, int layer) {
  const StatisticsConfig& config = statistics.config();
  const int head_dim = config.k_head_dim;
  const ChannelStatistics& k = statistics.of(layer, Side::kK);
  std::vector<float> factors;
  for (int head = 0; head < config.num_kv_heads; ++head) {
    const std::vector<double> moments = statistics.query_moments(layer, head);
    std::vector<double> logs(head_dim);
    double mean = 0;
    for (int d = 0; d < head_dim; ++d) {
      const double q = std::sqrt(moments[int64_t{d} * head_dim + d]);
      const double largest = k.largest[int64_t{head} * head_dim + d];
      logs[d] = q > 0 && largest > 0 ? 0.5 * std::log(q / largest) : 0;
      mean += logs[d] / head_dim;
    }
    for (const double log : logs) factors.push_back(static_cast<float>(std::exp(log - mean)));
  }
  return factors;
}

Result<std::vector<float>> feedback_of(const Statistics& statistics, int layer,
                                       const std::vector<float>& factor,
                                       const kv::LayerPlan& plan) {
  const StatisticsConfig& config = statistics.config();
  std::vector<double> moments;
  for (int head = 0; head < config.num_kv_heads; ++head) {
    const std::vector<double> of_head = statistics.query_moments(layer, head);
    moments.insert(moments.end(), of_head.begin(), of_head.end());
  }
  kv::FeedbackInput input;
  input.num_kv_heads = config.num_kv_heads;
  input.head_dim = config.k_head_dim;
  input.moments = moments;
  input.factor = factor;
  input.hadamard = plan.k_hadamard;
  input.has_error_weights =
      std::any_of(plan.runs.begin(), plan.runs.end(),
                  [](const kv::HeadRunPlan& run) { return run.k.spec.is_dual(); });
  return kv::feedback_table(input);
}

// The largest magnitude of a head.
double amax_of(const Statistics& statistics, int layer, Side side, int head) {
  return statistics.percentile(layer, side, head, 0, statistics.head_dim(side), 100);
}

Result<float> tensor_scale_of(TensorScaleRule rule, double amax) {
  if (amax == 0) return 1.0f;
  const auto of_floats = static_cast<float>(amax);
  return rule == TensorScaleRule::kAmaxBy448 ? format::tensor_scale_for_kv(of_floats)
                                             : format::tensor_scale_for_weights(of_floats);
}

// A head's given scales, appended.
void append_given(const Statistics& transformed, int layer, Side side, int head,
                  const format::FormatSpec& spec, float tensor_scale, double percentile,
                  std::vector<float>& scales) {
  const int head_dim = transformed.head_dim(side);
  const int length = format::group_length(spec, head_dim);
  for (int first = 0; first < head_dim; first += length) {
    const int count = std::min(length, head_dim - first);
    scales.push_back(step_for(spec, tensor_scale,
                              transformed.percentile(layer, side, head, first, count, percentile)));
  }
}

Status fit_side(const Statistics& transformed, int layer, Side side, const FitOptions& options,
                const kv::LayerPlan& plan, kv::StaticScales& scales) {
  for (const kv::HeadRunPlan& run : plan.runs) {
    const format::FormatSpec& spec = (side == Side::kK ? run.k : run.v).spec;
    for (int head = run.first_head; head < run.first_head + run.num_heads; ++head) {
      float tensor_scale = 1;
      if (options.tensor_scales != TensorScaleRule::kNone) {
        KVX_ASSIGN_OR_RETURN(
            tensor_scale,
            tensor_scale_of(options.tensor_scales, amax_of(transformed, layer, side, head)));
        scales.tensor_scales.push_back(tensor_scale);
      }
      const bool is_given = spec.has_scale() && spec.scale_source == format::ScaleSource::kGiven;
      if (!options.given_scales || !is_given) continue;
      append_given(transformed, layer, side, head, spec,
                   spec.facts->has_tensor_scale ? tensor_scale : 1.0f, options.percentile,
                   scales.group_scales);
    }
  }
  return {};
}

bool is_quantised(const kv::LayerPlan& plan) {
  return std::any_of(plan.runs.begin(), plan.runs.end(),
                     [](const kv::HeadRunPlan& run) { return run.k.spec.has_scale(); });
}

}  // namespace

Status check_percentile(double percentile) {
  if (percentile > 0 && percentile <= 100) return {};
  return invalid_argument("percentile is {}; expected a number above 0 and at most 100",
                          percentile);
}

float step_for(const format::FormatSpec& spec, float tensor_scale, double amax) {
  if (amax == 0) return 1;
  const format::ScaleMaker maker{spec.scale_type, spec.scale_rule, tensor_scale,
                                 spec.facts->has_tensor_scale};
  return format::decode_scale(
      spec.scale_type, maker.make(largest_code_of(spec.facts->id), static_cast<float>(amax)));
}

Result<kv::LayerCalibration> fit_tables(const Statistics& statistics, int layer,
                                        const FitOptions& options, const kv::LayerPlan& plan) {
  kv::LayerCalibration tables;
  if (options.k_mean) tables.k_mean = statistics.mean(layer, Side::kK);
  if (options.v_mean) tables.v_mean = statistics.mean(layer, Side::kV);
  if (options.k_block_offset) {
    tables.k_rope_mean = statistics.rope_mean(layer);
    tables.k_rope = *statistics.config().rope;
  }
  if (options.k_factor) tables.k_factor = smoothing_factors(statistics, layer);
  if (options.k_feedback && is_quantised(plan)) {
    KVX_ASSIGN_OR_RETURN(tables.k_feedback, feedback_of(statistics, layer, tables.k_factor, plan));
  }
  return tables;
}

Status fit_scales(const Statistics& transformed, int layer, const FitOptions& options,
                  const kv::LayerPlan& plan, kv::LayerCalibration& tables) {
  KVX_RETURN_IF_ERROR(fit_side(transformed, layer, Side::kK, options, plan, tables.k));
  return fit_side(transformed, layer, Side::kV, options, plan, tables.v);
}

}  // namespace kvx::tune
