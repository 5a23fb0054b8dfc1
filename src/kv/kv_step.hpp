// KvStep: tokens on their way into some sequences of a cache, layer by layer.
//
//   step.begin(entries)             acquires blocks, packs full ones that leave the window
//   step.append_and_attend(layer)   once a layer
//   step.end()                      the tokens are the sequences'
//
// With a full-precision window an entry of any length works: inside append_and_attend() the step
// takes it block by block, in passes. Before a pass writes a block, the block that leaves the
// window for it is packed, in this layer alone, and the new one is written in its place. Layers are
// independent of each other, since each has bytes of its own in every block.
//
// A sequence may still be loading its beginning from the tiers, layer by layer: a layer of the step
// waits for its own part of it (tier/chain/promotion.hpp).
//
// A writer thread owns one and uses it again and again. Steps of different sequences may be open at
// once, each in its own thread: a step takes the cache's lock to begin and to end, for its
// bookkeeping alone; bytes move and attention runs without it.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kv/kv_cache.hpp"

namespace kvx::kv {

class KvStep {
 public:
  // The cache outlives the step.
  explicit KvStep(KvCache& cache);
  // Cancels an open step.
  ~KvStep();
  KvStep(const KvStep&) = delete;
  KvStep& operator=(const KvStep&) = delete;

  // Allocates what its steps need; begin() does it where nobody has. OUT_OF_RANGE: a GPU has no
  // room for it.
  Status prepare();
  bool is_open() const { return is_open_; }

  // As KvCache's begin_step, append_and_attend, end_step and cancel_step. INVALID_ARGUMENT also: a
  // sequence that is in another step.
  Status begin(std::span<const StepEntry> entries);
  Status append_and_attend(int layer, const AttentionParams& params, FloatRows q, FloatRows k,
                           FloatRows v, MutableFloatRows out);
  // The first half of a layer, for rows of which nothing is asked, as a file's.
  Status append(int layer, FloatRows k, FloatRows v);
  // INVALID_ARGUMENT: a layer has no rows of the open step. What its blocks hold would be others'
  // rows, so an API boundary checks this before it ends a step.
  Status check_rows() const;
  Status end();
  Status end(std::span<const int> kept_tokens);
  Status cancel();

 private:
  // What GroupTables point to on the host.
  struct GroupStep {
    std::vector<int64_t> slots;
    std::vector<int32_t> block_ids;  // [entries, row_stride]
    std::vector<int32_t> num_sink_blocks;
    std::vector<int32_t> first_recent_block;
    int64_t row_stride = 0;
  };

  // Tokens that are appended and read in one go: all of some entries', or those that one entry has
  // in one block.
  struct Pass {
    size_t first_entry = 0;
    size_t num_entries = 0;
    int first_row = 0;  // of the step's rows
    int num_rows = 0;
    int first_token = 0;  // of its entry; 0 with several
  };
  enum class LayerState : uint8_t { kUntouched, kBegun, kComplete };
  // The full-precision block of a sequence's open block, and where its bytes are kept.
  struct SavedBlock {
    int block_class = 0;
    int32_t id = cache::kNoBlock;
    int64_t offset = 0;  // in saved_bytes_
  };

  // The lock is held by these ...
  Status acquire_sequences(std::span<const StepEntry> entries);
  Status check_entry(std::span<const StepEntry> entries, size_t i) const;
  Status check_num_tokens() const;
  void release_sequences();
  Status keep_pages();
  void begin_pages();
  void release_pages();
  void begin_outgoing();
  void end_outgoing(const std::string& why_not);
  bool speculates(const StepEntry& entry) const;
  Status acquire_blocks(std::unique_lock<std::mutex>& lock);
  Status acquire_growths();
  Status count_spare_blocks();
  Status commit_moves();
  Status cancel_growths(size_t num_entries);
  Status commit();
  // ... and not by these.
  Status check_layer(int layer) const;
  Status wait_for_loads(int layer) const;
  Status check_tree_mask(const AttentionParams& params) const;
  Status move_bytes();
  Status copy_open_blocks();
  Status pack_blocks();
  Status save_open_blocks();
  Status restore_open_blocks();
  void plan_passes();
  int num_tokens_in(const Pass& pass, size_t i) const;
  Status describe(const Pass& pass, int group = -1);
  void describe_group(const Pass& pass, int group);
  Status run_passes(int layer, FloatRows k, FloatRows v, const ops::AttendArgs* attend);
  Status run_pass(int layer, const Pass& pass, FloatRows k, FloatRows v,
                  const ops::AttendArgs* attend);
  Status pack_leaving_block(int layer, const Pass& pass);
  void set_tables(ops::AttendArgs& args, const Pass& pass, const GroupTables& group) const;
  Status log_rows(int layer, FloatRows k, FloatRows v);

  SequenceTable& table_;
  CacheStorage& storage_;
  bool is_open_ = false;
  std::chrono::steady_clock::time_point began_;  // begin() of the open step
  std::vector<LayerState> layer_states_;         // [layers]
  std::vector<StepEntry> entries_;
  std::vector<cache::SequenceGrowth> growths_;  // [entries], or more from earlier steps
  std::vector<Pass> passes_;
  // Sequences of the step that leave for another process with it.
  std::vector<std::shared_ptr<OutgoingSequence>> outgoing_;
  // Sequences of the step may still load layer by layer: these are their loads.
  std::vector<std::shared_ptr<tier::Promotion>> loads_;
  // Of the pass that is described, as tables_.
  std::vector<int64_t> positions_;
  std::vector<int32_t> q_starts_;
  std::vector<int32_t> seq_lens_;
  std::vector<GroupStep> groups_;
  std::unique_ptr<Verbs> verbs_;  // null until prepare()
  StepTables tables_;             // all of the above, where the verbs read it
  // Of begin().
  std::vector<int64_t> spare_blocks_;  // [classes of the pool]
  std::vector<ops::BlockCopy> copies_;
  std::vector<SavedBlock> saved_blocks_;
  cache::Region saved_bytes_;  // where the verbs read it
};

}  // namespace kvx::kv
