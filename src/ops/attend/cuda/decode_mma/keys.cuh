// Keys of a tile as the A operand: 16 tokens by 16 channels at a time, against 8 queries.
//
// A sum over channels may take them in any order, so each lane simply owns whole words of its
// tokens' rows, and the queries are loaded in the same order: no shuffle touches the cache.
#pragma once

#include <type_traits>

#include "ops/attend/cuda/common/decode_codes.cuh"
#include "ops/attend/cuda/common/tile_copy.cuh"
#include "ops/attend/cuda/common/tile_scales.cuh"

namespace kvx::ops::cuda {

// Queries as the B operand: registers [k-iteration][2] of an n-tile of 8 queries.
template <int Dim>
struct Queries {
  uint32_t b[Dim / 16][2];
  uint32_t low[Dim / 16][2] = {};  // what b rounds away, where keys ask for it
  float scale;  // what those of this lane were multiplied by: plus or minus a power of two
  // Of columns 2t and 2t + 1:
  float2 sums;                   // for the affine formats' zeros
  float2 starts[Dim / 64] = {};  // of the scores' parts: what takes away the keys' offsets
};

// The same of more n-tiles than registers hold, in a warp's shared memory. Of an n-tile:
// [step][lane] pairs of b, [part][lane] of starts, [lane] scales, with n-tile 0's; each 8 bytes.
template <int Dim>
struct SharedQueries {
  static constexpr int kSteps = Dim / 16;
  static constexpr int kParts = Dim / 64;
  static constexpr int kBytes = (kSteps + kParts + 1) * 32 * 8;
  uint32_t at = 0;  // of this lane

  __device__ void store(int column, const Queries<Dim>& queries, float first_scale) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) store(place(column, s), queries.b[s][0], queries.b[s][1]);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float2& start = queries.starts[i];
      store(place(column, kSteps + i), __float_as_uint(start.x), __float_as_uint(start.y));
    }
    store(place(column, kSteps + kParts), __float_as_uint(queries.scale),
          __float_as_uint(first_scale));
  }
  __device__ uint2 operand(int column, int step) const {
    return load_shared_8(place(column, step));
  }
  __device__ float2 start(int column, int part) const {
    const uint2 x = load_shared_8(place(column, kSteps + part));
    return {__uint_as_float(x.x), __uint_as_float(x.y)};
  }
  __device__ float scale(int column) const {
    const uint32_t own = place(column > 0 ? column : 1, kSteps + kParts);
    return __uint_as_float(load_shared_4(column > 0 ? own : own + 4));
  }

 private:
  // N-tile 0 is in registers.
  __device__ uint32_t place(int column, int i) const {
    return at + (column - 1) * kBytes + i * 32 * 8;
  }
  __device__ static void store(uint32_t to, uint32_t x, uint32_t y) {
    store_shared_8(to, {x, y});
  }
};

// Queries of all n-tiles.
template <int Dim, int NTiles, bool IsShared>
struct AllQueries {
  Queries<Dim> columns[NTiles];
  SharedQueries<Dim> shared;

  __device__ void share() const {
    if constexpr (IsShared) {
#pragma unroll
      for (int c = 1; c < NTiles; ++c) shared.store(c, columns[c], columns[0].scale);
    }
  }
  __device__ uint2 operand(int c, int step) const {
    if constexpr (IsShared) {
      if (c > 0) return shared.operand(c, step);
    }
    return {columns[c].b[step][0], columns[c].b[step][1]};
  }
  __device__ float2 start(int c, int part) const {
    if constexpr (IsShared) {
      if (c > 0) return shared.start(c, part);
    }
    return columns[c].starts[part];
  }
  __device__ float scale(int c) const {
    if constexpr (IsShared) return shared.scale(c);
    return columns[c].scale;
  }
};

// The same, all n-tiles in shared memory.
template <int Dim, int NTiles>
struct AllSharedQueries {
  Queries<Dim> columns[NTiles];  // until share()
  SharedQueries<Dim> shared;

  __device__ void share() const {
#pragma unroll
    for (int c = 0; c < NTiles; ++c) shared.store(c + 1, columns[c], 1.0f);
  }
  __device__ uint2 operand(int c, int step) const {
    return shared.operand(c + 1, step);
  }
  __device__ float scale(int c) const {
    return shared.scale(c + 1);
  }
};

