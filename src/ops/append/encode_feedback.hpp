// feed_back: rounds rows again, with error feedback, under the scales that encode_rows gave them.
// The arithmetic is format/feedback.hpp's; here are the loops, some rows side by side.
//
// What is saturated is counted here: of a row with feedback the numbers that are rounded, which are
// its own with the errors of those before them, and of another row its own.
#pragma once

#include "format/feedback.hpp"
#include "format/packing.hpp"
#include "format/traits.hpp"
#include "ops/append/encode_row.hpp"
#include "ops/append/saturation.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// A code must be known before the next number is: several rows at once fill the wait.
inline constexpr int kFedRows = 4;

// target[i] += error * weights[i] for i in [first, n); two roundings, at every level.
KVX_INLINE void add_error(float error, const float* weights, int first, int n, float* target) {
  for_lanes(
      n,
      [&]<class V>(int i) {
        store<V>(load<V>(target + i) + load<V>(weights + i) * error, target + i);
      },
      first);
}

template <class Format>
class FeedbackEncoder {
 public:
  explicit FeedbackEncoder(const EncodeParams& params)
      : params_(params), maker_(format::scale_maker<Format>(*params.spec, params.tensor_scale)) {
    if constexpr (!kIsAffine) {
      limit_ = format::saturation_limit<Codec>(params.spec->scale_source, maker_);
      counts_ = params.saturated != nullptr && !limit_.is_none();
    }
  }

  void encode_all() {
    for (int t = params_.first_token; t < params_.first_token + params_.num_tokens; ++t) {
      const EncodeRow row = encode_row(params_, t);
      if (!take(row)) {  // stays as it is
        if (counts_) count_row(row);
        continue;
      }
      if (++num_rows_ == kFedRows) round_rows();
    }
    round_rows();
  }

 private:
  using Codec = typename Format::Codec;
  using Code = typename Codec::Code;
  static constexpr bool kIsAffine = format::is_affine<Format>();

  // How one number of a row is rounded: what its group decided.
  struct Rounding {
    float step;
    float inverse;
    bool is_zero;
  };

  // The row becomes number num_rows_ of those at hand, unless feedback does not apply to it.
  bool take(const EncodeRow& row) {
    if (!(format::group_magnitude(row.x, params_.head_dim).amax < format::kFeedbackLimit)) {
      return false;
    }
    if constexpr (kIsAffine) {
      if (!take_params(row)) return false;
    } else {
      take_groups(row);
    }
    memcpy(numbers_[num_rows_], row.x, sizeof(float) * params_.head_dim);
    targets_[num_rows_] = row.codes;
    return true;
  }

  // Counts what is saturated in a row that is encoded without feedback.
  void count_row(const EncodeRow& row) const {
    const int size = group_size();
    const uint8_t* scale = row.scales;
    for (int first = 0; first < params_.head_dim;
         first += size, scale += params_.scale_group_stride) {
      const int n = params_.head_dim - first < size ? params_.head_dim - first : size;
      const float step =
          limit_.is_of_product ? maker_.step(format::load_scale(maker_.type, scale)) : 1.0f;
      *params_.saturated += count_saturated(limit_, step, row.x + first, n);
    }
  }

  int group_size() const {
    return params_.spec->group_size == format::kWholeRow ? params_.head_dim
                                                         : params_.spec->group_size;
  }

  bool take_params(const EncodeRow& row) {
    format::AffineParams params;
    memcpy(&params.scale, row.scales, 2);
    memcpy(&params.zero, row.scales + 2, 2);
    if (!format::is_finite(format::decode_scale(params_.spec->scale_type, {params.scale})))
      return false;
    affine_[num_rows_] = params_.spec->scale_type == format::ScaleType::kF16
                             ? format::affine_encoder_of<format::ScaleType::kF16>(params)
                             : format::affine_encoder_of<format::ScaleType::kBF16>(params);
    return true;
  }

  void take_groups(const EncodeRow& row) {
    const int size = group_size();
    const uint8_t* scale = row.scales;
    for (int first = 0; first < params_.head_dim;
         first += size, scale += params_.scale_group_stride) {
      const int n = params_.head_dim - first < size ? params_.head_dim - first : size;
      const float step = maker_.step(format::load_scale(maker_.type, scale));
      const Rounding rounding = {step, format::reciprocal(step),
                                 format::group_magnitude(row.x + first, n).amax == 0};
      for (int i = first; i < first + n; ++i) roundings_[num_rows_][i] = rounding;
    }
  }

  KVX_INLINE format::FedCode<Codec> round(int row, int i) const {
    const float number = numbers_[row][i];
    if constexpr (!kIsAffine) {
      const Rounding& r = roundings_[row][i];
      return format::round_fed<Codec>(r.step, r.inverse, r.is_zero, number);
    } else if (params_.spec->scale_type == format::ScaleType::kF16) {
      return format::round_fed_affine<Codec, format::ScaleType::kF16>(affine_[row], number);
    } else {
      return format::round_fed_affine<Codec, format::ScaleType::kBF16>(affine_[row], number);
    }
  }

  // Of a group that has none but zeros all codes are 0, whatever errors come to its numbers.
  KVX_INLINE void count_number(int row, int i) const {
    if constexpr (!kIsAffine) {
      const Rounding& r = roundings_[row][i];
      *params_.saturated += !r.is_zero && limit_.is_exceeded_by(numbers_[row][i], r.inverse);
    }
  }

  void round_rows() {
    const int n = params_.head_dim;
    for (int i = 0; i < n; ++i) {
      float errors[kFedRows];
      for (int row = 0; row < num_rows_; ++row) {
        const format::FedCode<Codec> fed = round(row, i);
        codes_[row][i] = fed.code;
        errors[row] = fed.error;
        if (counts_) count_number(row, i);
      }
      // Whole parts: a weight at or before the diagonal is 0 and its number already rounded.
      const int first = (i + 1) / kPartNumbers * kPartNumbers;
      const float* weights = params_.feedback + int64_t{i} * n;
      for (int row = 0; row < num_rows_; ++row) {
        add_error(errors[row], weights, first, n, numbers_[row]);
      }
    }
    for (int row = 0; row < num_rows_; ++row) {
      format::pack<Format::kFacts.packing>(codes_[row], 0, n, targets_[row]);
    }
    num_rows_ = 0;
  }

  const EncodeParams& params_;
  format::ScaleMaker maker_;
  format::SaturationLimit limit_ = {format::kFloatMax, false};
  bool counts_ = false;  // whether somebody wants saturated numbers and there may be any
  // Up to kFedRows rows are rounded side by side; the arrays below have an entry for each.
  int num_rows_ = 0;
  uint8_t* targets_[kFedRows];
  float numbers_[kFedRows][format::kMaxHeadDim];
  Code codes_[kFedRows][format::kMaxHeadDim];
  Rounding roundings_[kFedRows][kIsAffine ? 1 : format::kMaxHeadDim];
  format::AffineEncoder affine_[kFedRows];
};

template <class Format>
void feed_back(const EncodeParams& params) {
  FeedbackEncoder<Format>(params).encode_all();
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
