// encode_rows in vectors: the loops of encode_rows.hpp over parts of sixteen numbers, for rows that
// are whole parts. Same bytes.
//
// Computed scales go through three passes over some rows at a time: the amax of every group, the
// scales of all groups side by side (a scale is dozens of instructions, and sixteen of them take no
// longer than one), the codes.
#pragma once

#include <algorithm>

#include "ops/append/encode_lanes.hpp"
#include "ops/append/encode_row.hpp"
#include "ops/cpu/facts_in_kernels.hpp"

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

// Sixteen lanes to eight, the first step of adding halves.
KVX_INLINE Lanes8 add_halves(const Widest* part) {
#if defined(__AVX512F__)
  const auto whole = static_cast<__m512>(part[0]);
  return static_cast<Lanes8>(_mm512_castps512_ps256(whole)) +
         static_cast<Lanes8>(_mm512_extractf32x8_ps(whole, 1));
#else
  return part[0] + part[1];
#endif
}

// format::squared_error of Count candidates side by side, whose order of adding is sixteen lanes,
// then halves. steps, inverses: of candidate c at [c * stride]. errors: [Count].
template <class Codec, int Count>
KVX_INLINE void errors_of_span(const PartSpan& span, const float* steps, const float* inverses,
                               int stride, float* errors) {
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
  Lanes8 halves[Count];
  for (int c = 0; c < Count; ++c) halves[c] = add_halves(sums[c]);
  if constexpr (Count == 8) {
    const auto add = [](const Lanes8& a, const Lanes8& b) { return a + b; };
    store<Lanes8>(fold_each(halves, add), errors);
  } else {
    for (int c = 0; c < Count; ++c) errors[c] = sum_of_lanes(halves[c]);
  }
}

// What multiples of a group's amax format::choose_scale tries, in its order, asked of itself: with
// a scale of 32 bits and a largest code of 1 the steps are the multiples.
inline constexpr int kMostCandidates = 8;

struct Candidates {
  float multiples[kMostCandidates];
  int count;
};

struct UnitCodec {
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
  format::choose_scale<UnitCodec>(exact, choice, 1.0f, StepRecorder{&candidates});
  // Too few: the first again, which cannot win twice.
  for (int c = candidates.count; c < kMostCandidates; ++c) candidates.multiples[c] = 1.0f;
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

template <format::Packing P>
KVX_INLINE void encode_zeros(const PartSpan& span, uint8_t* row) {
  for (int i = 0; i < span.n; i += kPartNumbers) {
    store_codes<P>(_mm_setzero_si128(), span.first + i, row);
  }
}

// ---- Computed scales

template <class Format, format::ScaleType T>
class ScaledPartEncoder {
 public:
  explicit ScaledPartEncoder(const EncodeJob& job)
      : job_(job),
        size_(job.spec->group_size == format::kWholeRow ? job.head_dim : job.spec->group_size),
        groups_((job.head_dim + size_ - 1) / size_),
        maker_(scale_maker<Format>(*job.spec, job.tensor_scale)),
        candidates_(candidates_of(job.spec->scale_choice)) {
    maker_.type = T;
  }

  void encode_all() {
    const int tokens_together = std::clamp(kMostGroups / groups_, 1, kMostRows);
    for (int t = 0; t < job_.num_tokens; t += tokens_together) {
      const int n = std::min(tokens_together, job_.num_tokens - t);
      find_amax(t, n);
      choose_scales(t, n * groups_);
      write(t, n);
    }
  }

 private:
  using Codec = typename Format::Codec;
  static constexpr format::Packing kPacking = Format::kFacts.packing;
  static constexpr int kMostGroups = format::kMaxHeadDim / 16;
  // Rows are read twice. Those of a tensor lie a power of two apart, in few sets of the first
  // cache.
  static constexpr int kMostRows = 8;

  KVX_INLINE PartSpan span(int token, int group) const {
    const int first = group * size_;
    return {source_row(job_, token) + first, first, std::min(size_, job_.head_dim - first)};
  }

