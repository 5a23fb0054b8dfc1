// The full-precision tokens of a prefill tile beside packed ones: rows of bf16 that become f16,
// exactly but for digits 2^-24 below a row's largest number. A power of two brings a row into f16's
// range and is the token's scale, which goes to its scores and its weights.
#pragma once

#include "ops/attend/cuda/prefill/shape.cuh"

namespace kvx::ops::cuda {

// What one warpgroup fills.
template <class Shape>
struct PrefillSideWalk {
  const PrefillWalk& walk;
  const PrefillRing<Shape>& ring;
  int side;  // 0 is K, 1 is V

  __device__ const TileSide& facts() const {
    return side == 0 ? walk.params.tile_k : walk.params.tile_v;
  }
  __device__ const TileSide& rows() const {
    return side == 0 ? walk.params.tile_k : walk.params.tile_v;
  }
  __device__ const TileRegion& full_precision_rows() const {
    return side == 0 ? walk.params.tile_full_precision_k.codes
                     : walk.params.tile_full_precision_v.codes;
  }
  __device__ int num_sink_blocks() const {
    return walk.params.first_head + walk.head - walk.params.full_precision_first_head;
  }
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }

  // Of the first token of a group: the others are the same.
  __device__ bool is_full_precision(int token) const {
    const TokenRange packed = ring.packed_tokens();
    return token < packed.begin || token >= packed.end;
  }
  // Whether any token of the tile is read, and full precision.
  __device__ bool has_full_precision(int tile) const {
    const TokenRange packed = ring.packed_tokens();
    const int first = walk.first_token + tile * Shape::kTokens;
    const int begin = max(first, walk.tokens.begin);
    const int end = min(first + Shape::kTokens, walk.tokens.end);
    return begin < end && (begin < packed.begin || end > packed.end);
  }
  // From this tile on; where no more tokens are full-precision, the last tile.
  __device__ int next_full_precision_tile(int tile) const {
    if (has_full_precision(tile)) return tile;
    const int end = ring.packed_tokens().end;
    return end < walk.tokens.end ? (end - walk.first_token) / Shape::kTokens : walk.num_tiles - 1;
  }
};

// Of numbers that are not negative: they have the order of their bits.
__device__ inline void raise_shared(uint32_t address, float x) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(__float_as_uint(x)) : "memory");
}

template <class Shape>
class FullPrecisionTokens {
  using Ring = PrefillRing<Shape>;
  // Of a row, with chunks behind its end where a row of 192 numbers is on the way.
  static constexpr int kChunks = Shape::kIsLong ? kWarp : Shape::kKeyDim / 8;
  static constexpr int kRowsAtOnce = kWarpgroup / kChunks;
  static constexpr int kPasses = kTileTokens / kRowsAtOnce;
  static constexpr int kBarrier = 5;  // named barriers: kBarrier + side; prefill_rows.cuh has four

 public:
  __device__ FullPrecisionTokens(const PrefillSideWalk<Shape>& side, int tile)
      : side_(side), walk_(side.walk), tile_(tile) {}

  // By all threads of the side's warpgroup, behind the tile's packed rows, which left zeros here.
  __device__ void fill() const {
    if constexpr (!Shape::kScalesScores) {
      if (side_.side == 0) begin_scales();
    }
    wait_at(kBarrier + side_.side, kWarpgroup);
#pragma unroll 1
    for (int group = 0; group < Shape::kTokens; group += kTileTokens) {
      const int first = walk_.first_token + tile_ * Shape::kTokens + group;
      const bool is_read = first < walk_.tokens.end && first + kTileTokens > walk_.tokens.begin;
      if (is_read && side_.is_full_precision(first)) fill_group(group, first);
    }
  }

 private:
  // As if packed tokens had scales of 1.
  __device__ void begin_scales() const {
    for (int i = side_.thread(); i < Shape::kTokens; i += kWarpgroup) {
      store_shared(side_.ring.token_scales(tile_, Ring::kKeyScale) + 4 * i, 1.0f);
      store_shared(side_.ring.token_scales(tile_, Ring::kValueScale) + 4 * i, 1.0f);
      if (i % kWarp == 0) store_shared(side_.ring.tops(tile_) + i / kWarp * 4, 1.0f);
    }
  }

  // A lane has a chunk of eight numbers of a row.
  __device__ void fill_group(int group, int first) const {
    const PrefillParams& params = walk_.params;
    const int block = first / kTileTokens / params.tiles_per_block;
    const int32_t id = walk_.ids[block];
    if (id < 0 || id >= params.num_full_precision_blocks) return;  // counted, and hidden
    const int in_block = first - block * params.block_size;
#pragma unroll 1
    for (int p = 0; p < kPasses; ++p) {
      const int row = first_row() + p * kRowsAtOnce;
      const bool is_token = first + row < walk_.tokens.end;
      const bool is_there = is_token && 8 * chunk() < own_dim();
      const uint4 bits = is_there ? load(side_.full_precision_rows(), id, in_block + row) : uint4{};
      uint4 values = {};
      if (side_.side == 0 && is_token && 8 * chunk() < value_dim()) {
        values = load(params.tile_full_precision_v.codes, id, in_block + row);
      }
      const int exponent = store_row(group + row, bits);
      if (side_.side == 0) store_scales(group + row, exponent, exponent_of(values, 1));
    }
  }

