// The values of a GGUF, each within bounds, and the rotary frequencies that follow.
#include "runner/model_config.hpp"

#include <cmath>

#include "runner/config_keys.hpp"
#include "runner/latent_config.hpp"

namespace kvx::runner {
namespace {

Status read_sizes(const ConfigKeys& keys, ModelConfig& config) {
  KVX_RETURN_IF_ERROR(keys.read("block_count", kMostLayers, config.num_layers));
  KVX_RETURN_IF_ERROR(keys.read("embedding_length", kMostSize, config.hidden));
  KVX_RETURN_IF_ERROR(keys.read("feed_forward_length", kMostSize, config.feed_forward));
  KVX_RETURN_IF_ERROR(keys.read("attention.head_count", kMostHeads, config.num_q_heads));
  KVX_RETURN_IF_ERROR(keys.read("context_length", kMostContext, config.context_length));
  const GgufTensor* embedding = keys.gguf().find_tensor("token_embd.weight");
  if (embedding == nullptr) return invalid_argument("tensor token_embd.weight is missing");
  config.vocab_size = static_cast<int>(embedding->num_rows());
  KVX_ASSIGN_OR_RETURN(const double epsilon,
                       keys.positive("attention.layer_norm_rms_epsilon", 1e-5));
  config.norm_epsilon = static_cast<float>(epsilon);
  return {};
}

Status read_heads(const ConfigKeys& keys, ModelConfig& config) {
  KVX_ASSIGN_OR_RETURN(const int64_t kv_heads, keys.integer_or("attention.head_count_kv", 1,
                                                               kMostHeads, config.num_q_heads));
  config.num_kv_heads = static_cast<int>(kv_heads);
  if (config.num_q_heads % config.num_kv_heads != 0) {
    return invalid_argument(
        "llama.attention.head_count is {}; a multiple of head_count_kv ({}) was expected",
        config.num_q_heads, config.num_kv_heads);
  }
  KVX_ASSIGN_OR_RETURN(
      const int64_t head_dim,
      keys.integer_or("attention.key_length", 2, kMostHeadDim, config.hidden / config.num_q_heads));
  KVX_ASSIGN_OR_RETURN(const int64_t value_dim,
                       keys.integer_or("attention.value_length", 2, kMostHeadDim, head_dim));
  if (head_dim < 2) {
    return invalid_argument(
        "llama.embedding_length is {}; at least two for each of {} heads were expected",
        config.hidden, config.num_q_heads);
  }
  if (value_dim != head_dim) {
    return unsupported("llama.attention.value_length is {}; the runner needs key_length ({})",
                       value_dim, head_dim);
  }
  KVX_ASSIGN_OR_RETURN(const int64_t rope_dims,
                       keys.integer_or("rope.dimension_count", 2, kMostHeadDim, head_dim));
  if (rope_dims > head_dim || rope_dims % 2 != 0) {
    return invalid_argument(
        "llama.rope.dimension_count is {}; an even number up to head_dim ({}) was expected",
        rope_dims, head_dim);
  }
  config.head_dim = static_cast<int>(head_dim);
  config.value_dim = config.head_dim;
  config.rope_dims = static_cast<int>(rope_dims);
  config.softmax_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  return {};
}

// llama3's scaling comes as one divisor a frequency.
Status divide_by_rope_factors(const GgufView& gguf, std::vector<double>& frequencies) {
  const GgufTensor* tensor = gguf.find_tensor("rope_freqs.weight");
  if (tensor == nullptr) return {};
  const auto count = static_cast<int64_t>(frequencies.size());
  if (tensor->type != TensorType::kF32 || tensor->dims.size() != 1 || tensor->dims[0] != count) {
    return invalid_argument("tensor rope_freqs.weight: {} f32 numbers were expected", count);
  }
  std::vector<float> factors(frequencies.size());
  dequantize(tensor->type, tensor->data.data(), count, factors.data());
  for (size_t i = 0; i < frequencies.size(); ++i) {
    if (!(factors[i] > 0) || !std::isfinite(factors[i])) {
      return invalid_argument("rope_freqs.weight[{}] is {}; a positive number was expected", i,
                              factors[i]);
    }
    frequencies[i] /= factors[i];
  }
  return {};
}

// Angles are divided by the factor of linear scaling.
Status read_rope(const ConfigKeys& keys, ModelConfig& config) {
  KVX_ASSIGN_OR_RETURN(const double base, keys.positive("rope.freq_base", 10000.0));
  KVX_ASSIGN_OR_RETURN(const std::string_view type, keys.string_or("rope.scaling.type", "none"));
  if (type != "none" && type != "linear") {
    return unsupported(
        "llama.rope.scaling.type is {}; expected none, linear or llama3's rope_freqs.weight",
        type.substr(0, 40));
  }
  double factor = 1.0;
  if (type == "linear") {
    KVX_ASSIGN_OR_RETURN(factor, keys.positive("rope.scaling.factor", 1.0));
  }
  for (int i = 0; i < config.rope_dims / 2; ++i) {
    config.rope_frequencies.push_back(std::pow(base, -2.0 * i / config.rope_dims) / factor);
  }
  return divide_by_rope_factors(keys.gguf(), config.rope_frequencies);
}

}  // namespace

Result<ModelConfig> read_model_config(const GgufView& gguf) {
  KVX_ASSIGN_OR_RETURN(const std::string_view architecture, gguf.string("general.architecture"));
  const bool is_latent = architecture == "deepseek2";
  if (architecture != "llama" && !is_latent) {
    return unsupported("general.architecture is {}; expected llama or deepseek2",
                       architecture.substr(0, 40));
  }
  const ConfigKeys keys(gguf, architecture);
  ModelConfig config;
  KVX_RETURN_IF_ERROR(read_sizes(keys, config));
  if (is_latent) {
    KVX_RETURN_IF_ERROR(read_latent_config(keys, config));
    return config;
  }
  KVX_RETURN_IF_ERROR(read_heads(keys, config));
  KVX_RETURN_IF_ERROR(read_rope(keys, config));
  return config;
}

}  // namespace kvx::runner
