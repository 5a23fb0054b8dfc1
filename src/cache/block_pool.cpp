// BlockPool: classes of blocks, each with a free list threaded through its counters.
#include "cache/block_pool.hpp"

#include <limits>

#include "core/checked.hpp"

namespace kvx::cache {
namespace {

Status check_spec(const BlockClassSpec& spec) {
  constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
  if (spec.num_blocks < 0 || spec.num_blocks > kMostBlocks) {
    return invalid_argument("num_blocks of class '{}' is {}; expected 0 to {}", spec.name,
                            spec.num_blocks, kMostBlocks);
  }
  if (spec.block_bytes.empty()) {
    return invalid_argument("class '{}' has 0 regions; expected 1 or more", spec.name);
  }
  for (int64_t bytes : spec.block_bytes) {
    if (bytes < 1) {
      return invalid_argument("block_bytes of class '{}' is {}; expected 1 or more", spec.name,
                              bytes);
    }
    if (!(CheckedSize(bytes) * spec.num_blocks).get()) {
      return invalid_argument(
          "block_bytes of class '{}' is {}; expected {} blocks of it to fit in 63 bits", spec.name,
          bytes, spec.num_blocks);
    }
  }
  return {};
}

}  // namespace

Result<BlockPool> BlockPool::create(Memory& memory, std::span<const BlockClassSpec> classes) {
  if (classes.empty()) return invalid_argument("the pool has 0 classes; expected 1 or more");
  for (const BlockClassSpec& spec : classes) KVX_RETURN_IF_ERROR(check_spec(spec));

  BlockPool pool;
  for (const BlockClassSpec& spec : classes) {
    BlockClass& added = pool.classes_.emplace_back();
    added.name = spec.name;
    added.num_blocks = static_cast<int32_t>(spec.num_blocks);
    for (int64_t bytes : spec.block_bytes) {
      BlockRegion region{bytes, {}};
      if (spec.num_blocks > 0) {
        KVX_ASSIGN_OR_RETURN(region.memory, memory.allocate(bytes * spec.num_blocks,
                                                            "blocks of class '" + spec.name + "'"));
      }
      added.regions.push_back(std::move(region));
    }
    // The first blocks are handed out first.
    added.blocks.resize(static_cast<size_t>(spec.num_blocks));
    added.num_free = added.num_blocks;
    added.first_free = added.num_blocks > 0 ? 0 : kNoBlock;
    for (int32_t id = 0; id + 1 < added.num_blocks; ++id) added.blocks[id].next_free = id + 1;
  }
  return pool;
}

int64_t BlockPool::allocated_bytes() const {
  int64_t bytes = 0;
  for (const BlockClass& one : classes_) {
    for (const BlockRegion& region : one.regions) bytes += region.memory.bytes();
  }
  return bytes;
}

Status BlockPool::allocate(int block_class, std::span<int32_t> ids) {
  BlockClass& from = classes_[block_class];
  if (static_cast<int64_t>(ids.size()) > from.num_free) {
    return out_of_range("class '{}' has {} free blocks of {}; {} are wanted", from.name,
                        from.num_free, from.num_blocks, ids.size());
  }
  for (int32_t& id : ids) {
    id = from.first_free;
    Block& taken = from.blocks[id];
    from.first_free = taken.next_free;
    taken.next_free = kNoBlock;
    taken.use_count = 1;
  }
  from.num_free -= static_cast<int32_t>(ids.size());
  return {};
}

Result<BlockPool::Block*> BlockPool::used_block(int block_class, int32_t id) {
  BlockClass& owner = classes_[block_class];
  if (id < 0 || id >= owner.num_blocks) {
    return out_of_range("block {} of class '{}'; expected 0 to {}", id, owner.name,
                        owner.num_blocks - 1);
  }
  Block* found = &owner.blocks[id];
  if (found->use_count == 0) {
    return invalid_argument("block {} of class '{}' is free; expected a block in use", id,
                            owner.name);
  }
  return found;
}

Status BlockPool::retain(int block_class, int32_t id) {
  KVX_ASSIGN_OR_RETURN(Block * shared, used_block(block_class, id));
  if (shared->use_count == std::numeric_limits<int32_t>::max()) {
    return out_of_range("block {} of class '{}' has {} users; no more can be counted", id,
                        name(block_class), shared->use_count);
  }
  ++shared->use_count;
  return {};
}

Status BlockPool::release(int block_class, int32_t id) {
  KVX_ASSIGN_OR_RETURN(Block * left, used_block(block_class, id));
  if (--left->use_count > 0) return {};
  BlockClass& owner = classes_[block_class];
  ++left->generation;
  left->next_free = owner.first_free;
  owner.first_free = id;
  ++owner.num_free;
  return {};
}

}  // namespace kvx::cache
