// CudaCacheSets: caches on the device, filled by append in random block order, and the verbs that
// kvx bench measures there. Calls walk over several sets of sequences, so that none finds its bytes
// in the second-level cache.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "core/checked.hpp"
#include "device/cuda.hpp"
#include "kv/plan/group_plan.hpp"
#include "kv/plan/layer_store.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "tools/kvx/bench/cuda_bench.hpp"
#include "tools/kvx/bench/device_array.hpp"

namespace kvx::tool {

class CudaCacheSets {
 public:
  CudaCacheSets(const device::CudaDevice& device, const CudaBenchShape& named)
      : named_(named), shape_(named.shape), context_{device, nullptr} {}

  Status prepare(const kv::Recipe& recipe);

  const CudaBenchShape& named() const { return named_; }
  device::CudaStream stream() const { return context_.stream; }
  int num_sets() const { return num_sets_; }
  int64_t set_bytes() const {
    return blocks_per_set() * (group_.packed.code_bytes() + group_.packed.scale_bytes());
  }
  int64_t tokens_of_set() const { return blocks_per_set() * shape_.block_size; }
  // Tokens that a call of gather, copy, pack or transcode moves.
  int64_t tokens_at_once() const { return std::min<int64_t>(kTokens, tokens_of_set()); }
  // Bytes of a token's K, and of its V where verbs that move rows are measured.
  int64_t row_bytes() const { return int64_t{shape_.num_kv_heads} * shape_.head_dim * 2; }
  bool has_full_precision_window() const { return group_.full_precision_window.is_on(); }
  int64_t attend_bytes() const;  // what attend reads of a set, once each
  int64_t tokens_seen() const {  // by a query of each sequence of a set
    return std::accumulate(lens_.begin(), lens_.end(), int64_t{0});
  }
  // The number of values that kernels have found out of range so far.
  Result<uint64_t> num_out_of_range() const;

  Status append(int set, int64_t first_token, int64_t num_tokens) {
    return append(packed(), slots_.as<int64_t>() + first_token, set, num_tokens);
  }
  // append of K with error feedback; of formats with scales.
  Status append_fed(int set, int64_t first_token, int64_t num_tokens);
  bool has_scales() const { return runs_.front().k.spec.has_scale(); }
  Status gather(int set);
  Status copy(int set);       // blocks to the next set's
  Status pack(int set);       // blocks that leave the recent window
  Status transcode(int set);  // tokens of a layer of 16 bits to slots of the next set
  Status attend(int set) {
    return ops::attend(context_, attend_args(set), limits_, workspace_.data(), counters(), path());
  }
  // The copy of as many bytes that a verb is measured against. bytes: read and written together.
  Status plain_copy(int set, int64_t bytes);

 private:
  static constexpr int kTokens = 16384;

  int64_t blocks_per_sequence() const { return ceil_div(shape_.length, shape_.block_size); }
  int64_t blocks_per_set() const { return shape_.num_sequences * blocks_per_sequence(); }
  int64_t full_precision_blocks_per_sequence() const {
    return group_.full_precision_window.sink_blocks + group_.full_precision_window.recent_blocks;
  }
  int dim_of(int side) const { return side == 0 ? shape_.head_dim : named_.value_dim; }
  int64_t side_bytes() const {
    return kTokens * shape_.num_kv_heads * std::max(dim_of(0), dim_of(1)) * 2;
  }
  uint8_t* rows_of(int set) const { return rows_.data() + set * 2 * side_bytes(); }
  ops::DeviceCounters* counters() const { return counters_.as<ops::DeviceCounters>(); }
  ops::CudaAttendPath path() const {
    return named_.without_wgmma ? ops::CudaAttendPath::kPrefillMma : ops::CudaAttendPath::kChoose;
  }
  ops::LayerView packed() const {
    ops::LayerView view = store_->packed();
    view.runs = runs_;
    if (!more_runs_.empty()) view.next_segment = &more_;
    return view;
  }

  Status move_tables_to_device();
  Status move_tables_to_device(ops::SideView& side, int num_heads);
  Status make_tokens();
  void make_lens();
  Status make_full_precision_window();
  Status make_queries();
  Status make_copies();
  Status make_feedback();
  Status fill();
  Status fill_whole_blocks();
  ops::AttendArgs attend_args(int set) const;
  Status append(const ops::LayerView& cache, const int64_t* slots, int set, int64_t num_tokens);
  ops::HeadRun rows_as_run(int set) const;

  CudaBenchShape named_;
  BenchShape shape_;
  ops::CudaContext context_;
  std::unique_ptr<cache::Memory> memory_;
  std::optional<device::OwnedCudaStream> stream_;
  kv::GroupPlan group_;
  cache::Region blocks_;
  std::unique_ptr<kv::LayerStore> store_;
  std::vector<ops::HeadRun> runs_;
  std::vector<ops::HeadRun> more_runs_;  // of the second segment, where rows have one
  ops::LayerView more_;                  // those runs, as packed() refers to them
  std::vector<DeviceArray> tables_;      // given scales and tensor scales
  int num_sets_ = 1;
  cache::Region full_precision_blocks_;
  DeviceArray block_ids_;  // [num_sets, num_sequences, blocks_per_sequence]
  DeviceArray
      attend_ids_;  // the same, but the full-precision window's blocks are of their own pool
  DeviceArray num_sink_blocks_, first_recent_block_;
  DeviceArray sinks_;
  std::vector<int32_t> lens_;  // of a set's sequences
  DeviceArray slots_;          // [num_sets, tokens_of_set]
  cache::Region rows_;         // bf16 [num_sets, K and V, kTokens, num_kv_heads, dim_of(side)]
  cache::Region copied_;       // the same again
  DeviceArray ranges_;         // tokens_at_once of the sequences
  DeviceArray copies_;         // [num_sets, tokens_at_once / block_size]: to the next set's blocks
  DeviceArray packs_;          // the same, from the set's rows as if they were blocks
  DeviceArray row_slots_;      // [tokens_at_once]: of the set's rows, likewise
  DeviceArray feedback_;       // weights of all heads, [num_kv_heads, head_dim, head_dim]
  DeviceArray queries_, out_, seq_lens_, q_starts_, counters_;
  ops::CudaAttendLimits limits_;
  cache::Region workspace_;
};

}  // namespace kvx::tool
