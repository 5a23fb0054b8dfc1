// The prefill kernel's producing warpgroup: blocks of the cache into rings of 16-bit tiles. Rows of
// 16 bits are copied (cp.async), packed ones decoded on the way, once for 128 query rows.
#pragma once

#include "ops/attend/cuda/prefill_shape.cuh"
#include "ops/attend/cuda/tile_scales.cuh"

namespace kvx::ops::cuda {

// Where 16 tokens of a tile lie, in the lane that has the group's number. None are there before the
// split's first token, behind its last, and in a block whose id is out of range.
struct GroupsAt {
  uint32_t block;
  int offset;      // tokens into the block
  int num_tokens;  // that are there

  __device__ GroupsAt of_group(int group) const {
    return {__shfl_sync(kWholeWarp, block, group), __shfl_sync(kWholeWarp, offset, group),
            __shfl_sync(kWholeWarp, num_tokens, group)};
  }
};

template <class Shape>
class GroupFinder {
 public:
  __device__ GroupFinder(const PrefillWalk& walk, const PrefillRing<Shape>& ring)
      : walk_(walk), ring_(ring), lane_(threadIdx.x % kWarp) {
    next_id_ = load_id(0);
  }

  // Of the next tile; its ids were asked for a tile ago.
  __device__ GroupsAt next() {
    const int32_t id = next_id_;
    const int first = token(tile_);
    const bool is_wanted = is_read(tile_);
    const bool is_there = is_wanted && id >= 0 && id < walk_.job.num_packed_blocks;
    missing_ = __ballot_sync(kWholeWarp, is_wanted && !is_there);
    if (missing_ != 0 && threadIdx.x == 0) {
      atomicAdd(&walk_.job.findings->out_of_range, static_cast<unsigned long long>(__popc(missing_)));
    }
    const int group = first / kTileTokens;
    const GroupsAt at = {static_cast<uint32_t>(id),
                         group % walk_.job.tiles_per_block * kTileTokens,
                         is_there ? min(kTileTokens, walk_.tokens.end - first) : 0};
    ++tile_;
    next_id_ = load_id(tile_);
    return at;
  }
  // For the consumers: bits of the last tile's groups whose blocks are not there.
  __device__ void say_missing(int tile) const {
    if (threadIdx.x != 0) return;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(ring_.missing(tile)), "r"(missing_) : "memory");
  }

 private:
  __device__ int token(int tile) const {
    return walk_.first_token + tile * Shape::kTokens + lane_ * kTileTokens;
  }
  __device__ bool is_read(int tile) const {
    const int first = token(tile);
    return lane_ < Shape::kTokens / kTileTokens && first < walk_.tokens.end &&
           first + kTileTokens > walk_.tokens.begin;
  }
  __device__ int32_t load_id(int tile) const {
    return is_read(tile) ? walk_.ids[token(tile) / kTileTokens / walk_.job.tiles_per_block] : -1;
  }

  const PrefillWalk& walk_;
  const PrefillRing<Shape>& ring_;
  int lane_;
  int tile_ = 0;
  int32_t next_id_;
  uint32_t missing_ = 0;
};

// Rows of 16 bits: a side of a tile is a group of copies, of which the last is under way while the
// next is asked for.
template <class Shape>
class CopyFiller {
 public:
  __device__ static void run(const PrefillWalk& walk, const PrefillRing<Shape>& ring) {
    GroupFinder<Shape> finder(walk, ring);
    for (int tile = 0; tile < walk.num_tiles; ++tile) {
      const GroupsAt groups = finder.next();
      ring.wait_free(0, tile);
      copy(walk, walk.job.tile_k, groups, ring.keys(tile));
      commit_copies();
      if (tile > 0) {
        wait_for_copies<1>();
        ring.fill(1, tile - 1);
      }
      ring.wait_free(1, tile);
      copy(walk, walk.job.tile_v, groups, ring.values(tile));
      commit_copies();
      wait_for_copies<1>();
      finder.say_missing(tile);
      ring.fill(0, tile);
    }
    wait_for_copies<0>();
    ring.fill(1, walk.num_tiles - 1);
  }

 private:
  static constexpr int kChunks = Shape::kDim / 8;
  static constexpr int kRowsAtOnce = kWarpgroup / kChunks;

