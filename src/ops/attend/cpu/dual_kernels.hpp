// Scores and weighted sums of a tile of a dual-scale block: its codes become nibbles, and the integer
// products of code_keys.hpp and code_values.hpp do the rest. The channels' steps go into the queries
// before and into the sums after; their offsets are one product a query, and one sum of weights.
#pragma once

#include "format/dual_scale.hpp"
#include "ops/attend/cpu/code_keys.hpp"
#include "ops/attend/cpu/code_values.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

inline constexpr int kMostDualRows = 8;
inline constexpr int kMostDualHeadDim = 256;

// Sixteen bytes of codes, as words whose shifts do not mind what crosses a byte.
typedef uint16_t CodeWords __attribute__((vector_size(16)));
typedef uint8_t CodeByteLanes __attribute__((vector_size(16)));

// Codes count from the middle of the nibbles, where the products expect numbers around 0.
template <int Bits>
inline constexpr int kNibbleOfZero = 8 - (1 << (Bits - 1));

// 64 codes of a row, in order, as 32 bytes of nibbles.
template <int Bits>
KVX_INLINE void widen_codes(const uint8_t* codes, uint8_t* nibbles) {
  static_assert(Bits == 2 || Bits == 3);
  CodeWords low;
  memcpy(&low, codes, sizeof low);
  // The two codes of an even byte of nibbles, and of an odd one.
  CodeWords even = (low & 0x0303) | ((low << 2) & 0x3030);
  CodeWords odd = ((low >> 4) & 0x0303) | ((low >> 2) & 0x3030);
  if constexpr (Bits == 3) {
    uint64_t high[2];
    memcpy(high, codes + format::kHighBitsAt, sizeof high[0]);
    high[1] = high[0] >> 1;
    CodeWords bits;
    memcpy(&bits, high, sizeof bits);
    even |= ((bits << 2) & 0x0404) | ((bits << 4) & 0x4040);
    odd |= ((bits >> 2) & 0x0404) | (bits & 0x4040);
  }
  constexpr uint16_t kZeros = kNibbleOfZero<Bits> * 0x1111;
  const auto a = (CodeByteLanes)(even + kZeros);
  const auto b = (CodeByteLanes)(odd + kZeros);
  const CodeByteLanes first = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5,
                                                      21, 6, 22, 7, 23);
  const CodeByteLanes second = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                                       13, 29, 14, 30, 15, 31);
  memcpy(nibbles, &first, sizeof first);
  memcpy(nibbles + 16, &second, sizeof second);
}

// A tile of nibbles made of one of codes, with its channels.
template <int Bits>
class DualTile {
 public:
  explicit DualTile(const PackedTile& source) {
    tile_.spec = source.spec;
    tile_.head_dim = source.head_dim;
    tile_.num_tokens = source.num_tokens;
    tile_.scale_group_stride = source.scale_group_stride;
    const int n = source.padded_tokens();
    const int row_bytes = source.head_dim / 2;
    for (int t = 0; t < n; ++t) {
      tile_.scales[t] = source.scales[t];
      if constexpr (Bits == 4) {
        tile_.codes[t] = source.codes[t];
      } else {
        uint8_t* row = nibbles_ + t * row_bytes;
        tile_.codes[t] = row;
        for (int c = 0; c < source.head_dim; c += 64) {
          widen_codes<Bits>(source.codes[t] + c / 8 * Bits, row + c / 2);
        }
      }
    }
    const float factor = format::dual_factor(source.channels);
    for (int c = 0; c < source.head_dim; ++c) {
      const auto channel = format::dual_channel<Bits>(
          source.channels[c], source.channels[source.head_dim + c], factor);
      steps_[c] = channel.step;
      // Of what the products take for the number of a code.
      offsets_[c] = channel.offset + static_cast<float>(8 - kNibbleOfZero<Bits>);
    }
  }

  const PackedTile& tile() const { return tile_; }
  const float* steps() const { return steps_; }
  const float* offsets() const { return offsets_; }

 private:
  PackedTile tile_;
  alignas(64) float steps_[kMostDualHeadDim];
  alignas(64) float offsets_[kMostDualHeadDim];
  alignas(64) uint8_t nibbles_[Bits == 4 ? 1 : kMaxTileTokens * kMostDualHeadDim / 2];
};