  // As many groups at once as a vector has lanes: their maxima are found side by side.
  KVX_INLINE void find_amax(int first_token, int n) {
    constexpr int kTogether = kLanes<Widest>;
    for (int first = 0; first < n * groups_; first += kTogether) {
      LaneBits magnitudes[kTogether] = {};
      const int end = std::min(first + kTogether, n * groups_);
      for (int i = first; i < end; ++i) {
        magnitudes[i - first] = magnitudes_of_span(span(first_token + i / groups_, i % groups_));
      }
      const LaneBits largest = fold_each(
          magnitudes, [](const LaneBits& a, const LaneBits& b) { return larger_of(a, b); });
      __builtin_memcpy(amax_ + first, &largest, sizeof largest);
    }
  }

  // Groups without a plain scale get one here too; write() does not look at it.
  KVX_INLINE void choose_scales(int first_token, int n) {
    const format::ScaleChoice choice = job_.spec->scale_choice;
    if (choice != format::ScaleChoice::kAmax) {
      candidates_.count <= 2 ? search_scales<2>(first_token, n)
                             : search_scales<kMostCandidates>(first_token, n);
    } else {
      float steps[kMostGroups];
      make_scales(1.0f, n, scales_, steps, inverses_);
    }
  }

  // ScaleMaker::make and step in vectors: the scales of n groups for a multiple of their amax, the
  // steps and the steps' reciprocals. All arrays: [kMostGroups].
  KVX_INLINE void make_scales(float multiple, int n, uint32_t* scales, float* steps,
                              float* inverses) const {
    const float divisor =
        maker_.has_tensor_scale ? Codec::kQmax * maker_.tensor_scale : Codec::kQmax;
    const float unit = maker_.has_tensor_scale ? maker_.tensor_scale : 1.0f;
    for (int i = 0; i < n; i += kLanes<Widest>) {
      const Widest target = at_most(load<Widest>(amax_ + i) * multiple, format::kFloatMax);
      ScaleLanes made;
      if constexpr (T == format::ScaleType::kE8M0) {
        made = e8m0_lanes(maker_.rule, target);
      } else {
        made = round_scale_lanes<T>(target / divisor);
      }
      const Widest step = made.values * unit;
      __builtin_memcpy(scales + i, &made.bits, sizeof made.bits);
      store<Widest>(step, steps + i);
      store<Widest>(at_most(1.0f / step, format::kFloatMax), inverses + i);
    }
  }

  // format::choose_scale for all groups: every candidate's scales side by side, then every group's
  // errors.
  template <int kCount>
  KVX_INLINE void search_scales(int first_token, int n) {
    uint32_t scales[kCount][kMostGroups];
    float steps[kCount][kMostGroups];
    float inverses[kCount][kMostGroups];
    for (int c = 0; c < kCount; ++c) {
      make_scales(candidates_.multiples[c], n, scales[c], steps[c], inverses[c]);
    }
    for (int i = 0; i < n; ++i) {
      float errors[kCount];
      errors_of_span<Codec, kCount>(span(first_token + i / groups_, i % groups_), &steps[0][i],
                                    &inverses[0][i], kMostGroups, errors);
      int best = 0;
      float best_error = errors[0];
      for (int c = 1; c < kCount; ++c) {
        best = errors[c] < best_error ? c : best;
        best_error = errors[c] < best_error ? errors[c] : best_error;
      }
      scales_[i] = scales[best][i];
      inverses_[i] = inverses[best][i];
    }
  }

  KVX_INLINE void write(int first_token, int n) {
    for (int i = 0, t = first_token; t < first_token + n; ++t) {
      const EncodeRow row = encode_row(job_, job_.first_token + t);
      uint8_t* scale = row.scales;
      for (int g = 0; g < groups_; ++g, ++i, scale += job_.scale_group_stride) {
        if (amax_[i] > 0 && format::is_finite(amax_[i])) {
          format::store_scale(T, {scales_[i]}, scale);
          encode_span<Codec, kPacking>(span(t, g), inverses_[i], row.codes);
        } else {
          const bool is_zero = amax_[i] == 0;
          format::store_scale(T, is_zero ? format::StoredScale{0} : format::nan_scale(T), scale);
          encode_zeros<kPacking>(span(t, g), row.codes);
        }
      }
    }
  }