  __device__ static void copy(const PrefillWalk& walk, const TileSide& side, const GroupsAt& groups,
                              uint32_t to) {
    const int thread = threadIdx.x;
    const int chunk = thread % kChunks;
    const int row = thread / kChunks;  // of the first rows
    const TileRegion& codes = side.codes;
    const uint8_t* head = codes.base + int64_t{walk.head} * codes.head_stride + chunk * 16;
    to += chunk / 8 * Shape::kBlockBytes + wgmma_chunk(row, chunk % 8);
#pragma unroll
    for (int first = 0; first < Shape::kTokens; first += kTileTokens) {
      const GroupsAt at = groups.of_group(first / kTileTokens);
      const uint8_t* from =
          head + uint64_t{at.block} * codes.block_stride + (at.offset + row) * codes.token_stride;
#pragma unroll
      for (int r = 0; r < kTileTokens; r += kRowsAtOnce) {
        const bool is_there = row + r < at.num_tokens;
        copy_async_16(to + (first + r) * 128, is_there ? from + r * codes.token_stride : head,
                      is_there ? 16 : 0);
      }
    }
  }
};

// Affine codes less 128 or 8, the middle of what they can be: a sum over large positive numbers that
// the zero takes away again would lose digits.
using CentredUInt8 = TileInteger8<0u, 0xE480E480u>;                // -(1024 + 128)
using CentredUInt4 = TileInteger4<0u, 0xE408E408u, 0xD480D480u>;  // -1032, -(64 + 8)

// A unit: one side of 64 tokens, 16 bytes of codes a thread and pass.
inline constexpr int kUnitTokens = 64;

// How a side's packed rows are shared out among the producing threads.
struct PackedRows {
  int bits;
  int log2_chunks;      // of 16 bytes, in a row
  int log2_scale_bytes;  // of a chunk, where scales go into the tile; -1: they do not

  __device__ int rows_at_once() const { return kWarpgroup >> log2_chunks; }
  __device__ int num_passes() const { return kUnitTokens / rows_at_once(); }
  __device__ int chunk() const { return threadIdx.x & ((1 << log2_chunks) - 1); }
  __device__ int row() const { return threadIdx.x >> log2_chunks; }
};

template <class Shape>
__device__ inline PackedRows packed_rows(format::FormatId id) {
  using format::FormatId;
  const int bits = bits_of(id);
  const bool has_bytes = id == FormatId::kNvfp4 || id == FormatId::kMxfp4G16;
  return {bits, Shape::kDim / 128 + (bits == 8 ? 2 : 1),
          has_bytes ? 1 : id == FormatId::kMxfp4 ? 0 : -1};
}

// What a thread reads of a unit, ahead of its decoding.
struct PackedUnit {
  static constexpr int kPasses = 4;
  uint4 codes[kPasses];
  uint32_t scales[kPasses];
  uint32_t token_scales[2];  // K's and V's of a token, where they go to scores and weights
};

// A token's scales, and what is added to its numbers.
struct TokenScales {
  float scale[2];
  float zero;
};

template <class Shape>
class DecodeFiller {
 public:
  __device__ static void run(const PrefillWalk& walk, const PrefillRing<Shape>& ring) {
    DecodeFiller filler(walk, ring);
    filler.fill_all();
  }

 private:
  static constexpr int kUnits = Shape::kTokens / kUnitTokens;  // of a side of a tile
  static constexpr int kRowChunks = Shape::kDim / 8;           // of a tile

  __device__ DecodeFiller(const PrefillWalk& walk, const PrefillRing<Shape>& ring)
      : walk_(walk), job_(walk.job), ring_(ring), finder_(walk, ring) {}

  __device__ void fill_all() {
    GroupsAt groups = finder_.next();
    PackedUnit ahead = load(0, 0, groups);
#pragma unroll 1
    for (int u = 0; u < walk_.num_tiles * 2 * kUnits; ++u) {
      const int tile = u / (2 * kUnits);
      const int side = u / kUnits % 2;
      const int unit = u % kUnits;
      const PackedUnit now = ahead;
      if (side == 0 && unit == 0) {
        ring_.wait_free(0, tile);
        finder_.say_missing(tile);
      }
      if (side == 1 && unit == 0) ring_.wait_free(1, tile);
      const int next = u + 1;
      if (next % (2 * kUnits) == 0) groups = finder_.next();
      if (next < walk_.num_tiles * 2 * kUnits) {
        ahead = load(next / kUnits % 2, next % kUnits, groups);
      }
      decode(now, side, tile, unit);
      if (unit == kUnits - 1) ring_.fill(side, tile);
    }
  }

  __device__ const CudaSide& side_of(int side) const {
    return side == 0 ? job_.packed.k : job_.packed.v;
  }

