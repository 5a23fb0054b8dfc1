// The policies: LRU, LFU and 2Q, on linked lists of ids.
#include "cache/eviction_policy.hpp"

#include <array>
#include <bit>
#include <vector>

#include "cache/id_lists.hpp"
#include "cache/key_history.hpp"

namespace kvx::cache {
namespace {

class Lru final : public EvictionPolicy {
 public:
  explicit Lru(int32_t num_blocks) : lists_(num_blocks, 1) {}

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

 private:
  IdLists lists_;
};

// One list a number of uses, up to kMostUses; the mask says which have blocks.
class Lfu final : public EvictionPolicy {
 public:
  explicit Lfu(int32_t num_blocks)
      : lists_(num_blocks, kMostUses + 1), uses_(static_cast<size_t>(num_blocks)) {}

  void insert(int32_t id, uint32_t) override {
    lists_.push_back(uses_[id], id);
    mask_ |= uint64_t{1} << uses_[id];
  }
  void remove(int32_t id) override {
    lists_.remove(id);
    if (lists_.is_empty(uses_[id])) mask_ &= ~(uint64_t{1} << uses_[id]);
  }
  void touch(int32_t id) override {
    const bool was_inserted = lists_.contains(id);
    if (was_inserted) remove(id);
    if (uses_[id] < kMostUses) ++uses_[id];
    if (was_inserted) insert(id, 0);
  }
  void forget(int32_t id) override { uses_[id] = 0; }
  int32_t evict() override {
    const int32_t id = lists_.front(std::countr_zero(mask_));
    remove(id);
    return id;
  }

 private:
  static constexpr int kMostUses = 63;

  IdLists lists_;
  std::vector<uint8_t> uses_;
  uint64_t mask_ = 0;
};

// 2Q (Johnson and Shasha, 1994): a block's first time is spent in a FIFO queue; one that was used
// again there, or whose content comes back soon after it was evicted from there, is hot and lives
// in an LRU list. The queue gives way first while it holds more than a quarter of all blocks.
class TwoQueues final : public EvictionPolicy {
 public:
  explicit TwoQueues(int32_t num_blocks)
      : lists_(num_blocks, 2),
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

 private:
  enum List { kQueue, kHot };
  struct Block {
    uint32_t key = 0;
    bool is_hot = false;
    bool is_used_again = false;
  };
  static List list_of(const Block& block) { return block.is_hot ? kHot : kQueue; }

  IdLists lists_;
  std::vector<Block> blocks_;
  int32_t num_in_queue_ = 0;
  int32_t most_in_queue_;
  KeyHistory evicted_;
};

constexpr std::array<std::string_view, 3> kNames = {"lru", "lfu", "2q"};

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

std::unique_ptr<EvictionPolicy> make_eviction_policy(EvictionKind kind, int32_t num_blocks) {
  switch (kind) {
    case EvictionKind::kLfu:
      return std::make_unique<Lfu>(num_blocks);
    case EvictionKind::k2Q:
      return std::make_unique<TwoQueues>(num_blocks);
    case EvictionKind::kLru:
      break;
  }
  return std::make_unique<Lru>(num_blocks);
}

}  // namespace kvx::cache
