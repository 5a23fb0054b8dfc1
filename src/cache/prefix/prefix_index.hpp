// PrefixIndex: finds cached blocks by what they hold. A node stands for a full block of tokens
// after its parent's; it names, for every layer group, the packed and the full-precision block that
// hold it.
//
//   scope ── node: tokens 0..63 ──┬── node: tokens 64..127 ── ...
//                                 └── node: other tokens 64..127
//
// A match walks down from the scope, one block of tokens at a time, and compares parents and token
// ids themselves: hashes only find, so that no collision and no other scope can serve a block.
//
// The index counts no users: blocks are the pool's. It keeps blocks in the pool (BlockPool::keep),
// holds those that no longer match can do without (BlockPool::hold), and hears when they are
// evicted. One thread at a time; nothing is allocated after create() but
// the text of a new scope.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/pool/block_pool.hpp"
#include "cache/prefix/content_hash.hpp"
#include "cache/prefix/match_parts.hpp"
#include "cache/prefix/session_nodes.hpp"
#include "cache/sequence.hpp"

namespace kvx::cache {

inline constexpr int32_t kNoNode = -1;

struct PrefixMatch {
  std::span<const int32_t> nodes;  // one a block; valid until the next match
  std::span<const GroupMatch> groups;

  int64_t num_blocks() const { return static_cast<int64_t>(nodes.size()); }
};

enum class Tier : uint8_t { kFirst, kHost, kDisk, kStore };

// "pool", "host", "disk", "store".
std::string_view name_of(Tier tier);

struct PrefixEvent {
  enum class Kind : uint8_t { kStored, kRemoved, kAllCleared };
  Kind kind;
  ContentHash hash;
  ContentHash parent;  // of a block without a parent: its scope's hash
  std::span<const int32_t> tokens;
  Tier tier = Tier::kFirst;          // where it came or went
  bool is_first = false;             // it has no parent but its scope
  const PrefixKeys* keys = nullptr;  // its scope's; null when all is cleared
};

struct PrefixCounters {
  int64_t num_queries = 0;      // match() calls
  int64_t num_hit_blocks = 0;   // blocks that matches returned
  int64_t num_miss_blocks = 0;  // full blocks asked for and not returned
  int64_t num_stored = 0;       // nodes made
  int64_t num_removed = 0;      // nodes gone
  int64_t num_refused = 0;      // nodes that found no room
  int64_t num_nodes = 0;        // now, scopes included
};

class PrefixIndex {
 public:
  // pool outlives the index and stays where it is; the caller passes on its evictions to
  // on_evict(). fingerprint: all that decides a block's bytes beside its tokens (geometry, formats,
  // transforms). INVALID_ARGUMENT: a shape that Sequence::create refuses.
  static Result<PrefixIndex> create(BlockPool& pool, const SequenceShape& shape,
                                    std::string fingerprint, HashAlgorithm algorithm);

  // The node that a scope's chains begin at, made when it is new and pinned for the caller.
  // UNSUPPORTED: a tenant without kSha256; OUT_OF_RANGE: no room for a new scope.
  Result<int32_t> pin_scope(const PrefixKeys& keys);

  // The longest run of cached blocks that begins the tokens: at most max_blocks, and as many as
  // every layer group can serve. Locks nothing: retain the blocks before anything is allocated.
  // Requires: scope is pinned.
  PrefixMatch match(int32_t scope, std::span<const int32_t> tokens, int64_t max_blocks,
                    const ComingBlocks& coming = {});

  // The node of a block of tokens after `parent`, if there is one; else kNoNode. Requires:
  // tokens.size() == block_size.
  int32_t find_child(int32_t parent, std::span<const int32_t> tokens) const;
  // A match that was made elsewhere counts as one of this index.
  void count_match(int64_t num_hit_blocks, int64_t num_miss_blocks) {
    ++counters_.num_queries;
    counters_.num_hit_blocks += num_hit_blocks;
    counters_.num_miss_blocks += num_miss_blocks;
  }

  // The node of a block of tokens after `parent`, made when it is new; kNoNode when there is no
  // room. It goes when it has no block, no child and no pin. Requires: parent is pinned or has a
  // pinned descendant; tokens.size() == block_size.
  int32_t insert(int32_t parent, std::span<const int32_t> tokens);
  // The same for a sequence of this session, sessions()' number: a new node is the session's, one
  // that is there is shared with it.
  int32_t insert(int32_t parent, std::span<const int32_t> tokens, int32_t session);
  // The same for another index's node of these tokens: a new node is of the same session.
  int32_t insert_copy(int32_t parent, const PrefixIndex& other, int32_t node);

  // The node's block of this group and kind is `id`, from now on kept by the pool; nothing when it
  // already has one. Requires: id is active, full, no other node's, and never written again.
  Status attach(int32_t node, int group, BlockKind kind, int32_t id);

  // A pinned node, and so all its ancestors, stay.
  void pin(int32_t node) { add_dependent(node); }
  void unpin(int32_t node);

  // ---- who uses nodes, and how long they stay

  SessionNodes& sessions() { return sessions_; }
  const SessionNodes& sessions() const { return sessions_; }
  // A sequence of this session begins with these nodes.
  void share(std::span<const int32_t> nodes, int32_t session);
  // Of all blocks that the node has now. OUT_OF_RANGE: too many are pinned (BlockPool); the others
  // of the node have it all the same.
  Status set_retention(int32_t node, const Retention& retention);
  // The session's own blocks go before all others when room is wanted; how many nodes.
  int64_t end_session(std::string_view session);
  // They are forgotten at once and their bytes overwritten with zeros; how many nodes. Requires: no
  // sequence of the session is in use, and none of its blocks is on its way between tiers.
  Result<int64_t> delete_session(std::string_view session);

