// How four warps fill a tile of K or V for the prefill kernels: where its tokens lie, and rows of
// 16 bits, which are copied (cp.async). With wgmma one warpgroup does nothing else for K, and one
// for V.
#pragma once

#include "ops/attend/cuda/prefill/full_precision.cuh"

namespace kvx::ops::cuda {

// Where groups of 16 tokens lie: lane i has the place of group i of a stretch of 512 tokens, so
// that finding them costs a tile little. None are there before the split's first token, behind its
// last, where tokens are full-precision and not copied as they are, and in a block whose id is out
// of range.
struct TileGroup {  // of 16 tokens, as own_rows
  const uint8_t* rows;
  int num_tokens;
};

template <class Shape>
class GroupFinder {
 public:
  __device__ explicit GroupFinder(const PrefillSideWalk<Shape>& side)
      : side_(side), walk_(side.walk), lane_(static_cast<int>(threadIdx.x) % kWarp) {
    load_id(0);
  }

  // Moves to the next tile. Returns whether the lanes have other groups now.
  __device__ bool next() {
    ++tile_;
    if (in_stretch(tile_) != 0) return false;
    find(stretch(tile_));
    return true;
  }
  // Of this lane's group: its first token in the region, in a head of that. In block 0 where it is
  // not there.
  __device__ const uint8_t* own_rows(const TileRegion& region, int head) const {
    return region.base + int64_t{head} * region.head_stride +
           static_cast<int64_t>(uint64_t{block_} * region.block_stride) +
           offset_ * region.token_stride;
  }
  // Whether a group's tokens are full-precision; of this lane's, or of the tile's.
  __device__ bool has_full_precision() const { return full_precision_ != 0; }
  __device__ bool is_own_full_precision() const { return (full_precision_ >> lane_ & 1) != 0; }
  __device__ bool is_full_precision(int group) const {
    return (full_precision_ >> lane_of(group) & 1) != 0;
  }
  // As own_rows, of a group of the tile, which another lane has.
  __device__ const uint8_t* rows_of(int group, const uint8_t* own_rows) const {
    const auto own = reinterpret_cast<uint64_t>(own_rows);
    return reinterpret_cast<const uint8_t*>(__shfl_sync(kWholeWarp, own, lane_of(group)));
  }
  __device__ int num_tokens(int group) const {
    return __shfl_sync(kWholeWarp, num_tokens_, lane_of(group));
  }
  // Both, of the same group in all lanes. Where there are tables, place has told of own_rows.
  __device__ TileGroup group(int group, const uint8_t* own_rows) const {
    if constexpr (!Shape::kHasGroupTables) return {rows_of(group, own_rows), num_tokens(group)};
    const uint4 entry = load_shared_16(entry_of(lane_of(group)));
    return {reinterpret_cast<const uint8_t*>(uint64_t{entry.y} << 32 | entry.x),
            static_cast<int>(entry.z)};
  }
  // Tells the warp's lanes where this lane's group lies.
  __device__ void place(const uint8_t* own_rows) const {
    if constexpr (!Shape::kHasGroupTables) return;
    const auto own = reinterpret_cast<uint64_t>(own_rows);
    __syncwarp();  // behind other lanes' reads of what was there
    store_chunk(entry_of(lane_), {static_cast<uint32_t>(own), static_cast<uint32_t>(own >> 32),
                                  static_cast<uint32_t>(num_tokens_), 0});
    __syncwarp();
  }
  // For those that multiply. The tile is one of the last four.
  __device__ void store_facts(int tile) const {
    if (threadIdx.x != 0) return;
    const uint32_t missing = stretch(tile) == stretch(tile_) ? missing_ : missing_before_;
    uint32_t facts = missing >> (in_stretch(tile) * kGroups) & ((1u << kGroups) - 1);
    if constexpr (Shape::kAcceptsFullPrecision && !Shape::kScalesScores) {
      if (side_.has_full_precision(tile)) facts |= kHasFullPrecisionScales;
    }
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(side_.ring.tile_facts(tile)), "r"(facts)
                 : "memory");
  }

 private:
  static constexpr int kGroups = Shape::kTokens / kTileTokens;
  static constexpr int kDecodeMma = kWarp / kGroups;  // of a stretch
  static_assert(kMissingGroups >= (1u << kGroups) - 1 && kDecodeMma >= 4);

  __device__ static int stretch(int tile) { return static_cast<unsigned>(tile) / kDecodeMma; }
  __device__ static int in_stretch(int tile) { return static_cast<unsigned>(tile) % kDecodeMma; }
  __device__ int lane_of(int group) const { return in_stretch(tile_) * kGroups + group; }

  __device__ uint32_t entry_of(int lane) const {
    return side_.ring.group_table(threadIdx.x / kWarp) + lane * 16;
  }

