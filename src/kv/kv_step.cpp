// KvStep: books, bytes, books to begin; books to end.
#include "kv/kv_step.hpp"

#include <algorithm>

#include "core/caught.hpp"
#include "core/log.hpp"

namespace kvx::kv {

KvStep::KvStep(KvCache& cache) : cache_(cache), groups_(cache.groups_.size()) {}

KvStep::~KvStep() {
  if (is_open_) (void)cancel();
}

Status KvStep::prepare() {
  if (verbs_) return {};
  KVX_ASSIGN_OR_RETURN(verbs_, cache_.create_verbs());
  return {};
}

// ---- begin

Status KvStep::begin(std::span<const StepEntry> entries) {
  if (is_open_) return invalid_argument("a step is open; end or cancel it first");
  KVX_RETURN_IF_ERROR(prepare());
  std::unique_lock lock(cache_.state_mutex_);
  KVX_RETURN_IF_ERROR(acquire_sequences(entries));
  cache_.collect();
  const Status kept = keep_pages();
  if (!kept.ok()) {
    release_pages();
    leave_sequences();
    return kept;
  }
  Status status = book_blocks();
  if (!status.ok() && !cache_.is_drained()) {  // a block on its way out is free when it is there
    cache_.drain(lock);
    status = book_blocks();
  }
  if (status.ok()) {
    lock.unlock();
    status = caught([this] { return move_bytes(); });
    lock.lock();
    commit_the_rest();
    if (status.ok()) {
      status = finish_blocks();
    } else {
      release_blocks();
    }
  }
  if (!status.ok()) {
    release_pages();
    leave_sequences();
    return status;
  }
  drain_pages();
  lock.unlock();
  is_open_ = true;
  has_rows_.assign(cache_.layers_.size(), 0);
  status = caught([this] { return describe(); });
  if (!status.ok()) KVX_RETURN_IF_ERROR(cancel());
  return status;
}

// All entries' sequences become this step's, or none.
Status KvStep::acquire_sequences(std::span<const StepEntry> entries) {
  if (entries.empty()) return invalid_argument("entries is empty; expected at least one sequence");
  entries_.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    const Status status = check_entry(entries, i);
    if (!status.ok()) {
      leave_sequences();
      return status;
    }
    cache_.uses_[entries[i].sequence] = Use::kInStep;
    entries_.push_back(entries[i]);
  }
  const Status status = check_num_tokens();
  if (!status.ok()) leave_sequences();
  return status;
}

// A GPU's tables have room for so many.
Status KvStep::check_num_tokens() const {
  if (!cache_.config_.cuda) return {};
  int64_t num_tokens = 0;
  for (const StepEntry& entry : entries_) num_tokens += entry.num_tokens;
  const int most = cache_.config_.cuda->max_step_tokens;
  if (num_tokens <= most) return {};
  return invalid_argument("the entries have {} tokens; expected at most cuda.max_step_tokens, {}",
                          num_tokens, most);
}

void KvStep::leave_sequences() {
  for (const StepEntry& entry : entries_) cache_.uses_[entry.sequence] = Use::kIdle;
}

Status KvStep::check_entry(std::span<const StepEntry> entries, size_t i) const {
  const StepEntry& entry = entries[i];
  if (!cache_.is_known(entry.sequence)) {
    return invalid_argument("entries[{}].sequence is {}; it is not in use", i, entry.sequence);
  }
  if (cache_.uses_[entry.sequence] == Use::kInStep) {
    const bool is_own = std::any_of(entries_.begin(), entries_.end(), [&](const StepEntry& other) {
      return other.sequence == entry.sequence;
    });
    return invalid_argument("entries[{}].sequence is {}; it is {}", i, entry.sequence,
                            is_own ? "named twice" : "in another step");
  }
  const cache::Sequence& sequence = cache_.sequences_[entry.sequence];
  if (entry.num_tokens > sequence.max_tokens() - sequence.num_tokens()) {
    return out_of_range("entries[{}].num_tokens is {}; the sequence has {} of {} tokens", i,
                        entry.num_tokens, sequence.num_tokens(), sequence.max_tokens());
  }
  if (entry.num_tokens < 1 || entry.num_tokens > cache_.max_step_tokens(entry.sequence)) {
    return invalid_argument("entries[{}].num_tokens is {}; expected 1 to {} in one step", i,
                            entry.num_tokens, cache_.max_step_tokens(entry.sequence));
  }
  return {};
}

