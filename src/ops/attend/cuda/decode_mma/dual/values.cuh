// DualValues: weighted sums of the values of a dual-scale block, a stage of 64 tokens at a time.
//
//   sum[c] += step[c] * (sum_t(w' * code) + offset[c] * sum_t(w')),   w' = weight * scale[t]
//
// The inner sums are the stage's own: a channel's step and offset are the block's. sum_t(w') is a
// product with ones, of the very weights that the codes meet; then it is a weight itself, of one
// token more whose codes are the offsets, in two parts as f16 has too few bits.
#pragma once

#include "ops/attend/cuda/decode_mma/dual/codes.cuh"
#include "ops/attend/cuda/decode_mma/dual/tables.cuh"
#include "ops/attend/cuda/decode_mma/values.cuh"

namespace kvx::ops::cuda {

template <int Bits, int Dim>
struct DualValues {
  using Codes = DualCodes<Bits>;
  using Copy = typename DualSide<Bits, Dim>::Copy;
  using Scales = uint32_t;
  using ScaleOfRow = void;
  using Mma = MmaF16;
  static constexpr bool kIsBulk = true;
  static constexpr bool kIsPadded = false;
  static constexpr int kRowBytes = DualSide<Bits, Dim>::kRowBytes;
  static constexpr bool kHasScales = false;  // that walks over other formats' tiles take care of
  static constexpr bool kScalesWeights = false;
  static constexpr int kNeighbours = 4;
  static constexpr float unit() { return 1.0f / kDualCodeUnit; }
  // Codes are larger by their place.
  __device__ static constexpr float factor(int i, int high) {
    return 1.0f / (1 << Codes::bit(2 * (i % Codes::kFragments) + high));
  }

  // A chunk is what a fragment's rows g take a unit of 16 bits each from, and with 3 bits the high
  // bits of those: kChunkDim channels.
  static constexpr int kUnitCodes = Codes::kHalfCodes;
  static constexpr int kFragments = Codes::kFragments;
  static constexpr int kChunkDim = 8 * kUnitCodes;
  static constexpr int kChunks = Dim / kChunkDim;
  // As TileValues has it. Every second chunk of 3 bits begins in the middle of 16 bytes, of which
  // ldmatrix gives each lane the same two: its units come in another order.
  static constexpr bool kHasHalves = Bits == 3 && kRowBytes % 16 == 0;
  __device__ static constexpr int unit_of(int chunk, int g) {
    return kHasHalves && chunk % 2 == 1 ? g ^ 4 : g;
  }
  __device__ static constexpr int channel(int i, int g, int high) {
    const int chunk = i / kFragments;
    return chunk * kChunkDim + kUnitCodes * unit_of(chunk, g) + 2 * (i % kFragments) + high;
  }

  // [fragment][g]: of its two channels, offsets, each twice, and steps; scales.
  static constexpr int kScalesAt = 8 * Dim;
  static constexpr int kTableBytes = kScalesAt + DualScaleTable::kBytes;
  // Token scales have a root mean square of 16 over a block: weights of up to 2^8 stay in f16's
  // range under a sixteenth of the largest, 448.
  static constexpr float kUnitOfScales = 1.0f / 16.0f;

