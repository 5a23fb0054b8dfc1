// run_stress: one model with several caches, on questions about long texts and on a long text that
// the model writes itself.
#pragma once

#include <vector>

#include "runner/kv_attention.hpp"
#include "runner/model.hpp"
#include "runner/tokenizer.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/stress/stress_report.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {

struct StressPlan {
  std::vector<runner::KvAttentionOptions> caches;  // the base cache first
  std::vector<int64_t> lengths;                    // tokens of the retrieval tasks
  int num_samples = 1;                             // texts a task and length
  int drift_tokens = 0;                            // 0: none
  uint64_t seed = 0;
};

// The drift's parts.
inline constexpr int kDriftParts = 8;

// Fills the report's caches, retrieval and drift. Errors are those of the model, of
// KvAttention::create and of make_retrieval_text.
Status run_stress(runner::Model& model, const runner::Tokenizer& tokenizer, const StressPlan& plan,
                  const Engine& engine, Progress& progress, StressReport& report);

}  // namespace kvx::tool
