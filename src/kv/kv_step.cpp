// KvStep: a step acquires blocks under the cache's lock, copies bytes without it, and commits under
// the lock again.
#include "kv/kv_step.hpp"

#include <algorithm>

#include "core/caught.hpp"
#include "core/log.hpp"
#include "kv/files/outgoing_sequence.hpp"

namespace kvx::kv {

KvStep::KvStep(KvCache& cache)
    : table_(cache.table()), storage_(table_.storage), groups_(storage_.groups.size()) {}

KvStep::~KvStep() {
  if (is_open_) (void)cancel();
}

Status KvStep::prepare() {
  if (verbs_) return {};
  KVX_ASSIGN_OR_RETURN(verbs_, table_.create_verbs());
  return {};
}

// ---- begin

Status KvStep::begin(std::span<const StepEntry> entries) {
  if (is_open_) return invalid_argument("a step is open; end or cancel it first");
  KVX_RETURN_IF_ERROR(prepare());
  began_ = std::chrono::steady_clock::now();
  std::unique_lock lock(table_.mutex);
  KVX_RETURN_IF_ERROR(acquire_sequences(entries));
  table_.collect();
  Status status = keep_pages();
  if (status.ok()) status = acquire_blocks(lock);
  if (status.ok()) {
    lock.unlock();
    status = caught([this] { return move_bytes(); });
    lock.lock();
    if (status.ok()) status = commit_moves();
    if (!status.ok()) (void)cancel_growths(entries_.size());
  }
  if (!status.ok()) {
    release_pages();
    release_sequences();
    return status;
  }
  begin_pages();
  begin_outgoing();
  loads_.clear();
  for (const StepEntry& entry : entries_) {
    if (table_.loads[entry.sequence]) loads_.push_back(table_.loads[entry.sequence]);
  }
  lock.unlock();
  table_.latencies.step_begin.add(std::chrono::steady_clock::now() - began_);
  is_open_ = true;
  layer_states_.assign(storage_.layers.size(), LayerState::kUntouched);
  status = caught([this] {
    plan_passes();
    return passes_.size() == 1 ? describe(passes_.front()) : Status();
  });
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
      release_sequences();
      return status;
    }
    table_.uses[entries[i].sequence] = SequenceUse::kInStep;
    entries_.push_back(entries[i]);
  }
  const Status status = check_num_tokens();
  if (!status.ok()) release_sequences();
  return status;
}

// A GPU's tables have room for so many.
Status KvStep::check_num_tokens() const {
  if (!storage_.config.cuda) return {};
  int64_t num_tokens = 0;
  for (const StepEntry& entry : entries_) num_tokens += entry.num_tokens;
  const int most = storage_.config.cuda->max_step_tokens;
  if (num_tokens <= most) return {};
  return invalid_argument("the entries have {} tokens; expected at most cuda.max_step_tokens, {}",
                          num_tokens, most);
}

void KvStep::release_sequences() {
  for (const StepEntry& entry : entries_) table_.uses[entry.sequence] = SequenceUse::kIdle;
}

Status KvStep::check_entry(std::span<const StepEntry> entries, size_t i) const {
  const StepEntry& entry = entries[i];
  if (!table_.holds(entry.sequence)) {
    return invalid_argument("entries[{}].sequence is {}; it is not in use", i, entry.sequence);
  }
  if (table_.uses[entry.sequence] == SequenceUse::kInStep) {
    const bool is_own = std::any_of(entries_.begin(), entries_.end(), [&](const StepEntry& other) {
      return other.sequence == entry.sequence;
    });
    return invalid_argument("entries[{}].sequence is {}; it is {}", i, entry.sequence,
                            is_own ? "named twice" : "in another step");
  }
  const cache::Sequence& sequence = table_.sequences[entry.sequence];
  if (entry.num_tokens > sequence.max_tokens() - sequence.num_tokens()) {
    return out_of_range("entries[{}].num_tokens is {}; the sequence has {} of {} tokens", i,
                        entry.num_tokens, sequence.num_tokens(), sequence.max_tokens());
  }
  const int64_t most = table_.max_step_tokens(entry.sequence);
  if (entry.num_tokens < 1 || entry.num_tokens > most) {
    return invalid_argument("entries[{}].num_tokens is {}; expected 1 to {} in one step", i,
                            entry.num_tokens, most);
  }
  return {};
}

// ---- pages whose shared scales may grow (speculation.hpp)

bool KvStep::speculates(const StepEntry& entry) const {
  return entry.is_speculative && !table_.speculations.empty();
}

