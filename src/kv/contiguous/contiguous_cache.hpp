// ContiguousCache: K and V of a batch in preallocated, zeroed arrays, read and written by the same
// verbs as paged blocks. A sequence is one block.
//
//   per layer and run of heads, for K and for V:
//     codes   [batch, heads, block_tokens, row]     fp4_row, int4_row: head_dim / 8 uint32
//     scales  [batch, heads, block_tokens, groups]  computed ones; given ones are [heads, groups]
//
// Of block_tokens (ContiguousConfig) the first `capacity` are used: max_seq_len, or all of a ring,
// which a layer with a window has. All of it lies in host memory or in a GPU's
// (ContiguousConfig::cuda).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "cache/pool/memory.hpp"
#include "core/rows.hpp"
#include "kv/contiguous/contiguous_layout.hpp"
#include "kv/verbs/verbs.hpp"
#include "ops/attend/precision.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::kv {

struct ContiguousAttention {
  float softmax_scale = 1.0f;
  float softcap = 0.0f;          // 0: none
  int window = 0;                // 0: the layer's own; on a ring not more than that
  const float* sinks = nullptr;  // [num_q_heads], or null
  float* lse = nullptr;          // [batch * q_len, num_q_heads], or null
  bool is_causal = true;         // false: each query sees all tokens, less what a window hides
  ops::Precision precision = ops::Precision::kAccurate;
};

// All sequences of the batch have the same length. Rows of a call are the sequences' tokens, one
// sequence after the other, and lie where the cache lies, as do sinks and lse. One thread at a
// time. On a GPU calls return when the work is on its way, in the stream's order.
class ContiguousCache {
 public:
  // Allocates everything. Errors as plan_contiguous, LayerTables::create and CudaPlace::create;
  // OUT_OF_RANGE when the machine or the GPU has not that much memory.
  static Result<ContiguousCache> create(ContiguousConfig config, const ops::CpuContext& context);

  // Writes num_tokens new tokens of every sequence to a layer, behind seq_len(), which stays as it
  // is: after all layers have appended, one advance() makes the tokens part of the sequences. A
  // ring keeps the last `capacity` of them. k, v: [batch * num_tokens, num_kv_heads, head_dim].
  // OUT_OF_RANGE, nothing written: past max_seq_len without eviction, or past
  // cuda.max_step_tokens. INVALID_ARGUMENT: the layer has appended since the last advance.
  Status append(int layer, int num_tokens, FloatRows k, FloatRows v);

  // INVALID_ARGUMENT, nothing changed: a layer has not appended just num_tokens.
  Status advance(int num_tokens);

  // Forgets all tokens; the memory stays.
  void reset();

  // The last q_len tokens of each sequence ask; tokens that the layer has appended and no advance
  // has counted are among them. q: [batch * q_len, num_q_heads, k_head_dim]; out: the same with
  // v_head_dim. INVALID_ARGUMENT: q_len beyond the tokens that are there, or beyond what a full
  // ring still holds for its first query (max_append). OUT_OF_RANGE: 2^31 queries or more.
  Status attend(int layer, int q_len, FloatRows q, MutableFloatRows out,
                const ContiguousAttention& attention);

  // The stored tokens of a layer as floats, oldest first: [batch * num_held(layer), num_kv_heads,
  // head_dim]. A side whose data is null is not wanted.
  Status gather(int layer, MutableFloatRows k, MutableFloatRows v);

  const ContiguousConfig& config() const { return config_; }
  // Tokens that advance has counted; with eviction at most max_seq_len.
  int seq_len() const { return seq_len_; }
  // Tokens of a sequence that a layer holds, uncounted ones included.
  int num_held(int layer) const;
  // NaN or infinite inputs that given scales could not express, since creation. On a GPU it waits
  // for all that was launched; INTERNAL_ERROR: some of it failed.
  Result<int64_t> nonfinite_inputs() { return verbs_->nonfinite_inputs(); }

  // Where a layer's rows lie: block b is sequence b. Requires: layer in range. Refers to this.
  ops::LayerView view(int layer) const;

  // Bytes of K and V: all that is allocated; the tokens that are held; what the attention of one
  // new token reads of them.
  int64_t allocated_bytes() const;
  int64_t used_bytes() const;
  int64_t read_bytes_per_step() const;

 private:
  struct Layer {
    LayerTables tables;
    std::vector<ops::HeadRun> runs;
    std::vector<cache::Region> regions;  // what the runs point to
    int kept_tokens = 0;
    int capacity = 0;
    int block_tokens = 0;
    int64_t position_bytes = 0;  // of one token of every sequence
    int num_pending = 0;         // appended, not yet counted
  };

  // What the tables of a call depend on. A step's calls of one shape share them.
  struct TableShape {
    int capacity = 0;
    int block_tokens = 0;
    int first_position = 0;  // of the appended tokens
    int num_tokens = 0;      // appended; 0: there are no slots
    int seq_len = 0;         // in block_ids_
    int q_len = 0;
    bool operator==(const TableShape&) const = default;
  };

  explicit ContiguousCache(ContiguousConfig config);
  Status create_verbs(const ops::CpuContext& context);
  cache::Memory& memory() const { return place_ ? *place_->memory : cache::host_memory(); }
  Result<Layer> make_layer(int index, const LayerPlan& plan) const;
  Result<ops::SideView> make_side(Layer& layer, const format::FormatSpec& spec, int head_dim,
                                  int num_heads) const;
  Status evict(Layer& layer, int num_tokens);
  Status move_rows(uint8_t* first_row, int64_t row_bytes, int num_tokens);
  Status place_tables(const TableShape& shape);
  int length(const Layer& layer) const;
  int length_in_blocks(const Layer& layer) const;
  Status check_layer(int layer) const;
  Status check_queries(int layer, int q_len, int window) const;

  ContiguousConfig config_;
  std::unique_ptr<CudaPlace> place_;  // null: the CPU
  // NaN or infinite inputs, which the CPU's verbs count.
  std::unique_ptr<std::atomic<int64_t>> nonfinite_inputs_;
  int seq_len_ = 0;
  std::vector<Layer> layers_;
  cache::Region scratch_;  // evict's, on a GPU: one head's rows of a layer
  // The sequences' blocks as the verbs number them, [batch, 2]: a sequence's one block twice, so
  // that positions run on where a ring begins anew. What the first pass has lost to the second is
  // older than the window.
  std::vector<int32_t> block_ids_;
  std::vector<int64_t> slots_;      // [batch * num_tokens]
  std::vector<int64_t> positions_;  // [batch * q_len]; zeros, since no table of a layer needs them
  std::vector<int32_t> seq_lens_;   // [batch]
  std::vector<int32_t> q_starts_;   // [batch + 1]
  TableShape placed_shape_;
  StepTables placed_;             // of that shape
  std::unique_ptr<Verbs> verbs_;  // last: it waits for the GPU, which reads all of the above
};

}  // namespace kvx::kv
