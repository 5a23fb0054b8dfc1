// BlockPool hands out fixed-size blocks and counts who uses them.
//
// Blocks come in classes (the packed blocks of a layer group, its 16-bit blocks, those of a
// sliding-window group ...). A class has num_blocks blocks and one or more regions; ids of a class
// are dense, [0, num_blocks), and block `id` lies at region + id * block_bytes in every region of
// its class: one id moves data and scales together, and a block table's entries index a view
// directly. One counter, one free list and one generation stand behind each (class, id).
//
// One thread at a time. Nothing is allocated after create().
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache/memory.hpp"
#include "core/result.hpp"

namespace kvx::cache {

inline constexpr int32_t kNoBlock = -1;

struct BlockClassSpec {
  std::string name;
  int64_t num_blocks = 0;            // >= 0
  std::vector<int64_t> block_bytes;  // of each region; a record with its own scales needs one
};

class BlockPool {
 public:
  // INVALID_ARGUMENT names the class and field: none at all, a negative number of blocks or more
  // than 2^31 - 1, no region, block_bytes < 1 or too large. OUT_OF_RANGE when memory is short.
  static Result<BlockPool> create(Memory& memory, std::span<const BlockClassSpec> classes);

  int num_classes() const { return static_cast<int>(classes_.size()); }
  const std::string& name(int block_class) const { return of(block_class).name; }
  int32_t num_blocks(int block_class) const { return of(block_class).num_blocks; }
  int32_t num_free(int block_class) const { return of(block_class).num_free; }
  int32_t num_used(int block_class) const {
    return num_blocks(block_class) - num_free(block_class);
  }

  int num_regions(int block_class) const {
    return static_cast<int>(of(block_class).regions.size());
  }
  int64_t block_bytes(int block_class, int region = 0) const {
    return of(block_class).regions[region].block_bytes;
  }
  // The address of block 0; null in a class without blocks.
  uint8_t* region(int block_class, int region = 0) const {
    return of(block_class).regions[region].memory.data();
  }
  // All regions of all classes.
  int64_t allocated_bytes() const;

  // Takes ids.size() blocks with a use count of 1, all or none. OUT_OF_RANGE when fewer are free.
  // The block freed last is taken first: its bytes may still be in the processor's caches.
  Status allocate(int block_class, std::span<int32_t> ids);

  // One more user of a block in use. OUT_OF_RANGE: no such id; INVALID_ARGUMENT: a free block.
  Status retain(int block_class, int32_t id);

  // One user less; the last one frees the block. Errors as retain's: a block cannot be freed twice.
  Status release(int block_class, int32_t id);

  // Requires: 0 <= id < num_blocks.
  int32_t use_count(int block_class, int32_t id) const { return block(block_class, id).use_count; }
  // Goes up each time the block is freed: a handle that kept the old number is stale.
  uint32_t generation(int block_class, int32_t id) const {
    return block(block_class, id).generation;
  }

 private:
  struct BlockRegion {
    int64_t block_bytes;
    Region memory;
  };
  struct Block {
    int32_t use_count = 0;  // 0: free
    uint32_t generation = 0;
    int32_t next_free = kNoBlock;
  };
  struct BlockClass {
    std::string name;
    int32_t num_blocks = 0;
    int32_t num_free = 0;
    int32_t first_free = kNoBlock;
    std::vector<BlockRegion> regions;
    std::vector<Block> blocks;  // [num_blocks]
  };

  const BlockClass& of(int block_class) const { return classes_[block_class]; }
  const Block& block(int block_class, int32_t id) const { return of(block_class).blocks[id]; }
  Result<Block*> used_block(int block_class, int32_t id);

  std::vector<BlockClass> classes_;
};

}  // namespace kvx::cache