// Scores of tokens g, g + 8 against queries 2t, 2t + 1, as Fragment lays them out. NTiles: of 8
// queries each; a decoded key meets all of them. Bulk: tiles come in bulk copies, unswizzled.
// Padded: rows may be shorter than Dim (tile_copy_padded.cuh).
template <class Element, class Scale, int Dim, bool Bulk, bool Padded>
struct TileKeys {
  static constexpr bool kIsBulk = Bulk;
  static constexpr int kDim = Dim;
  static constexpr bool kHasOffset = Element::kHasKeyOffset;
  // Whether one n-tile's scores of a whole stage are found faster at once than in two passes (as
  // measured): of E2M1, unless they would spill.
  static constexpr bool kHasRoomForSteps =
      Scale::kOnOperand && (Scale::kGroup == 32 || !std::is_same_v<Element, TileE2M1Interleaved>);
  static constexpr int kRowBytes = Dim * Element::kBits / 8;
  static constexpr bool kIsPadded = Padded;
  using Copy = TileCopyOf<kRowBytes, Scale::kRowBytes, Padded>;
  using Scales = ScalesAt<Padded>;
  using ScaleOfRow = Scale;
  using Mma = typename Element::Mma;
  static constexpr int kParts = Dim / 64;           // of a row, each with accumulators of its own
  static constexpr bool kScalesAllQueries = false;  // into f16's range, those of f16 too
  static constexpr int kStepsOfNeighbours = 2;      // k-iterations that have neighbours in eights
  // bf16 has too few digits for a query of f16 or f32: it comes in two parts, where there are
  // registers for the second.
  template <int NTiles>
  static constexpr bool kHasLowQueries =
      Element::kBits == 16 && !Mma::kScalesQueries && Dim <= 128 && NTiles == 1;

  // Scores come out divided by this.
  static constexpr float unit() {
    if constexpr (Scale::kOnOperand) return Element::kUnit * Scale::kUnit;
    return Element::kUnit;
  }

  // Lane t of four owns Dim / 4 channels, in runs: 16 of each 64, or a whole chunk of 32 where one
  // load brings it and all channels meet in one sum.
  static constexpr int kRun =
      Element::kBits == 4 && Dim % 128 == 0 && Scale::kGroups == 1 ? 32 : 16;
  __device__ static constexpr int owned_channel(int i, int t) {
    return i / kRun * (4 * kRun) + t * kRun + i % kRun;
  }
  // Which of the lane's channels are the two numbers of register r of step s: counted from number
  // 16 (s / 4).
  __device__ static int2 channels(int s, int r) {
    const int pair = (2 * s + r) % 8;
    if constexpr (Element::kBits > 4) {
      return {2 * pair, 2 * pair + 1};
    } else {
      const int2 nibbles = Element::key_pair(pair % 4);  // of a word of 8
      return {pair / 4 * 8 + code_of_nibble(nibbles.x), pair / 4 * 8 + code_of_nibble(nibbles.y)};
    }
  }
  // What register r of step s multiplies queries with, and what it has beside the codes: into the
  // part of the scores that the second number names.
  __device__ static float factor(int s, int r) {
    if constexpr (Element::kHasKeyOffset) return Element::key_factor((2 * s + r) % 4);
    return 1.0f;
  }
  __device__ static float offset(int s, int r) { return Element::key_offset((2 * s + r) % 4); }
  __device__ static int part(int s) { return Scale::kGroups == 1 ? 0 : s / 4; }

  // Of the affine formats: codes 0..7 of a word lie as 0 2 4 6 1 3 5 7.
  static constexpr bool kIsTurboMind = Scale::kHasZero;
  __device__ static int code_of_nibble(int n) { return kIsTurboMind ? n % 4 * 2 + n / 4 : n; }

