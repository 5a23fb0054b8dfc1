// An independent reference of attention: plain loops in double precision over rows that the caller
// provides, written from the definition in ops/attend/attend.hpp.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "ops/attend/attend.hpp"
#include "tests/support/scene_cache.hpp"

namespace kvx::tests {

// The row of a token of a sequence and a KV head, all transforms undone.
using RowReader = std::function<Row(int sequence, int token, int kv_head)>;

struct AttendOutput {
  std::vector<double> out;  // [total_q, num_q_heads, value_dim]
  std::vector<double> lse;  // [total_q, num_q_heads]
};

inline double dot_of(const Row& a, const Row& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline bool reference_sees(const ops::AttendArgs& args, int sequence, int new_token, int token) {
  const int q_len = args.q_starts[sequence + 1] - args.q_starts[sequence];
  const int first_new = args.seq_lens[sequence] - q_len;
  const int position = first_new + new_token;
  const bool is_before_window = args.window > 0 && token <= position - args.window;
  if (is_before_window && token >= args.window_sinks) return false;
  if (!args.tree_mask || token < first_new) return token <= position;
  const int64_t q_row = args.q_starts[sequence] + new_token;
  return args.tree_mask[q_row * args.tree_mask_stride + (token - first_new)] != 0;
}

// One query head of one token: out [value_dim] and the log-sum-exp.
inline double attend_one(const ops::AttendArgs& args, const Row& query,
                         const std::vector<Row>& keys, const std::vector<Row>& values,
                         const double* sink, double* out, int value_dim) {
  std::vector<double> scores;
  double max = sink ? *sink : -std::numeric_limits<double>::infinity();
  for (const Row& key : keys) {
    double score = double{args.softmax_scale} * dot_of(query, key);
    if (args.softcap > 0) score = args.softcap * std::tanh(score / args.softcap);
    scores.push_back(score);
    max = std::isnan(score) || score > max ? score : max;
  }
  double sum = sink ? std::exp(*sink - max) : 0;
  for (double& score : scores) sum += score = std::exp(score - max);
  for (int d = 0; d < value_dim; ++d) {
    out[d] = 0;
    for (size_t t = 0; t < values.size(); ++t) out[d] += scores[t] / sum * values[t][d];
  }
  return sum == 0 ? -std::numeric_limits<double>::infinity() : max + std::log(sum);
}

// queries: [total_q, num_q_heads, key_dim], already rounded to the type that attend was given.
inline AttendOutput attend_reference(const ops::AttendArgs& args, const std::vector<float>& queries,
                                     int key_dim, int value_dim, const RowReader& key_row,
                                     const RowReader& value_row) {
  const int total_q = args.q_starts[args.num_sequences];
  AttendOutput result;
  result.out.resize(int64_t{total_q} * args.num_q_heads * value_dim);
  result.lse.resize(int64_t{total_q} * args.num_q_heads);
  const int q_per_kv = args.num_q_heads / args.packed.num_kv_heads;
  for (int s = 0; s < args.num_sequences; ++s) {
    const int q_len = args.q_starts[s + 1] - args.q_starts[s];
    for (int head = 0; q_len > 0 && head < args.packed.num_kv_heads; ++head) {
      std::vector<Row> keys, values;
      for (int t = 0; t < args.seq_lens[s]; ++t) {
        const bool is_needed =
            args.window == 0 || t < args.window_sinks || t > args.seq_lens[s] - q_len - args.window;
        keys.push_back(is_needed ? key_row(s, t, head) : Row());
        values.push_back(is_needed ? value_row(s, t, head) : Row());
      }
      for (int i = 0; i < q_len; ++i) {
        std::vector<Row> seen_keys, seen_values;
        for (int t = 0; t < args.seq_lens[s]; ++t) {
          if (!reference_sees(args, s, i, t)) continue;
          seen_keys.push_back(keys[t]);
          seen_values.push_back(values[t]);
        }
        for (int j = 0; j < q_per_kv; ++j) {
          const int q_head = head * q_per_kv + j;
          const int64_t row = int64_t{args.q_starts[s] + i} * args.num_q_heads + q_head;
          const Row query(queries.begin() + row * key_dim, queries.begin() + (row + 1) * key_dim);
          const double sink = args.sinks ? args.sinks[q_head] : 0;
          result.lse[row] =
              attend_one(args, query, seen_keys, seen_values, args.sinks ? &sink : nullptr,
                         result.out.data() + row * value_dim, value_dim);
        }
      }
    }
  }
  return result;
}

// Root mean square of the difference over that of the reference.
inline double relative_rms(const std::vector<double>& got, const std::vector<double>& expected) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

}  // namespace kvx::tests
