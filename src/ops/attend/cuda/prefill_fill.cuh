// How four warps fill a tile of K or V for the prefill kernels: blocks of the cache become 16-bit
// numbers. Rows of 16 bits are copied (cp.async), packed ones decoded on the way, once for 128
// query rows. With wgmma one warpgroup does nothing else for K, and one for V.
#pragma once

#include "ops/attend/cuda/prefill_wide.cuh"
#include "ops/attend/cuda/tile_scales.cuh"

namespace kvx::ops::cuda {

// Where the groups of 16 packed tokens of a tile lie: lane i has group i's place. None are there
// before the split's first token, behind its last, where tokens are wide, and in a block whose id
// is out of range.
template <class Shape>
class GroupFinder {
 public:
  __device__ explicit GroupFinder(const PrefillSideWalk<Shape>& side)
      : side_(side), walk_(side.walk), lane_(static_cast<int>(threadIdx.x) % kWarp) {
    load_id(0);
  }

  // Moves to the next tile, whose ids were asked for a tile ago.
  __device__ void next() {
    const int32_t id = next_id_;
    const int first = token(tile_);
    const bool is_wanted = is_read(tile_);
    const bool is_wide = Shape::kTakesWide && side_.is_wide(first);
    const int64_t num_blocks = is_wide ? walk_.job.num_wide_blocks : walk_.job.num_packed_blocks;
    const bool is_block = is_wanted && id >= 0 && id < num_blocks;
    const bool is_there = is_block && !is_wide;
    const uint32_t missing = __ballot_sync(kWholeWarp, is_wanted && !is_block);
    if (missing != 0 && threadIdx.x == 0) {
      atomicAdd(&walk_.job.findings->out_of_range,
                static_cast<unsigned long long>(__popc(missing)));
    }
    missing_ = (missing_ & ~(0xFFu << shift_of(tile_))) | missing << shift_of(tile_);
    block_ = is_there ? static_cast<uint32_t>(id) : 0;
    offset_ = is_there ? next_offset_ : 0;
    num_tokens_ = is_there ? min(kTileTokens, walk_.tokens.end - first) : 0;
    ++tile_;
    load_id(tile_);
  }
  // Of a group: the bytes from a region's base, in this lane's head, to its first token. In block 0
  // where it is not there.
  __device__ int64_t bytes_to(const TileRegion& region, int group) const {
    const int64_t bytes = static_cast<int64_t>(uint64_t{block_} * region.block_stride) +
                          offset_ * region.token_stride;
    return __shfl_sync(kWholeWarp, bytes, group);
  }
  __device__ int num_tokens(int group) const { return __shfl_sync(kWholeWarp, num_tokens_, group); }
  // For those that multiply. The tile is one of the last four.
  __device__ void say_facts(int tile) const {
    if (threadIdx.x != 0) return;
    uint32_t facts = missing_ >> shift_of(tile) & kMissingGroups;
    if constexpr (Shape::kTakesWide && !Shape::kScalesScores) {
      if (side_.has_wide(tile)) facts |= kHasWideScales;
    }
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(side_.ring.tile_facts(tile)), "r"(facts)
                 : "memory");
  }

 private:
  static_assert(Shape::kTokens / kTileTokens <= 8);
  __device__ static int shift_of(int tile) { return tile % 4 * 8; }
  __device__ int token(int tile) const {
    return walk_.first_token + tile * Shape::kTokens + lane_ * kTileTokens;
  }
  __device__ bool is_read(int tile) const {
    const int first = token(tile);
    return lane_ < Shape::kTokens / kTileTokens && first < walk_.tokens.end &&
           first + kTileTokens > walk_.tokens.begin;
  }
  __device__ void load_id(int tile) {
    next_id_ = -1;
    if (!is_read(tile)) return;
    const int group = token(tile) / kTileTokens;
    const int block = over_tiles_of_block(group);
    next_id_ = walk_.ids[block];
    next_offset_ = (group - block * walk_.job.tiles_per_block) * kTileTokens;
  }

  // A division takes a tenth of the filling loop, and most blocks are powers of two.
  __device__ int over_tiles_of_block(int group) const {
    const int tiles = walk_.job.tiles_per_block;
    return (tiles & (tiles - 1)) == 0 ? group >> (31 - __clz(tiles)) : group / tiles;
  }

  const PrefillSideWalk<Shape> side_;
  const PrefillWalk& walk_;
  int lane_;
  int tile_ = 0;
  int32_t next_id_ = -1;
  int next_offset_ = 0;
  uint32_t missing_ = 0;  // a byte a tile
  uint32_t block_ = 0;
  int offset_ = 0;      // tokens into the block
  int num_tokens_ = 0;  // that are there
};

