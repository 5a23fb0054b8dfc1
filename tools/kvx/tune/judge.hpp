// Judge: what a cache loses on windows of text, beside a bf16 cache whose states it keeps.
#pragma once

#include <memory>
#include <vector>

#include "quality/cache_quality.hpp"
#include "runner/kv_attention.hpp"
#include "runner/model.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/tune/work.hpp"

namespace kvx::tool {

// What all caches of a tuning have in common.
struct CacheSetup {
  int context = 0;  // tokens
  int block_size = 64;
  bool on_gpu = false;
};

// The bf16 cache that others are measured beside.
Result<std::unique_ptr<runner::KvAttention>> make_base_cache(const runner::Model& model,
                                                             const Engine& engine,
                                                             const CacheSetup& setup);

class Judge {
 public:
  // windows: at least 4 tokens each, all of one length. All arguments outlive the judge.
  Judge(runner::Model& model, const std::vector<std::vector<int>>& windows, const Engine& engine,
        Work& work)
      : model_(model), windows_(windows), engine_(engine), work_(work) {}

  // As kvx compare scores: the windows' second halves. The first call runs the bf16 cache too.
  Result<quality::CacheQuality> judge(const runner::KvAttentionOptions& cache);

  // Tokens that one call feeds.
  int64_t num_tokens() const;

 private:
  Status run_base(const runner::KvAttentionOptions& beside);
  Result<std::vector<float>> states_of(const std::vector<int>& window,
                                       runner::KvAttention& attention);

  runner::Model& model_;
  const std::vector<std::vector<int>>& windows_;
  const Engine& engine_;
  Work& work_;
  std::vector<std::vector<float>> base_;  // [windows][num_scored, hidden]
};

}  // namespace kvx::tool
