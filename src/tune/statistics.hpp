// Statistics: what a model's K, V and queries look like where the cache meets them, per layer, KV
// head and channel. Tables are fitted from them (fit.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/executor.hpp"
#include "core/result.hpp"
#include "kv/plan/rope_offsets.hpp"
#include "tune/log_histogram.hpp"
#include "tune/moments.hpp"

namespace kvx::tune {

enum class Side { kK, kV };

struct StatisticsConfig {
  int num_layers = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int k_head_dim = 0;
  int v_head_dim = 0;
  // Where it is known, K's mean before RoPE is collected too.
  std::optional<kv::Rope> rope;
  bool has_k_moments = false;
};

// The first tokens of a sequence attract attention and lie far from all others. They count in
// maxima and percentiles, but not in means.
inline constexpr int kSinkTokens = 4;
// How many of num_rows rows are such tokens'.
constexpr int num_sink_rows(int64_t first_position, int num_rows) {
  return static_cast<int>(std::clamp<int64_t>(kSinkTokens - first_position, 0, num_rows));
}

// Of one side of one layer; [num_kv_heads, head_dim] each.
struct ChannelStatistics {
  int64_t num_rows = 0;
  int64_t num_mean_rows = 0;          // less the sink tokens
  std::vector<double> sums;           // over the mean rows
  std::vector<double> square_sums;    // over all rows
  std::vector<double> unturned_sums;  // of K before RoPE, over the mean rows; empty if unknown
  std::vector<float> largest;         // magnitude
  std::vector<uint32_t> counts;       // [.., LogHistogram::kNumBuckets]
};

class Statistics {
 public:
  // INVALID_ARGUMENT names the field: a count or head_dim below 1, query heads that no KV head
  // divides, a rope that does not fit k_head_dim.
  static Result<Statistics> create(StatisticsConfig config);

  const StatisticsConfig& config() const { return config_; }

  // Rows of consecutive positions of one sequence, after RoPE, as a cache's append gets them.
  // k: [num_rows, num_kv_heads, k_head_dim], v likewise. INVALID_ARGUMENT: a NaN or an infinity,
  // named by layer, position, head and channel, or a layer out of range; nothing is counted then.
  // Calls for different layers may come from different threads.
  Status feed(int layer, int64_t first_position, int num_rows, const float* k, const float* v,
              Executor& executor = serial_executor());
  // q: [num_rows, num_q_heads, k_head_dim]; otherwise as feed().
  Status feed_queries(int layer, int64_t first_position, int num_rows, const float* q,
                      Executor& executor = serial_executor());

  // What was counted elsewhere, on a GPU (device_statistics.hpp): of one side of a layer, in the
  // shape of of(layer, side); and the sums of `count` queries of a KV head, as Moments::add_sums
  // takes them. Requires: a layer and a head of these statistics.
  void add(int layer, Side side, const ChannelStatistics& counted);
  void add_query_sums(int layer, int head, int64_t count, const double* sums);

  // What feed_queries() refuses, and nothing else.
  Status check_queries(int layer, int64_t first_position, int num_rows, const float* q) const;

  // Adds what another one collected. INVALID_ARGUMENT: it has another shape.
  Status merge(const Statistics& other);

  // INVALID_ARGUMENT names the first layer without rows or queries.
  Status check_complete() const;
  // INVALID_ARGUMENT: the layer has no rows beyond the sink tokens; or no queries.
  Status check_rows_of(int layer) const;
  Status check_queries_of(int layer) const;

  const ChannelStatistics& of(int layer, Side side) const {
    return side == Side::kK ? layers_[layer].k : layers_[layer].v;
  }
  int head_dim(Side side) const {
    return side == Side::kK ? config_.k_head_dim : config_.v_head_dim;
  }

  // [num_kv_heads, head_dim].
  std::vector<float> mean(int layer, Side side) const;
  // K's mean before RoPE. Requires: config().rope.
  std::vector<float> rope_mean(int layer) const;
  // Magnitude that `percent` of a head's numbers in channels [first, first + count) do not exceed;
  // 100 is the exact maximum.
  double percentile(int layer, Side side, int head, int first, int count, double percent) const;
  // Numbers whose magnitude exceeds `factor` times their channel's root mean square.
  int64_t num_outliers(int layer, Side side, int head, double factor) const;
  // [k_head_dim, k_head_dim]: E[q q^T] over the query heads of a KV head.
  std::vector<double> query_moments(int layer, int head) const;
  // [k_head_dim, k_head_dim]: E[k k^T]. Requires: config().has_k_moments.
  std::vector<double> key_moments(int layer, int head) const;

 private:
  struct Layer {
    ChannelStatistics k;
    ChannelStatistics v;
    std::vector<Moments> queries;  // [num_kv_heads]
    std::vector<Moments> keys;     // [num_kv_heads], or empty
  };

  explicit Statistics(StatisticsConfig config);
  Status check_rows(const char* name, int layer, int64_t first_position, int num_rows,
                    int num_heads, int head_dim, const float* rows) const;
  void feed_head(ChannelStatistics& side, int head, int head_dim, int64_t first_position,
                 int num_rows, const float* rows) const;
  void feed_unturned(ChannelStatistics& side, int head, int64_t first_position, int num_rows,
                     const float* rows, const std::vector<float>& turns) const;
  std::vector<float> turns_of(int64_t first_position, int num_rows) const;

  StatisticsConfig config_;
  std::vector<Layer> layers_;
};

}  // namespace kvx::tune
