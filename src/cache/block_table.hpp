// BlockTable: the block ids of one sequence in one layer group, dense, so that a verb reads them
// where they lie.
#pragma once

#include <cassert>
#include <cstdint>
#include <vector>

#include "cache/pool/block_pool.hpp"

namespace kvx::cache {

// Room for max_blocks is taken at once: data() never moves and growing allocates nothing.
class BlockTable {
 public:
  explicit BlockTable(int64_t max_blocks) : ids_(static_cast<size_t>(max_blocks), kNoBlock) {}

  const int32_t* data() const { return ids_.data(); }  // [max_blocks], kNoBlock from size() on
  int64_t size() const { return size_; }
  int64_t max_blocks() const { return static_cast<int64_t>(ids_.size()); }

  // kNoBlock where a sliding window has left the block behind. Requires: 0 <= block < size().
  int32_t operator[](int64_t block) const { return ids_[block]; }

  // Requires: size() < max_blocks().
  void push(int32_t id) {
    assert(size_ < max_blocks());
    ids_[size_++] = id;
  }
  // Requires: size() > 0.
  int32_t pop() {
    assert(size_ > 0);
    const int32_t id = ids_[--size_];
    ids_[size_] = kNoBlock;
    return id;
  }
  // Returns the id that was there. Requires: 0 <= block < size().
  int32_t replace(int64_t block, int32_t id) {
    assert(block >= 0 && block < size_);
    const int32_t old = ids_[block];
    ids_[block] = id;
    return old;
  }

 private:
  std::vector<int32_t> ids_;
  int64_t size_ = 0;
};

}  // namespace kvx::cache
