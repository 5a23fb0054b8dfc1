// encode_rows in vectors: the loops of encode_rows.hpp over parts of sixteen numbers, for rows that
// are whole parts. Same bytes.
//
// Computed scales go through three passes over some rows at a time: the amax of every group, the
// scales of all groups side by side (a scale is dozens of instructions, and sixteen of them take no
// longer than one), the codes.
#pragma once

#include <algorithm>
#include <bit>

#include "format/traits.hpp"
#include "ops/append/encode_lanes.hpp"
#include "ops/append/encode_row.hpp"
#include "ops/append/saturation.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Numbers [first, first + n) of a row.
struct PartSpan {
  const float* x;  // of the span
  int first;
  int n;
};

KVX_INLINE LaneBits magnitudes_of_span(const PartSpan& span) {
  LaneBits largest = {};
  for (int i = 0; i < span.n; i += kLanes<Widest>) {
    largest = larger_of(largest, magnitude_bits(load<Widest>(span.x + i)));
  }
  return largest;
}
KVX_INLINE float amax_of_span(const PartSpan& span) {
  return std::bit_cast<float>(max_of_lanes(magnitudes_of_span(span)));
}

// format::squared_error of Count candidates, lane by lane: folding a result halves first gives its
// order of adding. steps, inverses: of candidate c at [c * stride].
template <class Codec, int Count>
KVX_INLINE void errors_of_span(const PartSpan& span, const float* steps, const float* inverses,
                               int stride, Widest* errors) {
  Widest sums[Count][kPartVectors] = {};
  for (int i = 0; i < span.n; i += kPartNumbers) {
    for (int v = 0; v < kPartVectors; ++v) {
      const Widest x = load<Widest>(span.x + i + v * kLanes<Widest>);
      for (int c = 0; c < Count; ++c) {
        const Widest error =
            x - LanesCodec<Codec>::rounded(x * inverses[c * stride]) * steps[c * stride];
        sums[c][v] += error * error;
      }
    }
  }
  for (int c = 0; c < Count; ++c) {
    for (int half = kPartVectors / 2; half > 0; half /= 2) {
      for (int v = 0; v < half; ++v) sums[c][v] += sums[c][v + half];
    }
    errors[c] = sums[c][0];
  }
}

// The multiples of a group's amax that format::choose_scale tries, in its order. choose_scale
// itself gives them: with a scale of 32 bits and a largest code of 1 the steps are the multiples.
inline constexpr int kMostCandidates = 8;

struct Candidates {
  float multiples[kMostCandidates];
  int count;
};

struct OneCodec {
  static constexpr float kQmax = 1.0f;
};
struct StepRecorder {
  Candidates* candidates;
  KVX_INLINE float operator()(float step) const {
    if (candidates->count < kMostCandidates) candidates->multiples[candidates->count++] = step;
    return 0.0f;
  }
};

KVX_INLINE Candidates candidates_of(format::ScaleChoice choice) {
  const format::ScaleMaker exact = {format::ScaleType::kF32, format::ScaleRule::kAmax, 1.0f, false};
  Candidates candidates = {};
  format::choose_scale<OneCodec>(exact, choice, 1.0f, StepRecorder{&candidates});
  return candidates;
}

template <class Codec, format::Packing P>
KVX_INLINE void encode_span(const PartSpan& span, float inverse, uint8_t* row) {
  for (int i = 0; i < span.n; i += kPartNumbers) {
    LaneBits codes[kPartVectors];
    for (int v = 0; v < kPartVectors; ++v) {
      codes[v] = LanesCodec<Codec>::codes(load<Widest>(span.x + i + v * kLanes<Widest>) * inverse);
    }
    store_codes<P>(low_bytes(codes), span.first + i, row);
  }
}

// Whole vectors of codes at once, numbers [number, number + kQuadNumbers) of a row. Requires: none
// of the products is 2^31 or more.
template <class Codec, format::Packing P>
KVX_INLINE void encode_quad(const Widest* products, int number, uint8_t* row) {
  LaneBits codes[kQuadVectors];
  for (int v = 0; v < kQuadVectors; ++v) codes[v] = LanesCodec<Codec>::whole_codes(products[v]);
  store_quad<P>(LanesCodec<Codec>::bytes(codes), number, row);
}

template <format::Packing P>
KVX_INLINE void encode_zeros(const PartSpan& span, uint8_t* row) {
  for (int i = 0; i < span.n; i += kPartNumbers) {
    store_codes<P>(zero_codes(), span.first + i, row);
  }
}

// ---- 16-bit floats

