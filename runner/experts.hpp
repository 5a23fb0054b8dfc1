// Experts: a mixture-of-experts feed-forward layer: a router chooses some experts for each token,
// beside experts that all tokens share.
#pragma once

#include <memory>
#include <vector>

#include "core/executor.hpp"
#include "runner/model_config.hpp"
#include "runner/weight_loader.hpp"

namespace kvx::runner {

// The experts that a token goes to, and what their outputs are multiplied by. logits, bias:
// [num_experts]; bias counts for the choice alone, and may be empty. Ties go to the lower number.
struct ChosenExpert {
  int expert = 0;
  float weight = 0;
};
std::vector<ChosenExpert> choose_experts(const ExpertSizes& sizes, std::span<const float> logits,
                                         std::span<const float> bias);

class Experts {
 public:
  // prefix: of the layer's tensors, "blk.1.". Errors as WeightLoader's.
  static Result<std::unique_ptr<Experts>> load(const WeightLoader& weights,
                                               const ModelConfig& config,
                                               const std::string& prefix);

  // x, out: [num_tokens, hidden].
  Status feed(const float* x, int num_tokens, float* out, Executor& executor);

 private:
  struct Expert {
    std::unique_ptr<Linear> gate_up;
    std::unique_ptr<Linear> down;
    int feed_forward = 0;
  };

  explicit Experts(const ModelConfig& config) : config_(config) {}
  // y: [num_tokens, hidden].
  Status feed_expert(Expert& expert, const float* x, int num_tokens, float* y, Executor& executor);

  const ModelConfig& config_;
  std::unique_ptr<Linear> router_;
  std::vector<float> choice_bias_;
  std::vector<Expert> experts_;
  Expert shared_;  // without products where no expert is shared

  std::vector<float> logits_, gate_, up_, inputs_, outputs_;  // of one call
};

}  // namespace kvx::runner
