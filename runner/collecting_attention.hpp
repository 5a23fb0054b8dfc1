// CollectingAttention: shows the rows of a forward pass to statistics on their way to the backend
// that answers.
#pragma once

#include <span>

#include "runner/attention_backend.hpp"
#include "runner/model_config.hpp"
#include "tune/cuda/device_statistics.hpp"
#include "tune/transformed.hpp"

namespace kvx::runner {

// How the model turns K, for statistics and block offsets.
kv::Rope rope_of(const ModelConfig& config);

// Empty statistics of the model's shape.
Result<tune::Statistics> make_statistics(const ModelConfig& config);

class CollectingAttention final : public AttentionBackend {
 public:
  // All outlive this one. transforms: [num_layers]: K and V are collected as a cache with these
  // tables quantises them, and queries are not; empty: as they are, with queries.
  CollectingAttention(AttentionBackend& base, tune::Statistics& statistics,
                      const ops::CpuContext& context,
                      std::span<const kv::LayerTables> transforms = {}, int block_size = 1);

  // Rows on a GPU are counted there from now on, where they are counted as they are; null: the base
  // is given none. It outlives this one, and is drained by who made it.
  void count_on_gpu(tune::DeviceStatistics* on_gpu) { on_gpu_ = on_gpu; }

  int64_t num_tokens() const override { return base_.num_tokens(); }
  int64_t max_step_tokens() const override { return base_.max_step_tokens(); }
  Status begin_step(int num_tokens) override { return base_.begin_step(num_tokens); }
  Status append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                           const float* v, float* out) override;
  std::optional<device::CudaStream> gpu_stream() const override {
    return on_gpu_ != nullptr && transforms_.empty() ? base_.gpu_stream() : std::nullopt;
  }
  Status append_and_attend_on_gpu(int layer, int num_tokens, FloatRows q, FloatRows k, FloatRows v,
                                  MutableFloatRows out) override;
  Status end_step() override { return base_.end_step(); }

 private:
  AttentionBackend& base_;
  tune::Statistics& statistics_;
  ops::CpuContext context_;
  std::span<const kv::LayerTables> transforms_;
  int block_size_;
  tune::DeviceStatistics* on_gpu_ = nullptr;
};

}  // namespace kvx::runner
