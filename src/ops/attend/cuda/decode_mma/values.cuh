// Values of a tile, transposed, as the A operand: 16 channels by 16 tokens at a time, against the 8
// queries' weights.
//
// ldmatrix transposes units of 16 bits. In 4- and 8-bit rows such a unit holds 4 or 2 channels, so
// a register holds those channels of tokens 2t and 2t + 1: decoding picks one channel of both.
#pragma once

#include "ops/attend/cuda/common/decode_codes.cuh"
#include "ops/attend/cuda/common/tile_copy.cuh"
#include "ops/attend/cuda/common/tile_scales.cuh"
#include "ops/attend/cuda/decode_mma/scale_table.cuh"

namespace kvx::ops::cuda {

// Sums over tokens of weight * value: channels by queries 2t and 2t + 1.
template <int Dim>
struct ValueSums {
  Fragment f[Dim / 16];
  float2 zeros;  // the affine formats' part, the same for all channels

  __device__ void multiply(float2 by) {
#pragma unroll
    for (int i = 0; i < Dim / 16; ++i) {
      f[i].d[0] *= by.x;
      f[i].d[1] *= by.y;
      f[i].d[2] *= by.x;
      f[i].d[3] *= by.y;
    }
    zeros.x *= by.x;
    zeros.y *= by.y;
  }
};

// Weights as the B operand: tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of query g.
struct Weights {
  uint32_t low, high;
};

// Padded: rows may be shorter than Dim (tile_copy_padded.cuh).
template <class Element, class Scale, int Dim, bool Bulk, bool Padded>
struct TileValues {
  static constexpr bool kIsBulk = Bulk;
  static constexpr int kRowBytes = Dim * Element::kBits / 8;
  static constexpr bool kIsPadded = Padded;
  using Copy = TileCopyOf<kRowBytes, Scale::kRowBytes, Padded>;
  using Scales = ScalesAt<Padded>;
  using ScaleOfRow = Scale;
  using Mma = typename Element::Mma;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr bool kIsTurboMind = Scale::kHasZero;
  static constexpr bool kHasScales = !Scale::kIsNone;
  // Scales in binary32 multiply weights, in units that f16 holds: their largest is about 1.
  static constexpr bool kScalesWeights = kHasScales && !Scale::kOnOperand;
  // A group is all that a fragment's rows have of a token: its scale multiplies the weights, which
  // are fewer than the values.
  static constexpr bool kScalesFragments = Scale::kGroup == 32;

  // Where a step has many tokens, scales come from a table.
  template <int Tiles>
  using Table = std::conditional_t<kScalesWeights, WeightScaleTable<Scale, Tiles>,
                                   OperandScaleTable<Scale, Dim, Tiles>>;

  // Sums come out divided by this.
  static constexpr float unit() {
    if constexpr (Scale::kOnOperand) return Element::kUnit * Scale::kUnit;
    return Element::kUnit;
  }

  // The same of a fragment's channels, beside unit().
  __device__ static constexpr float factor(int, int) { return 1.0f; }

  // The channel of row g (or, high, g + 8) of fragment i.
  __device__ static int channel(int i, int g, int high) {
    if constexpr (Element::kBits == 16) return 16 * i + 8 * high + g;
    if constexpr (Element::kBits == 8) return 16 * i + 2 * g + high;
    const int nibble = 2 * (i % 2) + high;
    if constexpr (kIsTurboMind) return 32 * (i / 2) + 8 * (g / 2) + g % 2 + 2 * nibble;
    return 32 * (i / 2) + 4 * g + nibble;
  }

  // A lane's numbers of one row whose channels follow each other: number n of them is half n % 2 of
  // fragment i + n / 2, from channel(i, g, 0) on.
  static constexpr int kNeighbours = Element::kBits == 16  ? 1
                                     : Element::kBits == 8 ? 2
                                     : kIsTurboMind        ? 1
                                                           : 4;

  // Of this lane's tokens, what multiplies weights.
  using Largest = LargestScale<Scale>;
  __device__ static void find_largest(Scales scales, bool has_asked_type, int lane,
                                      Largest& largest) {
    largest.take(scales, lane / 4, has_asked_type);
    largest.take(scales, lane / 4 + 8, has_asked_type);
  }