// The queries are prepared tile by tile, with the block's steps.
inline void prepare_no_queries(const format::FormatSpec&, int, const float*, int, float*) {}

template <int Bits, Fixed F>
bool score_dual(const ScoreParams& params) {
  using Codec = format::UInt4Codec;
  constexpr auto kPacking = format::Packing::kNibbles;
  const DualTile<Bits> dual(params.keys);
  const int head_dim = params.keys.head_dim;
  alignas(64) float queries[kMostDualRows * kMostDualHeadDim];
  alignas(64) float prepared[kMostDualRows * kMostDualHeadDim];
  float constants[kMostDualRows];
  for (int r = 0; r < params.num_rows; ++r) {
    const float* q = params.queries + int64_t{r} * head_dim;
    float* folded = queries + r * head_dim;
    Widest sums = {};
    for (int c = 0; c < head_dim; c += kIntLanes) {
      const Widest x = load<Widest>(q + c) * load<Widest>(dual.steps() + c);
      store<Widest>(x, folded + c);
      sums += x * load<Widest>(dual.offsets() + c);
    }
    constants[r] = sum_of_lanes(sums);
  }
  prepare_code_queries<Codec, kPacking, F>(*params.keys.spec, head_dim, queries, params.num_rows,
                                           prepared);
  if (!score_codes<Codec, kPacking, F>({.keys = dual.tile(),
                                        .prefetcher = params.prefetcher,
                                        .queries = queries,
                                        .prepared = prepared,
                                        .num_rows = params.num_rows,
                                        .scores = params.scores,
                                        .scores_stride = params.scores_stride,
                                        .scratch = params.scratch})) {
    return false;
  }
  const int n = params.keys.padded_tokens();
  float scales[kMaxTileTokens];
  load_steps(dual.tile(), scale_row(*params.keys.spec, head_dim), 1.0f, scales);
  for (int r = 0; r < params.num_rows; ++r) {
    float* scores = params.scores + int64_t{r} * params.scores_stride;
    for (int t = 0; t < n; t += kIntLanes) {
      store<Widest>(load<Widest>(scores + t) + load<Widest>(scales + t) * constants[r],
                    scores + t);
    }
  }
  return true;
}

template <int Bits, Fixed F>
bool add_dual_values(const ValueParams& params) {
  const DualTile<Bits> dual(params.values);
  const int head_dim = params.values.head_dim;
  alignas(64) float sums[kMostDualRows * kMostDualHeadDim];
  memset(sums, 0, sizeof(float) * params.num_rows * head_dim);
  const ValueParams of_codes = {.values = dual.tile(),
                                .prefetcher = params.prefetcher,
                                .p = params.p,
                                .p_stride = params.p_stride,
                                .num_rows = params.num_rows,
                                .sums = sums,
                                .scratch = params.scratch};
  if (!add_code_values<format::UInt4Codec, format::Packing::kNibbles, F>(of_codes)) return false;
  float scales[kMaxTileTokens] = {};
  load_steps(dual.tile(), scale_row(*params.values.spec, head_dim), 1.0f, scales);
  for (int r = 0; r < params.num_rows; ++r) {
    Widest p[kTileVectors];
    load_probabilities(of_codes, r, p);
    Widest products = {};
    for (int i = 0; i < kTileVectors; ++i) {
      products += p[i] * load<Widest>(scales + i * kIntLanes);
    }
    const float weight = sum_of_lanes(products);
    float* target = params.sums + int64_t{r} * head_dim;
    for (int c = 0; c < head_dim; c += kIntLanes) {
      const Widest numbers =
          load<Widest>(sums + r * head_dim + c) + load<Widest>(dual.offsets() + c) * weight;
      store<Widest>(load<Widest>(target + c) + numbers * load<Widest>(dual.steps() + c),
                    target + c);
    }
  }
  return true;
}

template <int Bits, Fixed OfQuery, Fixed OfWeight>
inline constexpr PackedKernels kDualKernels = {prepare_no_queries, score_dual<Bits, OfQuery>,
                                               add_dual_values<Bits, OfWeight>, kMostDualRows};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
