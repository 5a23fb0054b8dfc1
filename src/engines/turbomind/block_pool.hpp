// TurboMind's data pool and scale pool as one: a block and its scales have one id, are taken and
// given back together, and are handed to kernels as tables of pointers.
#pragma once

#include <span>
#include <vector>

#include "cache/pool/block_pool.hpp"
#include "engines/turbomind/layout.hpp"
#include "engines/turbomind/probe.hpp"

namespace kvx::engines::turbomind {

class DataAndScalePool {
 public:
  // Allocates num_blocks blocks of both pools; without fp4 there is no scale pool. A memory budget
  // is divided by blocks_within_budget(). Errors as cache::BlockPool::create.
  static Result<DataAndScalePool> create(cache::Memory& memory, const BlockLayout& layout,
                                         int64_t num_blocks,
                                         const cache::BlockPoolOptions& options = {});

  // count blocks with one user each, all or none; scale_ids are data_ids. OUT_OF_RANGE: too few are
  // free or cached, or the spans are shorter than count.
  Status allocate_data_and_scale_blocks(int count, std::span<int32_t> data_ids,
                                        std::span<int32_t> scale_ids);
  // One user less, all or none. INVALID_ARGUMENT: ids that are no pairs, a block named more often
  // than it has users; OUT_OF_RANGE: no such id.
  Status free_data_and_scale_blocks(std::span<const int32_t> data_ids,
                                    std::span<const int32_t> scale_ids);

  // Null: no such id; of a scale block also without a scale pool.
  uint8_t* get_block_ptr(int32_t block_id) const;
  uint8_t* get_scale_block_ptr(int32_t block_id) const;

  // For layer_blocks().
  Pools pools() const;
  // retain (lock), release (unlock), keep, evict, touch, verify, snapshot: of class 0, both
  // regions.
  cache::BlockPool& blocks() { return pool_; }
  const cache::BlockPool& blocks() const { return pool_; }

 private:
  explicit DataAndScalePool(cache::BlockPool pool) : pool_(std::move(pool)) {}
  uint8_t* address(int region, int32_t block_id) const;

  cache::BlockPool pool_;
};

// Both tables of a batch, as prefill, decode and flatten take them: block i of sequence s is entry
// cu_block_nums[s] + i of each.
class PointerTables {
 public:
  // The blocks of each sequence, in order. OUT_OF_RANGE, nothing changed: an id that the pool has
  // not. Keeps its memory: a batch no larger than one before allocates nothing.
  Status assign(const DataAndScalePool& pool, std::span<const std::span<const int32_t>> sequences);

  std::span<uint8_t* const> block_ptrs() const { return block_ptrs_; }
  std::span<uint8_t* const> scale_block_ptrs() const { return scale_block_ptrs_; }  // fp4 only
  std::span<const int32_t> cu_block_nums() const { return cu_block_nums_; }  // [sequences + 1]

  // Requires: sequence < the number of sequences.
  SequenceBlocks blocks_of(int sequence) const;

 private:
  std::vector<uint8_t*> block_ptrs_;
  std::vector<uint8_t*> scale_block_ptrs_;
  std::vector<int32_t> cu_block_nums_ = {0};
};

}  // namespace kvx::engines::turbomind