  template <int NTiles, bool IsShared>
  __device__ static void score(uint32_t tile, Scales scales,
                               const AllQueries<Dim, NTiles, IsShared>& queries,
                               bool has_asked_type, int lane, Fragment (&scores)[NTiles]) {
    Fragment parts[NTiles][kParts] = {};
    if constexpr (Element::kHasKeyOffset) {
#pragma unroll
      for (int i = 0; i < NTiles * Scale::kGroups; ++i) {
        const float2 start = queries.start(i / Scale::kGroups, i % Scale::kGroups);
        parts[i / Scale::kGroups][i % Scale::kGroups] = {{start.x, start.y, start.x, start.y}};
      }
    }
    if constexpr (Element::kBits == 16) {
      score_16(tile, queries, parts, lane);
    } else if constexpr (Element::kBits == 8) {
      score_8(tile, queries, parts, lane);
    } else {
      static_assert(Element::kBits == 4);
      score_4(tile, scales, queries, parts, lane);
    }
    if constexpr (Scale::kIsNone || Scale::kOnOperand) {
#pragma unroll
      for (int c = 0; c < NTiles; ++c) scores[c] = parts[c][0];
    } else {
      const auto a = Scale::load(scales, lane / 4, has_asked_type);
      const auto b = Scale::load(scales, lane / 4 + 8, has_asked_type);
#pragma unroll
      for (int c = 0; c < NTiles; ++c) scores[c] = scaled(a, b, parts[c], queries.columns[c].sums);
    }
  }

