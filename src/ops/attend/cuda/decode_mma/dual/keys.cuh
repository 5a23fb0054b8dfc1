// DualKeys: keys of a dual-scale block against queries, a stage of 64 tokens at a time.
//
//   score = scale[t] * sum(q * step[c] * (code + offset[c])),   q' = q * step
//         = scale[t] * (sum(q' * code) + sum(q' * offset))
//
// The steps go into the queries, which are then 16 bits again, as every query of this path is. The
// sum beside the codes is the same for all tokens: one more tile's product gives it, whose rows are
// the offsets, and all scores begin with it. Queries have lost the power of two that a channel's
// codes have from their place (codes.cuh), and offsets have it too.
#pragma once

#include "ops/attend/cuda/decode_mma/dual/codes.cuh"
#include "ops/attend/cuda/decode_mma/dual/tables.cuh"
#include "ops/attend/cuda/decode_mma/keys.cuh"

namespace kvx::ops::cuda {

template <int Bits, int Dim>
struct DualKeys {
  using Codes = DualCodes<Bits>;
  using Copy = typename DualSide<Bits, Dim>::Copy;
  using Scales = uint32_t;
  using ScaleOfRow = void;
  using Mma = MmaF16;
  static constexpr bool kIsBulk = true;
  static constexpr bool kIsPadded = false;
  static constexpr int kDim = Dim;
  static constexpr int kRowBytes = DualSide<Bits, Dim>::kRowBytes;
  static constexpr int kParts = Dim / 64;
  static constexpr int kSteps = Dim / 16;  // k-iterations
  static constexpr bool kHasOffset = false;
  static constexpr bool kHasRoomForSteps = true;
  static constexpr bool kScalesAllQueries = true;  // steps of up to 448 multiply them
  static constexpr int kStepsOfNeighbours = 4;
  template <int NTiles>
  static constexpr bool kHasLowQueries = false;
  static constexpr float unit() { return 1.0f / (kDualCodeUnit * kLargestFactor); }

  // As TileKeys has it. Rows of 3 bits have their high bits behind every 64 channels.
  static constexpr int kRun = Bits != 3 && Dim % 128 == 0 ? 32 : 16;
  __device__ static constexpr int owned_channel(int i, int t) {
    return i / kRun * (4 * kRun) + t * kRun + i % kRun;
  }
  // Register j of a word has codes j of its halves.
  __device__ static constexpr int2 channels(int s, int r) {
    constexpr int kHalf = Codes::kHalfCodes;
    const int pair = 2 * (s % 4) + r;
    const int first = pair / kHalf * (2 * kHalf) + pair % kHalf;
    return {first, first + kHalf};
  }
  // What a query's number is multiplied by, so that codes have their size: times a step of up to
  // 448, a number below 2 stays in f16's range.
  static constexpr float kLargestFactor = 64.0f;
  __device__ static constexpr float factor(int s, int r) {
    return kLargestFactor / (1 << Codes::bit((2 * (s % 4) + r) % Codes::kHalfCodes));
  }
  // Of lane t, k-iteration after k-iteration, as the A operand takes them: offsets in the upper
  // rows, which are all the same, and steps in the lower ones, whose sums nobody reads. Behind the
  // lanes' parts, which lie 16 bytes apart from each other's banks, scales.
  static constexpr int kLaneBytes = kSteps * 16 + 16;
  static constexpr int kScalesAt = 4 * kLaneBytes;
  static constexpr int kTableBytes = kScalesAt + DualScaleTable::kBytes;

  // side: of the stage's keys; table: kTableBytes. scores: of its tiles.
  template <int NTiles>
  __device__ static void score(uint32_t side, uint32_t table,
                               const AllSharedQueries<Dim, NTiles>& queries, int lane,
                               Fragment (&scores)[kSideStageTiles][NTiles]) {
    fill_table(side, table, lane);
    __syncwarp();
    uint32_t folded[NTiles][kSteps][2];
    Fragment start[NTiles];
    fold(table, queries, lane, folded, start);
#pragma unroll
    for (int u = 0; u < kSideStageTiles; ++u) {
      score_tile(side + u * Copy::kCodeBytes, folded, start, lane, scores[u]);
    }
    const DualScales scales = DualScaleTable::load(table + kScalesAt, lane / 4);
#pragma unroll
    for (int i = 0; i < kSideStageTiles * NTiles; ++i) {
      const int u = i / NTiles;
      float(&d)[4] = scores[u][i % NTiles].d;
      d[0] *= scales.low[u];
      d[1] *= scales.low[u];
      d[2] *= scales.high[u];
      d[3] *= scales.high[u];
    }
  }

 private:
  // Offsets lie in the table so many times larger than beside codes, where f16 has all their bits.
  static constexpr int kOffsetExponent = 14;

