// How four warps fill a tile of K or V for the prefill kernels: blocks of the cache become 16-bit
// numbers. Rows of 16 bits are copied (cp.async), packed ones decoded on the way, once for 128
// query rows. With wgmma one warpgroup does nothing else for K, and one for V.
#pragma once

#include "ops/attend/cuda/prefill_wide.cuh"
#include "ops/attend/cuda/tile_scales.cuh"

namespace kvx::ops::cuda {

// Where groups of 16 tokens lie: lane i has the place of group i of a stretch of 512 tokens, so
// that finding them costs a tile little. None are there before the split's first token, behind its
// last, where tokens are wide and not copied as they are, and in a block whose id is out of range.
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
  // Whether a group's tokens are wide; of this lane's, or of the tile's.
  __device__ bool has_wide() const { return wide_ != 0; }
  __device__ bool is_own_wide() const { return (wide_ >> lane_ & 1) != 0; }
  __device__ bool is_wide(int group) const { return (wide_ >> lane_of(group) & 1) != 0; }
  // As own_rows, of a group of the tile, which another lane has.
  __device__ const uint8_t* rows_of(int group, const uint8_t* own_rows) const {
    const auto own = reinterpret_cast<uint64_t>(own_rows);
    return reinterpret_cast<const uint8_t*>(__shfl_sync(kWholeWarp, own, lane_of(group)));
  }
  __device__ int num_tokens(int group) const {
    return __shfl_sync(kWholeWarp, num_tokens_, lane_of(group));
  }
  // For those that multiply. The tile is one of the last four.
  __device__ void say_facts(int tile) const {
    if (threadIdx.x != 0) return;
    const uint32_t missing = stretch(tile) == stretch(tile_) ? missing_ : missing_before_;
    uint32_t facts = missing >> (in_stretch(tile) * kGroups) & ((1u << kGroups) - 1);
    if constexpr (Shape::kTakesWide && !Shape::kScalesScores) {
      if (side_.has_wide(tile)) facts |= kHasWideScales;
    }
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(side_.ring.tile_facts(tile)), "r"(facts)
                 : "memory");
  }

 private:
  static constexpr int kGroups = Shape::kTokens / kTileTokens;
  static constexpr int kTiles = kWarp / kGroups;  // of a stretch
  static_assert(kMissingGroups >= (1u << kGroups) - 1 && kTiles >= 4);

  __device__ static int stretch(int tile) { return static_cast<unsigned>(tile) / kTiles; }
  __device__ static int in_stretch(int tile) { return static_cast<unsigned>(tile) % kTiles; }
  __device__ int lane_of(int group) const { return in_stretch(tile_) * kGroups + group; }

  // The lanes' groups, whose blocks' ids were asked for a stretch ago.
  __device__ void find(int stretch) {
    const int32_t id = next_id_;
    const int first = token(stretch);
    const bool is_wanted = is_read(stretch);
    const bool is_wide = (Shape::kTakesWide || Shape::kCopiesWide) && side_.is_wide(first);
    const int64_t num_blocks = is_wide ? walk_.job.num_wide_blocks : walk_.job.num_packed_blocks;
    const bool is_block = is_wanted && id >= 0 && id < num_blocks;
    const bool is_there = is_block && (Shape::kCopiesWide || !is_wide);
    if constexpr (Shape::kCopiesWide) wide_ = __ballot_sync(kWholeWarp, is_wide);
    const uint32_t missing = __ballot_sync(kWholeWarp, is_wanted && !is_block);
    if (missing != 0 && threadIdx.x == 0) {
      atomicAdd(&walk_.job.findings->out_of_range,
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
    next_offset_ = (group - block * walk_.job.tiles_per_block) * kTileTokens;
  }

  // Most blocks are powers of two.
  __device__ int over_tiles_of_block(int group) const {
    const int tiles = walk_.job.tiles_per_block;
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
  uint32_t wide_ = 0;
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
    if (Shape::kCopiesWide && finder.is_own_wide()) {
      return finder.own_rows(side.wide_rows(), side.wide_head());
    }
    return finder.own_rows(side.rows().codes, side.walk.head);
  }
  // Starts the copies of the finder's tile.
  __device__ static void copy(const PrefillSideWalk<Shape>& side, const GroupFinder<Shape>& finder,
                              const uint8_t* own, uint32_t to) {
    if (Shape::kCopiesWide && finder.has_wide()) {
      copy_groups<true>(side, finder, own, to);
    } else {
      copy_groups<false>(side, finder, own, to);
    }
  }

 private:
  // MayBeWide: tokens of some groups.
  template <bool MayBeWide>
  __device__ static void copy_groups(const PrefillSideWalk<Shape>& side,
                                     const GroupFinder<Shape>& finder, const uint8_t* own,
                                     uint32_t to) {
    const int chunk = side.thread() % kChunks;
    const int row = side.thread() / kChunks;  // of the first rows
    // Behind the end of shorter rows none is there.
    int wanted[kPasses];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      wanted[p] = (p * kChunks + chunk) * 16 < side.facts().code_bytes ? row : kTileTokens;
    }
    const TileRegion& codes = side.rows().codes;
    to += chunk / 8 * Shape::kBlockBytes + wgmma_chunk(row, chunk % 8);
#pragma unroll
    for (int first = 0; first < Shape::kTokens; first += kTileTokens) {
      const int group = first / kTileTokens;
      const bool is_wide = MayBeWide && finder.is_wide(group);
      const int64_t stride = is_wide ? side.wide_rows().token_stride : codes.token_stride;
      const uint8_t* from = finder.rows_of(group, own) + row * stride + chunk * 16;
      const int num_tokens = finder.num_tokens(group);
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

// A unit: one side of 64 tokens. Its packed rows go by cp.async to where the thread that asked for
// them reads them again: no other has to wait for it.
inline constexpr int kUnitTokens = 64;
inline constexpr int kUnitPasses = 4;  // of 16 bytes of codes a thread, at most

// How a side's packed rows are shared out among the producing threads. A chunk of codes is two or
// four chunks of the tile; eight lanes take chunks of 64 channels in two or four rows, so that what
// they store at once lies in all banks.
template <class Shape, int Bits>
struct PackedRows {
  static constexpr int kTileChunks = 16 / Bits;    // of a chunk of 16 bytes
  static constexpr int kChunks = 8 / kTileChunks;  // of 64 channels
  static constexpr int kRowsOfEight = 8 / kChunks;
  static constexpr int kEights = kWarpgroup / 8 / Shape::kBlocksAtOnce;  // of lanes
  static constexpr int kRowsAtOnce = kEights * kRowsOfEight;
  static constexpr int kPasses = kUnitTokens / kRowsAtOnce;
  static_assert(kPasses <= kUnitPasses && kRowsAtOnce % 8 == 0);
  __device__ static int chunk() { return columns() * kChunks + thread() % kChunks; }
  __device__ static int row() {  // of the first pass
    return thread() / 8 / Shape::kBlocksAtOnce * kRowsOfEight + thread() / kChunks % kRowsOfEight;
  }
  // Where it begins to store; its next chunk i lies at the same place ^ 16 i.
  __device__ static uint32_t in_tile() {
    return columns() * Shape::kBlockBytes + wgmma_chunk(row(), thread() % kChunks * kTileChunks);
  }

 private:
  __device__ static unsigned thread() { return threadIdx.x % kWarpgroup; }
  __device__ static int columns() {  // which 64
    return thread() / 8 % Shape::kBlocksAtOnce;
  }
};

// Bytes of group scales that a chunk of codes has, where they go into the tile.
__device__ inline int scale_bytes_of_chunk(format::FormatId id) {
  using format::FormatId;
  if (id == FormatId::kMxfp4) return 1;
  return id == FormatId::kNvfp4 || id == FormatId::kMxfp4G16 ? 2 : 0;
}

// What multiplies a token's codes, by parts of the row, and what is added then.
struct TokenScales {
  float scale[2];
  float zero;
};

// Calls visit(Element{}, From{}): how a format's codes are decoded, and its scales that go into the
// tile.
template <class Shape, class Visit>
__device__ inline void visit_packed(const CudaSide& side, Visit&& visit) {
  using format::FormatId;
  if constexpr (Shape::kScalesScores) {
    switch (side.id) {
      case FormatId::kFp8E4M3:
        return visit(TileE4M3{}, NoScale{});
      case FormatId::kFp8E5M2:
        return visit(TileE5M2{}, NoScale{});
      case FormatId::kInt8:
        return visit(TileInt8{}, NoScale{});
      case FormatId::kInt8Affine:
        return visit(TileUInt8{}, NoScale{});
      case FormatId::kInt4:
        return visit(TileInt4{}, NoScale{});
      default:
        return visit(TileUInt4{}, NoScale{});
    }
  } else {
    switch (side.id) {
      case FormatId::kFp8E4M3:
        return visit(TileE4M3{}, NoScale{});
      case FormatId::kFp8E5M2:
        return visit(TileE5M2{}, NoScale{});
      case FormatId::kNvfp4:
        if (side.view.in_cells) return visit(TileE2M1Cells{}, FromE4M3Raised{});
        return visit(TileE2M1{}, FromE4M3{});
      default:
        if (side.view.in_cells) return visit(TileE2M1Cells{}, FromE8M0Raised<6>{});
        return visit(TileE2M1{}, FromE8M0{});
    }
  }
}

// Where the group of a lane lies: its codes, and the scales that come with them.
struct GroupRows {
  const uint8_t* codes;
  const uint8_t* scales;
};

// Units of a side on their way. finder: of the tile whose rows are asked for.
template <class Shape>
class PackedUnits {
 public:
  __device__ PackedUnits(const PrefillSideWalk<Shape>& side, const GroupFinder<Shape>& finder)
      : side_(side), ring_(side.ring), finder_(finder) {}

  // Of this lane's group; the same until the finder has others.
  __device__ GroupRows own_rows() const {
    const TileRegion& scales = Shape::kScalesScores ? token_scale_region() : side_.rows().scales;
    const int head = side_.walk.head;
    return {finder_.own_rows(side_.rows().codes, head), finder_.own_rows(scales, head)};
  }
  // Starts the copies of a unit of the finder's tile.
  template <int Bits>
  __device__ void copy(int unit, uint32_t raw, const GroupRows& own) const {
    copy_rows<Bits>(unit, raw, own);
    if constexpr (Shape::kScalesScores) {
      if (side_.side == 0) copy_token_scales(unit, raw, own.scales);
    }
  }
  // What this thread has copied goes into the tile.
  template <class Element, class From>
  __device__ void decode(uint32_t raw, int tile, int unit) const {
    decode_rows<Element, From>(raw, ring_.tile(side_.side, tile) + unit * kUnitTokens * 128);
    if constexpr (Shape::kScalesScores) {
      if (side_.side == 0) store_token_scales(raw, tile, unit);
    }
  }

  // slot: of the side's kRawUnits.
  __device__ uint32_t raw_unit(int slot) const {
    return ring_.shared + Shape::kRaw +
           (side_.side * Shape::kRawUnits + slot) * Shape::kRawUnitBytes;
  }

 private:
  // This thread's parts of a unit.
  __device__ static uint32_t raw_codes(uint32_t raw, int pass) {
    return raw + pass * kWarpgroup * 16 + PrefillSideWalk<Shape>::thread() * 16;
  }
  __device__ static uint32_t raw_scales(uint32_t raw, int pass) {
    return raw + Shape::kRawCodeBytes + pass * kWarpgroup * 4 +
           PrefillSideWalk<Shape>::thread() * 4;
  }

  template <int Bits>
  __device__ void copy_rows(int unit, uint32_t raw, const GroupRows& own) const {
    using Rows = PackedRows<Shape, Bits>;
    const TileRegion& codes = side_.rows().codes;
    const TileRegion& scales = side_.rows().scales;
    constexpr bool kHasScales = Bits == 4 && !Shape::kScalesScores;
    // A thread's rows of all passes are the same one of their groups, and a warp's are of one.
    static_assert(Rows::kRowsAtOnce % kTileTokens == 0);
    const int in_group = Rows::row() % kTileTokens;
    const int first_group = unit * (kUnitTokens / kTileTokens) + Rows::row() / kTileTokens;
    const int mine = in_group * codes.token_stride + Rows::chunk() * 16;
    // Which of a group's tokens it needs: behind the end of shorter rows none are there.
    const bool is_in_row = Rows::chunk() * 16 < side_.facts().code_bytes;
    const int wanted = is_in_row ? in_group : kTileTokens;
    [[maybe_unused]] int my_scales = 0;
    if constexpr (kHasScales) {  // the word that they lie in
      my_scales = (in_group * scales.token_stride +
                   Rows::chunk() * scale_bytes_of_chunk(side_.facts().id)) &
                  ~3;
    }
#pragma unroll
    for (int p = 0; p < Rows::kPasses; ++p) {
      const int group = first_group + p * (Rows::kRowsAtOnce / kTileTokens);
      const bool is_there = wanted < finder_.num_tokens(group);
      copy_async_16(raw_codes(raw, p), finder_.rows_of(group, own.codes) + mine, is_there ? 16 : 0);
      if constexpr (kHasScales) {
        copy_async_4(raw_scales(raw, p), finder_.rows_of(group, own.scales) + my_scales,
                     is_there ? 4 : 0);
      }
    }
  }

  // With K's rows: threads 0 to 63 have K's scales of a token each, the others V's.
  __device__ static int token_scale_row() {
    return PrefillSideWalk<Shape>::thread() % kUnitTokens;
  }
  __device__ static bool has_value_scales() {
    return PrefillSideWalk<Shape>::thread() >= kUnitTokens;  // the same in a warp
  }
  __device__ const TileRegion& token_scale_region() const {
    return has_value_scales() ? side_.walk.job.tile_v.scales : side_.walk.job.tile_k.scales;
  }
  __device__ static uint32_t token_scale_word(uint32_t raw) {
    return raw + Shape::kRawCodeBytes + PrefillSideWalk<Shape>::thread() * 4;
  }
  __device__ void copy_token_scales(int unit, uint32_t raw, const uint8_t* own) const {
    const int row = token_scale_row();
    const int group = (unit * kUnitTokens + row) / kTileTokens;  // a lane's own, of the tile's
    const bool is_there = row % kTileTokens < finder_.num_tokens(group);
    const int in_rows = row % kTileTokens * token_scale_region().token_stride;
    copy_async_4(token_scale_word(raw), finder_.rows_of(group, own) + (in_rows & ~3),
                 is_there ? 4 : 0);
  }
  // Rows of two bytes share a word.
  __device__ uint32_t token_scale_bits(uint32_t raw) const {
    const int in_rows = token_scale_row() % kTileTokens * token_scale_region().token_stride;
    return load_shared_4(token_scale_word(raw)) >> (in_rows % 4 * 8);
  }

  // centre: what tiles have subtracted from the codes.
  __device__ static TokenScales affine_scales(const CudaSide& side, uint32_t bits, float centre) {
    float2 params = __half22float2(reinterpret_cast<const __half2&>(bits));
    if (side.view.spec.scale_type == format::ScaleType::kBF16) {
      params = {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
    }
    return {{params.x, params.x}, fmaf(centre, params.x, params.y)};
  }
  __device__ static TokenScales token_scales_of(const CudaSide& side, uint32_t bits) {
    using format::FormatId;
    const float2 halves = __half22float2(reinterpret_cast<const __half2&>(bits));
    switch (side.id) {
      case FormatId::kFp8E4M3:
      case FormatId::kFp8E5M2:
        return {{__uint_as_float(bits), __uint_as_float(bits)}, 0.0f};
      case FormatId::kInt8Affine:
        return affine_scales(side, bits, TileUInt8::kMiddle);
      case FormatId::kInt4Affine:
        return affine_scales(side, bits, TileUInt4::kMiddle);
      default:  // rows of 64 numbers and less have one
        return {{halves.x, side.view.head_dim > 64 ? halves.y : 0.0f}, 0.0f};
    }
  }

  template <class Element, class From>
  __device__ void decode_rows(uint32_t raw, uint32_t to) const {
    using Rows = PackedRows<Shape, Element::kBits>;
    constexpr bool kHasScales = !std::is_same_v<From, NoScale>;
    to += Rows::in_tile();  // a tile lies on 1024 bytes
    // Of the word that they lie in: the same in all passes.
    [[maybe_unused]] int scales_at = 0, scale_bytes = 2;
    if constexpr (kHasScales) {
      if constexpr (!std::is_same_v<From, FromE4M3>) {
        scale_bytes = scale_bytes_of_chunk(side_.facts().id);
      }
      const int in_row = Rows::row() % kTileTokens * side_.rows().scales.token_stride;
      scales_at = 8 * ((in_row + Rows::chunk() * scale_bytes) & 3);
    }
    uint4 codes[Rows::kPasses];  // all are asked for before the first is used
    [[maybe_unused]] uint32_t group_scales[Rows::kPasses];
#pragma unroll
    for (int p = 0; p < Rows::kPasses; ++p) {
      codes[p] = load_shared_16(raw_codes(raw, p));
      if constexpr (kHasScales) group_scales[p] = load_shared_4(raw_scales(raw, p));
    }
#pragma unroll
    for (int p = 0; p < Rows::kPasses; ++p) {
      const uint32_t words[4] = {codes[p].x, codes[p].y, codes[p].z, codes[p].w};
      [[maybe_unused]] Two scales = {};
      if constexpr (kHasScales) {
        const uint32_t bytes = group_scales[p] >> scales_at;
        scales = From::f16x2(__byte_perm(bytes, 0, scale_bytes == 1 ? 0x0000 : 0x1100));
      }
#pragma unroll
      for (int i = 0; i < Rows::kTileChunks; ++i) {
        Four x;
        if constexpr (Element::kBits == 8) {
          const Two low = Element::for_values(words[2 * i]);
          const Two high = Element::for_values(words[2 * i + 1]);
          x = {low.a, low.b, high.a, high.b};
        } else {
          x = Element::for_values(words[i]);
        }
        if constexpr (kHasScales) {
          const uint32_t scale = i < 2 ? scales.a : scales.b;
#pragma unroll
          for (int j = 0; j < 4; ++j) x.r[j] = multiply_f16x2(x.r[j], scale);
        }
        store_chunk((to ^ (16 * i)) + p * Rows::kRowsAtOnce * 128, x);
      }
    }
  }

  __device__ void store_token_scales(uint32_t raw, int tile, int unit) const {
    using Ring = PrefillRing<Shape>;
    const AttendJob& job = side_.walk.job;
    const int row = token_scale_row();
    const int token = unit * kUnitTokens + row;
    const CudaSide& facts = has_value_scales() ? job.packed.v : job.packed.k;
    const TokenScales scales = token_scales_of(facts, token_scale_bits(raw));
    const int zero = has_value_scales() ? Ring::kValueZero : Ring::kKeyZero;
    store_shared(ring_.token_scales(tile, zero) + place_of_token(token), scales.zero);
    if (!has_value_scales()) {
      store_key_scales(ring_, tile, token, scales.scale[0], scales.scale[1]);
      return;
    }
    float largest = 0;
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) {
      store_shared(ring_.token_scales(tile, Ring::kValueScale + i) + place_of_token(token),
                   scales.scale[i]);
      largest = fmaxf(largest, fabsf(scales.scale[i]));
    }
    // Numbers that are not negative have the order of their bits.
    const uint32_t top = __reduce_max_sync(kWholeWarp, __float_as_uint(largest));
    if (row % kWarp == 0) {
      store_shared(ring_.tops(tile) + 4 * (unit * 2 + row / kWarp), __uint_as_float(top));
    }
  }

  const PrefillSideWalk<Shape>& side_;
  const PrefillRing<Shape>& ring_;
  const GroupFinder<Shape>& finder_;
};

}  // namespace kvx::ops::cuda