// A page that this step may make grow, and that may have to come back, gets one more user.
Status KvStep::keep_pages() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const StepEntry& entry = entries_[i];
    if (entry.is_speculative && storage_.has_growing_pages() && table_.speculations.empty()) {
      return invalid_argument(
          "entries[{}] is speculative; expected max_speculative_tokens of the cache above 0", i);
    }
    if (!speculates(entry)) continue;
    Speculation& speculation = table_.speculations[entry.sequence];
    if (!speculation.is_open()) {
      KVX_RETURN_IF_ERROR(speculation.open(*storage_.pool, storage_.sequence_shape(),
                                           table_.sequences[entry.sequence]));
    }
    if (speculation.has_room(entry.num_tokens)) continue;
    return invalid_argument(
        "entries[{}] has {} speculative tokens after {} others; expected at most "
        "max_speculative_tokens, {}, before they are cut or a step that is none",
        i, entry.num_tokens,
        table_.sequences[entry.sequence].num_tokens() - speculation.first_token(),
        storage_.config.max_speculative_tokens);
  }
  return {};
}

// The step takes place.
void KvStep::begin_pages() {
  if (table_.speculations.empty()) return;
  for (const StepEntry& entry : entries_) {
    Speculation& speculation = table_.speculations[entry.sequence];
    if (speculates(entry)) {
      speculation.begin_step(entry.num_tokens);
    } else {
      speculation.release(*storage_.pool);
    }
  }
}

// The step does not: what began with it ends.
void KvStep::release_pages() {
  for (const StepEntry& entry : entries_) {
    if (!speculates(entry)) continue;
    Speculation& speculation = table_.speculations[entry.sequence];
    if (speculation.is_open() && !speculation.has_tokens()) speculation.release(*storage_.pool);
  }
}

// ---- sequences that leave for another process in this step

void KvStep::begin_outgoing() {
  outgoing_.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int s = entries_[i].sequence;
    const std::shared_ptr<OutgoingSequence> leaving = table_.outgoing[s];
    if (!leaving) continue;
    const cache::Sequence& sequence = table_.sequences[s];
    const int64_t num_tokens = sequence.num_tokens() + entries_[i].num_tokens;
    if (num_tokens < leaving->num_tokens()) continue;
    if (num_tokens > leaving->num_tokens()) {
      table_.abandon_outgoing(
          s, fmt::format("a step brings the sequence from {} to {} tokens; {} are on offer",
                         sequence.num_tokens(), num_tokens, leaving->num_tokens()));
      continue;
    }
    const int64_t num_blocks = cache::blocks_for(num_tokens, sequence.block_size());
    std::vector<GroupBlocks> groups(groups_.size());
    for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
      groups[g].ids.resize(static_cast<size_t>(num_blocks));
      sequence.blocks_at(g, growths_[i], num_blocks, groups[g].ids);
      groups[g].num_sink_blocks = sequence.num_sink_blocks(g);
      groups[g].first_recent_block = sequence.first_recent_block_at(g, growths_[i], num_blocks);
    }
    leaving->begin_step(table_, *verbs_, groups);
    outgoing_.push_back(leaving);
  }
}

void KvStep::end_outgoing(const std::string& why_not) {
  if (outgoing_.empty()) return;
  // What comes next may write to the blocks that are still being read.
  const Status joined = verbs_->join_copies();
  const std::string& reason = joined.ok() ? why_not : joined.error().message;
  for (const auto& leaving : outgoing_) leaving->end_step(table_, reason);
  outgoing_.clear();
}

// ---- blocks

// Every block that the step writes to is acquired before anything moves.
Status KvStep::acquire_blocks(std::unique_lock<std::mutex>& lock) {
  Status status = acquire_growths();
  if (!status.ok() && table_.tiers) {
    // A block on its way out is free when it is there, one of a load that is late or has just ended
    // at once.
    table_.drain_stores(lock);
    status = acquire_growths();
  }
  return status;
}

Status KvStep::acquire_growths() {
  for (const StepEntry& entry : entries_) {
    KVX_RETURN_IF_ERROR(table_.sequences[entry.sequence].release_expired(*storage_.pool));
  }
  KVX_RETURN_IF_ERROR(count_spare_blocks());
  if (growths_.size() < entries_.size()) growths_.resize(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Status acquired = table_.sequences[entries_[i].sequence].acquire(
        *storage_.pool, entries_[i].num_tokens, spare_blocks_, growths_[i]);
    if (acquired.ok()) continue;
    (void)cancel_growths(i);
    return acquired;
  }
  return {};
}

