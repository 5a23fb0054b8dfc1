// PrefixIndex: a hash table of nodes, chained in arrays that never grow.
#include "cache/prefix/prefix_index.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "cache/prefix/longest_match.hpp"

namespace kvx::cache {
namespace {

// Part of the hash, for buckets and for the pool's policies.
uint32_t key_of(const ContentHash& hash) {
  uint32_t key;
  std::memcpy(&key, hash.bytes.data(), sizeof key);
  return key;
}

constexpr std::array<std::string_view, 4> kTierNames = {"pool", "host", "disk", "store"};

}  // namespace

std::string_view name_of(Tier tier) {
  return kTierNames[static_cast<size_t>(tier)];
}

// ---- creation

Result<PrefixIndex> PrefixIndex::create(BlockPool& pool, const SequenceShape& shape,
                                        std::string fingerprint, HashAlgorithm algorithm) {
  KVX_RETURN_IF_ERROR(Sequence::create(shape));
  return PrefixIndex(pool, shape, std::move(fingerprint), algorithm);
}

PrefixIndex::PrefixIndex(BlockPool& pool, const SequenceShape& shape, std::string fingerprint,
                         HashAlgorithm algorithm)
    : pool_(&pool),
      shape_(shape),
      fingerprint_(std::move(fingerprint)),
      algorithm_(algorithm),
      sessions_(0),
      matched_groups_(shape.groups.size()) {
  // Scopes have no block, and nodes without one stay while they have children: some room for both.
  int64_t num_nodes = 64;
  for (int c = 0; c < pool.num_classes(); ++c) {
    num_nodes += pool.num_blocks(c);
    node_of_block_.emplace_back(static_cast<size_t>(pool.num_blocks(c)), kNoNode);
  }
  num_nodes = std::min<int64_t>(num_nodes, std::numeric_limits<int32_t>::max());
  const bool has_full_precision =
      std::any_of(shape.groups.begin(), shape.groups.end(),
                  [](const LayerGroup& g) { return g.full_precision_window.is_on(); });
  slots_per_node_ = shape.groups.size() * (has_full_precision ? 2 : 1);
  nodes_.resize(static_cast<size_t>(num_nodes));
  sessions_ = SessionNodes(static_cast<int32_t>(num_nodes));
  tokens_.resize(nodes_.size() * static_cast<size_t>(shape.block_size));
  blocks_.assign(nodes_.size() * slots_per_node_, kNoBlock);
  buckets_.assign(std::bit_floor(nodes_.size()), kNoNode);
  for (size_t i = 0; i + 1 < nodes_.size(); ++i) nodes_[i].next = static_cast<int32_t>(i + 1);
  first_unused_ = 0;
  const auto max_blocks = static_cast<size_t>(blocks_for(shape.max_tokens, shape.block_size));
  matched_.reserve(max_blocks);
  fits_.reserve(max_blocks + 1);
}

int64_t PrefixIndex::metadata_bytes() const {
  size_t bytes =
      nodes_.size() * sizeof(Node) + (blocks_.size() + buckets_.size()) * sizeof(int32_t);
  for (const std::vector<int32_t>& blocks : node_of_block_)
    bytes += blocks.size() * sizeof(int32_t);
  return static_cast<int64_t>(bytes) + sessions_.metadata_bytes();
}

// ---- nodes

size_t PrefixIndex::bucket_of(const ContentHash& hash) const {
  return key_of(hash) & (buckets_.size() - 1);
}

int32_t PrefixIndex::take_node(const ContentHash& hash, int32_t parent) {
  if (first_unused_ == kNoNode) {
    ++counters_.num_refused;
    return kNoNode;
  }
  const int32_t node = first_unused_;
  first_unused_ = nodes_[node].next;
  int32_t& bucket = buckets_[bucket_of(hash)];
  const int32_t scope = parent == kNoNode ? node : nodes_[parent].scope;
  nodes_[node] = {hash, parent, scope, 0, bucket, ++num_births_};
  bucket = node;
  if (parent != kNoNode) add_dependent(parent);
  ++counters_.num_nodes;
  return node;
}

Result<int32_t> PrefixIndex::pin_scope(const PrefixKeys& keys) {
  if (!keys.tenant.empty() && algorithm_ != HashAlgorithm::kSha256) {
    return unsupported("tenant is '{}' and the hash is {}; expected sha256 where tenants share",
                       keys.tenant, name_of(algorithm_));
  }
  std::string scope = scope_of(fingerprint_, keys);
  auto found = scopes_.find(scope);
  if (found == scopes_.end()) {
    const int32_t node = take_node(hash_scope(algorithm_, scope), kNoNode);
    if (node == kNoNode) {
      return out_of_range("no room for a new scope beside {} nodes", counters_.num_nodes);
    }
    scope_keys_.emplace(node, keys);
    found = scopes_.emplace(std::move(scope), node).first;
  }
  pin(found->second);
  return found->second;
}

bool PrefixIndex::is_child(int32_t node, int32_t parent, std::span<const int32_t> tokens) const {
  return nodes_[node].parent == parent &&
         std::equal(tokens.begin(), tokens.end(), this->tokens(node).begin());
}

int32_t PrefixIndex::find_child(int32_t parent, std::span<const int32_t> tokens) const {
  // Nodes of a chain were mostly taken one after the other: then nothing need be hashed.
  const int32_t neighbour = parent + 1;
  if (neighbour < static_cast<int32_t>(nodes_.size()) && is_child(neighbour, parent, tokens)) {
    return neighbour;
  }
  const ContentHash hash = hash_block(algorithm_, nodes_[parent].hash, tokens);
  for (int32_t node = buckets_[bucket_of(hash)]; node != kNoNode; node = nodes_[node].next) {
    if (nodes_[node].hash == hash && is_child(node, parent, tokens)) return node;
  }
  return kNoNode;
}

int32_t PrefixIndex::insert(int32_t parent, std::span<const int32_t> tokens, int32_t session) {
  const int32_t found = find_child(parent, tokens);
  if (found != kNoNode) {
    share({&found, 1}, session);
    return found;
  }
  const int32_t node = make_node(parent, tokens);
  if (node != kNoNode) sessions_.add(node, session);
  return node;
}

int32_t PrefixIndex::insert_copy(int32_t parent, const PrefixIndex& other, int32_t node) {
  const int32_t found = find_child(parent, other.tokens(node));
  if (found != kNoNode) return found;
  const int32_t made = make_node(parent, other.tokens(node));
  const std::string_view owner = other.sessions_.owner(node);
  if (made == kNoNode || owner.empty()) return made;
  const int32_t session = sessions_.join(owner);
  sessions_.add(made, session);
  sessions_.leave(session);
  return made;
}

int32_t PrefixIndex::insert(int32_t parent, std::span<const int32_t> tokens) {
  const int32_t found = find_child(parent, tokens);
  return found != kNoNode ? found : make_node(parent, tokens);
}

int32_t PrefixIndex::make_node(int32_t parent, std::span<const int32_t> tokens) {
  const int32_t node = take_node(hash_block(algorithm_, nodes_[parent].hash, tokens), parent);
  if (node != kNoNode) {
    std::copy(tokens.begin(), tokens.end(), tokens_.begin() + node * shape_.block_size);
  }
  return node;
}

void PrefixIndex::unpin(int32_t node) {
  drop_dependent(node);
  remove_unused(node);
}

bool PrefixIndex::has_blocks(int32_t node) const {
  const auto first = blocks_.begin() + static_cast<int64_t>(slot_of(node, 0, BlockKind::kPacked));
  return std::any_of(first, first + static_cast<int64_t>(slots_per_node_),
                     [](int32_t id) { return id != kNoBlock; });
}

// A node without blocks, children and pins goes, and then perhaps its parent.
void PrefixIndex::remove_unused(int32_t node) {
  while (node != kNoNode && nodes_[node].num_dependents == 0 && !has_blocks(node)) {
    const int32_t parent = nodes_[node].parent;
    int32_t* link = &buckets_[bucket_of(nodes_[node].hash)];
    while (*link != node) link = &nodes_[*link].next;
    *link = nodes_[node].next;
    if (is_scope(node)) {
      const auto keys = scope_keys_.find(node);
      scopes_.erase(scope_of(fingerprint_, keys->second));
      scope_keys_.erase(keys);
    } else {
      drop_dependent(parent);
    }
    sessions_.drop(node);
    nodes_[node] = {};
    nodes_[node].next = first_unused_;
    first_unused_ = node;
    --counters_.num_nodes;
    node = parent;
  }
}

void PrefixIndex::for_each_node(const std::function<void(int32_t)>& visit) const {
  // Depth by depth would need lists of children; a child's chain is short, so walk up instead.
  std::vector<uint8_t> is_visited(nodes_.size(), 0);
  std::vector<int32_t> chain;
  for (int32_t bucket : buckets_) {
    for (int32_t node = bucket; node != kNoNode; node = nodes_[node].next) {
      for (int32_t up = node; !is_scope(up) && !is_visited[up]; up = nodes_[up].parent) {
        chain.push_back(up);
        is_visited[up] = 1;
      }
      for (; !chain.empty(); chain.pop_back()) visit(chain.back());
    }
  }
}

// ---- what must not go before its children

void PrefixIndex::add_dependent(int32_t node) {
  if (nodes_[node].num_dependents++ == 0) hold_blocks(node);
}

void PrefixIndex::drop_dependent(int32_t node) {
  if (--nodes_[node].num_dependents == 0) unhold_blocks(node);
}

// A longer match reads all packed blocks before it and the head's full-precision ones; of a window
// group it reads the last ones only, and its sinks.
bool PrefixIndex::is_needed_by_children(int32_t node, int group, BlockKind kind) const {
  const LayerGroup& facts = shape_.groups[group];
  if (facts.window > 0) {
    const BlockKind kind_of_sinks =
        facts.full_precision_window.is_on() ? BlockKind::kFullPrecision : BlockKind::kPacked;
    return kind == kind_of_sinks && is_among_first(node, facts.window_sink_blocks);
  }
  return kind == BlockKind::kPacked ||
         is_among_first(node, facts.full_precision_window.sink_blocks);
}

bool PrefixIndex::is_among_first(int32_t node, int64_t num_blocks) const {
  for (; num_blocks > 0; --num_blocks) {
    node = nodes_[node].parent;
    if (is_scope(node)) return true;
  }
  return false;
}

void PrefixIndex::hold_blocks(int32_t node) {
  for_each_block(node, [this, node](int group, BlockKind kind, int32_t id) {
    if (is_needed_by_children(node, group, kind)) pool_->hold(class_of(group, kind), id);
  });
}

void PrefixIndex::unhold_blocks(int32_t node) {
  for_each_block(node, [this](int group, BlockKind kind, int32_t id) {
    pool_->unhold(class_of(group, kind), id);
  });
}

// ---- blocks

Status PrefixIndex::attach(int32_t node, int group, BlockKind kind, int32_t id) {
  const size_t slot = slot_of(node, group, kind);
  if (blocks_[slot] != kNoBlock) return {};
  const int block_class = class_of(group, kind);
  if (node_of_block_[block_class][id] != kNoNode) {
    return internal_error("block {} of {} is another node's", id, pool_->name(block_class));
  }
  KVX_RETURN_IF_ERROR(pool_->keep(block_class, id, key_of(nodes_[node].hash)));
  const bool is_new = !has_blocks(node);
  blocks_[slot] = id;
  node_of_block_[block_class][id] = node;
  if (nodes_[node].num_dependents > 0 && is_needed_by_children(node, group, kind)) {
    pool_->hold(block_class, id);
  }
  if (is_new) {
    ++counters_.num_stored;
    tell(PrefixEvent::Kind::kStored, node);
  }
  return {};
}

void PrefixIndex::on_evict(int block_class, int32_t id) {
  const int32_t node = node_of_block_[block_class][id];
  if (node == kNoNode) return;
  node_of_block_[block_class][id] = kNoNode;
  const size_t first = slot_of(node, 0, BlockKind::kPacked);
  for (size_t i = 0; i < slots_per_node_; ++i) {
    const auto kind = static_cast<BlockKind>(i / num_groups());
    const int group = static_cast<int>(i % num_groups());
    if (blocks_[first + i] != id || class_of(group, kind) != block_class) continue;
    blocks_[first + i] = kNoBlock;
    break;
  }
  if (has_blocks(node)) return;
  ++counters_.num_removed;
  tell(PrefixEvent::Kind::kRemoved, node);
  remove_unused(node);
}

Status PrefixIndex::forget_block(int block_class, int32_t id) {
  on_evict(block_class, id);
  return pool_->discard(block_class, id);
}

Status PrefixIndex::clear() {
  for (int block_class = 0; block_class < pool_->num_classes(); ++block_class) {
    std::vector<int32_t>& nodes = node_of_block_[block_class];
    for (int32_t id = 0; id < static_cast<int32_t>(nodes.size()); ++id) {
      if (nodes[id] != kNoNode) KVX_RETURN_IF_ERROR(forget_block(block_class, id));
    }
  }
  if (listener_) listener_({PrefixEvent::Kind::kAllCleared, {}, {}, {}});
  return {};
}

PrefixEvent PrefixIndex::event_of(PrefixEvent::Kind kind, int32_t node) const {
  return {kind,
          hash(node),
          hash(parent(node)),
          tokens(node),
          Tier::kFirst,
          is_scope(parent(node)),
          &scope_keys_.at(scope(node))};
}

void PrefixIndex::tell(PrefixEvent::Kind kind, int32_t node) const {
  if (listener_) listener_(event_of(kind, node));
}

void PrefixIndex::for_each_stored(const std::function<void(const PrefixEvent&)>& visit) const {
  for_each_node([&](int32_t node) {
    if (has_blocks(node)) visit(event_of(PrefixEvent::Kind::kStored, node));
  });
}

// ---- who uses nodes, and how long they stay

void PrefixIndex::share(std::span<const int32_t> nodes, int32_t session) {
  for (const int32_t node : nodes) {
    if (!sessions_.share(node, session) || !pool_->keeps_shared_longer()) continue;
    (void)set_retention(node, {kSharedPriority});  // refuses pins alone
  }
}

Status PrefixIndex::set_retention(int32_t node, const Retention& retention) {
  Status first_failure;
  for_each_block(node, [&](int group, BlockKind kind, int32_t id) {
    const Status set = pool_->set_retention(class_of(group, kind), id, retention);
    if (!set.ok() && first_failure.ok()) first_failure = set;
  });
  return first_failure;
}

int64_t PrefixIndex::end_session(std::string_view session) {
  const std::vector<int32_t> nodes = sessions_.nodes_of(sessions_.find(session));
  for (const int32_t node : nodes) (void)set_retention(node, {0});  // refuses pins alone
  return static_cast<int64_t>(nodes.size());
}

Result<int64_t> PrefixIndex::delete_session(std::string_view session) {
  const std::vector<int32_t> nodes = sessions_.nodes_of(sessions_.find(session));
  for (const int32_t node : nodes) {  // the last made first: children before their parents
    std::vector<std::pair<int, int32_t>> blocks;  // class and id
    for_each_block(node, [&](int group, BlockKind kind, int32_t id) {
      blocks.emplace_back(class_of(group, kind), id);
    });
    if (blocks.empty()) sessions_.drop(node);
    for (const auto& [block_class, id] : blocks) {
      pool_->clear(block_class, id);
      KVX_RETURN_IF_ERROR(forget_block(block_class, id));
    }
  }
  return static_cast<int64_t>(nodes.size());
}

// ---- matching

PrefixMatch PrefixIndex::match(int32_t scope, std::span<const int32_t> tokens, int64_t max_blocks,
                               const ComingBlocks& coming) {
  const auto block_size = static_cast<size_t>(shape_.block_size);
  const auto num_wanted = static_cast<size_t>(
      std::min<int64_t>(static_cast<int64_t>(tokens.size() / block_size), max_blocks));
  matched_.clear();
  int32_t node = scope;
  while (matched_.size() < num_wanted) {
    node = find_child(node, tokens.subspan(matched_.size() * block_size, block_size));
    if (node == kNoNode) break;
    matched_.push_back(node);
  }
  const auto has = [&](int64_t block, int group, BlockKind kind) {
    return block_of(matched_[block], group, kind) != kNoBlock ||
           coming.find(matched_[block], group, kind) != kNoBlock;
  };
  const auto num_found = static_cast<int64_t>(matched_.size());
  matched_.resize(
      static_cast<size_t>(longest_match(shape_, num_found, has, fits_, matched_groups_)));
  count_match(static_cast<int64_t>(matched_.size()),
              static_cast<int64_t>(num_wanted - matched_.size()));
  return {matched_, matched_groups_};
}

}  // namespace kvx::cache
