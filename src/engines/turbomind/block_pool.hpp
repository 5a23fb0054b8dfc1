// TurboMind's data pool and scale pool as one: a block and its scales have one id, are
// allocated and released together, and are passed to kernels as tables of pointers.
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
  static Result<DataAndScalePool> create(cache::Memory& memory, const PoolLayout& layout,
                                         int64_t num_blocks,
                                         const cache::BlockPoolOptions& options = {});

  // Allocates count blocks with one user each, or none. scale_ids receives the same ids as
  // data_ids. OUT_OF_RANGE: too few blocks are free or cached, or the spans are shorter than count.
  Status allocate_data_and_scale_blocks(int count, std::span<int32_t> data_ids,
                                        std::span<int32_t> scale_ids);
  // Removes one user of each block, or of none. INVALID_ARGUMENT: data_ids and scale_ids differ, or
  // a block occurs more often than it has users. OUT_OF_RANGE: an id is out of range.
  Status free_data_and_scale_blocks(std::span<const int32_t> data_ids,
                                    std::span<const int32_t> scale_ids);

  // Null when there is no such id, and for a scale block when there is no scale pool.
  uint8_t* get_block_ptr(int32_t block_id) const;
  uint8_t* get_scale_block_ptr(int32_t block_id) const;

  // The memory of both pools, for layer_blocks().
  Pools pools() const;
  // The underlying pool, for retain (lock), release (unlock), keep, evict, touch, verify and
  // snapshot. Its class 0 has both regions.
  cache::BlockPool& blocks() { return pool_; }
  const cache::BlockPool& blocks() const { return pool_; }

 private:
  explicit DataAndScalePool(cache::BlockPool pool) : pool_(std::move(pool)) {}
  uint8_t* address(int region, int32_t block_id) const;

  cache::BlockPool pool_;
};

// Both tables of a batch, as TurboMind's prefill, decode and flatten take them: block i of sequence
// s is entry cu_block_nums[s] + i of each.
class PointerTables {
 public:
  // Sets the blocks of each sequence, in order. OUT_OF_RANGE, and nothing changed: an id is out of
  // range. A batch that is no larger than an earlier one allocates nothing.
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