// OUT_OF_RANGE: there are fewer blocks than the entries need.
Status KvStep::count_spare_blocks() {
  const cache::BlockPool& pool = *storage_.pool;
  std::vector<int64_t>& needed = spare_blocks_;
  needed.assign(pool.num_classes(), 0);
  for (const StepEntry& entry : entries_) {
    table_.sequences[entry.sequence].add_needed_blocks(pool, entry.num_tokens, needed);
  }
  for (int c = 0; c < pool.num_classes(); ++c) {
    if (needed[c] > pool.num_available(c)) {
      return out_of_range("the step needs {} blocks of {}; {} of {} are free", needed[c],
                          pool.name(c), pool.num_available(c), pool.num_blocks(c));
    }
    if (needed[c] > pool.num_free(c)) {
      log(LogLevel::kDebug, "the step evicts {} cached blocks of {}", needed[c] - pool.num_free(c),
          pool.name(c));
    }
    spare_blocks_[c] = pool.num_available(c) - needed[c];
  }
  return {};
}

// Open blocks that others need as they are get copies; blocks that leave the recent window go from
// 16 bits to their packed format, in all layers of their group.
Status KvStep::move_bytes() {
  KVX_RETURN_IF_ERROR(copy_open_blocks());
  KVX_RETURN_IF_ERROR(pack_blocks());
  return save_open_blocks();
}

Status KvStep::copy_open_blocks() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    for (const CopyKind kind : {CopyKind::kPacked, CopyKind::kFullPrecision}) {
      const bool is_full_precision = kind == CopyKind::kFullPrecision;
      if (is_full_precision && !storage_.has_full_precision_window()) continue;
      const int block_class =
          is_full_precision ? storage_.full_precision_class(g) : storage_.packed_class(g);
      copies_.clear();
      for (size_t i = 0; i < entries_.size(); ++i) {
        for (const cache::OpenBlockCopy& copy : growths_[i].copies) {
          if (copy.block_class != block_class) continue;
          copies_.push_back({copy.from_id, copy.to_id, copy.num_tokens});
        }
      }
      if (copies_.empty()) continue;
      KVX_RETURN_IF_ERROR(verbs_->copy_blocks(storage_.layer_copies(g, kind), copies_));
    }
  }
  return {};
}

// Blocks that were full before the step; those that the step fills are packed by its passes.
Status KvStep::pack_blocks() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    copies_.clear();
    for (size_t i = 0; i < entries_.size(); ++i) {
      for (const cache::BlockMove& move : growths_[i].moves) {
        if (move.group != g) continue;
        copies_.push_back({move.full_precision_id, move.packed_id, storage_.config.block_size});
      }
    }
    if (copies_.empty()) continue;
    KVX_RETURN_IF_ERROR(verbs_->copy_blocks(storage_.layer_copies(g, CopyKind::kPack), copies_));
  }
  return {};
}

Status KvStep::commit_moves() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int s = entries_[i].sequence;
    KVX_RETURN_IF_ERROR(table_.sequences[s].commit_moves(*storage_.pool, growths_[i]));
    if (!table_.prefixes) continue;
    KVX_RETURN_IF_ERROR(table_.prefixes->record_moves(s, growths_[i].moves));
  }
  return {};
}

// Of the first entries, so many.
Status KvStep::cancel_growths(size_t num_entries) {
  Status first_failure;  // the other entries' blocks go all the same
  for (size_t i = 0; i < num_entries; ++i) {
    const Status canceled =
        table_.sequences[entries_[i].sequence].cancel(*storage_.pool, growths_[i]);
    if (!canceled.ok() && first_failure.ok()) first_failure = canceled;
  }
  return first_failure;
}

// ---- open blocks whose place a long step gives to another block

// Their bytes are copied to memory of the step's own, so that cancel() can restore them.
Status KvStep::save_open_blocks() {
  saved_blocks_.clear();
  int64_t num_bytes = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const cache::Sequence& sequence = table_.sequences[entries_[i].sequence];
    for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
      if (!sequence.loses_open_block(g, growths_[i])) continue;
      const int64_t open_block = sequence.num_tokens() / sequence.block_size();
      const int block_class = storage_.full_precision_class(g);
      saved_blocks_.push_back({block_class, growths_[i].groups[g].id(open_block), num_bytes});
      num_bytes += storage_.pool->block_bytes(block_class);
    }
  }
  if (num_bytes > saved_bytes_.bytes()) {
    KVX_RETURN_IF_ERROR(verbs_->synchronize());  // the old memory may still be read
    saved_bytes_ = {};
    cache::Memory& memory = storage_.device_or_host_memory();
    KVX_ASSIGN_OR_RETURN(saved_bytes_, memory.allocate(num_bytes, "open blocks of a step"));
  }
  for (const SavedBlock& saved : saved_blocks_) {
    const std::span<uint8_t> block = storage_.block_bytes(saved.block_class, saved.id);
    KVX_RETURN_IF_ERROR(
        verbs_->copy_bytes(block.data(), saved_bytes_.data() + saved.offset, std::ssize(block)));
  }
  return {};
}