  // side: of the stage's values; table: kTableBytes. weights: of its tiles.
  template <int NTiles>
  __device__ static void add(uint32_t side, uint32_t table,
                             const Fragment (&weights)[kSideStageTiles][NTiles], int lane,
                             ValueSums<Dim> (&sums)[NTiles]) {
    fill_table(side, table, lane);
    __syncwarp();
    Weights w[kSideStageTiles][NTiles];
    uint32_t totals[NTiles];
    scale_weights(table, weights, lane, w, totals);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Fragment own[NTiles][kFragments];
      add_chunk(side, chunk, w, lane, own);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const int i = chunk * kFragments + f;
        const uint4 x = load_shared_16(table + (i * 8 + lane / 4) * 16);
        const float low = __uint_as_float(x.z), high = __uint_as_float(x.w);
#pragma unroll
        for (int c = 0; c < NTiles; ++c) {
          Mma::add_half(own[c][f], x.x, x.y, totals[c]);
          const float(&d)[4] = own[c][f].d;
          float(&to)[4] = sums[c].f[i].d;
          to[0] = fmaf(low, d[0], to[0]);
          to[1] = fmaf(low, d[1], to[1]);
          to[2] = fmaf(high, d[2], to[2]);
          to[3] = fmaf(high, d[3], to[3]);
        }
      }
    }
  }

 private:
  // Sums of weights become f16 divided by this, and offsets the rest of what codes are multiples
  // of: four lanes give the same product.
  static constexpr float kUnitOfTotals = 64.0f;
  static constexpr float kUnitOfOffsets = kDualCodeUnit * kUnitOfTotals / 4;

  __device__ static void fill_table(uint32_t side, uint32_t table, int lane) {
    __builtin_assume(static_cast<uint32_t>(lane) < kWarp);
    const uint32_t steps = side + kSideStageTiles * Copy::kBytes, zeros = steps + Dim;
    constexpr int kUnits = Dim / 2 / kWarp;  // a lane's, of two channels
    static_assert(Dim / 2 % kWarp == 0);
    uint32_t of_steps[kUnits], of_zeros[kUnits];
#pragma unroll
    for (int n = 0; n < kUnits; ++n) {
      const int unit = n * kWarp + lane, c = channel(unit / 8, unit % 8, 0);
      of_steps[n] = load_shared_2(steps + c);
      of_zeros[n] = load_shared_2(zeros + c);
    }
    const float factor = dual_factor_of_warp(steps, lane) / kUnitOfScales;
    DualScaleTable::fill(side + kSideStageTiles * Copy::kCodeBytes, kUnitOfScales,
                         table + kScalesAt, lane);
#pragma unroll
    for (int n = 0; n < kUnits; ++n) {
      const int unit = n * kWarp + lane, f = unit / 8 % kFragments;
      const float2 step = MmaF16::unpack(e4m3x4_to_f16x2(of_steps[n] & 0x7F7Fu).a);
      const uint32_t offsets = offsets_of(of_zeros[n]);
      store_shared_16(table + unit * 16,
                      {offset_twice(offsets, f, 0), offset_twice(offsets, f, 1),
                       __float_as_uint(step.x * factor), __float_as_uint(step.y * factor)});
    }
  }
  // Two channels' offsets, 2^11 times smaller. Exact: multiples of the zeros' unit below 2^8 of
  // them.
  __device__ static uint32_t offsets_of(uint32_t zeros) {
    constexpr float kUnit = format::DualGrid<Bits>::kZeroUnit * 0x1p-11f;
    constexpr float kMinus =
        -(1024.0f + 128.0f) * kUnit - format::DualGrid<Bits>::kTopCode * 0.5f * 0x1p-11f;
    constexpr uint32_t kUnits = f16_twice(kUnit), kMinuses = f16_twice(kMinus);
    return fma_f16x2(raised_zeros(zeros).a, kUnits, kMinuses);
  }
  // Offset `which` as a channel's codes are: exact too.
  __device__ static uint32_t offset_twice(uint32_t offsets, int f, int which) {
    static_assert(kUnitOfOffsets == 0x1p-20f);
    const uint32_t twice = __byte_perm(offsets, 0, which == 0 ? 0x1010 : 0x3232);
    return multiply_f16x2(twice, powers_of<Codes, 11 - 20>(f, which));
  }

  template <int NTiles>
  __device__ static void scale_weights(uint32_t table,
                                       const Fragment (&weights)[kSideStageTiles][NTiles], int lane,
                                       Weights (&w)[kSideStageTiles][NTiles],
                                       uint32_t (&totals)[NTiles]) {
    constexpr uint32_t kOnes = 0x3C003C00u;
    Fragment sums[NTiles] = {};
    const DualScales scales = DualScaleTable::load(table + kScalesAt, lane / 4);
#pragma unroll
    for (int u = 0; u < kSideStageTiles; ++u) {
#pragma unroll
      for (int c = 0; c < NTiles; ++c) {
        const float(&d)[4] = weights[u][c].d;
        const float x = scales.low[u], y = scales.high[u];
        Weights& to = w[u][c];
        to.low = transpose_8x8(Mma::pack(d[0] * x, d[1] * x));
        to.high = transpose_8x8(Mma::pack(d[2] * y, d[3] * y));
        Mma::add(sums[c], kOnes, kOnes, kOnes, kOnes, to.low, to.high);
      }
    }
#pragma unroll
    for (int c = 0; c < NTiles; ++c) totals[c] = as_weights(sums[c]);
  }
  // A column's sum, the same in all rows, as the B operand: what f16 takes of it, and the rest.
  __device__ static uint32_t as_weights(const Fragment& sums) {
    const float x = sums.d[0] / kUnitOfTotals, y = sums.d[1] / kUnitOfTotals;
    const uint32_t high = Mma::pack(x, y);
    const float2 taken = Mma::unpack(high);
    const uint32_t rest = Mma::pack(x - taken.x, y - taken.y);
    return __byte_perm(transpose_8x8(high), transpose_8x8(rest), 0x5410);
  }

  // Two tiles' units of a chunk: of tokens 2t, 2t + 1 and those 8, 16 and 24 behind them.
  struct Units {
    uint32_t low[4];
    uint32_t high[4];  // of 3 bits
  };
  template <int NTiles>
  __device__ static void add_chunk(uint32_t side, int chunk,
                                   const Weights (&w)[kSideStageTiles][NTiles], int lane,
                                   Fragment (&own)[NTiles][kFragments]) {
#pragma unroll
    for (int u = 0; u < kSideStageTiles; u += 2) {
      const Units units = load_units(side + u * Copy::kCodeBytes, chunk, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t x[kUnitCodes], y[kUnitCodes];
        unpack(units, 2 * i, x);
        unpack(units, 2 * i + 1, y);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
          for (int c = 0; c < NTiles; ++c) {
            const Weights& weight = w[u + i][c];
            const Fragment before = u + i == 0 ? Fragment{} : own[c][f];
            own[c][f] = Mma::begin(before, x[2 * f], x[2 * f + 1], y[2 * f], y[2 * f + 1],
                                   weight.low, weight.high);
          }
        }
      }
    }
  }
  __device__ static void unpack(const Units& units, int i, uint32_t (&to)[kUnitCodes]) {
    if constexpr (Bits == 3) {
      Codes::unpack(units.low[i], units.high[i], to);
    } else {
      Codes::unpack(units.low[i], to);
    }
  }
  // Lane l gives the address of row l's 16 bytes.
  __device__ static Units load_units(uint32_t tile, int chunk, int lane) {
    Units units;
    if constexpr (Bits != 3) {
      unpack_four(load_matrices_transposed(tile + lane * kRowBytes + chunk * 16), units.low);
    } else if constexpr (kHasHalves) {
      load_halves(tile + lane * kRowBytes + chunk / 2 * 48, chunk % 2, lane, units);
    } else {
      load_rows(tile + chunk * 24, lane, units);
    }
    return units;
  }
  __device__ static void unpack_four(const uint4& x, uint32_t (&to)[4]) {
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  // Two chunks of 3 bits are 48 bytes, 16 low units (L) and 8 high ones (H) of two bytes:
  //   [L0 .. L7][H0 .. H3 l0 .. l3][l4 .. l7 h0 .. h3]
  // Lanes that have no high units of the chunk take them from those that are 16 off.
  __device__ static void load_halves(uint32_t at, int half, int lane, Units& units) {
    const bool is_upper = lane >= 16;
    uint32_t middle[4], outer[4];
    unpack_four(load_matrices_transposed(at + 16), middle);
    unpack_four(load_matrices_transposed(at + (half == 0 ? 0 : 32)), outer);
    const int from = half == 0 ? lane & 15 : lane | 16;
    const int shift = is_upper == (half == 0) ? 1 : 0;  // units 4 to 7 have the odd bits
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      units.low[i] = half == 1 && is_upper ? middle[i] : outer[i];
      const uint32_t high = half == 0 ? middle[i] : outer[i];
      units.high[i] = __shfl_sync(kWholeWarp, high, from) >> shift;
    }
  }
  // Rows that do not lie on 16 bytes, as ldmatrix asks for.
  __device__ static void load_rows(uint32_t chunk, int lane, Units& units) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t row = chunk + 2 * t * kRowBytes;
    const uint32_t low = row + 2 * g, high = row + 16 + 2 * (g % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      units.low[i] = two_rows(low + i * 8 * kRowBytes);
      units.high[i] = two_rows(high + i * 8 * kRowBytes) >> (g / 4);
    }
  }
  __device__ static uint32_t two_rows(uint32_t at) {
    return __byte_perm(load_shared_2(at), load_shared_2(at + kRowBytes), 0x5410);
  }
};

}  // namespace kvx::ops::cuda
