// Model: the weights of a Llama or DeepSeek-V2 and its forward pass; K and V live in an
// AttentionBackend.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/executor.hpp"
#include "runner/attention_backend.hpp"
#include "runner/experts.hpp"
#include "runner/gpu_forward.hpp"
#include "runner/gpu_products.hpp"
#include "runner/latent_projection.hpp"
#include "runner/linear.hpp"
#include "runner/mapped_file.hpp"
#include "runner/model_config.hpp"

namespace kvx::runner {

// The most tokens of one forward pass; bounds the activations' memory.
constexpr int kMostStepTokens = 512;

class Model {
 public:
  // weights: kF32 or kBF16 (refused where the CPU does not multiply it). The executor must outlive
  // the model. gpu: what multiplies instead of the CPU, or null. Errors name the value or tensor
  // that is missing or does not fit.
  static Result<std::unique_ptr<Model>> load(const std::string& path, DType weights,
                                             Executor& executor,
                                             std::unique_ptr<GpuProducts> gpu = nullptr);

  const ModelConfig& config() const { return config_; }
  const GgufView& gguf() const { return gguf_; }
  DType weights_type() const { return weights_type_; }
  bool multiplies_on_gpu() const { return gpu_ != nullptr; }

  // Feeds tokens, in as many steps as the backend needs. hidden: [tokens, hidden] after the last
  // norm, what logits() takes; null: not wanted. INVALID_ARGUMENT: a token outside the vocabulary;
  // OUT_OF_RANGE: the backend is full or the model's context is too short.
  // on_step is called after each step with the number of tokens fed so far; its error ends the
  // call, and the tokens that were fed stay in the backend.
  using OnStep = std::function<Status(int64_t num_fed)>;
  Status forward(std::span<const int> tokens, AttentionBackend& backend, float* hidden,
                 const OnStep& on_step = {});

  // The same, and the logits after the last token: [vocab_size]. With a GPU's products and a
  // backend that takes rows on it, nothing else comes back from there.
  Status forward_to_logits(std::span<const int> tokens, AttentionBackend& backend, float* logits,
                           const OnStep& on_step = {});

  // What a layer adds to its input for attention's output: attended [num_tokens, attended_size],
  // out [num_tokens, hidden].
  Status project_attention(int layer, const float* attended, int num_tokens, float* out);

  // hidden: [num_tokens, hidden]; out: [num_tokens, vocab_size]. Many tokens are best computed in
  // strips: 64 tokens of a vocabulary of 49152 are 12 MiB.
  Status logits(const float* hidden, int num_tokens, float* out);

 private:
  struct Layer {
    std::vector<float> attention_norm;
    std::unique_ptr<Linear> qkv;  // null in a latent model
    std::unique_ptr<LatentProjection> latent;
    std::unique_ptr<Linear> attention_out;
    std::vector<float> feed_forward_norm;
    std::unique_ptr<Linear> gate_up;  // null in a layer of experts
    std::unique_ptr<Linear> down;
    std::unique_ptr<Experts> experts;
  };
  // Buffers of one step, [num_tokens, ...] each.
  struct Activations {
    std::vector<float> x, normed, q, k, v, attended, expanded, gate, up, delta;
    std::vector<float> cosines, sines;  // [num_tokens, rope_dims / 2]
  };

  Model(MappedFile file, GgufView gguf, ModelConfig config, DType weights, Executor& executor,
        std::unique_ptr<GpuProducts> gpu);
  Status load_weights();
  Result<Layer> load_layer(int index);
  Status load_attention(const WeightLoader& weights, int index, Layer& layer);
  Status load_feed_forward(const WeightLoader& weights, int index, Layer& layer);

  Status load_gpu_forward();

  // Whether steps with this backend run on the GPU as a whole.
  bool runs_on_gpu(const AttentionBackend& backend) const {
    return gpu_forward_ != nullptr && backend.gpu_stream().has_value();
  }
  Status forward_step(std::span<const int> tokens, AttentionBackend& backend, float* hidden);
  Status run_layers(int num_tokens, AttentionBackend& backend);
  Status forward_layer(int index, int num_tokens, AttentionBackend& backend);
  // Queries, keys and values of the step's normed rows.
  Status project_rows(Layer& layer, int num_tokens);
  // From the step's normed rows to its delta.
  Status feed_forward(Layer& layer, int num_tokens);
  void embed(std::span<const int> tokens);
  void rotate(int num_tokens, int num_heads, float* rows) const;

  MappedFile file_;
  GgufView gguf_;
  ModelConfig config_;
  DType weights_type_;
  Executor& executor_;
  const GgufTensor* embedding_ = nullptr;
  WeightMemory weight_memory_;  // before what lives in it
  std::unique_ptr<GpuProducts> gpu_;
  std::vector<Layer> layers_;
  std::vector<float> final_norm_;
  std::unique_ptr<Linear> output_;
  std::unique_ptr<GpuForward> gpu_forward_;  // null: without gpu_, or for another kind of model
  Activations step_;
};

}  // namespace kvx::runner
