// KvAttention: one sequence of a kvx::kv::KvCache as a model's AttentionBackend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kv/kv_cache.hpp"
#include "runner/attention_backend.hpp"
#include "runner/gpu_rows.hpp"
#include "runner/model_config.hpp"

namespace kvx::runner {

struct KvAttentionOptions {
  kv::Recipe recipe;
  std::vector<kv::RecipeOverride> overrides;
  std::vector<kv::LayerCalibration> calibration;
  int block_size = 64;              // tokens
  int64_t max_tokens = 0;           // of the sequence
  int max_sequences = 1;            // 2 for fork()
  int64_t memory_budget_bytes = 0;  // 0: what max_tokens need
  kv::PrefixCacheConfig prefix;
  std::vector<tier::TierConfig> tiers;  // need prefix.is_on
  ops::Precision precision = ops::Precision::kAccurate;
  bool on_gpu = false;  // the cache lies on the first GPU and attention runs there
};

// The cache's configuration for this model and these options, also for kv::cost_of; on_gpu is not
// part of it.
kv::KvCacheConfig cache_config_of(const ModelConfig& model, const KvAttentionOptions& options);

class KvAttention final : public AttentionBackend {
 public:
  // The executor must outlive the cache. Errors are KvCache::create's; UNSUPPORTED: on_gpu without
  // a device (device::open_cuda_device).
  static Result<std::unique_ptr<KvAttention>> create(const ModelConfig& model,
                                                     const KvAttentionOptions& options,
                                                     Executor& executor);

  int64_t num_tokens() const override { return cache_->num_tokens(sequence_); }
  int64_t max_step_tokens() const override { return cache_->max_step_tokens(sequence_); }
  Status begin_step(int num_tokens) override;
  Status append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                           const float* v, float* out) override;
  std::optional<device::CudaStream> gpu_stream() const override;
  Status append_and_attend_on_gpu(int layer, int num_tokens, FloatRows q, FloatRows k, FloatRows v,
                                  MutableFloatRows out) override;
  Status end_step() override { return cache_->end_step(); }

  // All keys of a layer as they are stored, [num_tokens(), num_kv_heads, head_dim], on the host.
  Status read_keys(int layer, std::vector<float>& keys);

  Status record_tokens(std::span<const int> tokens) override {
    return cache_->record_tokens(sequence_, tokens);
  }

  // Forgets all tokens, keeps the memory.
  Status reset();
  // reset(), then begins with the longest cached prefix of the tokens: num_tokens() says how much,
  // at least the last one is left to feed. Needs options.prefix.is_on.
  Status reset_to_prefix(const cache::PrefixKeys& keys, std::span<const int> tokens);
  // Goes on with a fork of the sequence, which return_from_fork() drops; nothing of it is left.
  // Needs options.max_sequences of 2. OUT_OF_RANGE: there is a fork already.
  Status fork();
  Status return_from_fork();
  // Becomes the sequence of a file. The errors of KvCache::load_sequence or transcode_sequence; the
  // old tokens are gone even so.
  enum class FileOf { kThisCache, kAnyCache };
  Status load(const std::string& path, FileOf file = FileOf::kThisCache);
  const kv::KvCache& cache() const { return *cache_; }
  kv::KvCache& cache() { return *cache_; }
  int sequence() const { return sequence_; }

 private:
  KvAttention(std::unique_ptr<GpuRows> rows, std::unique_ptr<kv::KvCache> cache, int sequence,
              const ModelConfig& model, ops::Precision precision);
  kv::AttentionParams params() const;

  std::unique_ptr<GpuRows> gpu_rows_;  // null on the host; its stream is the cache's
  std::unique_ptr<kv::KvCache> cache_;
  int sequence_;
  int forked_from_ = -1;  // -1: nothing is forked
  int num_q_heads_;
  int num_kv_heads_;
  int head_dim_;
  int value_dim_;
  bool is_latent_;
  float softmax_scale_;
  ops::Precision precision_;
};

}  // namespace kvx::runner