  // The block's content is going. Nothing when it is no block of a node.
  void on_evict(int block_class, int32_t id);
  // Forgets all blocks: active ones are freed with their last user.
  Status clear();

  // kNoBlock when there is none.
  int32_t block_of(int32_t node, int group, BlockKind kind) const {
    const bool has_slot = kind == BlockKind::kPacked || slots_per_node_ > num_groups();
    return has_slot ? blocks_[slot_of(node, group, kind)] : kNoBlock;
  }
  // kNoNode when it is no node's.
  int32_t node_of(int group, BlockKind kind, int32_t id) const {
    return node_of_block_[class_of(group, kind)][id];
  }
  int32_t max_nodes() const { return static_cast<int32_t>(nodes_.size()); }
  bool is_full() const { return first_unused_ == kNoNode; }
  // Another number for every node that was made: who keeps it sees whether the node is still the
  // same (of the last 2^32).
  uint32_t birth(int32_t node) const { return nodes_[node].birth; }
  int32_t parent(int32_t node) const { return nodes_[node].parent; }
  const ContentHash& hash(int32_t node) const { return nodes_[node].hash; }
  std::span<const int32_t> tokens(int32_t node) const {
    return {tokens_.data() + node * shape_.block_size, static_cast<size_t>(shape_.block_size)};
  }
  bool is_scope(int32_t node) const { return nodes_[node].parent == kNoNode; }
  // The scope that the node's chain begins at.
  int32_t scope(int32_t node) const { return nodes_[node].scope; }
  // Calls visit(event) for every node that has a block as if it were stored now, parents first.
  void for_each_stored(const std::function<void(const PrefixEvent&)>& visit) const;
  // Calls visit(node) for every node that is no scope, parents before children.
  void for_each_node(const std::function<void(int32_t)>& visit) const;
  // The keys of a scope. Requires: is_scope(node).
  const PrefixKeys& keys(int32_t node) const { return scope_keys_.at(node); }

  PrefixCounters counters() const { return counters_; }
  // What the index itself takes, token ids apart.
  int64_t metadata_bytes() const;
  // Called after each change; it must not call back. Empty: nobody.
  void set_listener(std::function<void(const PrefixEvent&)> listener) {
    listener_ = std::move(listener);
  }

 private:
  struct Node {
    ContentHash hash;
    int32_t parent = kNoNode;
    int32_t scope = kNoNode;
    int32_t num_dependents = 0;  // children and pins
    int32_t next = kNoNode;      // in the bucket, or in the list of unused nodes
    uint32_t birth = 0;
  };

  PrefixIndex(BlockPool& pool, const SequenceShape& shape, std::string fingerprint,
              HashAlgorithm algorithm);

  size_t slot_of(int32_t node, int group, BlockKind kind) const {
    return static_cast<size_t>(node) * slots_per_node_ + static_cast<size_t>(kind) * num_groups() +
           group;
  }
  size_t num_groups() const { return shape_.groups.size(); }
  int class_of(int group, BlockKind kind) const {
    const LayerGroup& facts = shape_.groups[group];
    return kind == BlockKind::kFullPrecision ? facts.full_precision_class : facts.packed_class;
  }
  size_t bucket_of(const ContentHash& hash) const;
  bool is_child(int32_t node, int32_t parent, std::span<const int32_t> tokens) const;
  int32_t make_node(int32_t parent, std::span<const int32_t> tokens);
  int32_t take_node(const ContentHash& hash, int32_t parent);
  void detach(int32_t node, size_t slot);
  bool has_blocks(int32_t node) const;
  void add_dependent(int32_t node);
  void drop_dependent(int32_t node);
  bool is_needed_by_children(int32_t node, int group, BlockKind kind) const;
  bool is_among_first(int32_t node, int64_t num_blocks) const;
  // Calls visit(group, kind, id) for each block of the node.
  template <class Visit>
  void for_each_block(int32_t node, const Visit& visit) const {
    const size_t first = slot_of(node, 0, BlockKind::kPacked);
    for (size_t i = 0; i < slots_per_node_; ++i) {
      if (blocks_[first + i] == kNoBlock) continue;
      visit(static_cast<int>(i % num_groups()), static_cast<BlockKind>(i / num_groups()),
            blocks_[first + i]);
    }
  }
  void hold_blocks(int32_t node);
  void unhold_blocks(int32_t node);
  void remove_unused(int32_t node);
  Status forget_block(int block_class, int32_t id);
  PrefixEvent event_of(PrefixEvent::Kind kind, int32_t node) const;
  void tell(PrefixEvent::Kind kind, int32_t node) const;

  BlockPool* pool_;
  SequenceShape shape_;
  std::string fingerprint_;
  HashAlgorithm algorithm_;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;  // [nodes, block_size]
  std::vector<int32_t> blocks_;  // [nodes, kinds, groups]; one kind without full-precision window
  size_t slots_per_node_;
  std::vector<int32_t> buckets_;                     // first node of each
  std::vector<std::vector<int32_t>> node_of_block_;  // [classes][blocks]
  int32_t first_unused_ = kNoNode;
  uint32_t num_births_ = 0;
  std::unordered_map<std::string, int32_t> scopes_;
  std::unordered_map<int32_t, PrefixKeys> scope_keys_;
  PrefixCounters counters_;
  std::function<void(const PrefixEvent&)> listener_;
  SessionNodes sessions_;
  // Of the last match.
  std::vector<int32_t> matched_;
  std::vector<GroupMatch> matched_groups_;
  std::vector<uint8_t> fits_;  // [blocks + 1]: do all groups serve a match of that length?
};

}  // namespace kvx::cache