  const EncodeJob& job_;
  int size_;  // numbers in a full group
  int groups_;
  format::ScaleMaker maker_;
  Candidates candidates_;
  // Of the groups at hand, token by token; whole vectors of them are computed with.
  float amax_[kMostGroups] = {};
  uint32_t scales_[kMostGroups];
  float inverses_[kMostGroups];
};

// Finds the spec's scale type among those that the format has, so that the compiler knows it.
template <class Format, int Index = 0>
int64_t encode_computed_parts(const EncodeJob& job) {
  constexpr auto kTypes = Format::kFacts.scale_types;
  if constexpr (Index + 1 < kTypes.count) {
    if (job.spec->scale_type != kTypes.values[Index]) {
      return encode_computed_parts<Format, Index + 1>(job);
    }
  }
  ScaledPartEncoder<Format, kTypes.values[Index]>(job).encode_all();
  return 0;
}

// ---- Given scales

// Requires: every number of the row is finite.
template <class Format>
void encode_given_row(const EncodeJob& job, const EncodeRow& row) {
  const format::ScaleMaker maker = scale_maker<Format>(*job.spec, job.tensor_scale);
  const int size = job.spec->group_size == format::kWholeRow ? job.head_dim : job.spec->group_size;
  const uint8_t* scale = row.scales;
  for (int first = 0; first < job.head_dim; first += size, scale += job.scale_group_stride) {
    const PartSpan span = {row.x + first, first, std::min(size, job.head_dim - first)};
    const float step = maker.step(format::load_scale(maker.type, scale));
    if (step > 0) {
      encode_span<typename Format::Codec, Format::kFacts.packing>(span, format::reciprocal(step),
                                                                  row.codes);
    } else {
      encode_zeros<Format::kFacts.packing>(span, row.codes);
    }
  }
}

// A row with a number that is not finite is what `definition` makes of it.
template <class Format>
int64_t encode_given_parts(const EncodeJob& job, int64_t (*definition)(const EncodeJob&)) {
  int64_t nonfinite = 0;
  for (int i = 0; i < job.num_tokens; ++i) {
    const EncodeRow row = encode_row(job, job.first_token + i);
    if (format::is_finite(amax_of_span({row.x, 0, job.head_dim}))) {
      encode_given_row<Format>(job, row);
      continue;
    }
    EncodeJob one = job;
    one.rows = row.x;
    one.first_token += i;
    one.num_tokens = 1;
    nonfinite += definition(one);
  }
  return nonfinite;
}

// ---- Affine rows

template <class Format, format::ScaleType T>
void encode_affine_parts(const EncodeJob& job) {
  using Codec = typename Format::Codec;
  constexpr format::Packing kPacking = Format::kFacts.packing;
  alignas(64) float rounded[format::kMaxHeadDim];
  for (int t = job.first_token; t < job.first_token + job.num_tokens; ++t) {
    const EncodeRow row = encode_row(job, t);
    LaneInts high = ordered_lanes(round_to_param<T>(load<Widest>(row.x)));
    LaneInts negated_low = ~high;  // the largest of ~x is ~ the smallest of x
    for (int i = 0; i < job.head_dim; i += kLanes<Widest>) {
      const Widest x = round_to_param<T>(load<Widest>(row.x + i));
      store<Widest>(x, rounded + i);
      high = larger_of(high, ordered_lanes(x));
      negated_low = larger_of(negated_low, ~ordered_lanes(x));
    }
    const format::AffineEncoder encoder = format::affine_encoder<Codec, T>(
        format::affine_range(~max_of_lanes(negated_low), max_of_lanes(high)));
    memcpy(row.scales, &encoder.params.scale, 2);
    memcpy(row.scales + 2, &encoder.params.zero, 2);
    const PartSpan all = {rounded, 0, job.head_dim};
    if (encoder.has_nonfinite) {
      encode_zeros<kPacking>(all, row.codes);
      continue;
    }
    for (int i = 0; i < job.head_dim; i += kPartNumbers) {
      LaneBits codes[kPartVectors];
      for (int v = 0; v < kPartVectors; ++v) {
        const Widest above =
            round_to_param<T>(load<Widest>(rounded + i + v * kLanes<Widest>) - encoder.low);
        codes[v] = LanesCodec<Codec>::codes(round_to_param<T>(above * encoder.inverse));
      }
      store_codes<kPacking>(low_bytes(codes), i, row.codes);
    }
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
