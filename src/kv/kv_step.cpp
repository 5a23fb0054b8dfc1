// KvStep: books, bytes, books; then layer by layer.
#include "kv/kv_step.hpp"

#include <algorithm>

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
  if (is_open_) return invalid_argument("a step is open; call end_step first");
  KVX_RETURN_IF_ERROR(prepare());
  std::unique_lock lock(cache_.books_);
  KVX_RETURN_IF_ERROR(take_sequences(entries));
  cache_.collect();
  Status status = book_blocks();
  if (!status.ok() && !cache_.is_settled()) {  // a block on its way out is free when it is there
    cache_.settle(lock);
    status = book_blocks();
  }
  if (status.ok()) {
    lock.unlock();
    status = move_bytes();
    lock.lock();
    redeem_the_rest();
    if (status.ok()) {
      status = finish_blocks();
    } else {
      give_up_blocks();
    }
  }
  if (!status.ok()) {
    leave_sequences();
    return status;
  }
  lock.unlock();
  is_open_ = true;
  status = describe();
  if (!status.ok()) KVX_RETURN_IF_ERROR(cancel());
  return status;
}

// All entries' sequences become this step's, or none.
Status KvStep::take_sequences(std::span<const StepEntry> entries) {
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

// Before anything moves all blocks are found: those that bytes go to now are taken, the others are
// promised.
Status KvStep::book_blocks() {
  for (const StepEntry& entry : entries_) {
    KVX_RETURN_IF_ERROR(cache_.sequences_[entry.sequence].release_expired(*cache_.pool_));
  }
  KVX_RETURN_IF_ERROR(count_needed_blocks());
  const Status taken = take_blocks();
  if (taken.ok()) {
    promise_the_rest();
  } else {
    give_up_blocks();
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
Status KvStep::take_blocks() {
  moves_.clear();
  move_ends_.clear();
  open_copies_.clear();
  copy_ends_.clear();
  for (const StepEntry& entry : entries_) {
    cache::Sequence& sequence = cache_.sequences_[entry.sequence];
    // Moves first: their check counts the copies that are still to come.
    KVX_RETURN_IF_ERROR(sequence.take_moves(*cache_.pool_, entry.num_tokens, moves_));
    move_ends_.push_back(moves_.size());
    KVX_RETURN_IF_ERROR(sequence.take_copies(*cache_.pool_, open_copies_));
    copy_ends_.push_back(open_copies_.size());
  }
  return {};
}

// What finish_blocks() will reserve. A wide block that leaves its window comes back before that;
// where there is no other, it must come back for sure: from now on nobody finds it.
void KvStep::promise_the_rest() {
  cache::BlockPool& pool = *cache_.pool_;
  promised_ = needed_blocks_;
  for (const cache::OpenBlockCopy& copy : open_copies_) --promised_[copy.block_class];
  for (const cache::BlockMove& move : moves_) {
    --promised_[cache_.packed_class(move.group)];
    const int wide = cache_.wide_class(move.group);
    if (pool.use_count(wide, move.wide_id) > 1) continue;  // was not counted
    if (promised_[wide] < pool.num_available(wide)) {
      ++promised_[wide];
    } else {
      cache_.forget_block(wide, move.wide_id);
    }
  }
  for (int c = 0; c < pool.num_classes(); ++c) {
    promised_[c] = std::max<int64_t>(promised_[c], 0);
    pool.promise(c, promised_[c]);
  }
}

void KvStep::redeem_the_rest() {
  for (int c = 0; c < cache_.pool_->num_classes(); ++c) cache_.pool_->redeem(c, promised_[c]);
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
    for (const CopyKind kind : {CopyKind::kPacked, CopyKind::kWide}) {
      const bool is_wide = kind == CopyKind::kWide;
      if (is_wide && !cache_.has_wide_ends()) continue;
      copies_.clear();
      for (const cache::OpenBlockCopy& copy : open_copies_) {
        if (copy.block_class != (is_wide ? cache_.wide_class(g) : cache_.packed_class(g))) continue;
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
      copies_.push_back({move.wide_id, move.packed_id, cache_.config_.block_size});
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
void KvStep::give_up_blocks() {
  for (const cache::OpenBlockCopy& copy : open_copies_) {
    (void)cache_.pool_->release(copy.block_class, copy.to_id);
  }
  for (const cache::BlockMove& move : moves_) {
    (void)cache_.pool_->release(cache_.packed_class(move.group), move.packed_id);
  }
}

// Once a step, for all layers: slots, positions, lengths and block tables as the verbs take them.
Status KvStep::describe() {
  positions_.clear();
  q_starts_.assign(1, 0);
  seq_lens_.clear();
  tables_.max_q_len = 0;
  tables_.max_tokens = 0;
  for (const StepEntry& entry : entries_) {
    const int64_t first = cache_.sequences_[entry.sequence].num_tokens();
    const int64_t end = first + entry.num_tokens;
    for (int64_t position = first; position < end; ++position) positions_.push_back(position);
    q_starts_.push_back(q_starts_.back() + entry.num_tokens);
    seq_lens_.push_back(static_cast<int32_t>(end));
    tables_.max_q_len = std::max(tables_.max_q_len, entry.num_tokens);
    tables_.max_tokens = std::max(tables_.max_tokens, end);
  }
  tables_.positions = positions_;
  tables_.q_starts = q_starts_;
  tables_.seq_lens = seq_lens_;
  tables_.groups.resize(groups_.size());
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) describe_group(g);
  return verbs_->place(tables_);
}

namespace {

// A GPU's tiles begin at multiples of their own, before the window does: what they read there is
// hidden from every query, but a block must be there to be read.
void name_blocks_for_tiles(std::span<int32_t> row) {
  const auto is_there = [](int32_t id) { return id != cache::kNoBlock; };
  const auto known = std::find_if(row.begin(), row.end(), is_there);
  if (known != row.end()) std::replace(row.begin(), row.end(), cache::kNoBlock, *known);
}

}  // namespace

void KvStep::describe_group(int g) {
  GroupStep& group = groups_[g];
  group.slots.resize(positions_.size());
  group.row_stride = 0;
  for (const StepEntry& entry : entries_) {
    group.row_stride =
        std::max(group.row_stride, cache_.sequences_[entry.sequence].table(g).size());
  }
  group.block_ids.assign(group.row_stride * entries_.size(), cache::kNoBlock);
  group.wide_head.clear();
  group.wide_tail.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const cache::Sequence& sequence = cache_.sequences_[entries_[i].sequence];
    const std::span<int64_t> slots(group.slots.data() + q_starts_[i], entries_[i].num_tokens);
    sequence.slots(g, sequence.num_tokens(), slots);
    const cache::BlockTable& table = sequence.table(g);
    const std::span row(group.block_ids.data() + i * group.row_stride, group.row_stride);
    std::copy_n(table.data(), table.size(), row.begin());
    if (cache_.config_.cuda) name_blocks_for_tiles(row.first(table.size()));
    group.wide_head.push_back(static_cast<int32_t>(sequence.wide_head(g)));
    group.wide_tail.push_back(static_cast<int32_t>(sequence.wide_tail(g)));
  }
  tables_.groups[g] = {group.slots, group.block_ids, group.wide_head, group.wide_tail,
                       group.row_stride};
}

// ---- a layer

Status KvStep::append(int layer, FloatRows k, FloatRows v) {
  const KvCacheConfig& config = cache_.config_;
  if (layer < 0 || layer >= config.geometry.num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer,
                            config.geometry.num_layers - 1);
  }
  if (!is_open_) return invalid_argument("no step is open; call begin_step first");
  const LayerStore& store = *cache_.layers_[layer];
  ops::AppendArgs append;
  append.cache = cache_.has_wide_ends() ? store.wide() : store.packed();
  append.transform = store.transform();
  append.k = k;
  append.v = v;
  append.slot_mapping = tables_.groups[cache_.group_of_layer_[layer]].slots;
  append.positions = tables_.positions;
  return verbs_->append(append);
}

Status KvStep::append_and_attend(int layer, const AttentionParams& params, FloatRows q, FloatRows k,
                                 FloatRows v, MutableFloatRows out) {
  KVX_RETURN_IF_ERROR(append(layer, k, v));
  const LayerStore& store = *cache_.layers_[layer];
  const int g = cache_.group_of_layer_[layer];
  const GroupTables& group = tables_.groups[g];
  ops::AttendArgs attend;
  attend.packed = store.packed();
  if (cache_.has_wide_ends()) {
    attend.wide = store.wide();
    attend.wide_head_blocks = group.wide_head.data();
    attend.wide_tail_block = group.wide_tail.data();
  }
  attend.transform = store.transform();
  attend.num_sequences = static_cast<int>(entries_.size());
  attend.block_table = {group.block_ids.data(), group.row_stride};
  attend.max_blocks_per_sequence = group.row_stride;
  attend.seq_lens = tables_.seq_lens.data();
  attend.q_starts = tables_.q_starts.data();
  attend.num_q_heads = params.num_q_heads;
  attend.q = q;
  attend.out = out;
  attend.softmax_scale = params.softmax_scale;
  attend.softcap = params.softcap;
  attend.window = cache_.groups_[g].window;
  attend.window_sinks = cache_.groups_[g].sinks;
  attend.sinks = params.sinks;
  attend.precision = params.precision;
  return verbs_->attend(attend, tables_);
}

// ---- end

Status KvStep::end() {
  if (!is_open_) return invalid_argument("no step is open; call begin_step first");
  const std::lock_guard lock(cache_.books_);
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
  if (!is_open_) return invalid_argument("no step is open; call begin_step first");
  if (kept_tokens.size() != entries_.size()) {
    return invalid_argument("kept_tokens has {} counts; the step has {} entries",
                            kept_tokens.size(), entries_.size());
  }
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
  const std::lock_guard lock(cache_.books_);
  advance();
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    cache::Sequence& sequence = cache_.sequences_[entries_[i].sequence];
    const int64_t kept = sequence.num_tokens() - entries_[i].num_tokens + kept_tokens[i];
    KVX_RETURN_IF_ERROR(sequence.truncate(*cache_.pool_, kept));
  }
  return {};
}

// The blocks that the step has reserved go back, so that a fork does not share them.
Status KvStep::cancel() {
  if (!is_open_) return invalid_argument("no step is open; call begin_step first");
  is_open_ = false;
  const std::lock_guard lock(cache_.books_);
  leave_sequences();
  for (const StepEntry& entry : entries_) {
    cache::Sequence& sequence = cache_.sequences_[entry.sequence];
    KVX_RETURN_IF_ERROR(sequence.truncate(*cache_.pool_, sequence.num_tokens()));
  }
  return {};
}

}  // namespace kvx::kv
