// DataAndScalePool: one class of cache::BlockPool with two regions; one id names a block in both.
#include "engines/turbomind/block_pool.hpp"

#include <algorithm>

namespace kvx::engines::turbomind {
namespace {

constexpr int kClass = 0;
constexpr int kData = 0;
constexpr int kScales = 1;

}  // namespace

Result<DataAndScalePool> DataAndScalePool::create(cache::Memory& memory, const PoolLayout& layout,
                                                  int64_t num_blocks,
                                                  const cache::BlockPoolOptions& options) {
  cache::BlockClassSpec blocks{"blocks", num_blocks, {layout.block_bytes}};
  if (layout.scale_block_bytes > 0) blocks.block_bytes.push_back(layout.scale_block_bytes);
  KVX_ASSIGN_OR_RETURN(cache::BlockPool pool,
                       cache::BlockPool::create(memory, {&blocks, 1}, options));
  return DataAndScalePool(std::move(pool));
}

Status DataAndScalePool::allocate_data_and_scale_blocks(int count, std::span<int32_t> data_ids,
                                                        std::span<int32_t> scale_ids) {
  if (count < 0) return invalid_argument("count is {}; expected 0 or more", count);
  const size_t room = std::min(data_ids.size(), scale_ids.size());
  if (room < static_cast<size_t>(count)) {
    return out_of_range("count is {}; there is room for {} ids", count, room);
  }
  const std::span<int32_t> taken = data_ids.first(static_cast<size_t>(count));
  KVX_RETURN_IF_ERROR(pool_.allocate(kClass, taken));
  std::copy(taken.begin(), taken.end(), scale_ids.begin());
  return {};
}

Status DataAndScalePool::free_data_and_scale_blocks(std::span<const int32_t> data_ids,
                                                    std::span<const int32_t> scale_ids) {
  if (!std::equal(data_ids.begin(), data_ids.end(), scale_ids.begin(), scale_ids.end())) {
    return invalid_argument("scale_ids are not data_ids; a block and its scales have one id");
  }
  // Checks everything before it releases anything.
  std::vector<int32_t> sorted(data_ids.begin(), data_ids.end());
  std::sort(sorted.begin(), sorted.end());
  for (auto first = sorted.begin(); first != sorted.end();) {
    const auto last = std::upper_bound(first, sorted.end(), *first);
    if (get_block_ptr(*first) == nullptr) {
      return out_of_range("data_ids hold {}; the pool has {} blocks", *first,
                          pool_.num_blocks(kClass));
    }
    if (last - first > pool_.use_count(kClass, *first)) {
      return invalid_argument("data_ids hold block {} {} times; it has {} users", *first,
                              last - first, pool_.use_count(kClass, *first));
    }
    first = last;
  }
  for (const int32_t id : data_ids) KVX_RETURN_IF_ERROR(pool_.release(kClass, id));
  return {};
}

uint8_t* DataAndScalePool::address(int region, int32_t block_id) const {
  if (block_id < 0 || block_id >= pool_.num_blocks(kClass)) return nullptr;
  if (region >= pool_.num_regions(kClass)) return nullptr;
  return pool_.region(kClass, region) + block_id * pool_.block_bytes(kClass, region);
}

uint8_t* DataAndScalePool::get_block_ptr(int32_t block_id) const {
  return address(kData, block_id);
}

uint8_t* DataAndScalePool::get_scale_block_ptr(int32_t block_id) const {
  return address(kScales, block_id);
}

Pools DataAndScalePool::pools() const {
  Pools pools;
  pools.data = pool_.region(kClass, kData);
  pools.data_stride = pool_.block_bytes(kClass, kData);
  pools.num_blocks = pool_.num_blocks(kClass);
  if (pool_.num_regions(kClass) > kScales) {
    pools.scales = pool_.region(kClass, kScales);
    pools.scale_stride = pool_.block_bytes(kClass, kScales);
  }
  return pools;
}

Status PointerTables::assign(const DataAndScalePool& pool,
                             std::span<const std::span<const int32_t>> sequences) {
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (size_t i = 0; i < sequences[s].size(); ++i) {
      if (pool.get_block_ptr(sequences[s][i]) != nullptr) continue;
      return out_of_range("block {} of sequence {} is {}; the pool has {} blocks", i, s,
                          sequences[s][i], pool.blocks().num_blocks(kClass));
    }
  }
  block_ptrs_.clear();
  scale_block_ptrs_.clear();
  cu_block_nums_.assign(1, 0);
  const bool has_scales = pool.pools().scales != nullptr;
  for (const std::span<const int32_t> ids : sequences) {
    for (const int32_t id : ids) {
      block_ptrs_.push_back(pool.get_block_ptr(id));
      if (has_scales) scale_block_ptrs_.push_back(pool.get_scale_block_ptr(id));
    }
    cu_block_nums_.push_back(static_cast<int32_t>(block_ptrs_.size()));
  }
  return {};
}

SequenceBlocks PointerTables::blocks_of(int sequence) const {
  const auto first = static_cast<size_t>(cu_block_nums_[sequence]);
  const auto count = static_cast<size_t>(cu_block_nums_[sequence + 1]) - first;
  const std::span<uint8_t* const> scales = scale_block_ptrs();
  return {block_ptrs().subspan(first, count),
          scales.empty() ? scales : scales.subspan(first, count)};
}

}  // namespace kvx::engines::turbomind