// ---- pages whose shared scales may grow (speculation.hpp)

bool KvStep::speculates(const StepEntry& entry) const {
  return entry.is_speculative && !cache_.speculations_.empty();
}

// A page that this step may make grow, and that may have to come back, gets one more user.
Status KvStep::keep_pages() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const StepEntry& entry = entries_[i];
    if (entry.is_speculative && cache_.has_growing_pages() && cache_.speculations_.empty()) {
      return invalid_argument(
          "entries[{}] is speculative; expected max_speculative_tokens of the cache above 0", i);
    }
    if (!speculates(entry)) continue;
    Speculation& speculation = cache_.speculations_[entry.sequence];
    if (!speculation.is_open()) {
      KVX_RETURN_IF_ERROR(speculation.open(*cache_.pool_, cache_.sequence_shape(),
                                           cache_.sequences_[entry.sequence]));
    }
    if (speculation.has_room(entry.num_tokens)) continue;
    return invalid_argument(
        "entries[{}] has {} speculative tokens after {} others; expected at most "
        "max_speculative_tokens, {}, before they are cut or a step that is none",
        i, entry.num_tokens, cache_.num_tokens(entry.sequence) - speculation.first_token(),
        cache_.config_.max_speculative_tokens);
  }
  return {};
}

// The step takes place.
void KvStep::drain_pages() {
  if (cache_.speculations_.empty()) return;
  for (const StepEntry& entry : entries_) {
    Speculation& speculation = cache_.speculations_[entry.sequence];
    if (speculates(entry)) {
      speculation.begin_step(entry.num_tokens);
    } else {
      speculation.let_go(*cache_.pool_);
    }
  }
}

// The step does not: what began with it ends.
void KvStep::release_pages() {
  for (const StepEntry& entry : entries_) {
    if (!speculates(entry)) continue;
    Speculation& speculation = cache_.speculations_[entry.sequence];
    if (speculation.is_open() && !speculation.has_tokens()) speculation.let_go(*cache_.pool_);
  }
}

// ---- blocks

// Before anything moves all blocks are found: those that bytes go to now are taken, the others are
// promised.
Status KvStep::book_blocks() {
  for (const StepEntry& entry : entries_) {
    KVX_RETURN_IF_ERROR(cache_.sequences_[entry.sequence].release_expired(*cache_.pool_));
  }
  KVX_RETURN_IF_ERROR(count_needed_blocks());
  const Status taken = acquire_blocks();
  if (taken.ok()) {
    promise_the_rest();
  } else {
    release_blocks();
  }
  return taken;
}

Status KvStep::count_needed_blocks() {
  const cache::BlockPool& pool = *cache_.pool_;
  needed_blocks_.assign(pool.num_classes(), 0);
  for (const StepEntry& entry : entries_) {
    cache_.sequences_[entry.sequence].add_needed_blocks(pool, entry.num_tokens, needed_blocks_);
  }
  for (int c = 0; c < pool.num_classes(); ++c) {
    if (needed_blocks_[c] <= pool.num_free(c)) continue;
    if (needed_blocks_[c] <= pool.num_available(c)) {
      log(LogLevel::kDebug, "the step evicts {} cached blocks of {}",
          needed_blocks_[c] - pool.num_free(c), pool.name(c));
      continue;
    }
    return out_of_range("the step needs {} blocks of {}; {} of {} are free", needed_blocks_[c],
                        pool.name(c), pool.num_available(c), pool.num_blocks(c));
  }
  return {};
}

