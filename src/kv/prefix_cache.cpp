// PrefixCache: logs beside sequences. Only a log's last node is pinned: that keeps its ancestors.
#include "kv/prefix_cache.hpp"

#include <algorithm>

namespace kvx::kv {

using cache::BlockKind;
using cache::kNoBlock;
using cache::kNoNode;

Result<std::unique_ptr<PrefixCache>> PrefixCache::create(cache::BlockPool& pool,
                                                         const cache::SequenceShape& shape,
                                                         const PrefixCacheConfig& config,
                                                         std::string fingerprint,
                                                         int max_sequences) {
  KVX_ASSIGN_OR_RETURN(cache::PrefixIndex index,
                       cache::PrefixIndex::create(pool, shape, fingerprint, config.hash));
  return std::unique_ptr<PrefixCache>(
      new PrefixCache(pool, shape, std::move(index), std::move(fingerprint), max_sequences));
}

PrefixCache::PrefixCache(cache::BlockPool& pool, const cache::SequenceShape& shape,
                         cache::PrefixIndex index, std::string fingerprint, int max_sequences)
    : pool_(&pool),
      shape_(shape),
      index_(std::move(index)),
      fingerprint_(std::move(fingerprint)),
      logs_(static_cast<size_t>(max_sequences)),
      ids_(shape.groups.size()) {
  const auto max_blocks =
      static_cast<size_t>(cache::blocks_for(shape.max_tokens, shape.block_size));
  for (Log& log : logs_) {
    log.tokens.reserve(static_cast<size_t>(shape.max_tokens));
    log.nodes.reserve(max_blocks);
  }
  for (std::vector<int32_t>& ids : ids_) ids.reserve(max_blocks);
  pool_->set_eviction_listener(this);
}

PrefixCache::~PrefixCache() {
  pool_->set_eviction_listener(nullptr);
}

// ---- a sequence's life

Status PrefixCache::begin(int sequence, const cache::PrefixKeys& keys, std::string_view session) {
  Log& log = logs_[sequence];
  KVX_ASSIGN_OR_RETURN(log.scope, index_.pin_scope(keys));
  if (tiers_) {
    const Status begun = tiers_->begin(log.way, keys, session);
    if (!begun.ok()) {
      index_.unpin(log.scope);
      return begun;
    }
  }
  log.keys = keys;
  log.session = index_.sessions().join(session);
  log.is_in_use = true;
  return {};
}

void PrefixCache::end(int sequence) {
  Log& log = logs_[sequence];
  index_.unpin(tip(log));
  if (tiers_) tiers_->end(log.way);
  index_.sessions().leave(log.session);
  log.session = cache::kNoSession;
  log.ranges.clear();
  log.tokens.clear();
  log.nodes.clear();
  log.is_in_use = false;
}

void PrefixCache::fork(int from, int to) {
  const Log& source = logs_[from];
  Log& log = logs_[to];
  log.is_in_use = true;
  log.keys = source.keys;
  log.scope = source.scope;
  log.tokens.assign(source.tokens.begin(), source.tokens.end());
  log.nodes.assign(source.nodes.begin(), source.nodes.end());
  log.session = source.session;
  log.ranges = source.ranges;
  index_.sessions().join(log.session);
  index_.pin(tip(log));
  if (tiers_) tiers_->fork(source.way, log.way);
}

void PrefixCache::truncate(int sequence, int64_t num_tokens) {
  Log& log = logs_[sequence];
  if (num_tokens >= static_cast<int64_t>(log.tokens.size())) return;
  log.tokens.resize(static_cast<size_t>(num_tokens));
  const int32_t old_tip = tip(log);
  const auto num_full = static_cast<size_t>(num_tokens / shape_.block_size);
  if (log.nodes.size() > num_full) log.nodes.resize(num_full);
  index_.pin(tip(log));
  index_.unpin(old_tip);
  if (tiers_) tiers_->truncate(log.way, static_cast<int64_t>(num_full));
}

// ---- the tiers

// A full-precision block behind the head is packed sooner or later: only those of a sequence that
// ends go as they are.
void PrefixCache::store_block(const Log& log, int64_t block, bool with_tail) {
  for (int group = 0; group < static_cast<int>(shape_.groups.size()); ++group) {
    const cache::FullPrecisionWindow& in_full = shape_.groups[group].full_precision_window;
    for (const BlockKind kind : {BlockKind::kPacked, BlockKind::kFullPrecision}) {
      if (kind == BlockKind::kFullPrecision && !in_full.is_on()) continue;
      if (kind == BlockKind::kFullPrecision && block >= in_full.sink_blocks && !with_tail) continue;
      const int32_t id = index_.block_of(log.nodes[block], group, kind);
      if (id != kNoBlock) tiers_->store(log.way, block, group, kind, id);
    }
  }
}

void PrefixCache::store_tail(int sequence) {
  if (!tiers_) return;
  const Log& log = logs_[sequence];
  int64_t num_recent = 0;
  for (const cache::LayerGroup& group : shape_.groups) {
    num_recent = std::max(num_recent, group.full_precision_window.recent_blocks);
  }
  const auto num_blocks = static_cast<int64_t>(log.nodes.size());
  for (int64_t block = std::max<int64_t>(num_blocks - num_recent, 0); block < num_blocks; ++block) {
    store_block(log, block, true);
  }
}

// ---- finding and being found

bool PrefixCache::is_full_precision(const cache::Sequence& blocks, int group, int64_t block) const {
  return shape_.groups[group].full_precision_window.is_on() &&
         (block < blocks.num_sink_blocks(group) || block >= blocks.first_recent_block(group));
}

Result<int64_t> PrefixCache::adopt(int sequence, cache::Sequence& blocks,
                                   std::span<const int32_t> tokens, int64_t max_blocks,
                                   const cache::ComingBlocks& coming) {
  Log& log = logs_[sequence];
  const cache::PrefixMatch match = index_.match(log.scope, tokens, max_blocks, coming);
  std::vector<cache::GroupPrefix> prefixes;
  for (int group = 0; group < blocks.num_groups(); ++group) {
    const cache::GroupMatch& found = match.groups[group];
    const cache::FullPrecisionWindow& in_full = shape_.groups[group].full_precision_window;
    ids_[group].clear();
    for (int64_t block = 0; block < match.num_blocks(); ++block) {
      const bool full_precision =
          in_full.is_on() && (block < in_full.sink_blocks || block >= found.first_recent_block);
      const BlockKind kind = full_precision ? BlockKind::kFullPrecision : BlockKind::kPacked;
      const int32_t cached = index_.block_of(match.nodes[block], group, kind);
      ids_[group].push_back(cached != kNoBlock ? cached
                                               : coming.find(match.nodes[block], group, kind));
    }
    prefixes.push_back({ids_[group], found.first_block, found.first_recent_block});
  }
  const int64_t num_tokens = match.num_blocks() * shape_.block_size;
  KVX_RETURN_IF_ERROR(blocks.adopt(*pool_, num_tokens, prefixes));
  for (int group = 0; group < blocks.num_groups(); ++group) {  // for policies that count uses
    const cache::LayerGroup& facts = shape_.groups[group];
    for (int64_t block = 0; block < match.num_blocks(); ++block) {
      if (block < prefixes[group].first_block && block >= facts.window_sink_blocks) continue;
      KVX_RETURN_IF_ERROR(pool_->touch(
          is_full_precision(blocks, group, block) ? facts.full_precision_class : facts.packed_class,
          ids_[group][block]));
    }
  }
  log.tokens.assign(tokens.begin(), tokens.begin() + num_tokens);
  const int32_t old_tip = tip(log);
  log.nodes.assign(match.nodes.begin(), match.nodes.end());
  index_.share(match.nodes, log.session);
  index_.pin(tip(log));
  index_.unpin(old_tip);
  if (tiers_) tiers_->follow(log.way, log.tokens, match.num_blocks());
  store_blocks(sequence);
  return num_tokens;
}

void PrefixCache::store_blocks(int sequence) {
  if (!tiers_) return;
  const Log& log = logs_[sequence];
  for (int64_t block = 0; block < std::ssize(log.nodes); ++block) store_block(log, block, false);
}

Status PrefixCache::record(int sequence, const cache::Sequence& blocks,
                           std::span<const int32_t> tokens) {
  Log& log = logs_[sequence];
  const auto num_recorded = static_cast<int64_t>(log.tokens.size());
  if (static_cast<int64_t>(tokens.size()) > blocks.num_tokens() - num_recorded) {
    return out_of_range("{} tokens are recorded after {}; the sequence has {}", tokens.size(),
                        num_recorded, blocks.num_tokens());
  }
  log.tokens.insert(log.tokens.end(), tokens.begin(), tokens.end());
  if (const Status agrees = check_shared_blocks(log, blocks); !agrees.ok()) {
    log.tokens.resize(static_cast<size_t>(num_recorded));
    return agrees;
  }
  const auto block_size = static_cast<size_t>(shape_.block_size);
  const size_t num_full = log.tokens.size() / block_size;
  while (log.nodes.size() < num_full) {
    const auto block = static_cast<int64_t>(log.nodes.size());
    const int32_t parent = tip(log);
    const std::span<const int32_t> all(log.tokens);
    const int32_t node =
        index_.insert(parent, all.subspan(log.nodes.size() * block_size, block_size), log.session);
    if (node == kNoNode) return {};  // no room in the index: not an error, and counted there
    index_.pin(node);
    log.nodes.push_back(node);
    const Status attached = attach_block(node, blocks, block);
    index_.unpin(parent);
    KVX_RETURN_IF_ERROR(attached);
    retain_block(log, block);
    if (!tiers_) continue;
    tiers_->follow(log.way, log.tokens, block + 1);
    store_block(log, block, false);
  }
  return {};
}

// Full blocks that are a node's already, by way of a fork, must hold what was recorded there.
Status PrefixCache::check_shared_blocks(const Log& log, const cache::Sequence& blocks) const {
  const auto num_known = std::ssize(log.nodes);
  const int64_t num_full = std::ssize(log.tokens) / shape_.block_size;
  int64_t first = num_known;  // all before it are known to be the sequence's, and end with `last`
  int32_t last = tip(log);
  for (int64_t block = num_known; block < num_full; ++block) {
    const int32_t node = node_of_block(blocks, block);
    if (node == kNoNode) continue;
    if (node_before(node, first, block + 1, log.tokens) != last) {
      return invalid_argument(
          "the tokens up to block {} are not those that were recorded for it by way of a fork; "
          "expected the same tokens in sequences that share a block",
          block);
    }
    first = block + 1;
    last = node;
  }
  return {};
}

// The node before block `first` in the chain that ends with `node`, block end - 1, if its nodes
// from there on hold these tokens; else kNoNode.
int32_t PrefixCache::node_before(int32_t node, int64_t first, int64_t end,
                                 std::span<const int32_t> tokens) const {
  const auto block_size = static_cast<size_t>(shape_.block_size);
  for (int64_t block = end - 1; block >= first; --block) {
    const auto held = tokens.subspan(static_cast<size_t>(block) * block_size, block_size);
    if (index_.is_scope(node) || !std::ranges::equal(index_.tokens(node), held)) return kNoNode;
    node = index_.parent(node);
  }
  return node;
}

int32_t PrefixCache::node_of_block(const cache::Sequence& blocks, int64_t block) const {
  for (int group = 0; group < blocks.num_groups(); ++group) {
    const int32_t id = blocks.table(group)[block];
    if (id == kNoBlock) continue;
    const BlockKind kind =
        is_full_precision(blocks, group, block) ? BlockKind::kFullPrecision : BlockKind::kPacked;
    const int32_t node = index_.node_of(group, kind, id);
    if (node != kNoNode) return node;
  }
  return kNoNode;
}

Status PrefixCache::attach_block(int32_t node, const cache::Sequence& blocks, int64_t block) {
  for (int group = 0; group < blocks.num_groups(); ++group) {
    const int32_t id = blocks.table(group)[block];
    if (id == kNoBlock) continue;
    const BlockKind kind =
        is_full_precision(blocks, group, block) ? BlockKind::kFullPrecision : BlockKind::kPacked;
    KVX_RETURN_IF_ERROR(index_.attach(node, group, kind, id));
  }
  return {};
}

Status PrefixCache::record_moves(int sequence, std::span<const cache::BlockMove> moves) {
  const Log& log = logs_[sequence];
  for (const cache::BlockMove& move : moves) {
    if (move.block >= static_cast<int64_t>(log.nodes.size())) continue;
    KVX_RETURN_IF_ERROR(
        index_.attach(log.nodes[move.block], move.group, BlockKind::kPacked, move.packed_id));
    retain_block(log, move.block);
    if (tiers_) store_block(log, move.block, false);
  }
  return {};
}

// ---- how long blocks stay

Status PrefixCache::retain(int sequence, std::span<const RetentionRange> ranges) {
  Log& log = logs_[sequence];
  const int64_t block_size = shape_.block_size;
  for (const RetentionRange& range : ranges) {
    Range& added = log.ranges.emplace_back();
    added.first_block = range.is_pinned ? 0 : range.first_token / block_size;
    added.end_block = range.num_tokens == 0
                          ? cache::blocks_for(shape_.max_tokens, block_size)
                          : cache::blocks_for(range.first_token + range.num_tokens, block_size);
    added.retention = {range.priority, range.is_pinned, cache::kForever};
    if (range.duration_ms > 0) added.retention.until_ms = pool_->now_ms() + range.duration_ms;
  }
  Status first_failure;
  for (size_t block = 0; block < log.nodes.size(); ++block) {
    for (const Range& range : log.ranges) {
      const auto number = static_cast<int64_t>(block);
      if (number < range.first_block || number >= range.end_block) continue;
      const Status set = index_.set_retention(log.nodes[block], range.retention);
      if (!set.ok() && first_failure.ok()) first_failure = set;
    }
  }
  return first_failure;
}

// A block that has come. A pin for which there is no room any more is the highest priority instead.
void PrefixCache::retain_block(const Log& log, int64_t block) {
  for (auto range = log.ranges.rbegin(); range != log.ranges.rend(); ++range) {
    if (block < range->first_block || block >= range->end_block) continue;
    if (!index_.set_retention(log.nodes[block], range->retention).ok()) {
      (void)index_.set_retention(log.nodes[block],
                                 {cache::kMostPriority, false, range->retention.until_ms});
    }
    return;
  }
}

Status PrefixCache::check_session_is_idle(std::string_view session) const {
  const cache::SessionNodes& sessions = index_.sessions();
  const int32_t number = sessions.find(session);
  if (number == cache::kNoSession || sessions.num_sequences(number) == 0) return {};
  return invalid_argument("session '{}' has {} sequences in use; free them first", session,
                          sessions.num_sequences(number));
}

Result<int64_t> PrefixCache::end_session(std::string_view session) {
  KVX_RETURN_IF_ERROR(check_session_is_idle(session));
  for (int i = 0; tiers_ && i < tiers_->num_tiers(); ++i) {
    tiers_->tier(i).nodes().end_session(session);
  }
  return index_.end_session(session);
}

Result<int64_t> PrefixCache::delete_session(std::string_view session) {
  KVX_RETURN_IF_ERROR(check_session_is_idle(session));
  int64_t most = 0;  // a tier behind the pool may have blocks that the pool has not
  for (int i = 0; tiers_ && i < tiers_->num_tiers(); ++i) {
    KVX_ASSIGN_OR_RETURN(const int64_t count, tiers_->tier(i).nodes().delete_session(session));
    most = std::max(most, count);
  }
  KVX_ASSIGN_OR_RETURN(const int64_t count, index_.delete_session(session));
  return std::max(most, count);
}

}  // namespace kvx::kv
