// find_pools numbers the blocks of each pool by their distances.
#include "engines/turbomind/pointer_tables.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace kvx::engines::turbomind {
namespace {

// One pool's blocks as numbers: block i begins at base + ids[i] * stride.
struct Numbering {
  uint64_t base = 0;
  uint64_t stride = 0;
  std::vector<uint64_t> ids;
};

Status check_apart(std::vector<uint64_t> sorted, int64_t block_bytes, std::string_view table) {
  std::ranges::sort(sorted);
  for (size_t i = 1; i < sorted.size(); ++i) {
    const uint64_t distance = sorted[i] - sorted[i - 1];
    if (distance == 0 || distance >= static_cast<uint64_t>(block_bytes)) continue;
    return invalid_argument("{} has two blocks that are {} bytes apart; a block takes {} bytes",
                            table, distance, block_bytes);
  }
  return {};
}

Result<Numbering> number_blocks(std::span<const uint8_t* const> pointers, int64_t block_bytes,
                                std::string_view table) {
  Numbering numbering;
  for (size_t i = 0; i < pointers.size(); ++i) {
    if (pointers[i] == nullptr) return invalid_argument("{}[{}] is null", table, i);
    numbering.ids.push_back(reinterpret_cast<uintptr_t>(pointers[i]));
  }
  KVX_RETURN_IF_ERROR(check_apart(numbering.ids, block_bytes, table));
  numbering.base = *std::ranges::min_element(numbering.ids);
  for (uint64_t& id : numbering.ids) {
    id -= numbering.base;
    numbering.stride = std::gcd(numbering.stride, id);
  }
  if (numbering.stride == 0) numbering.stride = static_cast<uint64_t>(block_bytes);  // one block
  for (uint64_t& id : numbering.ids) id /= numbering.stride;
  return numbering;
}

Status check_scale_table(const PoolLayout& layout, size_t num_blocks, size_t num_scale_blocks) {
  const size_t expected = layout.scale_block_bytes > 0 ? num_blocks : 0;
  if (num_scale_blocks == expected) return {};
  return invalid_argument("scale_block_ptrs has {} entries; {} with {} blocks needs {}",
                          num_scale_blocks, name_of(layout.geometry.mode), num_blocks, expected);
}

// Whether the pool's blocks follow each other without gaps, so that all memory between the first
// and the last is its own.
bool is_dense(Numbering numbering, int64_t block_bytes) {
  if (numbering.stride != static_cast<uint64_t>(block_bytes)) return false;
  std::ranges::sort(numbering.ids);
  const auto end = std::unique(numbering.ids.begin(), numbering.ids.end());
  return static_cast<uint64_t>(end - numbering.ids.begin()) == *(end - 1) + 1;
}

}  // namespace

Result<Pools> find_pools(const PoolLayout& layout, std::span<const uint8_t* const> block_ptrs,
                         std::span<const uint8_t* const> scale_block_ptrs) {
  if (block_ptrs.empty()) return invalid_argument("num_block_ptrs is 0; expected 1 or more");
  KVX_RETURN_IF_ERROR(check_scale_table(layout, block_ptrs.size(), scale_block_ptrs.size()));
  KVX_ASSIGN_OR_RETURN(const Numbering data,
                       number_blocks(block_ptrs, layout.block_bytes, "block_ptrs"));
  const uint64_t num_ids = *std::ranges::max_element(data.ids) + 1;
  constexpr uint64_t kMostIds = std::numeric_limits<int32_t>::max();
  if (num_ids > kMostIds) {
    return unsupported(
        "block_ptrs lie {} distances of {} bytes apart; expected at most {}, so allocate blocks "
        "at multiples of a larger number of bytes",
        num_ids - 1, data.stride, kMostIds - 1);
  }
  Pools pools;
  pools.data = reinterpret_cast<uint8_t*>(data.base);
  pools.data_stride = static_cast<int64_t>(data.stride);
  pools.num_blocks = static_cast<int64_t>(num_ids);
  pools.is_scattered = !is_dense(data, layout.block_bytes);
  if (scale_block_ptrs.empty()) return pools;
  KVX_ASSIGN_OR_RETURN(
      const Numbering scales,
      number_blocks(scale_block_ptrs, layout.scale_block_bytes, "scale_block_ptrs"));
  for (size_t i = 0; i < data.ids.size(); ++i) {
    if (data.ids[i] == scales.ids[i]) continue;
    return unsupported(
        "scale_block_ptrs[{}] is block {} of its pool and block_ptrs[{}] block {}; expected scale "
        "blocks in the order and at the distances of their data blocks, as in pools of one chunk "
        "each (cache_chunk_size -1)",
        i, scales.ids[i], i, data.ids[i]);
  }
  pools.scales = reinterpret_cast<uint8_t*>(scales.base);
  pools.scale_stride = static_cast<int64_t>(scales.stride);
  pools.is_scattered = pools.is_scattered || !is_dense(scales, layout.scale_block_bytes);
  return pools;
}

Status block_ids_of_both(const Pools& pools, std::span<const uint8_t* const> block_ptrs,
                         std::span<const uint8_t* const> scale_block_ptrs, std::span<int32_t> ids) {
  KVX_RETURN_IF_ERROR(block_ids_of(pools, block_ptrs, ids));
  for (size_t i = 0; i < scale_block_ptrs.size(); ++i) {
    if (scale_block_ptrs[i] == get_scale_block_ptr(pools, ids[i])) continue;
    return out_of_range(
        "scale_block_ptrs[{}] is not the scale block of block_ptrs[{}], which has id {}", i, i,
        ids[i]);
  }
  return {};
}

}  // namespace kvx::engines::turbomind
