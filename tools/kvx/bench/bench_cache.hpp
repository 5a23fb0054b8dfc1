// BenchCache: one layer of a paged cache, filled by append, with the verbs that kvx bench measures.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cache/pool/memory.hpp"
#include "kv/plan/group_plan.hpp"
#include "kv/plan/layer_store.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::tool {

struct BenchShape {
  int num_sequences = 8;
  int length = 8192;  // tokens a sequence
  int num_kv_heads = 8;
  int num_q_heads = 32;
  int head_dim = 128;
  int latent_dim = 0;  // of latent rows (MLA), the first so many numbers are V; 0: V has its own
  int block_size = 64;
  int prefill_tokens = 512;  // of a sequence's end, when prefill attention is measured
  bool is_fast = false;      // attention's precision

  bool operator==(const BenchShape&) const = default;
  bool is_latent() const { return latent_dim > 0; }
  int value_dim() const { return is_latent() ? latent_dim : head_dim; }
};

class BenchCache {
 public:
  // The checks of create(), without allocating. INVALID_ARGUMENT names what does not fit: a count,
  // or a head_dim that the format does not support.
  static Status check(const BenchShape& shape, const kv::Recipe& recipe);

  static Result<std::unique_ptr<BenchCache>> create(const BenchShape& shape,
                                                    const kv::Recipe& recipe,
                                                    const ops::CpuContext& context);

  // Whether attention reads some blocks in 16 bits. The other verbs then measure nothing of the
  // recipe: they go over packed blocks alone.
  bool has_full_precision_window() const { return group_.full_precision_window.is_on(); }

  // Codes and scales of num_tokens, as they lie in blocks. With a full-precision window, num_tokens
  // is that of whole sequences, and the window's rows count in 16 bits.
  int64_t packed_bytes(int64_t num_tokens) const;

  // Every token of every sequence, in calls of one step each.
  Status append_all();
  // Every token of one sequence, to f32.
  Status gather(int sequence);
  // Reads the same blocks as attend_decode, in its order and with prefetches, without the
  // mathematics, for comparison.
  Status read_blocks();
  // One query a sequence, for all sequences in one call. Requires: append_all() was called.
  Status attend_decode();
  // The last prefill_tokens of one sequence, causal.
  Status attend_prefill(int sequence);

 private:
  BenchCache(const BenchShape& shape, const ops::CpuContext& context)
      : shape_(shape), context_(context) {}

  Status attend(int first_sequence, int num_sequences, int queries_per_sequence);
  Status append_rows(const ops::LayerView& view, int64_t num_tokens,
                     const std::function<int64_t(int64_t)>& slot_of);
  void fill_inputs();
  void fill_block_table();
  Status fill_full_precision_window();
  int64_t blocks_per_sequence() const;
  int64_t full_precision_blocks_per_sequence() const;

  BenchShape shape_;
  ops::CpuContext context_;
  kv::GroupPlan group_;
  cache::Region memory_;
  cache::Region full_precision_memory_;  // empty without a full-precision window
  std::unique_ptr<kv::LayerStore> store_;
  std::vector<int32_t> block_ids_;  // [num_sequences, blocks_per_sequence], packed blocks
  // With a full-precision window alone: the table that attention reads, the same shape, and where
  // the window lies, [num_sequences] each.
  std::vector<int32_t> attend_ids_;
  std::vector<int32_t> num_sink_blocks_;
  std::vector<int32_t> first_recent_block_;
  std::vector<float> rows_;          // [kStepTokens, num_kv_heads, head_dim], K and V alike
  std::vector<int64_t> slots_;       // [kStepTokens]
  std::vector<int64_t> positions_;   // [kStepTokens]
  std::vector<float> queries_;       // [max(num_sequences, prefill), num_q_heads, head_dim]
  std::vector<float> out_;           // [the same, value_dim]
  std::vector<float> gathered_k_;    // [length, num_kv_heads, head_dim]
  std::vector<float> gathered_v_;    // [length, num_kv_heads, value_dim]
  std::vector<uint64_t> read_sums_;  // [num_sequences, num_kv_heads]
};

}  // namespace kvx::tool
