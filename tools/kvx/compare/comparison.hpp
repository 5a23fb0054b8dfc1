// compare_caches: one model on one text with several caches, window by window.
#pragma once

#include <span>
#include <vector>

#include "runner/kv_attention.hpp"
#include "runner/model.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/report/report.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {

struct ComparisonPlan {
  std::vector<runner::KvAttentionOptions> caches;  // the base cache first
  int context = 0;                                 // tokens in a window, at least 4
  int num_windows = 0;
  bool measures_logits = false;  // of attention
};

// Runs every window through every cache and scores its second half (compare/window_scores.hpp).
// Before that, the first window goes through all caches at once: the base cache answers and the
// others show how far their attention outputs are from its (ShadowAttention), and where the plan
// wants it, the logits of some queries (LogitErrors). The last tokens of the last window are fed
// one by one, a few per cache in turn, which measures decoding.
//
// tokens: at least num_windows * context. Errors are those of KvAttention::create and of the model.
Result<std::vector<CacheReport>> compare_caches(runner::Model& model, std::span<const int> tokens,
                                                const ComparisonPlan& plan, const Engine& engine,
                                                Progress& progress);

}  // namespace kvx::tool
