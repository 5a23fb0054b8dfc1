// CompareReport: what kvx compare has measured, as data. The table, the JSON and the HTML page are
// made from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kv/kv_cache.hpp"
#include "quality/cache_quality.hpp"
#include "quality/gate.hpp"

namespace kvx::tool {

// Attention's output on one window, beside the 16-bit cache fed with the same q, k and v.
struct LayerError {
  double cosine_similarity = 0;
  double relative_error = 0;
};

// One window alone.
struct WindowReport {
  double perplexity = 0;
  double kl = 0;
};

// Tokens a second of repeats that took turns with the other caches', so that a machine that grows
// slower or faster does so for all of them.
struct Speed {
  double median = 0;
  double lowest = 0;
  double highest = 0;
  int num_repeats = 0;
};

// The median and extremes of the repeats; none for fewer than three, because they have no
// meaningful spread.
std::optional<Speed> speed_of(std::vector<double> tokens_per_second);

struct CacheReport {
  std::string name;  // the recipe
  double bits_per_value = 0;
  double bytes_per_token = 0;  // all layers, K and V, at the context in question
  int64_t tokens_per_gib = 0;
  quality::Estimate perplexity{};
  quality::Estimate change_percent{};    // of perplexity against the base cache, paired
  quality::Estimate kl{};                // nats a token
  quality::Estimate same_top_percent{};  // tokens where both caches put the same token first
  std::vector<WindowReport> windows;
  std::vector<LayerError> layers;
  int num_kv_heads = 0;
  std::vector<LayerError> heads;        // attention's outputs, [layers, num_kv_heads]
  std::vector<LayerError> logit_heads;  // attention's logits, likewise; empty: not measured
  std::optional<Speed> prefill;         // a repeat a window
  std::optional<Speed> decode;          // repeats of a few tokens of the last window
  int64_t nonfinite_inputs = 0;
  std::vector<kv::LayerCounts> saturation;  // [layers]
};

// A gate that a cache did not pass. layer and kv_head: where it is worst, of a figure that has
// them.
struct GateFailure {
  std::string cache;
  quality::Gate gate;
  double value = 0;
  int layer = -1;
  int kv_head = -1;

  // "nvfp4: cosine is 0.98712 in layer 3, KV head 1, which --fail-if cosine<0.999 does not allow"
  std::string text() const;
};

struct CompareReport {
  std::string version;
  std::string model;
  std::string text;
  std::string cpu_level;
  std::string products;  // what the matrix products compute in
  int threads = 0;
  int context = 0;
  int num_windows = 0;
  int64_t num_scored_tokens = 0;
  std::string overrides;            // --layers and --heads as given, empty without
  std::vector<CacheReport> caches;  // the base cache first
  std::vector<quality::Gate> gates;
};

// The layer with the largest relative error. Requires: layers is not empty.
const LayerError& worst_layer(const CacheReport& cache);

// The sum of the cache's saturated inputs.
int64_t saturated_inputs(const CacheReport& cache);

// Every cache but the base, every gate of the report, in order. A figure that was not measured
// fails.
std::vector<GateFailure> failures_of(const CompareReport& report);

// In words: the smallest cache that keeps the perplexity within kGoodChangePercent of the base's,
// and what it costs and saves; or that there is none.
inline constexpr double kGoodChangePercent = 2;
std::string headline(const CompareReport& report);

// The table for people. Columns are explained below it.
std::string report_table(const CompareReport& report, bool color);

// Numbers that are not finite become null.
std::string report_json(const CompareReport& report);

// One page that needs nothing beside itself: table and charts, light and dark.
std::string report_html(const CompareReport& report);

}  // namespace kvx::tool
