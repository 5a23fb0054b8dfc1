// The policies: LRU, LFU and 2Q, on linked lists of ids.
#include "cache/prefix/eviction_policy.hpp"

#include <array>
#include <bit>
#include <vector>

#include "cache/prefix/key_history.hpp"

namespace kvx::cache {
namespace {

class Lru final : public EvictionPolicy {
 public:
  explicit Lru(IdLists& lists) : lists_(lists) {}

  void insert(int32_t id, uint32_t) override { lists_.push_back(0, id); }
  void remove(int32_t id) override { lists_.remove(id); }
  void touch(int32_t id) override {
    if (!lists_.contains(id)) return;
    lists_.remove(id);
    lists_.push_back(0, id);
  }
  void forget(int32_t) override {}
  int32_t evict() override {
    const int32_t id = lists_.front(0);
    lists_.remove(id);
    return id;
  }
  void put_first(int32_t id) override { lists_.push_front(0, id); }

 private:
  IdLists& lists_;
};

// LFU with dynamic aging (Arlitt et al., 2000): a block's level is its uses and the age at the time
// that it was released; the age is the level of the block evicted last. So a block that was once
// used often does not stay for ever; few uses are counted, that the age may overtake them soon
// (bench/log). Levels lie within kMostUses of the age: a list each, modulo kPolicyLists, and a
// mask of those that have blocks.
class Lfu final : public EvictionPolicy {
 public:
  Lfu(IdLists& lists, int32_t num_blocks)
      : lists_(lists),
        uses_(static_cast<size_t>(num_blocks)),
        list_(static_cast<size_t>(num_blocks)) {}

  void insert(int32_t id, uint32_t) override {
    join(id, uses_[id]);
    lists_.push_back(list_[id], id);
  }
  void remove(int32_t id) override {
    lists_.remove(id);
    if (lists_.is_empty(list_[id])) mask_ ^= bit_of(id);
  }
  void touch(int32_t id) override {
    const bool was_inserted = lists_.contains(id);
    if (was_inserted) remove(id);
    if (uses_[id] < kMostUses) ++uses_[id];
    if (was_inserted) insert(id, 0);
  }
  void forget(int32_t id) override { uses_[id] = 0; }
  int32_t evict() override {
    age_ = (age_ + std::countr_zero(std::rotr(mask_, age_))) % kPolicyLists;
    const int32_t id = lists_.front(age_);
    remove(id);
    return id;
  }
  void put_first(int32_t id) override {
    join(id, 0);
    lists_.push_front(list_[id], id);
  }

 private:
  static constexpr uint8_t kMostUses = 3;
  static_assert(kMostUses < kPolicyLists && kPolicyLists == 8, "a bit of the mask each");

  uint8_t bit_of(int32_t id) const { return static_cast<uint8_t>(1u << list_[id]); }
  void join(int32_t id, int uses) {
    list_[id] = static_cast<uint8_t>((age_ + uses) % kPolicyLists);
    mask_ |= bit_of(id);
  }

  IdLists& lists_;
  std::vector<uint8_t> uses_;
  std::vector<uint8_t> list_;  // of inserted blocks
  uint8_t mask_ = 0;
  int age_ = 0;  // modulo kPolicyLists
};

// 2Q (Johnson and Shasha, 1994): a block's first time is spent in a FIFO queue; one that was used
// again there, or whose content comes back soon after it was evicted from there, is hot and lives
// in an LRU list. The queue gives way first while it holds more than a quarter of all blocks.
class TwoQueues final : public EvictionPolicy {
 public:
  TwoQueues(IdLists& lists, int32_t num_blocks)
      : lists_(lists),
        blocks_(static_cast<size_t>(num_blocks)),
        most_in_queue_(num_blocks / 4),
        evicted_(num_blocks / 2) {}

  void insert(int32_t id, uint32_t key) override {
    Block& block = blocks_[id];
    block.key = key;
    if (evicted_.contains(key)) block.is_hot = true;
    lists_.push_back(list_of(block), id);
    if (!block.is_hot) ++num_in_queue_;
  }
  void remove(int32_t id) override {
    lists_.remove(id);
    if (!blocks_[id].is_hot) --num_in_queue_;
  }
  void touch(int32_t id) override { blocks_[id].is_used_again = true; }
  void forget(int32_t id) override { blocks_[id] = {}; }
  int32_t evict() override {
    while (true) {
      const bool from_queue =
          num_in_queue_ > most_in_queue_ || (num_in_queue_ > 0 && lists_.is_empty(kHot));
      const int32_t id = lists_.front(from_queue ? kQueue : kHot);
      Block& block = blocks_[id];
      remove(id);
      if (from_queue && block.is_used_again) {  // at most once a block: amortised O(1)
        block.is_hot = true;
        lists_.push_back(kHot, id);
        continue;
      }
      if (from_queue) evicted_.add(block.key);
      return id;
    }
  }
  void put_first(int32_t id) override {
    lists_.push_front(list_of(blocks_[id]), id);
    if (!blocks_[id].is_hot) ++num_in_queue_;
  }

 private:
  enum List { kQueue, kHot };
  struct Block {
    uint32_t key = 0;
    bool is_hot = false;
    bool is_used_again = false;
  };
  static List list_of(const Block& block) { return block.is_hot ? kHot : kQueue; }

  IdLists& lists_;
  std::vector<Block> blocks_;
  int32_t num_in_queue_ = 0;
  int32_t most_in_queue_;
  KeyHistory evicted_;
};

constexpr std::array<std::string_view, 4> kNames = {"lru", "lfu", "2q", "agents"};

}  // namespace

std::string_view name_of(EvictionKind kind) {
  return kNames[static_cast<size_t>(kind)];
}

std::optional<EvictionKind> eviction_named(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<EvictionKind>(i);
  }
  return std::nullopt;
}

std::unique_ptr<EvictionPolicy> make_eviction_policy(EvictionKind kind, IdLists& lists,
                                                     int32_t num_blocks) {
  switch (kind) {
    case EvictionKind::kLfu:
      return std::make_unique<Lfu>(lists, num_blocks);
    case EvictionKind::k2Q:
      return std::make_unique<TwoQueues>(lists, num_blocks);
    case EvictionKind::kLru:
    case EvictionKind::kAgents:
      break;
  }
  return std::make_unique<Lru>(lists);
}

}  // namespace kvx::cache
