// KeyHistory: the last n keys that were added, with a look-up; what a policy remembers of blocks
// that are gone.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace kvx::cache {

// A ring of keys, and an open-addressing table of their places in it. O(1) on average, for keys
// that are hashes.
class KeyHistory {
 public:
  explicit KeyHistory(int32_t most_keys)
      : ring_(static_cast<size_t>(std::max(most_keys, 1))),
        table_(std::bit_ceil(ring_.size() * 2), kEmpty),
        mask_(table_.size() - 1) {}

  bool contains(uint32_t key) const { return table_[find(key)] != kEmpty; }

  // The oldest key is forgotten when there is no room.
  void add(uint32_t key) {
    if (contains(key)) return;
    if (num_added_ >= ring_.size()) forget(ring_[num_added_ % ring_.size()]);
    const size_t at = num_added_++ % ring_.size();
    ring_[at] = key;
    table_[find(key)] = static_cast<int32_t>(at);
  }

 private:
  static constexpr int32_t kEmpty = -1;

  // Where the key stands, or the empty place where it would.
  size_t find(uint32_t key) const {
    size_t at = key & mask_;
    while (table_[at] != kEmpty && ring_[table_[at]] != key) at = (at + 1) & mask_;
    return at;
  }

  // Closes the hole, so that no search ends too early.
  void forget(uint32_t key) {
    size_t hole = find(key);
    for (size_t at = (hole + 1) & mask_; table_[at] != kEmpty; at = (at + 1) & mask_) {
      const size_t home = ring_[table_[at]] & mask_;
      if (((at - home) & mask_) < ((at - hole) & mask_)) continue;
      table_[hole] = table_[at];
      hole = at;
    }
    table_[hole] = kEmpty;
  }

  std::vector<uint32_t> ring_;
  std::vector<int32_t> table_;  // indices of ring_
  size_t mask_;
  size_t num_added_ = 0;
};

}  // namespace kvx::cache
