// KvStep: tokens on their way into some sequences of a cache, layer by layer.
//
//   step.begin(entries)             books blocks, quantises those that leave the window
//   step.append_and_attend(layer)   once a layer
//   step.end()                      the tokens are the sequences'
//
// A writer thread owns one and uses it again and again. Steps of different sequences may be open at
// once, each in its own thread: a step takes the cache's lock to begin and to end, for its
// bookkeeping alone; bytes move and attention runs without it.
#pragma once

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
  // rows, so doors ask this before they end a step.
  Status check_rows() const;
  Status end();
  Status end(std::span<const int> kept_tokens);
  Status cancel();

 private:
  using Use = KvCache::Use;
  // What GroupTables point to on the host.
  struct GroupStep {
    std::vector<int64_t> slots;
    std::vector<int32_t> block_ids;  // [entries, row_stride]
    std::vector<int32_t> num_sink_blocks;
    std::vector<int32_t> first_recent_block;
    int64_t row_stride = 0;
  };

  // The lock is held by these ...
  Status acquire_sequences(std::span<const StepEntry> entries);
  Status check_entry(std::span<const StepEntry> entries, size_t i) const;
  Status check_num_tokens() const;
  void leave_sequences();
  Status keep_pages();
  void drain_pages();
  void release_pages();
  bool speculates(const StepEntry& entry) const;
  Status book_blocks();
  Status count_needed_blocks();
  Status acquire_blocks();
  void promise_the_rest();
  void commit_the_rest();
  Status finish_blocks();
  void release_blocks();
  void advance();
  // ... and not by these.
  Status check_layer(int layer) const;
  Status move_bytes();
  Status copy_open_blocks();
  Status pack_blocks();
  Status describe();
  void describe_group(int group);
  Status log_rows(int layer, FloatRows k, FloatRows v);

  KvCache& cache_;
  bool is_open_ = false;
  std::vector<uint8_t> has_rows_;  // [layers]: of the open step
  std::vector<StepEntry> entries_;
  std::vector<int64_t> positions_;
  std::vector<int32_t> q_starts_;
  std::vector<int32_t> seq_lens_;
  std::vector<GroupStep> groups_;
  std::unique_ptr<Verbs> verbs_;  // null until prepare()
  StepTables tables_;             // all of the above, where the verbs read it
  // Of begin().
  std::vector<cache::BlockMove> moves_;
  std::vector<size_t> move_ends_;  // [entries]
  std::vector<cache::OpenBlockCopy> open_copies_;
  std::vector<size_t> copy_ends_;  // [entries]
  std::vector<ops::BlockCopy> copies_;
  std::vector<int64_t> needed_blocks_;  // [classes of the pool]
  std::vector<int64_t> promised_;       // [classes]
};

}  // namespace kvx::kv
