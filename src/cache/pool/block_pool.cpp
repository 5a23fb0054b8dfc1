// BlockPool: classes of blocks, each with a free list threaded through its counters.
#include "cache/pool/block_pool.hpp"

#include <algorithm>
#include <limits>

#include "core/checked.hpp"

namespace kvx::cache {
namespace {

constexpr uint32_t kMostGenerations = (uint32_t{1} << 31) - 1;

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

Result<BlockPool> BlockPool::create(Memory& memory, std::span<const BlockClassSpec> classes,
                                    const BlockPoolOptions& options) {
  if (classes.empty()) return invalid_argument("the pool has 0 classes; expected 1 or more");
  for (const BlockClassSpec& spec : classes) KVX_RETURN_IF_ERROR(check_spec(spec));

  BlockPool pool;
  pool.options_ = options;
  pool.memory_ = &memory;
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
    // The first blocks are allocated first.
    added.blocks.resize(static_cast<size_t>(spec.num_blocks));
    added.num_free = added.num_blocks;
    added.first_free = added.num_blocks > 0 ? 0 : kNoBlock;
    for (int32_t id = 0; id + 1 < added.num_blocks; ++id) added.blocks[id].next_free = id + 1;
    added.order =
        std::make_unique<EvictionOrder>(options.eviction, added.num_blocks, options.now_ms);
  }
  return pool;
}

int64_t BlockPool::max_block_bytes() const {
  int64_t most = 0;
  for (const BlockClass& one : classes_) {
    for (const BlockRegion& region : one.regions) most = std::max(most, region.block_bytes);
  }
  return most;
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
  const auto wanted = static_cast<int64_t>(ids.size());
  if (wanted > from.num_free) from.order->expire();
  if (wanted > num_available(block_class)) {
    return out_of_range("class '{}' has {} free blocks of {}; {} are wanted", from.name,
                        num_available(block_class), from.num_blocks, wanted);
  }
  while (from.num_free < wanted) evict_one(block_class);
  for (int32_t& id : ids) {
    id = from.first_free;
    Block& taken = from.blocks[id];
    from.first_free = taken.next_free;
    taken.use_count = 1;
  }
  from.num_free -= static_cast<int32_t>(wanted);
  return {};
}

Status BlockPool::check_id(int block_class, int32_t id) const {
  const BlockClass& owner = of(block_class);
  if (id >= 0 && id < owner.num_blocks) return {};
  return out_of_range("block {} of class '{}'; expected 0 to {}", id, owner.name,
                      owner.num_blocks - 1);
}

Status BlockPool::check_active(int block_class, int32_t id) const {
  KVX_RETURN_IF_ERROR(check_id(block_class, id));
  const Block& found = block(block_class, id);
  if (found.use_count > 0) return {};
  return invalid_argument("block {} of class '{}' is {}; expected a block in use", id,
                          name(block_class), found.is_kept ? "cached" : "free");
}

Status BlockPool::check_content(int block_class, int32_t id) const {
  KVX_RETURN_IF_ERROR(check_id(block_class, id));
  const Block& found = block(block_class, id);
  if (found.use_count > 0 || found.is_kept) return {};
  return invalid_argument("block {} of class '{}' is free; expected one in use or cached", id,
                          name(block_class));
}

Status BlockPool::retain(int block_class, int32_t id) {
  KVX_RETURN_IF_ERROR(check_content(block_class, id));
  BlockClass& owner = classes_[block_class];
  Block& shared = owner.blocks[id];
  if (shared.use_count == std::numeric_limits<int32_t>::max()) {
    return out_of_range("block {} of class '{}' has {} users; no more can be counted", id,
                        owner.name, shared.use_count);
  }
  if (shared.use_count == 0) {
    owner.order->remove(id);
    --owner.num_cached;
    ++owner.num_revived;
  }
  ++shared.use_count;
  return {};
}

Status BlockPool::release(int block_class, int32_t id) {
  KVX_RETURN_IF_ERROR(check_active(block_class, id));
  BlockClass& owner = classes_[block_class];
  Block& left = owner.blocks[id];
  if (--left.use_count > 0) return {};
  if (left.is_kept) {
    owner.order->insert(id, left.key);
    ++owner.num_cached;
  } else {
    free_block(owner, id);
  }
  return {};
}

Status BlockPool::keep(int block_class, int32_t id, uint32_t key) {
  KVX_RETURN_IF_ERROR(check_active(block_class, id));
  Block& kept = classes_[block_class].blocks[id];
  kept.is_kept = 1;
  kept.key = key;
  return {};
}

Status BlockPool::discard(int block_class, int32_t id) {
  KVX_RETURN_IF_ERROR(check_content(block_class, id));
  BlockClass& owner = classes_[block_class];
  Block& discarded = owner.blocks[id];
  if (!discarded.is_kept) return {};
  discarded.is_kept = 0;
  owner.order->unhold(id);
  if (discarded.use_count > 0) return {};
  owner.order->remove(id);
  --owner.num_cached;
  free_block(owner, id);
  return {};
}

void BlockPool::forget(int block_class, int32_t id) {
  if (listener_ != nullptr) listener_->on_evict(block_class, id);
  (void)discard(block_class, id);
}

Status BlockPool::touch(int block_class, int32_t id) {
  KVX_RETURN_IF_ERROR(check_content(block_class, id));
  classes_[block_class].order->touch(id);
  return {};
}

int32_t BlockPool::acquire_next_evicted(int block_class) {
  BlockClass& owner = classes_[block_class];
  owner.order->expire();
  if (num_available(block_class) == owner.num_free) return kNoBlock;
  const int32_t id = owner.order->evict();
  --owner.num_cached;
  owner.blocks[id].use_count = 1;
  return id;
}

Status BlockPool::set_retention(int block_class, int32_t id, const Retention& retention) {
  KVX_RETURN_IF_ERROR(check_content(block_class, id));
  BlockClass& owner = classes_[block_class];
  const int32_t most = owner.num_blocks / 2;
  const bool is_new_pin = retention.is_pinned && !owner.order->retention(id).is_pinned;
  if (is_new_pin && owner.order->num_pinned() >= most) {
    return out_of_range("class '{}' has {} pinned blocks of {}; at most half may be pinned",
                        owner.name, owner.order->num_pinned(), owner.num_blocks);
  }
  owner.order->set_retention(id, owner.blocks[id].key, retention);
  return {};
}

int64_t BlockPool::evict(int block_class, int64_t num_blocks) {
  classes_[block_class].order->expire();
  const int64_t num_cached_there = num_available(block_class) - num_free(block_class);
  const int64_t num_evicted = std::min(num_blocks, num_cached_there);
  for (int64_t i = 0; i < num_evicted; ++i) evict_one(block_class);
  return num_evicted;
}

void BlockPool::clear(int block_class, int32_t id) {
  clear_block(of(block_class), id);
}

// Requires: a block is cached.
void BlockPool::evict_one(int block_class) {
  BlockClass& owner = classes_[block_class];
  const int32_t id = owner.order->evict();
  if (listener_ != nullptr) listener_->on_evict(block_class, id);
  owner.blocks[id].is_kept = 0;
  --owner.num_cached;
  ++owner.num_evicted;
  free_block(owner, id);
}

// Requires: no user, in no list.
void BlockPool::free_block(BlockClass& owner, int32_t id) {
  Block& freed = owner.blocks[id];
  freed.generation = (freed.generation + 1) & kMostGenerations;
  freed.next_free = owner.first_free;
  owner.first_free = id;
  ++owner.num_free;
  owner.order->forget(id);
  if (options_.zeroes_on_free) clear_block(owner, id);
}

void BlockPool::clear_block(const BlockClass& owner, int32_t id) {
  for (const BlockRegion& region : owner.regions) {
    memory_->clear(region.memory.data() + id * region.block_bytes, region.block_bytes);
  }
}

bool BlockPool::verify(int block_class, int32_t id, uint32_t generation) const {
  return check_content(block_class, id).ok() && block(block_class, id).generation == generation;
}

BlockClassSnapshot BlockPool::snapshot(int block_class) const {
  const BlockClass& seen = of(block_class);
  BlockClassSnapshot snapshot;
  snapshot.name = seen.name;
  for (const BlockRegion& region : seen.regions) snapshot.block_bytes += region.block_bytes;
  snapshot.num_active = num_used(block_class);
  snapshot.num_cached = seen.num_cached;
  snapshot.num_free = seen.num_free;
  snapshot.num_evicted = seen.num_evicted;
  snapshot.num_revived = seen.num_revived;
  snapshot.num_pinned = seen.order->num_pinned();
  return snapshot;
}

}  // namespace kvx::cache