  // Scales as they multiply weights: in `unit`, a power of two that brings them near 1. Instead of
  // zero a middle code's value.
  using Row = RowScale<Scale::kGroups>;
  __device__ static Row load_scales(Scales scales, int token, bool has_asked_type) {
    return Scale::load(scales, token, has_asked_type);
  }
  __device__ static Row normalised(const Row& row, float unit) {
    Row r = {};
#pragma unroll
    for (int i = 0; i < Scale::kGroups; ++i) r.scale[i] = row.scale[i] * unit;
    if constexpr (Scale::kHasZero) r.zero = fmaf(Element::kMiddle, row.scale[0], row.zero) * unit;
    return r;
  }

  // weights: of tokens g, g + 8 and queries 2t, 2t + 1 of each column; a decoded value meets all of
  // them. inverse_scale multiplies the scales; those of a table are multiplied already.
  template <class AnyScales, int NTiles>
  __device__ static void add(uint32_t tile, AnyScales scales, const Fragment (&weights)[NTiles],
                             float inverse_scale, bool has_asked_type, int lane,
                             ValueSums<Dim> (&sums)[NTiles]) {
    Weights w[NTiles][Scale::kGroups];
    if constexpr (kScalesWeights) {
      const Row a = weight_scales(scales, lane / 4, inverse_scale, has_asked_type);
      const Row b = weight_scales(scales, lane / 4 + 8, inverse_scale, has_asked_type);
#pragma unroll
      for (int c = 0; c < NTiles; ++c) {
        const float* d = weights[c].d;
#pragma unroll
        for (int i = 0; i < Scale::kGroups; ++i) {
          const float x = a.scale[i], y = b.scale[i];
          w[c][i] = operand({{d[0] * x, d[1] * x, d[2] * y, d[3] * y}});
        }
        if constexpr (Scale::kHasZero) {
          sums[c].zeros.x += d[0] * a.zero + d[2] * b.zero;
          sums[c].zeros.y += d[1] * a.zero + d[3] * b.zero;
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < NTiles; ++c) w[c][0] = operand(weights[c]);
    }
    if constexpr (Element::kBits == 16) {
      add_16(tile, w, lane, sums);
    } else if constexpr (Element::kBits == 8) {
      add_8(tile, w, lane, sums);
    } else {
      add_4(tile, scales, w, lane, sums);
    }
  }

 private:
  template <class TileOfTable>
  __device__ static Row weight_scales(TileOfTable scales, int token, float, bool) {
    return scales.row(token);
  }
  __device__ static Row weight_scales(Scales scales, int token, float unit, bool has_asked_type) {
    return normalised(load_scales(scales, token, has_asked_type), unit);
  }

  template <int NTiles>
  using AllWeights = Weights[NTiles][Scale::kGroups];

  __device__ static Weights operand(const Fragment& w) {
    return {transpose_8x8(Mma::pack(w.d[0], w.d[1])), transpose_8x8(Mma::pack(w.d[2], w.d[3]))};
  }

  // Sixteen channels of all tokens into fragment i of every column's sums.
  template <int NTiles>
  __device__ static void add(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             const AllWeights<NTiles>& w, int group, ValueSums<Dim> (&sums)[NTiles],
                             int i) {
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      const Weights& weights = w[c][Scale::kGroups == 1 ? 0 : group];
      Mma::add(sums[c].f[i], a0, a1, a2, a3, weights.low, weights.high);
    }
  }

  // Chunks c and c + 1 of all tokens, c even: x and y are chunk c of tokens 0 to 7 and 8 to 15, z
  // and w chunk c + 1.
  __device__ static uint4 load_chunks(uint32_t tile, int c, int lane) {
    const int token = lane % 16;
    return load_matrices_transposed(chunk_address<kRowBytes, !Bulk>(tile, token, c + lane / 16));
  }