  __device__ PackedUnit load(int side, int unit, const GroupsAt& groups) const {
    const TileSide& from = side == 0 ? job_.tile_k : job_.tile_v;
    const PackedRows rows = packed_rows<Shape>(side_of(side).id);
    PackedUnit raw = {};
    const uint8_t* codes =
        from.codes.base + int64_t{walk_.head} * from.codes.head_stride + rows.chunk() * 16;
    const uint8_t* scales = from.scales.base + int64_t{walk_.head} * from.scales.head_stride +
                            (rows.chunk() << max(rows.log2_scale_bytes, 0));
#pragma unroll
    for (int p = 0; p < PackedUnit::kPasses; ++p) {
      if (p >= rows.num_passes()) break;
      const int row = rows.row() + p * rows.rows_at_once();  // a warp's are of one group
      const GroupsAt at = groups.of_group((unit * kUnitTokens + row) / kTileTokens);
      const int in_group = row % kTileTokens;
      if (in_group >= at.num_tokens) continue;
      raw.codes[p] = __ldg(reinterpret_cast<const uint4*>(
          codes + uint64_t{at.block} * from.codes.block_stride +
          (at.offset + in_group) * from.codes.token_stride));
      if (rows.log2_scale_bytes < 0) continue;
      const uint8_t* s = scales + uint64_t{at.block} * from.scales.block_stride +
                         (at.offset + in_group) * from.scales.token_stride;
      raw.scales[p] =
          rows.log2_scale_bytes == 0 ? *s : uint32_t{*reinterpret_cast<const uint16_t*>(s)};
    }
    if constexpr (Shape::kScalesScores) {
      if (side == 1) load_token_scales(unit, groups, raw);
    }
    return raw;
  }