  // The lanes' groups, whose blocks' ids were asked for a stretch ago.
  __device__ void find(int stretch) {
    const int32_t id = next_id_;
    const int first = token(stretch);
    const bool is_wanted = is_read(stretch);
    const bool is_full_precision = (Shape::kAcceptsFullPrecision || Shape::kCopiesFullPrecision) &&
                                   side_.is_full_precision(first);
    const int64_t num_blocks =
        is_full_precision ? walk_.params.num_full_precision_blocks : walk_.params.num_packed_blocks;
    const bool is_block = is_wanted && id >= 0 && id < num_blocks;
    const bool is_there = is_block && (Shape::kCopiesFullPrecision || !is_full_precision);
    if constexpr (Shape::kCopiesFullPrecision)
      full_precision_ = __ballot_sync(kWholeWarp, is_full_precision);
    const uint32_t missing = __ballot_sync(kWholeWarp, is_wanted && !is_block);
    if (missing != 0 && threadIdx.x == 0) {
      atomicAdd(&walk_.params.counters->out_of_range,
                static_cast<unsigned long long>(__popc(missing)));
    }
    missing_before_ = missing_;
    missing_ = missing;
    block_ = is_there ? static_cast<uint32_t>(id) : 0;
    offset_ = is_there ? next_offset_ : 0;
    num_tokens_ = is_there ? min(kTileTokens, walk_.tokens.end - first) : 0;
    load_id(stretch + 1);
  }

  __device__ int token(int stretch) const {  // the first of this lane's group
    return walk_.first_token + (stretch * kWarp + lane_) * kTileTokens;
  }
  __device__ bool is_read(int stretch) const {
    const int first = token(stretch);
    return first < walk_.tokens.end && first + kTileTokens > walk_.tokens.begin;
  }
  __device__ void load_id(int stretch) {
    next_id_ = -1;
    if (!is_read(stretch)) return;
    const int group = token(stretch) / kTileTokens;
    const int block = over_tiles_of_block(group);
    next_id_ = walk_.ids[block];
    next_offset_ = (group - block * walk_.params.tiles_per_block) * kTileTokens;
  }

  // Most blocks are powers of two.
  __device__ int over_tiles_of_block(int group) const {
    const int tiles = walk_.params.tiles_per_block;
    return (tiles & (tiles - 1)) == 0 ? group >> (31 - __clz(tiles)) : group / tiles;
  }

  const PrefillSideWalk<Shape> side_;
  const PrefillWalk& walk_;
  int lane_;
  int tile_ = -1;
  int32_t next_id_ = -1;
  int next_offset_ = 0;
  uint32_t missing_ = 0;  // a bit a group
  uint32_t missing_before_ = 0;
  uint32_t full_precision_ = 0;
  uint32_t block_ = 0;
  int offset_ = 0;      // tokens into the block
  int num_tokens_ = 0;  // that are there
};

// Rows of 16 bits.
template <class Shape>
struct TileCopier {
  static constexpr int kChunks = 8 * Shape::kBlocksAtOnce;  // of a row, by lanes side by side
  static constexpr int kRowsAtOnce = kWarpgroup / kChunks;
  static constexpr int kPasses = Shape::kKeyBlocks / Shape::kBlocksAtOnce;

  // Of this lane's group; the same until the finder has others.
  __device__ static const uint8_t* own_rows(const PrefillSideWalk<Shape>& side,
                                            const GroupFinder<Shape>& finder) {
    if (Shape::kCopiesFullPrecision && finder.is_own_full_precision()) {
      return finder.own_rows(side.full_precision_rows(), side.num_sink_blocks());
    }
    return finder.own_rows(side.rows().codes, side.walk.head);
  }
  // Starts the copies of the finder's tile.
  __device__ static void copy(const PrefillSideWalk<Shape>& side, const GroupFinder<Shape>& finder,
                              const uint8_t* own, uint32_t to) {
    if (Shape::kCopiesFullPrecision && finder.has_full_precision()) {
      copy_groups<true>(side, finder, own, to);
    } else {
      copy_groups<false>(side, finder, own, to);
    }
  }

 private:
  // MayBeFullPrecision: tokens of some groups.
  template <bool MayBeFullPrecision>
  __device__ static void copy_groups(const PrefillSideWalk<Shape>& side,
                                     const GroupFinder<Shape>& finder, const uint8_t* own,
                                     uint32_t to) {
    const int chunk = side.thread() % kChunks;
    const int row = side.thread() / kChunks;  // of the first rows
    // Behind the end of shorter rows none is there.
    int wanted[kPasses];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      wanted[p] = (p * kChunks + chunk) * 16 < side.facts().row_bytes ? row : kTileTokens;
    }
    const TileRegion& codes = side.rows().codes;
    to += chunk / 8 * Shape::kBlockBytes + wgmma_chunk(row, chunk % 8);
#pragma unroll
    for (int first = 0; first < Shape::kTokens; first += kTileTokens) {
      const int group = first / kTileTokens;
      const bool is_full_precision = MayBeFullPrecision && finder.is_full_precision(group);
      const int64_t stride =
          is_full_precision ? side.full_precision_rows().token_stride : codes.token_stride;
      const auto [rows, num_tokens] = finder.group(group, own);
      const uint8_t* from = rows + row * stride + chunk * 16;
#pragma unroll
      for (int r = 0; r < kTileTokens; r += kRowsAtOnce) {
#pragma unroll
        for (int p = 0; p < kPasses; ++p) {
          if (p * Shape::kBlocksAtOnce == Shape::kValueBlocks && side.side != 0) break;
          copy_async_16(to + p * Shape::kBlocksAtOnce * Shape::kBlockBytes + (first + r) * 128,
                        from + p * kChunks * 16, wanted[p] + r < num_tokens ? 16 : 0);
        }
        from += kRowsAtOnce * stride;
      }
    }
  }
};

}  // namespace kvx::ops::cuda
