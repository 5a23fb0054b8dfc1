// EvictionPolicy: which cached block goes first when a class has no free one. It sees ids only;
// every call is O(1), amortised, and allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "cache/prefix/id_lists.hpp"

namespace kvx::cache {

enum class EvictionKind : uint8_t {
  kLru,  // the block that was released first
  kLfu,  // the block used least often, the oldest of these first; old uses lose their weight
  k2Q,   // blocks used once wait in a queue of their own, so that one long scan evicts no others
  // LRU, but blocks of ended sessions go first, and those that several sessions use last
  // (PrefixIndex::share, end_session)
  kAgents,
};

std::string_view name_of(EvictionKind kind);
std::optional<EvictionKind> eviction_named(std::string_view name);

// A block is the policy's from insert() to remove() or evict(); all ids are below the num_blocks
// that it was made for.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // The block has no user any more. key: what it holds (part of its content's hash): a
  // policy may remember keys of blocks that are gone.
  virtual void insert(int32_t id, uint32_t key) = 0;
  // It has a user again, or its content was discarded. Requires: inserted.
  virtual void remove(int32_t id) = 0;
  // Somebody found it useful; it may be the policy's or in use.
  virtual void touch(int32_t id) = 0;
  // Its content is gone and with it what the policy recorded of it. Requires: not inserted.
  virtual void forget(int32_t id) = 0;
  // Removes and returns the block to go. Requires: one is inserted.
  virtual int32_t evict() = 0;
  // evict() returned it, but it stayed: inserted again, before all others that are worth as much.
  virtual void put_first(int32_t id) = 0;
};

// A policy keeps its blocks in lists [0, kPolicyLists).
inline constexpr int kPolicyLists = 8;

// Requires: lists hold num_blocks ids and outlive the policy.
std::unique_ptr<EvictionPolicy> make_eviction_policy(EvictionKind kind, IdLists& lists,
                                                     int32_t num_blocks);

}  // namespace kvx::cache