  __device__ static void fill_table(uint32_t side, uint32_t table, int lane) {
    __builtin_assume(static_cast<uint32_t>(lane) < kWarp);
    const uint32_t steps = side + kSideStageTiles * Copy::kBytes, zeros = steps + Dim;
    const float factor = dual_factor_of_warp(steps, lane);
    DualScaleTable::fill(side + kSideStageTiles * Copy::kCodeBytes, factor, table + kScalesAt,
                         lane);
    constexpr int kUnits = 4 * kSteps;  // of two pairs: lane t's of a k-iteration
#pragma unroll
    for (int first = 0; first < kUnits; first += kWarp) {
      const int unit = first + lane;
      if (kUnits % kWarp != 0 && unit >= kUnits) break;
      const int t = unit / kSteps, s = unit % kSteps;
      const int2 pair = channels(s, 0);
      const int low = owned_channel(16 * (s / 4) + pair.x, t), high = low + Codes::kHalfCodes;
      const Two of_steps = e4m3x4_to_f16x2(two_pairs(steps + low, steps + high) & 0x7F7F7F7Fu);
      const Two raised = raised_zeros(two_pairs(zeros + low, zeros + high));
      store_shared_16(table + t * kLaneBytes + s * 16, {offset_of(raised.a, s % 4, 0), of_steps.a,
                                                        offset_of(raised.b, s % 4, 1), of_steps.b});
    }
  }
  // Bytes (a, b) and (a + 1, b + 1) of two addresses.
  __device__ static uint32_t two_pairs(uint32_t a, uint32_t b) {
    return __byte_perm(load_shared_2(a), load_shared_2(b), 0x5140);
  }
  // Exact: multiples of the zeros' unit below 2^8 of them.
  __device__ static uint32_t offset_of(uint32_t raised, int pair, int which) {
    constexpr float kUnit = format::DualGrid<Bits>::kZeroUnit;
    constexpr float kMinus = -(1024.0f + 128.0f) * kUnit - format::DualGrid<Bits>::kTopCode * 0.5f;
    constexpr uint32_t kUnits = f16_twice(kUnit), kMinuses = f16_twice(kMinus);
    const uint32_t offset = fma_f16x2(raised, kUnits, kMinuses);
    return multiply_f16x2(offset, powers_of<Codes, kOffsetExponent - 24>(pair, which));
  }

  template <int NTiles>
  __device__ static void fold(uint32_t table, const AllSharedQueries<Dim, NTiles>& queries,
                              int lane, uint32_t (&folded)[NTiles][kSteps][2],
                              Fragment (&start)[NTiles]) {
    Fragment sums[NTiles][2] = {};  // two, since a sum waits for itself
    const uint32_t own = table + lane % 4 * kLaneBytes;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 a = load_shared_16(own + s * 16);
#pragma unroll
      for (int c = 0; c < NTiles; ++c) {
        const uint2 q = queries.operand(c, s);
        uint32_t(&to)[2] = folded[c][s];
        to[0] = multiply_f16x2(q.x, a.y);
        to[1] = multiply_f16x2(q.y, a.w);
        Mma::add(sums[c][s % 2], a.x, a.y, a.z, a.w, to[0], to[1]);
      }
    }
    constexpr float kUnit = 1.0f / (1 << kOffsetExponent);
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      const float(&x)[4] = sums[c][0].d;
      const float(&y)[4] = sums[c][1].d;
      float(&d)[4] = start[c].d;
      d[0] = d[2] = (x[0] + y[0]) * kUnit;
      d[1] = d[3] = (x[1] + y[1]) * kUnit;
    }
  }

  template <int NTiles>
  __device__ static void score_tile(uint32_t tile, const uint32_t (&folded)[NTiles][kSteps][2],
                                    const Fragment (&start)[NTiles], int lane,
                                    Fragment (&scores)[NTiles]) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t row = tile + g * kRowBytes, other_row = row + 8 * kRowBytes;
    constexpr int kPartsAtOnce = kRun / 16;
#pragma unroll
    for (int part = 0; part < kParts; part += kPartsAtOnce) {
      Numbers a[kPartsAtOnce], b[kPartsAtOnce];
      decode(row, part, t, a);
      decode(other_row, part, t, b);
#pragma unroll
      for (int i = 0; i < 4 * kPartsAtOnce; ++i) {
        const uint32_t* x = &a[i / 4].r[2 * (i % 4)];
        const uint32_t* y = &b[i / 4].r[2 * (i % 4)];
#pragma unroll
        for (int c = 0; c < NTiles; ++c) {
          const uint32_t(&q)[2] = folded[c][4 * part + i];
          const Fragment& before = part + i == 0 ? start[c] : scores[c];
          scores[c] = Mma::begin(before, x[0], y[0], x[1], y[1], q[0], q[1]);
        }
      }
    }
  }

  // A lane's 16 numbers of a part of a row.
  struct Numbers {
    uint32_t r[8];
  };
  __device__ static void decode(uint32_t row, int part, int t, Numbers (&to)[kRun / 16]) {
    if constexpr (Bits == 3) {
      const uint32_t of_64 = row + part * 24;
      const uint32_t high = load_shared_4(of_64 + 16 + t % 2 * 4) >> (t / 2);
      Codes::unpack(load_shared_4(of_64 + t * 4), high, to[0].r);
    } else if constexpr (Bits == 2) {
      if constexpr (kRun == 32) {
        const uint2 words = load_shared_8(row + part * 16 + t * 8);
        Codes::unpack(words.x, to[0].r);
        Codes::unpack(words.y, to[1].r);
      } else {
        Codes::unpack(load_shared_4(row + part * 16 + t * 4), to[0].r);
      }
    } else {
      if constexpr (kRun == 32) {
        const uint4 words = load_shared_16(row + part * 32 + t * 16);
        unpack_two(words.x, words.y, to[0]);
        unpack_two(words.z, words.w, to[1]);
      } else {
        const uint2 words = load_shared_8(row + part * 32 + t * 8);
        unpack_two(words.x, words.y, to[0]);
      }
    }
  }
  __device__ static void unpack_two(uint32_t a, uint32_t b, Numbers& to) {
    uint32_t x[4], y[4];
    DualCodes<4>::unpack(a, x);
    DualCodes<4>::unpack(b, y);
#pragma unroll
    for (int j = 0; j < 4; ++j) to.r[j] = x[j], to.r[4 + j] = y[j];
  }
};

}  // namespace kvx::ops::cuda
