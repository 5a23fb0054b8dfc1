// AttendArgs: what attend is called with, on the CPU and on a GPU.
#pragma once

#include "core/rows.hpp"
#include "ops/attend/precision.hpp"
#include "ops/cache_view.hpp"
#include "ops/transform.hpp"

namespace kvx::ops {

// A block table and lengths on a GPU as an engine keeps them, read there where they lie. What it
// says here does not change what they mean, so that a plan serves all of them.
struct TableInPlace {
  int entry_words = 1;   // 32-bit words of an entry: 2 for 64 bits
  int length_words = 1;  // likewise, of seq_lens
  // [num_sequences + 1]: sequence s has entries indptr[s] to indptr[s + 1] of all num_entries, in
  // the place of row_stride. Null: a row each.
  const int32_t* indptr = nullptr;
  int indptr_words = 1;  // likewise
  int64_t num_entries = 0;
  // V's entries lie so many behind K's, and each names the block after its K. 0: they have none.
  int64_t v_entries_at = 0;

  // Whether entries are what kernels read without it: rows of 32 bits.
  bool has_plain_entries() const {
    return entry_words == 1 && indptr == nullptr && v_entries_at == 0;
  }
  bool is_plain() const { return has_plain_entries() && length_words == 1; }
};

struct AttendArgs {
  // Blocks of a sequence: [0, num_sink_blocks) and [first_recent_block, end) index
  // `full_precision`, the others `packed`. Both views have the same geometry. Without
  // full-precision window, full_precision_* are null and `full_precision` is not used.
  LayerView packed;
  LayerView full_precision;
  const int32_t* num_sink_blocks = nullptr;     // [num_sequences]
  const int32_t* first_recent_block = nullptr;  // [num_sequences]
  LayerTransform transform;

  int num_sequences = 0;
  BlockTable block_table;
  TableInPlace in_place;  // other than plain on a GPU alone: AttendPlan::reads_in_place
  int64_t max_blocks_per_sequence = 0;
  const int32_t* seq_lens =
      nullptr;  // [num_sequences], tokens in the cache, the queries' own included

  // Queries of sequence s are rows q_starts[s] .. q_starts[s + 1]; they are the sequence's last
  // tokens.
  const int32_t* q_starts = nullptr;  // [num_sequences + 1]
  int num_q_heads = 0;                // a multiple of num_kv_heads
  FloatRows q;                        // [total_q, num_q_heads, k head_dim]
  MutableFloatRows out;               // [total_q, num_q_heads, v head_dim]
  float* lse = nullptr;               // [total_q, num_q_heads], natural log, or null

  float softmax_scale = 1.0f;
  float softcap = 0.0f;   // 0: none
  bool is_causal = true;  // a query sees no token behind its own; false: it sees those, too
  int window = 0;         // a query sees its own and the window - 1 tokens before; 0: all
  int window_sinks = 0;   // with a window: a query sees the sequence's first tokens too, so many
  const float* sinks =
      nullptr;  // [num_q_heads] logits that take probability and add no value; lse counts them
  // [total_q, tree_mask_stride] bytes: entry j of a query's row says whether it sees new token j of
  // its sequence (j < its q_len). It replaces the causal rule among the new tokens; all earlier
  // tokens are seen, less those that a window hides, counted in slots. Null: causal.
  const uint8_t* tree_mask = nullptr;
  int64_t tree_mask_stride = 0;

  Precision precision = Precision::kAccurate;  // on a GPU both are the same
};

}  // namespace kvx::ops