// Requires: they are there (count_needed_blocks).
Status KvStep::acquire_blocks() {
  moves_.clear();
  move_ends_.clear();
  open_copies_.clear();
  copy_ends_.clear();
  for (const StepEntry& entry : entries_) {
    cache::Sequence& sequence = cache_.sequences_[entry.sequence];
    // Moves first: their check counts the copies that are still to come.
    KVX_RETURN_IF_ERROR(sequence.acquire_moves(*cache_.pool_, entry.num_tokens, moves_));
    move_ends_.push_back(moves_.size());
    KVX_RETURN_IF_ERROR(sequence.drain_copies(*cache_.pool_, open_copies_));
    copy_ends_.push_back(open_copies_.size());
  }
  return {};
}

// What finish_blocks() will reserve. A full-precision block that leaves its window comes back
// before that; where there is no other, it must come back for sure: from now on nobody finds it.
void KvStep::promise_the_rest() {
  cache::BlockPool& pool = *cache_.pool_;
  promised_ = needed_blocks_;
  for (const cache::OpenBlockCopy& copy : open_copies_) --promised_[copy.block_class];
  for (const cache::BlockMove& move : moves_) {
    --promised_[cache_.packed_class(move.group)];
    const int full_precision = cache_.full_precision_class(move.group);
    if (pool.use_count(full_precision, move.full_precision_id) > 1) continue;  // was not counted
    if (promised_[full_precision] < pool.num_available(full_precision)) {
      ++promised_[full_precision];
    } else {
      cache_.forget_block(full_precision, move.full_precision_id);
    }
  }
  for (int c = 0; c < pool.num_classes(); ++c) {
    promised_[c] = std::max<int64_t>(promised_[c], 0);
    pool.promise(c, promised_[c]);
  }
}

void KvStep::commit_the_rest() {
  for (int c = 0; c < cache_.pool_->num_classes(); ++c) cache_.pool_->commit(c, promised_[c]);
}

// Open blocks that others need as they are get copies; blocks that leave the recent window go from
// 16 bits to their packed format, in all layers of their group.
Status KvStep::move_bytes() {
  if (!open_copies_.empty()) KVX_RETURN_IF_ERROR(copy_open_blocks());
  return moves_.empty() ? Status() : pack_blocks();
}

Status KvStep::copy_open_blocks() {
  using CopyKind = KvCache::CopyKind;
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    for (const CopyKind kind : {CopyKind::kPacked, CopyKind::kFullPrecision}) {
      const bool is_full_precision = kind == CopyKind::kFullPrecision;
      if (is_full_precision && !cache_.has_full_precision_window()) continue;
      copies_.clear();
      for (const cache::OpenBlockCopy& copy : open_copies_) {
        if (copy.block_class !=
            (is_full_precision ? cache_.full_precision_class(g) : cache_.packed_class(g)))
          continue;
        copies_.push_back({copy.from_id, copy.to_id, copy.num_tokens});
      }
      if (copies_.empty()) continue;
      KVX_RETURN_IF_ERROR(verbs_->copy_blocks(cache_.layer_copies(g, kind), copies_));
    }
  }
  return {};
}

Status KvStep::pack_blocks() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    copies_.clear();
    for (const cache::BlockMove& move : moves_) {
      if (move.group != g) continue;
      copies_.push_back({move.full_precision_id, move.packed_id, cache_.config_.block_size});
    }
    if (copies_.empty()) continue;
    KVX_RETURN_IF_ERROR(
        verbs_->copy_blocks(cache_.layer_copies(g, KvCache::CopyKind::kPack), copies_));
  }
  return {};
}