template <class Codec>
void encode_half_rows(const EncodeParams& params) {
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const EncodeRow row = encode_row(params, t);
    for (int i = 0; i < params.head_dim; i += kLanes<Widest>) {
      store_halves<Codec>(load<Widest>(row.x + i), row.codes + int64_t{2} * i);
    }
  }
}

// ---- Computed scales

// Whether all group sizes but the whole row are powers of two.
template <class Format>
constexpr bool sizes_are_powers_of_two() {
  constexpr auto kSizes = Format::kFacts.group_sizes;
  for (int i = 0; i < kSizes.count; ++i) {
    const int size = kSizes.values[i];
    if (size != format::kWholeRow && !std::has_single_bit(static_cast<unsigned>(size)))
      return false;
  }
  return true;
}

template <class Format, format::ScaleType T>
class ScaledPartEncoder {
 public:
  explicit ScaledPartEncoder(const EncodeParams& params)
      : params_(params),
        size_(params.spec->group_size == format::kWholeRow ? params.head_dim
                                                           : params.spec->group_size),
        groups_((params.head_dim + size_ - 1) / size_),
        size_bits_(groups_ == 1 ? 31 : std::countr_zero(static_cast<unsigned>(size_))),
        maker_(format::scale_maker<Format>(*params.spec, params.tensor_scale)),
        largest_storable_(format::largest_storable<Codec>(maker_)),
        storable_limit_(params.saturated == nullptr ? UINT32_MAX
                                                    : std::bit_cast<uint32_t>(largest_storable_)),
        candidates_(candidates_of(params.spec->scale_choice)) {
    maker_.type = T;
  }

  void encode_all() {
    const int tokens_together = std::clamp(kMostGroups / groups_, 1, kMostRows);
    for (int t = 0; t < params_.num_tokens; t += tokens_together) {
      const int n = std::min(tokens_together, params_.num_tokens - t);
      find_amax(t, n);
      choose_scales(t, n);
      const uint32_t largest = largest_amax(n * groups_);
      largest < kPlainLimit ? write_plain(t, n) : write(t, n);
      if (largest >= storable_limit_) count(t, n);
    }
  }

 private:
  using Codec = typename Format::Codec;
  static constexpr format::Packing kPacking = Format::kFacts.packing;
  static constexpr int kMostGroups = format::kMaxHeadDim / 16;
  static_assert(sizes_are_powers_of_two<Format>(), "a number's group is found by a shift");
  // Rows are read twice. Those of a tensor lie a power of two apart, in few sets of the first
  // cache.
  static constexpr int kMostRows = 8;

  KVX_INLINE PartSpan span(int token, int group) const {
    const int first = group * size_;
    return {source_row(params_, token) + first, first, std::min(size_, params_.head_dim - first)};
  }

  // Scales of the groups at hand, their steps and the steps' reciprocals.
  struct Scales {
    uint32_t bits[kMostGroups];
    float steps[kMostGroups];
    float inverses[kMostGroups];
  };

  // result[c][i] = lane vector c of group i folded, for the groups of n tokens: as many at once as
  // a vector has lanes. find(span, i, lanes) stores the vectors of a group in lanes[0..Count).
  template <class Lanes, int Count, class Find, class Combine>
  KVX_INLINE void fold_groups(int first_token, int n, const Find& find, const Combine& combine,
                              float (*result)[kMostGroups]) {
    constexpr int kTogether = kLanes<Widest>;
    Lanes lanes[Count][kTogether];
    if (n * groups_ % kTogether != 0) __builtin_memset(lanes, 0, sizeof lanes);
    const auto fold_all = [&](int first) {
      for (int c = 0; c < Count; ++c) {
        const Lanes folded = fold_each(lanes[c], combine);
        __builtin_memcpy(result[c] + first, &folded, sizeof folded);
      }
    };
    int i = 0;
    for (int t = first_token; t < first_token + n; ++t) {
      for (int g = 0; g < groups_; ++g) {
        Lanes found[Count];
        find(span(t, g), i, found);
        for (int c = 0; c < Count; ++c) lanes[c][i % kTogether] = found[c];
        if (++i % kTogether == 0) fold_all(i - kTogether);
      }
    }
    if (i % kTogether != 0) fold_all(i / kTogether * kTogether);
  }

  KVX_INLINE void find_amax(int first_token, int n) {
    fold_groups<LaneBits, 1>(
        first_token, n,
        [](const PartSpan& s, int, LaneBits* found) { *found = magnitudes_of_span(s); },
        [](const LaneBits& a, const LaneBits& b) { return larger_of(a, b); }, &amax_);
  }

