// DualValues: weighted sums of the values of a dual-scale block, a stage of 64 tokens at a time.
//
//   sum[c] += step[c] * sum_t(w' * (base + code)) + step[c] * (offset[c] - base) * sum_t(w'),
//   w' = weight * scale[t]
//
// The inner sums are the stage's own: what its codes have beside their values is taken away before
// it meets the sums over all tokens, which would lose digits under it. sum_t(w') is a product with
// ones, of the very weights that the codes meet.
#pragma once

#include "ops/attend/cuda/decode_mma/dual/codes.cuh"
#include "ops/attend/cuda/decode_mma/dual/tables.cuh"
#include "ops/attend/cuda/decode_mma/values.cuh"

namespace kvx::ops::cuda {

template <int Bits, int Dim>
struct DualValues {
  using Codes = DualValueCodes<Bits>;
  using Copy = typename DualSide<Bits, Dim>::Copy;
  using Scales = uint32_t;
  using Mma = MmaF16;
  static constexpr bool kIsBulk = true;
  static constexpr bool kIsPadded = false;
  static constexpr int kRowBytes = DualSide<Bits, Dim>::kRowBytes;
  static constexpr bool kHasScales = false;  // that walks over other formats' tiles take care of
  static constexpr bool kScalesWeights = false;
  static constexpr int kNeighbours = 4;
  static constexpr float unit() { return 1.0f; }

  // A chunk is what a fragment's rows g take a unit of 16 bits each from, and with 3 bits the high
  // bits of those: kChunkDim channels.
  static constexpr int kUnitCodes = Codes::kHalfCodes;
  static constexpr int kFragments = Codes::kFragments;
  static constexpr int kChunkDim = 8 * kUnitCodes;
  static constexpr int kChunks = Dim / kChunkDim;
  // As TileValues has it.
  __device__ static constexpr int channel(int i, int g, int high) {
    return i / kFragments * kChunkDim + kUnitCodes * g + 2 * (i % kFragments) + high;
  }

  // [fragment][g]: steps of its two channels, each with what sum_t(w') is multiplied by; scales.
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
    Fragment totals[NTiles] = {};
    scale_weights(table, weights, lane, w, totals);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Fragment own[NTiles][kFragments];
      add_chunk(side, chunk, w, lane, own);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const int i = chunk * kFragments + f;
        const uint4 x = load_shared_16(table + (i * 8 + lane / 4) * 16);
        const float2 low = {__uint_as_float(x.x), __uint_as_float(x.y)};
        const float2 high = {__uint_as_float(x.z), __uint_as_float(x.w)};
#pragma unroll
        for (int c = 0; c < NTiles; ++c) {
          const float(&d)[4] = own[c][f].d;
          const float(&total)[4] = totals[c].d;
          float(&to)[4] = sums[c].f[i].d;
          to[0] = fmaf(low.x, d[0], fmaf(low.y, total[0], to[0]));
          to[1] = fmaf(low.x, d[1], fmaf(low.y, total[1], to[1]));
          to[2] = fmaf(high.x, d[2], fmaf(high.y, total[0], to[2]));
          to[3] = fmaf(high.x, d[3], fmaf(high.y, total[1], to[3]));
        }
      }
    }
  }

 private:
  __device__ static void fill_table(uint32_t side, uint32_t table, int lane) {
    const uint32_t steps = side + kSideStageTiles * Copy::kBytes, zeros = steps + Dim;
    const float factor = dual_factor_of_warp(steps, lane) / kUnitOfScales;
    DualScaleTable::fill(side + kSideStageTiles * Copy::kCodeBytes, kUnitOfScales,
                         table + kScalesAt, lane);
    constexpr int kUnits = Dim / 2;  // of two channels
#pragma unroll
    for (int first = 0; first < kUnits; first += kWarp) {
      const int unit = first + lane, i = unit / 8;
      const int c = channel(i, unit % 8, 0);
      const uint32_t bits = load_shared_2(steps + c) & 0x7F7Fu;
      const float2 step = MmaF16::unpack(e4m3x4_to_f16x2(bits).a);
      const uint32_t zero = load_shared_2(zeros + c) ^ 0x8080u;
      const float x = step.x * factor, y = step.y * factor;
      const float of_x = x * offset(zero, 0x7440, bases_of<Codes>(i % kFragments, 0));
      const float of_y = y * offset(zero, 0x7441, bases_of<Codes>(i % kFragments, 1));
      store_shared_16(table + unit * 16, {__float_as_uint(x), __float_as_uint(of_x),
                                          __float_as_uint(y), __float_as_uint(of_y)});
    }
  }
  // The zero in a byte of `zeros`, which lie 128 higher, less the base; `place` puts it below 2^23.
  // Exact.
  __device__ static float offset(uint32_t zeros, uint32_t place, uint32_t bases) {
    constexpr float kUnit = format::DualGrid<Bits>::kZeroUnit;
    constexpr float kMinus = -(0x1p23f + 128.0f) * kUnit - format::DualGrid<Bits>::kTopCode * 0.5f;
    const float raised = __uint_as_float(__byte_perm(zeros, 0x4B000000u, place));
    return fmaf(raised, kUnit, kMinus) - MmaF16::unpack(bases).x;
  }

  template <int NTiles>
  __device__ static void scale_weights(uint32_t table,
                                       const Fragment (&weights)[kSideStageTiles][NTiles], int lane,
                                       Weights (&w)[kSideStageTiles][NTiles],
                                       Fragment (&totals)[NTiles]) {
    constexpr uint32_t kOnes = 0x3C003C00u;
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
        Mma::add(totals[c], kOnes, kOnes, kOnes, kOnes, to.low, to.high);
      }
    }
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
  // Rows of 3 bits do not lie on 16 bytes, as ldmatrix asks for.
  __device__ static Units load_units(uint32_t tile, int chunk, int lane) {
    Units units = {};
    if constexpr (Bits == 3) {
      const int g = lane / 4, t = lane % 4;
      const uint32_t row = tile + 2 * t * kRowBytes + chunk * 24;
      const uint32_t low = row + 2 * g, high = row + 16 + 2 * (g % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        units.low[i] = two_rows(low + i * 8 * kRowBytes);
        units.high[i] = two_rows(high + i * 8 * kRowBytes) >> (g / 4);
      }
    } else {
      const uint4 x = load_matrices_transposed(tile + lane * kRowBytes + chunk * 16);
      units.low[0] = x.x, units.low[1] = x.y, units.low[2] = x.z, units.low[3] = x.w;
    }
    return units;
  }
  __device__ static uint32_t two_rows(uint32_t at) {
    return __byte_perm(load_shared_2(at), load_shared_2(at + kRowBytes), 0x5410);
  }
};

}  // namespace kvx::ops::cuda