Status KvStep::finish_blocks() {
  size_t first_copy = 0;
  size_t first_move = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int s = entries_[i].sequence;
    const std::span<const cache::OpenBlockCopy> copies(open_copies_.begin() + first_copy,
                                                       open_copies_.begin() + copy_ends_[i]);
    const std::span<const cache::BlockMove> moves(moves_.begin() + first_move,
                                                  moves_.begin() + move_ends_[i]);
    KVX_RETURN_IF_ERROR(cache_.sequences_[s].finish_copies(*cache_.pool_, copies));
    KVX_RETURN_IF_ERROR(cache_.sequences_[s].finish_moves(*cache_.pool_, moves));
    if (cache_.prefixes_) KVX_RETURN_IF_ERROR(cache_.prefixes_->record_moves(s, moves));
    first_copy = copy_ends_[i];
    first_move = move_ends_[i];
  }
  for (const StepEntry& entry : entries_) {
    KVX_RETURN_IF_ERROR(cache_.sequences_[entry.sequence].reserve(*cache_.pool_, entry.num_tokens));
  }
  return {};
}

// The blocks that bytes should have gone to.
void KvStep::release_blocks() {
  for (const cache::OpenBlockCopy& copy : open_copies_) {
    (void)cache_.pool_->release(copy.block_class, copy.to_id);
  }
  for (const cache::BlockMove& move : moves_) {
    (void)cache_.pool_->release(cache_.packed_class(move.group), move.packed_id);
  }
}

// ---- end

Status KvStep::check_rows() const {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  const auto missing = std::find(has_rows_.begin(), has_rows_.end(), 0);
  if (missing == has_rows_.end()) return {};
  return invalid_argument("layer {} has no rows of this step; expected rows for each of {} layers",
                          missing - has_rows_.begin(), has_rows_.size());
}

Status KvStep::end() {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  const std::lock_guard lock(cache_.state_mutex_);
  advance();
  return {};
}

void KvStep::advance() {
  for (const StepEntry& entry : entries_) {
    cache_.sequences_[entry.sequence].advance(entry.num_tokens);
  }
  leave_sequences();
  is_open_ = false;
  cache_.warn_of_nonfinite_inputs();
}

Status KvStep::end(std::span<const int> kept_tokens) {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  if (kept_tokens.size() != entries_.size()) {
    return invalid_argument("kept_tokens has {} counts; the step has {} entries",
                            kept_tokens.size(), entries_.size());
  }
  const std::lock_guard lock(cache_.state_mutex_);
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    const StepEntry& entry = entries_[i];
    if (kept_tokens[i] < 0 || kept_tokens[i] > entry.num_tokens) {
      return invalid_argument("kept_tokens[{}] is {}; expected 0 to {}", i, kept_tokens[i],
                              entry.num_tokens);
    }
    const int64_t before = cache_.sequences_[entry.sequence].num_tokens();
    KVX_RETURN_IF_ERROR(
        cache_.check_cut(entry.sequence, before + kept_tokens[i], before + entry.num_tokens));
  }
  advance();
  Status first_failure;  // the other entries' tokens go all the same
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    const StepEntry& entry = entries_[i];
    const int64_t written = cache_.sequences_[entry.sequence].num_tokens();
    const int64_t kept = written - entry.num_tokens + kept_tokens[i];
    const Status cut = cache_.cut(*verbs_, entry.sequence, kept, written);
    if (!cut.ok() && first_failure.ok()) first_failure = cut;
    if (speculates(entry)) cache_.speculations_[entry.sequence].let_go(*cache_.pool_);
  }
  return first_failure;
}

// The blocks that the step has reserved go back, so that a fork does not share them.
Status KvStep::cancel() {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  is_open_ = false;
  const std::lock_guard lock(cache_.state_mutex_);
  leave_sequences();
  Status first_failure;  // the other entries' blocks go all the same
  for (const StepEntry& entry : entries_) {
    const int64_t num_tokens = cache_.sequences_[entry.sequence].num_tokens();
    const bool speculated = speculates(entry);
    if (speculated) cache_.speculations_[entry.sequence].cancel_step();
    const int64_t num_written = num_tokens + (speculated ? entry.num_tokens : 0);
    const Status cut = cache_.cut(*verbs_, entry.sequence, num_tokens, num_written);
    if (!cut.ok() && first_failure.ok()) first_failure = cut;
  }
  return first_failure;
}

}  // namespace kvx::kv