  // ScaleMaker::make and step in vectors: the scales of n groups for a multiple of their amax.
  // Groups without a plain scale get one here too; write() does not look at it.
  KVX_INLINE void make_scales(float multiple, int n, Scales& made) const {
    const float divisor =
        maker_.has_tensor_scale ? Codec::kQmax * maker_.tensor_scale : Codec::kQmax;
    const float tensor_scale = maker_.has_tensor_scale ? maker_.tensor_scale : 1.0f;
    for (int i = 0; i < n; i += kLanes<Widest>) {
      const Widest target = at_most(load<Widest>(amax_ + i) * multiple, format::kFloatMax);
      ScaleLanes scales;
      if constexpr (T == format::ScaleType::kE8M0) {
        scales = e8m0_lanes(maker_.rule, target);
      } else {
        scales = round_scale_lanes<T>(target / divisor);
      }
      const Widest step = scales.values * tensor_scale;
      __builtin_memcpy(made.bits + i, &scales.bits, sizeof scales.bits);
      store<Widest>(step, made.steps + i);
      store<Widest>(at_most(1.0f / step, format::kFloatMax), made.inverses + i);
    }
  }

  KVX_INLINE void choose_scales(int first_token, int n) {
    constexpr int kTogether = 4;  // candidates; what registers hold beside their steps
    if (params_.spec->scale_choice == format::ScaleChoice::kAmax) {
      make_scales(1.0f, n * groups_, best_);
    } else if (candidates_.count < kTogether) {
      search_scales<2>(first_token, n);
    } else {
      search_scales<kTogether>(first_token, n);
    }
  }

  // format::choose_scale for all groups, Count candidates at a time, which divides their number.
  template <int Count>
  KVX_INLINE void search_scales(int first_token, int n) {
    float least[kMostGroups] = {};
    for (int first = 0; first < candidates_.count; first += Count) {
      Scales scales[Count];
      float errors[Count][kMostGroups];
      for (int c = 0; c < Count; ++c) {
        make_scales(candidates_.multiples[first + c], n * groups_, scales[c]);
      }
      constexpr int kStride = sizeof(Scales) / sizeof(float);
      fold_groups<Widest, Count>(
          first_token, n,
          [&](const PartSpan& s, int i, Widest* found) {
            errors_of_span<Codec, Count>(s, scales[0].steps + i, scales[0].inverses + i, kStride,
                                         found);
          },
          [](const Widest& a, const Widest& b) { return a + b; }, errors);
      for (int c = 0; c < Count; ++c) {
        keep_better(scales[c], errors[c], n * groups_, first + c == 0, least);
      }
    }
  }

  KVX_INLINE void keep_better(const Scales& scales, const float* errors, int n, bool is_first,
                              float* least) {
    for (int i = 0; i < n; i += kLanes<Widest>) {
      const Widest error = load<Widest>(errors + i);
      const LaneInts is_better =
          is_first ? ~LaneInts{} : __builtin_bit_cast(LaneInts, error < load<Widest>(least + i));
      const auto keep = [&](const void* better, void* best) {
        LaneInts lanes[2];
        __builtin_memcpy(&lanes[0], better, sizeof(LaneInts));
        __builtin_memcpy(&lanes[1], best, sizeof(LaneInts));
        const LaneInts kept = is_better ? lanes[0] : lanes[1];
        __builtin_memcpy(best, &kept, sizeof kept);
      };
      keep(errors + i, least + i);
      keep(scales.bits + i, best_.bits + i);
      keep(scales.inverses + i, best_.inverses + i);
    }
  }

  // Of n groups' amax, its bits less one, so that 0 is the largest. Below kPlainLimit every group
  // has a plain scale, and products whose integers a lane can hold: a scale that was cut to its
  // type's largest number makes larger ones.
  static constexpr uint32_t kPlainLimit = std::bit_cast<uint32_t>(0x1p20f);
  KVX_INLINE uint32_t largest_amax(int n) const {
    uint32_t largest = 0;
    for (int i = 0; i < n; ++i) {
      largest = std::max(largest, std::bit_cast<uint32_t>(amax_[i]) - 1u);
    }
    return largest;
  }

  // Adds to params_.saturated what the largest scale cannot store.
  void count(int first_token, int n) const {
    if (params_.saturated == nullptr) return;
    for (int i = 0, t = first_token; t < first_token + n; ++t) {
      for (int g = 0; g < groups_; ++g, ++i) {
        const PartSpan of_group = span(t, g);
        if (!(amax_[i] <= largest_storable_)) {  // a NaN too
          *params_.saturated += count_beyond(largest_storable_, of_group.x, of_group.n);
        }
      }
    }
  }

