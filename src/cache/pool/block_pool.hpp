// BlockPool allocates fixed-size blocks and counts the users of each.
//
// Blocks come in classes (the packed blocks of a layer group, its 16-bit blocks, those of a
// sliding-window group ...). A class has num_blocks blocks and one or more regions; ids of a class
// are dense, [0, num_blocks), and block `id` lies at region + id * block_bytes in every region of
// its class: one id moves data and scales together, and a block table's entries index a view
// directly. One counter, one free list and one generation stand behind each (class, id).
//
// A block is in one of three states:
//
//   active   use count > 0
//   cached   use count 0, its content kept for the next one who wants it; it is evicted, by the
//            class's policy, when a block is wanted and none is free
//   free     use count 0, nothing of worth in it
//
//            allocate              retain
//     free ────────────▶ active ◀────────── cached
//       ▲   last release │     last release   ▲
//       ├────────────────┴──── of a kept one ─┤
//       └──────────── evict, discard ─────────┘
//
// One thread at a time. Nothing is allocated after create(); each call is O(1) a block.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/pool/memory.hpp"
#include "cache/prefix/eviction_order.hpp"
#include "core/result.hpp"

namespace kvx::cache {

inline constexpr int32_t kNoBlock = -1;

struct BlockClassSpec {
  std::string name;
  int64_t num_blocks = 0;            // >= 0
  std::vector<int64_t> block_bytes;  // of each region; a record with its own scales needs one
};

struct BlockPoolOptions {
  EvictionKind eviction = EvictionKind::kLru;
  bool zeroes_on_free = false;  // a block's bytes in all regions, when it becomes free
  int64_t (*now_ms)() = EvictionOrder::steady_ms;  // of deadlines
};

// Called for a cached block before its content goes to make room; its bytes are still there. It may
// call unhold(), nothing else of the pool.
class EvictionListener {
 public:
  virtual ~EvictionListener() = default;
  virtual void on_evict(int block_class, int32_t id) = 0;
};

// A class's blocks by state, and what happened since creation.
struct BlockClassSnapshot {
  std::string name;
  int64_t block_bytes = 0;  // of all regions
  int64_t num_active = 0;
  int64_t num_cached = 0;
  int64_t num_free = 0;
  int64_t num_evicted = 0;
  int64_t num_revived = 0;  // cached blocks that were wanted again
  int64_t num_pinned = 0;   // active or cached
};

class BlockPool {
 public:
  // INVALID_ARGUMENT names the class and field: none at all, a negative number of blocks or more
  // than 2^31 - 1, no region, block_bytes < 1 or too large. OUT_OF_RANGE when memory is short. The
  // memory outlives the pool.
  static Result<BlockPool> create(Memory& memory, std::span<const BlockClassSpec> classes,
                                  const BlockPoolOptions& options = {});
  // Null: nobody.
  void set_eviction_listener(EvictionListener* listener) { listener_ = listener; }

  int num_classes() const { return static_cast<int>(classes_.size()); }
  const std::string& name(int block_class) const { return of(block_class).name; }
  int32_t num_blocks(int block_class) const { return of(block_class).num_blocks; }
  int32_t num_free(int block_class) const { return of(block_class).num_free; }
  int32_t num_cached(int block_class) const { return of(block_class).num_cached; }
  // What allocate() can allocate: free and cached blocks, less pinned ones.
  int32_t num_available(int block_class) const {
    return num_free(block_class) + num_cached(block_class) -
           of(block_class).order->num_pinned_inserted();
  }
  // Active blocks.
  int32_t num_used(int block_class) const {
    return num_blocks(block_class) - num_free(block_class) - num_cached(block_class);
  }

  int num_regions(int block_class) const {
    return static_cast<int>(of(block_class).regions.size());
  }
  int64_t block_bytes(int block_class, int region = 0) const {
    return of(block_class).regions[region].block_bytes;
  }
  int64_t max_block_bytes() const;  // of any region
  MemoryKind memory_kind() const { return memory_->kind(); }
  bool zeroes_on_free() const { return options_.zeroes_on_free; }
  // Do blocks that several sessions use stay longer than others?
  bool keeps_shared_longer() const { return options_.eviction == EvictionKind::kAgents; }
  // Deadlines of retentions that have come are over.
  void expire() {
    for (BlockClass& one : classes_) one.order->expire();
  }
  // The address of block 0; null in a class without blocks.
  uint8_t* region(int block_class, int region = 0) const {
    return of(block_class).regions[region].memory.data();
  }
  // All regions of all classes.
  int64_t allocated_bytes() const;