  template <int NTiles>
  __device__ static void add_16(uint32_t tile, const AllWeights<NTiles>& w, int lane,
                                ValueSums<Dim> (&sums)[NTiles]) {
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      // In the order of the operand: no register moves.
      const int token = lane % 8 + lane / 16 * 8;
      const uint4 x =
          load_matrices_transposed(chunk_address<kRowBytes, !Bulk>(tile, token, c + lane / 8 % 2));
      add(x.x, x.y, x.z, x.w, w, 0, sums, c / 2);
    }
  }

  template <int NTiles>
  __device__ static void add_8(uint32_t tile, const AllWeights<NTiles>& w, int lane,
                               ValueSums<Dim> (&sums)[NTiles]) {
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      const uint4 x = load_chunks(tile, c, lane);
      const Two a = Element::for_values(x.x), b = Element::for_values(x.y);
      add(a.a, a.b, b.a, b.b, w, c / 4, sums, c);
      const Two d = Element::for_values(x.z), e = Element::for_values(x.w);
      add(d.a, d.b, e.a, e.b, w, c / 4, sums, c + 1);
    }
  }

  template <class AnyScales, int NTiles>
  __device__ static void add_4(uint32_t tile, AnyScales scales_at, const AllWeights<NTiles>& w,
                               int lane, ValueSums<Dim> (&sums)[NTiles]) {
    OperandScales scales;
    if constexpr (Scale::kOnOperand) scales = operand_scales(scales_at, lane);
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      const uint4 x = load_chunks(tile, c, lane);
      add_chunk_4(c, x.x, x.y, w, scales, sums);
      add_chunk_4(c + 1, x.z, x.w, w, scales, sums);
    }
  }

  // low, high: chunk c of tokens 0 to 7 and 8 to 15.
  struct OperandScales {
    uint32_t low[kChunks];  // of tokens 2t and 2t + 1
    uint32_t high[kChunks];
  };
  template <int NTiles>
  __device__ static void add_chunk_4(int c, uint32_t low, uint32_t high,
                                     const AllWeights<NTiles>& w, const OperandScales& scales,
                                     ValueSums<Dim> (&sums)[NTiles]) {
    Four a = Element::for_values(low);
    Four b = Element::for_values(high);
    if constexpr (kScalesFragments) {
      AllWeights<NTiles> scaled;
#pragma unroll
      for (int i = 0; i < NTiles; ++i) {
        scaled[i][0] = {multiply_f16x2(w[i][0].low, scales.low[c]),
                        multiply_f16x2(w[i][0].high, scales.high[c])};
      }
      add(a.r[0], a.r[1], b.r[0], b.r[1], scaled, 0, sums, 2 * c);
      add(a.r[2], a.r[3], b.r[2], b.r[3], scaled, 0, sums, 2 * c + 1);
      return;
    }
    if constexpr (Scale::kOnOperand) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a.r[j] = multiply_f16x2(a.r[j], scales.low[c]);
        b.r[j] = multiply_f16x2(b.r[j], scales.high[c]);
      }
    }
    add(a.r[2], a.r[3], b.r[2], b.r[3], w, c / 2, sums, 2 * c + 1);
    add(a.r[0], a.r[1], b.r[0], b.r[1], w, c / 2, sums, 2 * c);
  }

  // Chunk c of row g lies in the group of channel 32 c + 4 g.
  template <class TileOfTable>
  __device__ static OperandScales operand_scales(TileOfTable scales, int lane) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t at = scales.of_place(4 * g / Scale::kGroup);
    OperandScales result;
    scales.load_pair(at, t, result.low);
    scales.load_pair(at, t + 4, result.high);
    return result;
  }
  // The same from stored scales.
  __device__ static OperandScales operand_scales(Scales scales, int lane) {
    const int g = lane / 4, t = lane % 4;
    OperandScales result;
    const auto a = Scale::load_row(scales, 2 * t), b = Scale::load_row(scales, 2 * t + 1);
    const auto d = Scale::load_row(scales, 2 * t + 8), e = Scale::load_row(scales, 2 * t + 9);
    const auto place = static_cast<uint32_t>(4 * g / Scale::kGroup);
    Scale::pairs(a, b, place, result.low);
    Scale::pairs(d, e, place, result.high);
    return result;
  }
};

}  // namespace kvx::ops::cuda