Status KvStep::restore_open_blocks() {
  for (const SavedBlock& saved : saved_blocks_) {
    const std::span<uint8_t> block = storage_.block_bytes(saved.block_class, saved.id);
    KVX_RETURN_IF_ERROR(
        verbs_->copy_bytes(saved_bytes_.data() + saved.offset, block.data(), std::ssize(block)));
  }
  return {};
}

// ---- end

Status KvStep::check_rows() const {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  const auto has_rows = [](LayerState state) { return state == LayerState::kComplete; };
  const auto missing = std::find_if_not(layer_states_.begin(), layer_states_.end(), has_rows);
  if (missing == layer_states_.end()) return {};
  return invalid_argument("layer {} has no rows of this step; expected rows for each of {} layers",
                          missing - layer_states_.begin(), layer_states_.size());
}

Status KvStep::end() {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  const std::lock_guard lock(table_.mutex);
  end_outgoing("");
  return commit();
}

Status KvStep::commit() {
  Status first_failure;  // the other entries' tokens come all the same
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Status committed =
        table_.sequences[entries_[i].sequence].commit(*storage_.pool, growths_[i]);
    if (!committed.ok() && first_failure.ok()) first_failure = committed;
    table_.commit_load(entries_[i].sequence);
  }
  loads_.clear();
  release_sequences();
  is_open_ = false;
  table_.latencies.step.add(std::chrono::steady_clock::now() - began_);
  table_.warn_of_nonfinite_inputs();
  return first_failure;
}

Status KvStep::end(std::span<const int> kept_tokens) {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  if (kept_tokens.size() != entries_.size()) {
    return invalid_argument("kept_tokens has {} counts; the step has {} entries",
                            kept_tokens.size(), entries_.size());
  }
  const std::lock_guard lock(table_.mutex);
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    const StepEntry& entry = entries_[i];
    if (kept_tokens[i] < 0 || kept_tokens[i] > entry.num_tokens) {
      return invalid_argument("kept_tokens[{}] is {}; expected 0 to {}", i, kept_tokens[i],
                              entry.num_tokens);
    }
    const cache::Sequence& sequence = table_.sequences[entry.sequence];
    const int64_t kept = sequence.num_tokens() + kept_tokens[i];
    KVX_RETURN_IF_ERROR(sequence.check_cut(growths_[i], kept));
    KVX_RETURN_IF_ERROR(
        table_.check_cut(entry.sequence, kept, sequence.num_tokens() + entry.num_tokens));
  }
  end_outgoing(std::ranges::equal(kept_tokens, entries_, {}, {}, &StepEntry::num_tokens)
                   ? ""
                   : "tokens of the step that completes the sequence were refused");
  KVX_RETURN_IF_ERROR(commit());
  Status first_failure;  // the other entries' tokens go all the same
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    const StepEntry& entry = entries_[i];
    const int64_t written = table_.sequences[entry.sequence].num_tokens();
    const int64_t kept = written - entry.num_tokens + kept_tokens[i];
    const Status cut = table_.cut(*verbs_, entry.sequence, kept, written);
    if (!cut.ok() && first_failure.ok()) first_failure = cut;
    if (speculates(entry)) table_.speculations[entry.sequence].release(*storage_.pool);
  }
  return first_failure;
}

Status KvStep::cancel() {
  if (!is_open_) return invalid_argument("no step is open; begin one first");
  is_open_ = false;
  loads_.clear();
  const std::lock_guard lock(table_.mutex);
  release_sequences();
  end_outgoing("the step that completes the sequence was cancelled");
  Status first_failure = restore_open_blocks();  // the other entries' blocks go all the same
  const Status released = cancel_growths(entries_.size());
  if (!released.ok() && first_failure.ok()) first_failure = released;
  for (const StepEntry& entry : entries_) {
    const int64_t num_tokens = table_.sequences[entry.sequence].num_tokens();
    const bool speculated = speculates(entry);
    if (speculated) table_.speculations[entry.sequence].cancel_step();
    const int64_t num_written = num_tokens + (speculated ? entry.num_tokens : 0);
    const Status cut = table_.cut(*verbs_, entry.sequence, num_tokens, num_written);
    if (!cut.ok() && first_failure.ok()) first_failure = cut;
  }
  return first_failure;
}

}  // namespace kvx::kv