  // Takes ids.size() blocks with a use count of 1, all or none: free ones, then cached ones, which
  // it evicts. OUT_OF_RANGE when both together are too few. The block freed last is taken first:
  // its bytes may still be in the processor's caches.
  Status allocate(int block_class, std::span<int32_t> ids);

  // One more user of an active or cached block. OUT_OF_RANGE: no such id; INVALID_ARGUMENT: a free
  // block.
  Status retain(int block_class, int32_t id);

  // One user less; the last one frees the block, or leaves it cached when it is kept.
  // OUT_OF_RANGE: no such id; INVALID_ARGUMENT: not active, a block cannot be freed twice.
  Status release(int block_class, int32_t id);

  // From now on the block is cached, not freed, when its last user leaves. key: part of a hash of
  // its content, for policies that remember. Errors as release's.
  Status keep(int block_class, int32_t id, uint32_t key);
  // No longer: a cached block becomes free, an active one with its last user. Errors as retain's.
  Status discard(int block_class, int32_t id);
  // The same, and the listener is called as for an eviction. Requires: the block is active.
  void forget(int block_class, int32_t id);
  // The policy hears that the block was useful. Errors as retain's.
  Status touch(int block_class, int32_t id);
  // Other blocks' contents are of no use without this one's, or no longer: it is evicted after
  // them. Requires: the block is active or cached.
  void hold(int block_class, int32_t id) { classes_[block_class].order->hold(id); }
  void unhold(int block_class, int32_t id) { classes_[block_class].order->unhold(id); }
  // The cached block that would be evicted next gets a user, its content kept; kNoBlock: none is
  // cached, or all of them are pinned.
  int32_t acquire_next_evicted(int block_class);
  // How long the block stays when nobody uses it (retained_blocks.hpp); it is forgotten with the
  // block's content. Errors as retain's; OUT_OF_RANGE: half of the class's blocks are pinned.
  Status set_retention(int block_class, int32_t id, const Retention& retention);
  Retention retention(int block_class, int32_t id) const {
    return of(block_class).order->retention(id);
  }
  int64_t now_ms() const { return options_.now_ms(); }
  // Makes up to num_blocks cached blocks free, in the policy's order; returns how many.
  int64_t evict(int block_class, int64_t num_blocks);
  // Zeros to all of a block's bytes (Memory::clear). Requires: 0 <= id < num_blocks.
  void clear(int block_class, int32_t id);

  // Is the block active or cached, and still the one that the generation was read from?
  bool verify(int block_class, int32_t id, uint32_t generation) const;
  BlockClassSnapshot snapshot(int block_class) const;

  // Requires: 0 <= id < num_blocks.
  int32_t use_count(int block_class, int32_t id) const { return block(block_class, id).use_count; }
  bool is_kept(int block_class, int32_t id) const { return block(block_class, id).is_kept; }
  // Goes up each time the block is freed (31 bits): a handle that kept the old number is stale.
  uint32_t generation(int block_class, int32_t id) const {
    return block(block_class, id).generation;
  }

 private:
  struct BlockRegion {
    int64_t block_bytes;
    Region memory;
  };
  struct Block {
    int32_t use_count = 0;  // 0: cached when it is kept, else free
    uint32_t generation : 31 = 0;
    uint32_t is_kept : 1 = 0;
    union {
      int32_t next_free = kNoBlock;  // of a free block
      uint32_t key;                  // of a kept one
    };
  };
  struct BlockClass {
    std::string name;
    int32_t num_blocks = 0;
    int32_t num_free = 0;
    int32_t num_cached = 0;
    int64_t num_evicted = 0;
    int64_t num_revived = 0;
    int32_t first_free = kNoBlock;
    std::vector<BlockRegion> regions;
    std::vector<Block> blocks;  // [num_blocks]
    std::unique_ptr<EvictionOrder> order;
  };

  const BlockClass& of(int block_class) const { return classes_[block_class]; }
  const Block& block(int block_class, int32_t id) const { return of(block_class).blocks[id]; }
  Status check_id(int block_class, int32_t id) const;
  Status check_active(int block_class, int32_t id) const;
  Status check_content(int block_class, int32_t id) const;
  void free_block(BlockClass& owner, int32_t id);
  void clear_block(const BlockClass& owner, int32_t id);
  void evict_one(int block_class);

  std::vector<BlockClass> classes_;
  BlockPoolOptions options_;
  Memory* memory_ = nullptr;
  EvictionListener* listener_ = nullptr;
};

}  // namespace kvx::cache
