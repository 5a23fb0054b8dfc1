// StressReport: what kvx stress has measured, as data; the table, the JSON and the page are made
// from it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kv/kv_cache.hpp"
#include "quality/cache_quality.hpp"
#include "quality/retrieval.hpp"

namespace kvx::tool {

// One cache's answers to the questions of one task at one length.
struct RetrievalScore {
  quality::Estimate exact_percent{};  // questions whose answer's tokens all come first
  quality::Estimate nll{};            // of the answers' tokens, nats a token
  quality::Estimate nll_change{};     // against the base cache, paired token by token
};

struct RetrievalReport {
  quality::RetrievalTask task{};
  int64_t length = 0;  // tokens of text, question and answer at most
  int num_questions = 0;
  std::vector<RetrievalScore> scores;  // [caches]
};

// Divergence from the base while a text that the base wrote grows.
struct DriftPart {
  int64_t first_token = 0;  // of those that were written
  int64_t num_tokens = 0;
  std::vector<quality::Estimate> kl;        // [caches]
  std::vector<quality::Estimate> same_top;  // [caches], percent
};

struct StressCache {
  std::string name;
  double bits_per_value = 0;
  int64_t nonfinite_inputs = 0;
  std::vector<kv::LayerCounts> saturation;  // [layers]
};

struct StressReport {
  std::string version;
  std::string model;
  std::string cpu_level;
  std::string products;
  int threads = 0;
  uint64_t seed = 0;
  int num_samples = 0;
  std::vector<StressCache> caches;  // the base cache first
  std::vector<RetrievalReport> retrieval;
  std::vector<DriftPart> drift;  // parts of equal length; empty where it was not wanted
};

std::string stress_table(const StressReport& report, bool color);
// Numbers that are not finite become null.
std::string stress_json(const StressReport& report);
// One page that needs nothing beside itself.
std::string stress_html(const StressReport& report);

}  // namespace kvx::tool
