// Statistics: a task of the executor is one head, so that no two threads write one number.
#include "tune/statistics.hpp"

#include <cmath>
#include <utility>

namespace kvx::tune {
namespace {

ChannelStatistics empty_channels(int num_heads, int head_dim, bool has_unturned) {
  const size_t size = static_cast<size_t>(num_heads) * head_dim;
  ChannelStatistics side;
  side.sums.resize(size);
  side.square_sums.resize(size);
  if (has_unturned) side.unturned_sums.resize(size);
  side.largest.resize(size);
  side.counts.resize(size * LogHistogram::kNumBuckets);
  return side;
}

template <class T>
void add_all(const std::vector<T>& from, std::vector<T>& to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

void merge_channels(const ChannelStatistics& from, ChannelStatistics& to) {
  to.num_rows += from.num_rows;
  to.num_mean_rows += from.num_mean_rows;
  add_all(from.sums, to.sums);
  add_all(from.square_sums, to.square_sums);
  add_all(from.unturned_sums, to.unturned_sums);
  add_all(from.counts, to.counts);
  for (size_t i = 0; i < to.largest.size(); ++i) {
    to.largest[i] = std::max(to.largest[i], from.largest[i]);
  }
}

std::vector<float> means_of(const std::vector<double>& sums, int64_t count) {
  std::vector<float> means(sums.size());
  for (size_t i = 0; i < sums.size() && count > 0; ++i) {
    means[i] = static_cast<float>(sums[i] / static_cast<double>(count));
  }
  return means;
}

Status check_positive(const char* field, int value) {
  if (value > 0) return {};
  return invalid_argument("{} is {}; expected at least 1", field, value);
}

}  // namespace

Statistics::Statistics(StatisticsConfig config) : config_(std::move(config)) {
  for (int i = 0; i < config_.num_layers; ++i) {
    Layer layer;
    layer.k = empty_channels(config_.num_kv_heads, config_.k_head_dim, config_.rope.has_value());
    layer.v = empty_channels(config_.num_kv_heads, config_.v_head_dim, false);
    layer.queries.assign(config_.num_kv_heads, Moments(config_.k_head_dim));
    if (config_.has_k_moments) {
      layer.keys.assign(config_.num_kv_heads, Moments(config_.k_head_dim));
    }
    layers_.push_back(std::move(layer));
  }
}

Result<Statistics> Statistics::create(StatisticsConfig config) {
  KVX_RETURN_IF_ERROR(check_positive("num_layers", config.num_layers));
  KVX_RETURN_IF_ERROR(check_positive("num_kv_heads", config.num_kv_heads));
  KVX_RETURN_IF_ERROR(check_positive("k_head_dim", config.k_head_dim));
  KVX_RETURN_IF_ERROR(check_positive("v_head_dim", config.v_head_dim));
  if (config.num_q_heads < 1 || config.num_q_heads % config.num_kv_heads != 0) {
    return invalid_argument("num_q_heads is {}; expected a multiple of num_kv_heads, {}",
                            config.num_q_heads, config.num_kv_heads);
  }
  if (config.rope) KVX_RETURN_IF_ERROR(kv::check_rope("rope", *config.rope, config.k_head_dim));
  return Statistics(std::move(config));
}

Status Statistics::check_rows(const char* name, int layer, int64_t first_position, int num_rows,
                              int num_heads, int head_dim, const float* rows) const {
  if (layer < 0 || layer >= config_.num_layers) {
    return invalid_argument("layer is {}; expected 0 to {}", layer, config_.num_layers - 1);
  }
  const int64_t size = int64_t{num_rows} * num_heads * head_dim;
  float sum = 0;  // of zeros, unless a number is not finite
  for (int64_t i = 0; i < size; ++i) sum += rows[i] * 0.0f;
  if (sum == 0) return {};
  int64_t bad = 0;
  while (std::isfinite(rows[bad])) ++bad;
  return invalid_argument(
      "{} of layer {} is {} at position {}, head {}, channel {}; expected finite numbers", name,
      layer, rows[bad], first_position + bad / (int64_t{num_heads} * head_dim),
      bad / head_dim % num_heads, bad % head_dim);
}

void Statistics::feed_head(ChannelStatistics& side, int head, int head_dim, int64_t first_position,
                           int num_rows, const float* rows) const {
  const int64_t row_stride = int64_t{config_.num_kv_heads} * head_dim;
  const int first_mean_row = num_sink_rows(first_position, num_rows);
  for (int r = 0; r < num_rows; ++r) {
    const float* row = rows + r * row_stride + int64_t{head} * head_dim;
    for (int d = 0; d < head_dim; ++d) {
      const int64_t channel = int64_t{head} * head_dim + d;
      const float magnitude = std::fabs(row[d]);
      side.square_sums[channel] += double{row[d]} * row[d];
      if (r >= first_mean_row) side.sums[channel] += row[d];
      if (magnitude > side.largest[channel]) side.largest[channel] = magnitude;
      ++side.counts[channel * LogHistogram::kNumBuckets + LogHistogram::bucket_of(magnitude)];
    }
  }
}

// [num_rows, pairs, 2]: cosine and sine of every position's angles, divided by the scaling.
std::vector<float> Statistics::turns_of(int64_t first_position, int num_rows) const {
  std::vector<float> turns;
  const kv::Rope& rope = *config_.rope;
  turns.reserve(2 * rope.inv_freq.size() * num_rows);
  for (int r = 0; r < num_rows; ++r) {
    for (const double frequency : rope.inv_freq) {
      const double angle = frequency * static_cast<double>(first_position + r);
      turns.push_back(static_cast<float>(std::cos(angle) / rope.attention_scaling));
      turns.push_back(static_cast<float>(std::sin(angle) / rope.attention_scaling));
    }
  }
  return turns;
}

void Statistics::feed_unturned(ChannelStatistics& side, int head, int64_t first_position,
                               int num_rows, const float* rows,
                               const std::vector<float>& turns) const {
  const kv::Rope& rope = *config_.rope;
  const int num_pairs = static_cast<int>(rope.inv_freq.size());
  const bool is_interleaved = rope.pairs == kv::RopePairs::kInterleaved;
  double* sums = side.unturned_sums.data() + int64_t{head} * config_.k_head_dim;
  for (int r = num_sink_rows(first_position, num_rows); r < num_rows; ++r) {
    const float* row = rows + (int64_t{r} * config_.num_kv_heads + head) * config_.k_head_dim;
    const float* turn = turns.data() + int64_t{r} * num_pairs * 2;
    for (int i = 0; i < num_pairs; ++i) {
      const int a = is_interleaved ? 2 * i : i;
      const int b = is_interleaved ? 2 * i + 1 : i + num_pairs;
      sums[a] += row[a] * turn[2 * i] + row[b] * turn[2 * i + 1];
      sums[b] += row[b] * turn[2 * i] - row[a] * turn[2 * i + 1];
    }
    for (int d = 2 * num_pairs; d < config_.k_head_dim; ++d) sums[d] += row[d];
  }
}

Status Statistics::feed(int layer, int64_t first_position, int num_rows, const float* k,
                        const float* v, Executor& executor) {
  const int num_heads = config_.num_kv_heads;
  KVX_RETURN_IF_ERROR(
      check_rows("k", layer, first_position, num_rows, num_heads, config_.k_head_dim, k));
  KVX_RETURN_IF_ERROR(
      check_rows("v", layer, first_position, num_rows, num_heads, config_.v_head_dim, v));
  Layer& to = layers_[layer];
  const std::vector<float> turns =
      config_.rope ? turns_of(first_position, num_rows) : std::vector<float>();
  executor.parallel_for(2 * num_heads, [&](int task) {
    const int head = task / 2;
    if (task % 2 == 1) {
      feed_head(to.v, head, config_.v_head_dim, first_position, num_rows, v);
      return;
    }
    feed_head(to.k, head, config_.k_head_dim, first_position, num_rows, k);
    if (config_.rope) feed_unturned(to.k, head, first_position, num_rows, k, turns);
    if (config_.has_k_moments) {
      to.keys[head].add(k + int64_t{head} * config_.k_head_dim, num_rows,
                        int64_t{num_heads} * config_.k_head_dim);
    }
  });
  const int num_mean_rows = num_rows - num_sink_rows(first_position, num_rows);
  for (ChannelStatistics* side : {&to.k, &to.v}) {
    side->num_rows += num_rows;
    side->num_mean_rows += num_mean_rows;
  }
  return {};
}

Status Statistics::feed_queries(int layer, int64_t first_position, int num_rows, const float* q,
                                Executor& executor) {
  const int head_dim = config_.k_head_dim;
  KVX_RETURN_IF_ERROR(check_queries(layer, first_position, num_rows, q));
  const int q_per_kv = config_.num_q_heads / config_.num_kv_heads;
  executor.parallel_for(config_.num_kv_heads, [&](int head) {
    for (int i = 0; i < q_per_kv; ++i) {
      layers_[layer].queries[head].add(q + int64_t{head * q_per_kv + i} * head_dim, num_rows,
                                       int64_t{config_.num_q_heads} * head_dim);
    }
  });
  return {};
}

Status Statistics::check_queries(int layer, int64_t first_position, int num_rows,
                                 const float* q) const {
  return check_rows("q", layer, first_position, num_rows, config_.num_q_heads, config_.k_head_dim,
                    q);
}

void Statistics::add(int layer, Side side, const ChannelStatistics& counted) {
  merge_channels(counted, side == Side::kK ? layers_[layer].k : layers_[layer].v);
}

void Statistics::add_query_sums(int layer, int head, int64_t count, const double* sums) {
  layers_[layer].queries[head].add_sums(count, sums);
}

Status Statistics::merge(const Statistics& other) {
  const StatisticsConfig& a = config_;
  const StatisticsConfig& b = other.config_;
  if (a.num_layers != b.num_layers || a.num_q_heads != b.num_q_heads ||
      a.num_kv_heads != b.num_kv_heads || a.k_head_dim != b.k_head_dim ||
      a.v_head_dim != b.v_head_dim || a.rope != b.rope || a.has_k_moments != b.has_k_moments) {
    return invalid_argument(
        "statistics are of {} layers, {} query and {} KV heads of {} and {}, rope and moments "
        "alike; the others have {}, {}, {}, {} and {} or another rope",
        a.num_layers, a.num_q_heads, a.num_kv_heads, a.k_head_dim, a.v_head_dim, b.num_layers,
        b.num_q_heads, b.num_kv_heads, b.k_head_dim, b.v_head_dim);
  }
  for (int i = 0; i < config_.num_layers; ++i) {
    Layer& to = layers_[i];
    const Layer& from = other.layers_[i];
    merge_channels(from.k, to.k);
    merge_channels(from.v, to.v);
    for (size_t h = 0; h < to.queries.size(); ++h) to.queries[h].merge(from.queries[h]);
    for (size_t h = 0; h < to.keys.size(); ++h) to.keys[h].merge(from.keys[h]);
  }
  return {};
}

Status Statistics::check_complete() const {
  for (int i = 0; i < config_.num_layers; ++i) {
    KVX_RETURN_IF_ERROR(check_rows_of(i));
    KVX_RETURN_IF_ERROR(check_queries_of(i));
  }
  return {};
}

Status Statistics::check_rows_of(int layer) const {
  if (layers_[layer].k.num_mean_rows > 0) return {};
  return invalid_argument("layer {} was fed {} rows; expected more than {}", layer,
                          layers_[layer].k.num_rows, kSinkTokens);
}

Status Statistics::check_queries_of(int layer) const {
  if (layers_[layer].queries.front().count() > 0) return {};
  return invalid_argument("layer {} was fed no queries; expected one a token", layer);
}

std::vector<float> Statistics::mean(int layer, Side side) const {
  const ChannelStatistics& from = of(layer, side);
  return means_of(from.sums, from.num_mean_rows);
}

std::vector<float> Statistics::rope_mean(int layer) const {
  const ChannelStatistics& from = layers_[layer].k;
  return means_of(from.unturned_sums, from.num_mean_rows);
}

double Statistics::percentile(int layer, Side side, int head, int first, int count,
                              double percent) const {
  const ChannelStatistics& from = of(layer, side);
  const int64_t channel = int64_t{head} * head_dim(side) + first;
  float largest = 0;
  std::vector<uint32_t> counts(LogHistogram::kNumBuckets);
  for (int64_t c = channel; c < channel + count; ++c) {
    largest = std::max(largest, from.largest[c]);
    for (int b = 0; b < LogHistogram::kNumBuckets; ++b) {
      counts[b] += from.counts[c * LogHistogram::kNumBuckets + b];
    }
  }
  return percentile_of(counts, percent, largest);
}

int64_t Statistics::num_outliers(int layer, Side side, int head, double factor) const {
  const ChannelStatistics& from = of(layer, side);
  int64_t count = 0;
  for (int d = 0; d < head_dim(side); ++d) {
    const int64_t channel = int64_t{head} * head_dim(side) + d;
    const double mean_square = from.square_sums[channel] / static_cast<double>(from.num_rows);
    count +=
        count_above(std::span(from.counts)
                        .subspan(channel * LogHistogram::kNumBuckets, LogHistogram::kNumBuckets),
                    factor * std::sqrt(mean_square));
  }
  return count;
}

std::vector<double> Statistics::query_moments(int layer, int head) const {
  return layers_[layer].queries[head].mean();
}

std::vector<double> Statistics::key_moments(int layer, int head) const {
  return layers_[layer].keys[head].mean();
}

}  // namespace kvx::tune