// Rows of 16 bits.
template <class Shape>
struct TileCopier {
  static constexpr int kChunks = Shape::kDim / 8;
  static constexpr int kRowsAtOnce = kWarpgroup / kChunks;

  // Starts the copies of the finder's tile.
  __device__ static void copy(const PrefillSideWalk<Shape>& side, const GroupFinder<Shape>& finder,
                              uint32_t to) {
    const int chunk = side.thread() % kChunks;
    const int row = side.thread() / kChunks;  // of the first rows
    const TileRegion& codes = side.rows().codes;
    const uint8_t* from = codes.base + int64_t{side.walk.head} * codes.head_stride +
                          int64_t{row} * codes.token_stride + chunk * 16;
    const int64_t rows_on = int64_t{kRowsAtOnce} * codes.token_stride;
    to += chunk / 8 * Shape::kBlockBytes + wgmma_chunk(row, chunk % 8);
#pragma unroll
    for (int first = 0; first < Shape::kTokens; first += kTileTokens) {
      const uint8_t* group = from + finder.bytes_to(codes, first / kTileTokens);
      const int num_tokens = finder.num_tokens(first / kTileTokens);
#pragma unroll
      for (int r = 0; r < kTileTokens; r += kRowsAtOnce) {
        copy_async_16(to + (first + r) * 128, group, row + r < num_tokens ? 16 : 0);
        group += rows_on;
      }
    }
  }
};

// A unit: one side of 64 tokens. Its packed rows go by cp.async to where the thread that asked for
// them reads them again: no other has to wait for it.
inline constexpr int kUnitTokens = 64;
inline constexpr int kUnitPasses = 4;  // of 16 bytes of codes a thread, at most

// How a side's packed rows are shared out among the producing threads.
template <class Shape, int Bits>
struct PackedRows {
  static constexpr int kLog2Chunks = Shape::kDim / 128 + (Bits == 8 ? 2 : 1);  // 16 bytes each
  static constexpr int kRowsAtOnce = kWarpgroup >> kLog2Chunks;                // multiples of 8
  static constexpr int kPasses = kUnitTokens / kRowsAtOnce;
  static_assert(kPasses <= kUnitPasses);
  __device__ static int chunk() { return threadIdx.x & ((1 << kLog2Chunks) - 1); }
  __device__ static int row() {
    return threadIdx.x % kWarpgroup >> kLog2Chunks;
  }  // of the first pass
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

// Units of a side on their way. finder: of the tile whose rows are asked for.
template <class Shape>
class PackedUnits {
 public:
  __device__ PackedUnits(const PrefillSideWalk<Shape>& side, const GroupFinder<Shape>& finder)
      : side_(side), ring_(side.ring), finder_(finder) {}

