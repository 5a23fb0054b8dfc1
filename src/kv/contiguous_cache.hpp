// ContiguousCache: K and V of a batch in preallocated, zeroed arrays, read and written by the same
// verbs as paged blocks. A sequence is one block of `capacity` tokens.
//
//   per layer, for K and for V:
//     codes   [batch, num_kv_heads, capacity, row]   fp4_row, int4_row: row is head_dim / 8 uint32
//     scales  [batch, num_kv_heads, capacity, scale] computed ones; given ones are [num_kv_heads,
//     groups]
//
// capacity is max_seq_len, or the ring's size when there is a window.
#pragma once

#include <vector>

#include "cache/memory.hpp"
#include "core/rows.hpp"
#include "kv/contiguous_layout.hpp"
#include "ops/cache_view.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::kv {

struct ContiguousAttention {
  float softmax_scale = 1.0f;
  float softcap = 0.0f;
  int window = 0;                // 0: the cache's own; smaller than that is fine, larger is not
  const float* sinks = nullptr;  // [num_q_heads]
  float* lse = nullptr;          // [batch * q_len, num_q_heads] or null
};

// All sequences of the batch have the same length. Rows of a call are [batch, num_tokens] rows, a
// sequence after the other. Not for several threads at once.
class ContiguousCache {
 public:
  // Everything is allocated here. Errors as check_contiguous, and OUT_OF_RANGE without memory.
  static Result<ContiguousCache> create(ContiguousConfig config, const ops::CpuContext& context);

  // Writes num_tokens new tokens of every sequence to a layer, behind seq_len(), and leaves
  // seq_len() as it is: after all layers have appended, one advance() makes the tokens part of the
  // sequences. A ring keeps the last `capacity` of them, whatever num_tokens.
  // k: [batch * num_tokens, num_kv_heads, k_head_dim]; v: likewise.
  // OUT_OF_RANGE, nothing written: past max_seq_len without eviction. INVALID_ARGUMENT: the layer
  // has appended since the last advance.
  Status append(int layer, int num_tokens, FloatRows k, FloatRows v);

  // INVALID_ARGUMENT, nothing changed: a layer has not appended just num_tokens.
  Status advance(int num_tokens);

  // Forgets all tokens; the memory stays.
  void reset();

  // The last q_len tokens of each sequence ask; tokens that the layer has appended but that no
  // advance has counted are among them. q: [batch * q_len, num_q_heads, k_head_dim]; out:
  // [batch * q_len, num_q_heads, v_head_dim].
  // INVALID_ARGUMENT: q_len beyond the tokens that are there, or beyond what a full ring still
  // holds for its first query (max_append).
  Status attend(int layer, int q_len, FloatRows q, MutableFloatRows out,
                const ContiguousAttention& attention) const;

  // The stored tokens of a layer as floats, oldest first: [batch * num_held(layer), num_kv_heads,
  // head_dim]. A null target is not wanted.
  Status gather(int layer, MutableFloatRows k, MutableFloatRows v) const;

  const ContiguousConfig& config() const { return config_; }
  // Tokens that advance has counted; with eviction at most max_seq_len.
  int seq_len() const { return seq_len_; }
  // Tokens of a sequence that a layer holds, its uncounted ones included.
  int num_held(int layer) const;
  // NaN or infinite inputs that given scales could not express, since creation.
  int64_t nonfinite_inputs() const { return nonfinite_inputs_; }

  // Where the layer's rows lie: block b is sequence b. Requires: layer in range. Refers to this.
  ops::LayerView view(int layer) const;

  // Bytes of K and V: for max_seq_len (or the ring), for the tokens that are held, and what the
  // attention of one new token reads.
  int64_t allocated_bytes() const { return bytes_per_position(config_) * capacity_; }
  int64_t used_bytes() const;
  int64_t read_bytes_per_step() const;

 private:
  struct Side {
    cache::Region codes;
    cache::Region scales;              // computed
    std::vector<uint8_t> given;        // stored scales [num_kv_heads, groups]
    std::vector<float> tensor_scales;  // [num_kv_heads] or empty
  };
  struct Layer {
    Side k;
    Side v;
    ops::HeadRun run;
    int num_pending = 0;  // appended, not yet counted
  };

  // A sequence's blocks as the verbs number them: its one block twice, so that positions run on
  // where a ring begins anew. What the first pass has lost is older than the window.
  struct Span {
    int num_tokens = 0;  // from `base` on
    int base = 0;        // position of the first slot of the first pass
  };

  ContiguousCache(ContiguousConfig config, const ops::CpuContext& context);
  Result<Side> make_side(const format::FormatSpec& spec, int head_dim, const StaticScales& scales,
                         std::string_view what) const;
  ops::SideView side_view(const format::FormatSpec& spec, int head_dim, const Side& side) const;
  void evict(Layer& layer, int num_tokens);
  int length(int layer) const;
  Span span_of(int layer) const;
  Status check_layer(int layer) const;
  Status check_queries(int layer, int q_len, int window) const;

  ContiguousConfig config_;
  ops::CpuContext context_;
  int capacity_;
  int seq_len_ = 0;
  int64_t nonfinite_inputs_ = 0;
  std::vector<Layer> layers_;
  std::vector<int32_t> block_ids_;         // [batch, 2]: b, b
  std::vector<int64_t> slots_;             // scratch of append
  mutable std::vector<int32_t> seq_lens_;  // scratch of attend: [batch]
  mutable std::vector<int32_t> q_starts_;  // scratch of attend: [batch + 1]
};

}  // namespace kvx::kv