 private:
  // A step's 16 channels into the accumulators of a part.
  template <int NTiles, bool IsShared>
  __device__ static void add(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             const AllQueries<Dim, NTiles, IsShared>& queries, int step,
                             Fragment (&parts)[NTiles][kParts], int part) {
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      const uint2 b = queries.operand(c, step);
      Mma::add(parts[c][part], a0, a1, a2, a3, b.x, b.y);
    }
  }

  template <int NTiles, bool IsShared>
  __device__ static void score_16(uint32_t tile, const AllQueries<Dim, NTiles, IsShared>& queries,
                                  Fragment (&parts)[NTiles][kParts], int lane) {
    const int g = lane / 4, t = lane % 4;
    [[maybe_unused]] Fragment low_part = {};  // apart: a sum waits for itself
#pragma unroll
    for (int i = 0; i < Dim / 32; ++i) {
      const int chunk = 8 * (i / 2) + 2 * t + i % 2;
      const uint4 x = load_shared_16(chunk_address<kRowBytes, !Bulk>(tile, g, chunk));
      const uint4 y = load_shared_16(chunk_address<kRowBytes, !Bulk>(tile, g + 8, chunk));
      add(x.x, y.x, x.y, y.y, queries, 2 * i, parts, 0);
      add(x.z, y.z, x.w, y.w, queries, 2 * i + 1, parts, 0);
      if constexpr (kHasLowQueries<NTiles>) {
        const auto& low = queries.columns[0].low;
        Mma::add(low_part, x.x, y.x, x.y, y.y, low[2 * i][0], low[2 * i][1]);
        Mma::add(low_part, x.z, y.z, x.w, y.w, low[2 * i + 1][0], low[2 * i + 1][1]);
      }
    }
    if constexpr (kHasLowQueries<NTiles>) {
#pragma unroll
      for (int j = 0; j < 4; ++j) parts[0][0].d[j] += low_part.d[j];
    }
  }

  template <int NTiles, bool IsShared>
  __device__ static void score_8(uint32_t tile, const AllQueries<Dim, NTiles, IsShared>& queries,
                                 Fragment (&parts)[NTiles][kParts], int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int chunk = 4 * part + t;
      const uint4 x = load_shared_16(chunk_address<kRowBytes, !Bulk>(tile, g, chunk));
      const uint4 y = load_shared_16(chunk_address<kRowBytes, !Bulk>(tile, g + 8, chunk));
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
      const uint32_t ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const Two a = Element::for_keys(xs[w]);
        const Two b = Element::for_keys(ys[w]);
        add(a.a, b.a, a.b, b.b, queries, 4 * part + w, parts, Scale::kGroups == 1 ? 0 : part);
      }
    }
  }

  template <int NTiles, bool IsShared>
  __device__ static void score_4(uint32_t tile, Scales scales,
                                 const AllQueries<Dim, NTiles, IsShared>& queries,
                                 Fragment (&parts)[NTiles][kParts], int lane) {
    const int g = lane / 4, t = lane % 4;
    uint32_t low[kParts], high[kParts];  // this lane's scales of tokens g and g + 8, both halves
    if constexpr (Scale::kOnOperand) operand_scales(scales, g, t, low, high);
    uint32_t xs[kParts * 2], ys[kParts * 2];
    load_words(tile, g, t, xs);
    load_words(tile, g + 8, t, ys);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        Four a = Element::for_keys(xs[2 * part + w]);
        Four b = Element::for_keys(ys[2 * part + w]);
        if constexpr (Scale::kOnOperand) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            a.r[j] = multiply_f16x2(a.r[j], low[part]);
            b.r[j] = multiply_f16x2(b.r[j], high[part]);
          }
        }
        const int step = 4 * part + 2 * w;
        const int to = Scale::kGroups == 1 ? 0 : part;
        add(a.r[0], b.r[0], a.r[1], b.r[1], queries, step, parts, to);
        add(a.r[2], b.r[2], a.r[3], b.r[3], queries, step + 1, parts, to);
      }
    }
  }

  // This lane's words of a row of four bits.
  __device__ static void load_words(uint32_t tile, int row, int t, uint32_t (&words)[kParts * 2]) {
    if constexpr (kRun == 32) {
#pragma unroll
      for (int i = 0; i < kParts * 2; i += 4) {
        const uint4 x = load_shared_16(chunk_address<kRowBytes, !Bulk>(tile, row, i + t));
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint2 x = load_shared_8(chunk_address<kRowBytes, !Bulk>(tile, row, 2 * part + t / 2) +
                                      (t % 2) * 8);
        words[2 * part] = x.x, words[2 * part + 1] = x.y;
      }
    }
  }

  // Numbers 16 p to 16 p + 15 of lane t lie in one group.
  __device__ static void operand_scales(Scales scales, int g, int t, uint32_t* low,
                                        uint32_t* high) {
    const auto a = Scale::load_row(scales, g);
    const auto b = Scale::load_row(scales, g + 8);
    const auto first = static_cast<uint32_t>(owned_channel(0, t) / Scale::kGroup);
#pragma unroll
    for (int p = 0; p < kParts; p += 2) {  // 128 channels
      if constexpr (kRun == 32 && Scale::kGroup == 32) {
        low[p] = low[p + 1] = Scale::f16x2_of_byte(a.words[p / 2], first);
        high[p] = high[p + 1] = Scale::f16x2_of_byte(b.words[p / 2], first);
      } else {
        // Two bytes, of parts p and p + 1.
        const auto second = static_cast<uint32_t>(owned_channel(16, t) / Scale::kGroup);
        const uint32_t bytes = first | second << 4;
        const uint32_t x = __byte_perm(a.words[p], a.words[p + 1], bytes);
        const uint32_t y = __byte_perm(b.words[p], b.words[p + 1], bytes);
        const Two of_a = halves_twice(Scale::f16x2_of_two(x));
        const Two of_b = halves_twice(Scale::f16x2_of_two(y));
        low[p] = of_a.a;
        high[p] = of_b.a;
        if constexpr (kParts > 1) {
          low[p + 1] = of_a.b;
          high[p + 1] = of_b.b;
        }
      }
    }
  }

  // a, b: of tokens g and g + 8.
  __device__ static Fragment scaled(const RowScale<Scale::kGroups>& a,
                                    const RowScale<Scale::kGroups>& b, const Fragment* parts,
                                    float2 query_sums) {
    Fragment f = {};
    if constexpr (Scale::kHasZero) {
      f = {{a.zero * query_sums.x, a.zero * query_sums.y, b.zero * query_sums.x,
            b.zero * query_sums.y}};
    }
#pragma unroll
    for (int i = 0; i < Scale::kGroups; ++i) {
      f.d[0] += a.scale[i] * parts[i].d[0];
      f.d[1] += a.scale[i] * parts[i].d[1];
      f.d[2] += b.scale[i] * parts[i].d[2];
      f.d[3] += b.scale[i] * parts[i].d[3];
    }
    return f;
  }
};

}  // namespace kvx::ops::cuda