  // Starts the copies of a unit of the finder's tile.
  template <int Bits>
  __device__ void copy(int unit, uint32_t raw) const {
    copy_rows<Bits>(unit, raw);
    if constexpr (Shape::kScalesScores) {
      if (side_.side == 0) copy_token_scales(unit, raw);
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

  __device__ uint32_t raw_unit(int u) const {
    return ring_.shared + Shape::kRaw +
           (side_.side * Shape::kRawUnits + u % Shape::kRawUnits) * Shape::kRawUnitBytes;
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
  __device__ void copy_rows(int unit, uint32_t raw) const {
    using Rows = PackedRows<Shape, Bits>;
    const TileRegion& codes = side_.rows().codes;
    const TileRegion& scales = side_.rows().scales;
    const uint8_t* head =
        codes.base + int64_t{side_.walk.head} * codes.head_stride + Rows::chunk() * 16;
    [[maybe_unused]] const uint8_t* head_scales =
        scales.base + int64_t{side_.walk.head} * scales.head_stride;
    [[maybe_unused]] const int scale_bytes = scale_bytes_of_chunk(side_.facts().id);
#pragma unroll
    for (int p = 0; p < Rows::kPasses; ++p) {
      const int row = Rows::row() + p * Rows::kRowsAtOnce;  // a warp's rows are of one group
      const int group = (unit * kUnitTokens + row) / kTileTokens;
      const int in_group = row % kTileTokens;
      const bool is_there = in_group < finder_.num_tokens(group);
      copy_async_16(raw_codes(raw, p),
                    head + (finder_.bytes_to(codes, group) + in_group * codes.token_stride),
                    is_there ? 16 : 0);
      if constexpr (Bits == 4 && !Shape::kScalesScores) {  // the word that they lie in
        const int in_row = in_group * scales.token_stride + Rows::chunk() * scale_bytes;
        copy_async_4(raw_scales(raw, p),
                     head_scales + (finder_.bytes_to(scales, group) + (in_row & ~3)),
                     is_there ? 4 : 0);
      }
    }
  }

  // Threads 0 to 63: a token each, K's scales and V's, with K's rows.
  __device__ void copy_token_scales(int unit, uint32_t raw) const {
    const int row = side_.thread();
    if (row >= kUnitTokens) return;  // whole warps
    const int group = (unit * kUnitTokens + row) / kTileTokens;
    const bool is_there = row % kTileTokens < finder_.num_tokens(group);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const TileRegion& from = scales_of(s);
      const uint8_t* head = from.base + int64_t{side_.walk.head} * from.head_stride;
      const int in_rows = row % kTileTokens * from.token_stride;
      copy_async_4(token_scale_word(raw, s),
                   head + (finder_.bytes_to(from, group) + (in_rows & ~3)), is_there ? 4 : 0);
    }
  }
  __device__ const TileRegion& scales_of(int side) const {
    return side == 0 ? side_.walk.job.tile_k.scales : side_.walk.job.tile_v.scales;
  }
  __device__ static uint32_t token_scale_word(uint32_t raw, int side) {
    return raw + Shape::kRawCodeBytes + (side * kUnitTokens + PrefillSideWalk<Shape>::thread()) * 4;
  }
  // Rows of two bytes share a word.
  __device__ uint32_t token_scale_bits(uint32_t raw, int side) const {
    const int row = side_.thread() % kTileTokens;
    return load_shared_4(token_scale_word(raw, side)) >>
           (row * scales_of(side).token_stride % 4 * 8);
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
      default:
        return {{halves.x, halves.y}, 0.0f};
    }
  }

  // A chunk of codes is two chunks of the tile, or four. Eight lanes that store at once hit all
  // banks: lanes in the upper 64 channels take their chunks in another order.
  template <class Element, class From>
  __device__ void decode_rows(uint32_t raw, uint32_t to) const {
    using Rows = PackedRows<Shape, Element::kBits>;
    constexpr bool kHasScales = !std::is_same_v<From, NoScale>;
    constexpr int kChunks = Element::kBits == 8 ? 2 : 4;  // of the tile
    const int first = Rows::chunk() * kChunks;
    const int turn = first >= 8 ? kChunks / 2 : 0;
    uint32_t places[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = first + (i ^ turn);
      places[i] = to + chunk / 8 * Shape::kBlockBytes + wgmma_chunk(Rows::row(), chunk % 8);
    }
    [[maybe_unused]] const int scale_bytes = scale_bytes_of_chunk(side_.facts().id);
    [[maybe_unused]] const int scale_stride = side_.rows().scales.token_stride;
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
        const int row = Rows::row() + p * Rows::kRowsAtOnce;
        const int in_word = (row % kTileTokens * scale_stride + Rows::chunk() * scale_bytes) % 4;
        const uint32_t bytes = group_scales[p] >> (8 * in_word);
        scales = From::f16x2(__byte_perm(bytes, 0, scale_bytes == 1 ? 0x0000 : 0x1100));
      }
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int other = i ^ (kChunks / 2);
        Four x;
        if constexpr (Element::kBits == 8) {
          const Two low = Element::for_values(turn ? words[2 * other] : words[2 * i]);
          const Two high = Element::for_values(turn ? words[2 * other + 1] : words[2 * i + 1]);
          x = {low.a, low.b, high.a, high.b};
        } else {
          x = Element::for_values(turn ? words[other] : words[i]);
        }
        if constexpr (kHasScales) {
          const uint32_t scale = (i < 2) != (turn != 0) ? scales.a : scales.b;
#pragma unroll
          for (int j = 0; j < 4; ++j) x.r[j] = multiply_f16x2(x.r[j], scale);
        }
        store_chunk(places[i] + p * Rows::kRowsAtOnce * 128, x);
      }
    }
  }

  __device__ void store_token_scales(uint32_t raw, int tile, int unit) const {
    using Ring = PrefillRing<Shape>;
    const int row = side_.thread();
    if (row >= kUnitTokens) return;  // whole warps
    const AttendJob& job = side_.walk.job;
    const TokenScales k = token_scales_of(job.packed.k, token_scale_bits(raw, 0));
    const TokenScales v = token_scales_of(job.packed.v, token_scale_bits(raw, 1));
    const int token = unit * kUnitTokens + row;
    const int at = 4 * token;
    store_key_scales(ring_, tile, token, k.scale[0], k.scale[1]);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) {
      store_shared(ring_.token_scales(tile, Ring::kValueScale + i) + at, v.scale[i]);
      largest = fmaxf(largest, fabsf(v.scale[i]));
    }
    store_shared(ring_.token_scales(tile, Ring::kKeyZero) + at, k.zero);
    store_shared(ring_.token_scales(tile, Ring::kValueZero) + at, v.zero);
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