  // Threads 0 to 63: a token each. Both sides' come with V's unit and leave with it.
  __device__ void load_token_scales(int unit, const GroupsAt& groups, PackedUnit& raw) const {
    const int row = threadIdx.x;
    if (row >= kUnitTokens) return;
    const GroupsAt at = groups.of_group((unit * kUnitTokens + row) / kTileTokens);
    const int in_group = row % kTileTokens;
    if (in_group >= at.num_tokens) return;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const TileRegion& from = s == 0 ? job_.tile_k.scales : job_.tile_v.scales;
      if (!has_token_scales(side_of(s).id)) continue;
      const uint8_t* at_token = from.base + int64_t{walk_.head} * from.head_stride +
                                uint64_t{at.block} * from.block_stride +
                                (at.offset + in_group) * from.token_stride;
      raw.token_scales[s] = is_half_word(side_of(s).id)
                                ? uint32_t{*reinterpret_cast<const uint16_t*>(at_token)}
                                : *reinterpret_cast<const uint32_t*>(at_token);
    }
  }
  __device__ static bool has_token_scales(format::FormatId id) {
    using format::FormatId;
    return id != FormatId::kNvfp4 && id != FormatId::kMxfp4 && id != FormatId::kMxfp4G16;
  }
  // One f16 scale a row.
  __device__ static bool is_half_word(format::FormatId id) {
    using format::FormatId;
    return Shape::kDim == 64 && (id == FormatId::kInt8 || id == FormatId::kInt4);
  }

  // centre: what tiles have subtracted from the codes.
  __device__ static TokenScales affine_scales(const CudaSide& side, uint32_t bits, float centre) {
    float2 params = __half22float2(reinterpret_cast<const __half2&>(bits));
    if (side.view.spec.scale_type == format::ScaleType::kBF16) {
      params = {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
    }
    return {{params.x, params.x}, fmaf(centre, params.x, params.y)};
  }
  __device__ TokenScales token_scales_of(const CudaSide& side, uint32_t bits) const {
    using format::FormatId;
    const float2 halves = __half22float2(reinterpret_cast<const __half2&>(bits));
    switch (side.id) {
      case FormatId::kFp8E4M3:
      case FormatId::kFp8E5M2: return {{__uint_as_float(bits), __uint_as_float(bits)}, 0.0f};
      case FormatId::kInt8:
      case FormatId::kInt4: return {{halves.x, halves.y}, 0.0f};
      case FormatId::kInt8Affine: return affine_scales(side, bits, 128.0f);
      case FormatId::kInt4Affine: return affine_scales(side, bits, 8.0f);
      default: return {{1.0f, 1.0f}, 0.0f};
    }
  }

  __device__ void decode(const PackedUnit& raw, int side, int tile, int unit) const {
    using format::FormatId;
    const uint32_t to = (side == 0 ? ring_.keys(tile) : ring_.values(tile)) + unit * kUnitTokens * 128;
    const FormatId id = side_of(side).id;
    if constexpr (Shape::kScalesScores) {
      if (side == 1) store_token_scales(raw, tile, unit);
      switch (id) {
        case FormatId::kFp8E4M3: return decode_codes<TileE4M3, NoScale>(raw, id, to);
        case FormatId::kFp8E5M2: return decode_codes<TileE5M2, NoScale>(raw, id, to);
        case FormatId::kInt8: return decode_codes<TileInt8, NoScale>(raw, id, to);
        case FormatId::kInt8Affine: return decode_codes<CentredUInt8, NoScale>(raw, id, to);
        case FormatId::kInt4: return decode_codes<TileInt4, NoScale>(raw, id, to);
        default: return decode_codes<CentredUInt4, NoScale>(raw, id, to);
      }
    } else {
      switch (id) {
        case FormatId::kFp8E4M3: return decode_codes<TileE4M3, NoScale>(raw, id, to);
        case FormatId::kFp8E5M2: return decode_codes<TileE5M2, NoScale>(raw, id, to);
        case FormatId::kNvfp4: return decode_codes<TileE2M1, FromE4M3>(raw, id, to);
        default: return decode_codes<TileE2M1, FromE8M0>(raw, id, to);
      }
    }
  }

  // A chunk of codes is two chunks of the tile, or four. Eight lanes that store at once hit all
  // banks: lanes in the upper 64 channels take their chunks in another order.
  template <class Element, class From>
  __device__ void decode_codes(const PackedUnit& raw, format::FormatId id, uint32_t to) const {
    constexpr int kChunks = Element::kBits == 8 ? 2 : 4;  // of the tile
    const PackedRows rows = packed_rows<Shape>(id);
    const int first = rows.chunk() * kChunks;
    const int turn = first >= 8 ? kChunks / 2 : 0;
    const bool is_wide_group = id == format::FormatId::kMxfp4;
#pragma unroll
    for (int p = 0; p < PackedUnit::kPasses; ++p) {
      if (p >= rows.num_passes()) break;
      const int row = rows.row() + p * rows.rows_at_once();
      const uint32_t words[4] = {raw.codes[p].x, raw.codes[p].y, raw.codes[p].z, raw.codes[p].w};
      Two scales = {};
      if constexpr (!std::is_same_v<From, NoScale>) {
        scales = From::f16x2(__byte_perm(raw.scales[p], 0, is_wide_group ? 0x0000 : 0x1100));
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
          if constexpr (!std::is_same_v<From, NoScale>) {
            const uint32_t scale = (i < 2) != (turn != 0) ? scales.a : scales.b;
#pragma unroll
            for (int j = 0; j < 4; ++j) x.r[j] = multiply_f16x2(x.r[j], scale);
          }
        }
        const int chunk = first + (i ^ turn);
        store_chunk(to + chunk / 8 * Shape::kBlockBytes + wgmma_chunk(row, chunk % 8), x);
      }
    }
  }

  __device__ void store_token_scales(const PackedUnit& raw, int tile, int unit) const {
    const int row = threadIdx.x;
    if (row >= kUnitTokens) return;  // whole warps
    float largest = 0;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const TokenScales scales = token_scales_of(side_of(s), raw.token_scales[s]);
      const int first = s == 0 ? PrefillRing<Shape>::kKeyScale : PrefillRing<Shape>::kValueScale;
      const int zero = s == 0 ? PrefillRing<Shape>::kKeyZero : PrefillRing<Shape>::kValueZero;
      const int at = 4 * (unit * kUnitTokens + row);
#pragma unroll
      for (int i = 0; i < Shape::kParts; ++i) {
        store_float(ring_.token_scales(tile, first + i) + at, scales.scale[i]);
        if (s == 1) largest = fmaxf(largest, fabsf(scales.scale[i]));
      }
      store_float(ring_.token_scales(tile, zero) + at, scales.zero);
    }
    // Numbers that are not negative have the order of their bits.
    const uint32_t top = __reduce_max_sync(kWholeWarp, __float_as_uint(largest));
    if (row % kWarp == 0) {
      store_float(ring_.tops(tile) + 4 * (unit * 2 + row / kWarp), __uint_as_float(top));
    }
  }
  __device__ static void store_float(uint32_t address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
  }

  const PrefillWalk& walk_;
  const AttendJob& job_;
  const PrefillRing<Shape>& ring_;
  GroupFinder<Shape> finder_;
};

}  // namespace kvx::ops::cuda