  // Numbers of a row.
  __device__ int own_dim() const {
    return side_.facts().head_dim;
  }
  __device__ int value_dim() const {
    return walk_.params.value_dim;
  }

  // Returns the row's exponent.
  __device__ int store_row(int row, const uint4& bits) const {
    const int exponent = exponent_of(bits, side_.side);
    float x[8];
    widen(bits, x);
    const int blocks = side_.side == 0 ? Shape::kKeyBlocks : Shape::kValueBlocks;
    if (8 * blocks < kChunks && chunk() >= 8 * blocks) return exponent;
    const uint32_t tile = side_.ring.tile(side_.side, tile_);
    store_chunk(
        tile + chunk() / 8 * Shape::kBlockBytes + wgmma_chunk(row, chunk() % 8),
        chunk_of<typename Shape::Mma>(side_.facts().format.pair_order, x, power_of_two(-exponent)));
    return exponent;
  }

  __device__ static int chunk() {
    return PrefillSideWalk<Shape>::thread() % kChunks;
  }
  __device__ static int first_row() {
    return PrefillSideWalk<Shape>::thread() / kChunks;
  }

  __device__ uint4 load(const TileRegion& rows, int32_t id, int row) const {
    const uint8_t* at =
        rows.at(static_cast<uint32_t>(id), side_.num_sink_blocks() * rows.head_stride +
                                               row * rows.token_stride + chunk() * 16);
    return *reinterpret_cast<const uint4*>(at);
  }
  __device__ static void widen(const uint4& bits, float (&x)[8]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = MmaBf16::unpack(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }

  // What scores and sums are multiplied by in the end, for packed tokens' sake.
  __device__ float unit_of_side(int side) const {
    return side == 0 ? key_scale_of_head(walk_.params, walk_.head)
                     : value_scale_of_head(walk_.params, walk_.head);
  }

  // A row's: its numbers are stored without it. They become about as large as codes, so that
  // weights under V's scales have much the same size in a tile. Where packed tokens have scales of
  // 1, V's numbers become as large as what is decoded, and numbers far smaller than that share the
  // distance with their weights, of which neither has 16 bits to give away. A row of zeros, or of
  // no token, has no scale: it must not count among the tile's largest.
  __device__ int exponent_of(const uint4& bits, int side) const {
    float x[8];
    widen(bits, x);
    float largest = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(x[j]));
    for (int other = 1; other < kChunks; other *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, other));
    }
    if (largest == 0) return kNothing;
    if (largest == INFINITY) return 0;
    constexpr int kCodes = 6, kMost = 14, kLeast = -10, kRange = 120;
    const int top = ilogbf(largest);
    int exponent = top - kCodes;
    if (!Shape::kScalesScores && side == 1) {
      exponent = min(max(ilogbf(unit_of_side(side)), top - kMost), top - kLeast);
    }
    return min(max(exponent, -kRange), kRange);
  }
  static constexpr int kNothing = -127;
  __device__ static float power_of_two(int exponent) {  // of kNothing: 0
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
  }

  __device__ void store_scales(int row, int key_exponent, int value_exponent) const {
    if (chunk() != 0) return;
    const float k = power_of_two(key_exponent) / unit_of_side(0);
    const float v = power_of_two(value_exponent) / unit_of_side(1);
    const Ring& ring = side_.ring;
    store_key_scales(ring, tile_, row, k, k);
#pragma unroll
    for (int p = 0; p < Shape::kParts; ++p) {
      store_shared(ring.token_scales(tile_, Ring::kValueScale + p) + place_of_token(row), v);
    }
    if constexpr (Shape::kScalesScores) {
      store_shared(ring.token_scales(tile_, Ring::kKeyZero) + place_of_token(row), 0.0f);
      store_shared(ring.token_scales(tile_, Ring::kValueZero) + place_of_token(row), 0.0f);
    }
    raise_shared(ring.tops(tile_) + row / kWarp * 4, fabsf(v));
  }

  const PrefillSideWalk<Shape>& side_;
  const PrefillWalk& walk_;
  const int tile_;
};

template <class Shape>
__device__ inline void fill_full_precision_tokens(const PrefillSideWalk<Shape>& side, int tile) {
  if (side.has_full_precision(tile)) FullPrecisionTokens<Shape>(side, tile).fill();
}

}  // namespace kvx::ops::cuda
