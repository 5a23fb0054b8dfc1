// The llama.* values of a GGUF, each within bounds, and the rotary frequencies that follow.
#include "runner/model_config.hpp"

#include <cmath>

namespace kvx::runner {
namespace {

// Generous: far above any Llama, far below where a product of two could overflow.
constexpr int64_t kMostLayers = 4096;
constexpr int64_t kMostSize = 1 << 20;
constexpr int64_t kMostHeads = 4096;
constexpr int64_t kMostHeadDim = 4096;
constexpr int64_t kMostContext = int64_t{1} << 30;

Status read_int(const GgufView& gguf, const char* key, int64_t most, int& out) {
  KVX_ASSIGN_OR_RETURN(const int64_t value, gguf.integer(key, 1, most));
  out = static_cast<int>(value);
  return {};
}

Status read_sizes(const GgufView& gguf, ModelConfig& config) {
  KVX_RETURN_IF_ERROR(read_int(gguf, "llama.block_count", kMostLayers, config.num_layers));
  KVX_RETURN_IF_ERROR(read_int(gguf, "llama.embedding_length", kMostSize, config.hidden));
  KVX_RETURN_IF_ERROR(read_int(gguf, "llama.feed_forward_length", kMostSize, config.feed_forward));
  KVX_RETURN_IF_ERROR(read_int(gguf, "llama.attention.head_count", kMostHeads, config.num_q_heads));
  KVX_RETURN_IF_ERROR(read_int(gguf, "llama.context_length", kMostContext, config.context_length));
  const GgufTensor* embedding = gguf.find_tensor("token_embd.weight");
  if (embedding == nullptr) return invalid_argument("tensor token_embd.weight is missing");
  config.vocab_size = static_cast<int>(embedding->num_rows());
  return {};
}

Status read_heads(const GgufView& gguf, ModelConfig& config) {
  KVX_ASSIGN_OR_RETURN(const int64_t kv_heads, gguf.integer_or("llama.attention.head_count_kv", 1,
                                                               kMostHeads, config.num_q_heads));
  config.num_kv_heads = static_cast<int>(kv_heads);
  if (config.num_q_heads % config.num_kv_heads != 0) {
    return invalid_argument(
        "llama.attention.head_count is {}; a multiple of head_count_kv ({}) was expected",
        config.num_q_heads, config.num_kv_heads);
  }
  KVX_ASSIGN_OR_RETURN(const int64_t head_dim,
                       gguf.integer_or("llama.attention.key_length", 2, kMostHeadDim,
                                       config.hidden / config.num_q_heads));
  KVX_ASSIGN_OR_RETURN(const int64_t value_dim,
                       gguf.integer_or("llama.attention.value_length", 2, kMostHeadDim, head_dim));
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
                       gguf.integer_or("llama.rope.dimension_count", 2, kMostHeadDim, head_dim));
  if (rope_dims > head_dim || rope_dims % 2 != 0) {
    return invalid_argument(
        "llama.rope.dimension_count is {}; an even number up to head_dim ({}) was expected",
        rope_dims, head_dim);
  }
  config.head_dim = static_cast<int>(head_dim);
  config.rope_dims = static_cast<int>(rope_dims);
  return {};
}

Result<double> positive(const GgufView& gguf, const char* key, double fallback) {
  KVX_ASSIGN_OR_RETURN(const double value, gguf.number_or(key, fallback));
  if (!(value > 0) || !std::isfinite(value)) {
    return invalid_argument("GGUF value {} is {}; a positive number was expected", key, value);
  }
  return value;
}

// 1 without scaling; positions are divided by it.
Result<double> linear_rope_factor(const GgufView& gguf) {
  KVX_ASSIGN_OR_RETURN(const std::string_view type,
                       gguf.string_or("llama.rope.scaling.type", "none"));
  if (type == "none") return 1.0;
  if (type == "linear") return positive(gguf, "llama.rope.scaling.factor", 1.0);
  return unsupported(
      "llama.rope.scaling.type is {}; expected none, linear or llama3's rope_freqs.weight",
      type.substr(0, 40));
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

Status read_rope(const GgufView& gguf, ModelConfig& config) {
  KVX_ASSIGN_OR_RETURN(const double base, positive(gguf, "llama.rope.freq_base", 10000.0));
  KVX_ASSIGN_OR_RETURN(const double factor, linear_rope_factor(gguf));
  for (int i = 0; i < config.rope_dims / 2; ++i) {
    config.rope_frequencies.push_back(std::pow(base, -2.0 * i / config.rope_dims) / factor);
  }
  return divide_by_rope_factors(gguf, config.rope_frequencies);
}

}  // namespace

Result<ModelConfig> read_model_config(const GgufView& gguf) {
  KVX_ASSIGN_OR_RETURN(const std::string_view architecture, gguf.string("general.architecture"));
  if (architecture != "llama") {
    return unsupported("general.architecture is {}; expected llama", architecture.substr(0, 40));
  }
  ModelConfig config;
  KVX_RETURN_IF_ERROR(read_sizes(gguf, config));
  KVX_RETURN_IF_ERROR(read_heads(gguf, config));
  KVX_ASSIGN_OR_RETURN(const double epsilon,
                       positive(gguf, "llama.attention.layer_norm_rms_epsilon", 1e-5));
  config.norm_epsilon = static_cast<float>(epsilon);
  KVX_RETURN_IF_ERROR(read_rope(gguf, config));
  return config;
}

}  // namespace kvx::runner