  // write() without a group that needs care.
  KVX_INLINE void write_plain(int first_token, int n) {
    for (int i = 0, t = first_token; t < first_token + n; ++t, i += groups_) {
      const EncodeRow row = encode_row(params_, params_.first_token + t);
      uint8_t* scale = row.scales;
      for (int g = 0; g < groups_; ++g, scale += params_.scale_group_stride) {
        format::store_scale(T, {best_.bits[i + g]}, scale);
      }
      const float* inverses = best_.inverses + i;
      int number = 0;
      for (; number + kQuadNumbers <= params_.head_dim; number += kQuadNumbers) {
        Widest products[kQuadVectors];
        for (int v = 0; v < kQuadVectors; ++v) {
          const int first = number + v * kLanes<Widest>;
          products[v] = load<Widest>(row.x + first) * inverses[first >> size_bits_];
        }
        encode_quad<Codec, kPacking>(products, number, row.codes);
      }
      for (; number < params_.head_dim; number += kPartNumbers) {
        encode_span<Codec, kPacking>({row.x + number, number, kPartNumbers},
                                     inverses[number >> size_bits_], row.codes);
      }
    }
  }

  KVX_INLINE void write(int first_token, int n) {
    for (int i = 0, t = first_token; t < first_token + n; ++t) {
      const EncodeRow row = encode_row(params_, params_.first_token + t);
      uint8_t* scale = row.scales;
      for (int g = 0; g < groups_; ++g, ++i, scale += params_.scale_group_stride) {
        if (amax_[i] > 0 && format::is_finite(amax_[i])) {
          format::store_scale(T, {best_.bits[i]}, scale);
          encode_span<Codec, kPacking>(span(t, g), best_.inverses[i], row.codes);
        } else {
          const bool is_zero = amax_[i] == 0;
          format::store_scale(T, is_zero ? format::StoredScale{0} : format::nan_scale(T), scale);
          encode_zeros<kPacking>(span(t, g), row.codes);
        }
      }
    }
  }

  const EncodeParams& params_;
  int size_;  // numbers in a full group
  int groups_;
  int size_bits_;  // a number's group is number >> size_bits_
  format::ScaleMaker maker_;
  float largest_storable_;
  uint32_t storable_limit_;  // its bits; nothing reaches it where nobody counts
  Candidates candidates_;
  // Of the groups at hand, token by token; whole vectors of them are computed with.
  float amax_[kMostGroups] = {};
  Scales best_ = {};
};

// Finds the spec's scale type among those that the format has, so that it is a constant.
template <class Format, int Index = 0>
int64_t encode_computed_parts(const EncodeParams& params) {
  constexpr auto kTypes = Format::kFacts.scale_types;
  if constexpr (Index + 1 < kTypes.count) {
    if (params.spec->scale_type != kTypes.values[Index]) {
      return encode_computed_parts<Format, Index + 1>(params);
    }
  }
  ScaledPartEncoder<Format, kTypes.values[Index]>(params).encode_all();
  return 0;
}

// ---- Given scales

// Requires: every number of the row is finite; amax is the largest magnitude.
template <class Format>
void encode_given_row(const EncodeParams& params, const EncodeRow& row, float amax) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = format::scale_maker<Format>(*params.spec, params.tensor_scale);
  const int size =
      params.spec->group_size == format::kWholeRow ? params.head_dim : params.spec->group_size;
  const uint8_t* scale = row.scales;
  for (int first = 0; first < params.head_dim; first += size, scale += params.scale_group_stride) {
    const PartSpan span = {row.x + first, first, std::min(size, params.head_dim - first)};
    const float step = maker.step(format::load_scale(maker.type, scale));
    const float inverse = format::reciprocal(step);  // once: a division takes as long as the rest
    constexpr format::SaturationLimit kLimit = {format::saturation_product<Codec>(), true};
    if (params.saturated != nullptr && amax * inverse > kLimit.most) {
      *params.saturated += count_saturated(kLimit, step, span.x, span.n);
    }
    if (step > 0) {
      encode_span<Codec, Format::kFacts.packing>(span, inverse, row.codes);
    } else {
      encode_zeros<Format::kFacts.packing>(span, row.codes);
    }
  }
}

// A row with a number that is not finite is what `definition` makes of it.
template <class Format>
int64_t encode_given_parts(const EncodeParams& params, int64_t (*definition)(const EncodeParams&)) {
  int64_t nonfinite = 0;
  for (int i = 0; i < params.num_tokens; ++i) {
    const EncodeRow row = encode_row(params, params.first_token + i);
    const float amax = amax_of_span({row.x, 0, params.head_dim});
    if (format::is_finite(amax)) {
      encode_given_row<Format>(params, row, amax);
      continue;
    }
    EncodeParams one = params;
    one.rows = row.x;
    one.first_token += i;
    one.num_tokens = 1;
    nonfinite += definition(one);
  }
  return nonfinite;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
