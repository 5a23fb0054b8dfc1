// Latent attention's sizes follow from llama.cpp's keys; YaRN is Peng et al. 2023 ("YaRN"), with
// the scale of the softmax that DeepSeek gives it.
#include "runner/latent_config.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace kvx::runner {
namespace {

// Files say the length of a head's key and value as *_length_mla where *_length is a cache's row.
Status read_head_length(const ConfigKeys& keys, const std::string& name, int& out) {
  const std::string mla = name + "_mla";
  return keys.read(keys.contains(mla) ? mla : name, kMostHeadDim, out);
}

Status read_attention(const ConfigKeys& keys, ModelConfig& config) {
  LatentSizes& latent = config.latent;
  KVX_RETURN_IF_ERROR(keys.read("attention.kv_lora_rank", kMostHeadDim, latent.latent_dim));
  KVX_ASSIGN_OR_RETURN(const int64_t rank,
                       keys.integer_or("attention.q_lora_rank", 0, kMostSize, 0));
  latent.query_rank = static_cast<int>(rank);
  KVX_RETURN_IF_ERROR(keys.read("rope.dimension_count", kMostHeadDim, latent.rotary_dim));
  int key_dim = 0;
  KVX_RETURN_IF_ERROR(read_head_length(keys, "attention.key_length", key_dim));
  KVX_RETURN_IF_ERROR(read_head_length(keys, "attention.value_length", latent.value_dim));
  if (latent.rotary_dim % 2 != 0 || latent.rotary_dim >= key_dim) {
    return invalid_argument("{} is {}; an even number below the keys' length ({}) was expected",
                            keys.key("rope.dimension_count"), latent.rotary_dim, key_dim);
  }
  latent.nope_dim = key_dim - latent.rotary_dim;
  config.num_kv_heads = 1;
  config.head_dim = latent.latent_dim + latent.rotary_dim;
  config.value_dim = latent.latent_dim;
  config.rope_dims = latent.rotary_dim;
  config.softmax_scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  return {};
}

Status read_scores(const ConfigKeys& keys, ExpertSizes& experts) {
  constexpr int64_t kSoftmax = 1;
  constexpr int64_t kSigmoid = 2;
  KVX_ASSIGN_OR_RETURN(const int64_t scores,
                       keys.integer_or("expert_gating_func", 0, kMostSize, kSoftmax));
  if (scores != kSoftmax && scores != kSigmoid && scores != 0) {
    return unsupported("{} is {}; expected 1 (softmax) or 2 (sigmoid)",
                       keys.key("expert_gating_func"), scores);
  }
  experts.has_sigmoid_scores = scores == kSigmoid;
  KVX_ASSIGN_OR_RETURN(experts.has_normed_weights, keys.flag_or("expert_weights_norm", false));
  KVX_ASSIGN_OR_RETURN(const double scale, keys.positive("expert_weights_scale", 1.0));
  experts.scale = static_cast<float>(scale);
  return {};
}

Status read_experts(const ConfigKeys& keys, ModelConfig& config) {
  ExpertSizes& experts = config.experts;
  const auto read_or = [&keys](const char* name, int64_t least, int64_t most, int64_t fallback,
                               int& out) -> Status {
    KVX_ASSIGN_OR_RETURN(const int64_t value, keys.integer_or(name, least, most, fallback));
    out = static_cast<int>(value);
    return {};
  };
  KVX_RETURN_IF_ERROR(read_or("expert_count", 0, kMostHeads, 0, experts.num_experts));
  if (experts.num_experts == 0) return {};
  KVX_RETURN_IF_ERROR(keys.read("expert_used_count", experts.num_experts, experts.num_used));
  KVX_RETURN_IF_ERROR(keys.read("expert_feed_forward_length", kMostSize, experts.feed_forward));
  KVX_RETURN_IF_ERROR(read_or("expert_shared_count", 0, 64, 0, experts.num_shared));
  KVX_RETURN_IF_ERROR(
      read_or("leading_dense_block_count", 0, config.num_layers, 0, experts.first_layer));
  KVX_RETURN_IF_ERROR(read_or("expert_group_count", 1, experts.num_experts, 1, experts.num_groups));
  KVX_RETURN_IF_ERROR(read_or("expert_group_used_count", 1, experts.num_groups, experts.num_groups,
                              experts.num_used_groups));
  const int group_size = experts.num_experts / experts.num_groups;
  if (experts.num_experts % experts.num_groups != 0 ||
      experts.num_used > experts.num_used_groups * group_size) {
    return invalid_argument(
        "{} is {} with {} experts, {} of them used in {} groups; expected a divisor, and groups "
        "that hold those used",
        keys.key("expert_group_count"), experts.num_groups, experts.num_experts, experts.num_used,
        experts.num_used_groups);
  }
  return read_scores(keys, experts);
}

// The pair of dimensions that turns so many times in the context that the model was trained with.
double pair_of_turns(double turns, int rope_dims, double context, double base) {
  return rope_dims * std::log(context / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
}

// Fast pairs keep their frequency, slow ones are interpolated, and those between are mixed.
Status read_rope(const ConfigKeys& keys, ModelConfig& config) {
  const int dims = config.rope_dims;
  KVX_ASSIGN_OR_RETURN(const double base, keys.positive("rope.freq_base", 10000.0));
  KVX_ASSIGN_OR_RETURN(const std::string_view type, keys.string_or("rope.scaling.type", "none"));
  if (type != "none" && type != "yarn") {
    return unsupported("{} is {}; expected none or yarn", keys.key("rope.scaling.type"),
                       type.substr(0, 40));
  }
  for (int i = 0; i < dims / 2; ++i) {
    config.rope_frequencies.push_back(std::pow(base, -2.0 * i / dims));
  }
  if (type == "none") return {};
  KVX_ASSIGN_OR_RETURN(const double factor, keys.positive("rope.scaling.factor", 1.0));
  KVX_ASSIGN_OR_RETURN(const int64_t trained,
                       keys.integer_or("rope.scaling.original_context_length", 1, kMostContext,
                                       config.context_length));
  const auto context = static_cast<double>(trained);
  KVX_ASSIGN_OR_RETURN(const double fast, keys.positive("rope.scaling.yarn_beta_fast", 32.0));
  KVX_ASSIGN_OR_RETURN(const double slow, keys.positive("rope.scaling.yarn_beta_slow", 1.0));
  const double first = std::max(0.0, std::floor(pair_of_turns(fast, dims, context, base)));
  const double last = std::min(dims - 1.0, std::ceil(pair_of_turns(slow, dims, context, base)));
  for (int i = 0; i < dims / 2; ++i) {
    const double ramp = std::clamp((i - first) / std::max(0.001, last - first), 0.0, 1.0);
    config.rope_frequencies[i] *= 1.0 - ramp + ramp / factor;
  }
  // DeepSeek multiplies the scores' scale and leaves rotated rows as long as they are.
  KVX_ASSIGN_OR_RETURN(const double log_factor,
                       keys.gguf().number_or(keys.key("rope.scaling.yarn_log_multiplier"), 0.0));
  const double longer = 1.0 + log_factor * std::log(factor);
  if (!std::isfinite(longer) || longer <= 0) {
    return invalid_argument("{} is {}; a number that keeps the scale positive was expected",
                            keys.key("rope.scaling.yarn_log_multiplier"), log_factor);
  }
  config.softmax_scale *= static_cast<float>(longer * longer);
  return {};
}

}  // namespace

Status read_latent_config(const ConfigKeys& keys, ModelConfig& config) {
  KVX_RETURN_IF_ERROR(read_attention(keys, config));
  KVX_RETURN_IF_ERROR(read_experts(keys, config));
  return read_rope(keys, config);
}

}  // namespace kvx::runner
