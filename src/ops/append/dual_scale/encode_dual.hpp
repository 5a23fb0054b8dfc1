// encode_dual: f32 rows to a dual-scale block, all of its tokens at once. The arithmetic is
// format/dual_scale.hpp's; here are the loops over a block, in the order of docs/numbers.md,
// section 9.
#pragma once

#include "format/dual_scale.hpp"
#include "format/feedback.hpp"
#include "format/packing.hpp"
#include "ops/append/dual_scale/dual_scratch.hpp"
#include "ops/append/encode_feedback.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Sums over head_dim are of sixteen lanes, then halves. Requires: n is a multiple of sixteen.
template <class Term>
KVX_INLINE float sum_of_channels(int n, const Term& term) {
  float lanes[16] = {};
  for (int first = 0; first < n; first += 16) {
    KVX_VECTOR_LOOP
    for (int lane = 0; lane < 16; ++lane) lanes[lane] += term(first + lane);
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class Format>
class DualEncoder {
 public:
  explicit DualEncoder(const EncodeParams& params)
      : params_(params),
        head_dim_(params.head_dim),
        next_(dual_scratch(int64_t{params.num_tokens} * (params.head_dim + 4) +
                           int64_t{kChannelRows} * params.head_dim)),
        numbers_(take(int64_t{params.num_tokens} * head_dim_)),
        spreads_(take(params.num_tokens)),
        inverses_(take(params.num_tokens)),
        scales_(take(params.num_tokens)),
        tokens_(reinterpret_cast<int32_t*>(take(params.num_tokens))),
        sums_(take(head_dim_)),
        squares_(take(head_dim_)),
        about_mean_(take(head_dim_)),
        channel_inverses_(take(head_dim_)),
        lows_(take(head_dim_)),
        highs_(take(head_dim_)),
        steps_(take(head_dim_)),
        offsets_(take(head_dim_)),
        inverse_steps_(take(head_dim_)),
        fed_(take(int64_t{kFedRows} * head_dim_)),
        errors_(take(int64_t{kFedRows} * head_dim_)),
        folded_(take(head_dim_)) {}

  void encode() {
    take_tokens();
    memset(params_.channels, 0, static_cast<size_t>(2 * head_dim_));
    if (num_rows_ == 0) return;
    for (int round = 0; round < 2; ++round) {
      balance_channels(round == 0);
      balance_tokens();
    }
    store_scales();
    find_ranges();
    store_channels();
    for (int i = 0; i < num_rows_; i += kFedRows) {
      const int left = num_rows_ - i;
      round_rows(i, left < kFedRows ? left : kFedRows);
    }
  }

 private:
  using Codec = typename Format::Codec;
  using Code = typename Codec::Code;
  static constexpr int kBits = Codec::kBits;
  // Of head_dim floats each: what is kept of channels, and of the rows that are rounded together.
  static constexpr int kChannelRows = 9 + 2 * kFedRows + 1;

  float* take(int64_t count) {
    float* taken = next_;
    next_ += count;
    return taken;
  }
  KVX_INLINE static void fill(float value, int n, float* target) {
    KVX_VECTOR_LOOP
    for (int c = 0; c < n; ++c) target[c] = value;
  }
  float* row(int i) const { return numbers_ + int64_t{i} * head_dim_; }
  uint8_t& scale_byte(int token) const {
    return params_.scales[token * params_.scale_token_stride];
  }

  // The tokens that have numbers, in the block's unit. Those of zeros, and those that are NaN, get
  // their scale and codes here.
  void take_tokens() {
    float amax = 0;
    for (int t = 0; t < params_.num_tokens; ++t) {
      const float of_token = format::group_magnitude(source_row(params_, t), head_dim_).amax;
      const bool is_number = of_token < format::kDualLimit;
      if (is_number && of_token > 0) {
        tokens_[num_rows_++] = t;
        amax = of_token > amax ? of_token : amax;
        continue;
      }
      scale_byte(t) = is_number ? 0 : static_cast<uint8_t>(format::E4M3::kNanCode);
      memset(params_.codes + t * params_.token_stride, 0,
             static_cast<size_t>(head_dim_) * kBits / 8);
    }
    if (num_rows_ == 0) return;
    unit_ = format::DualUnit::of(amax);
    const float inverse = unit_.inverse();
    for (int i = 0; i < num_rows_; ++i) {
      const float* x = source_row(params_, tokens_[i]);
      KVX_VECTOR_LOOP
      for (int c = 0; c < head_dim_; ++c) row(i)[c] = x[c] * inverse;
    }
  }

  // Each channel's spread over the tokens.
  void balance_channels(bool is_first) {
    const int n = num_rows_;
    for (int i = 0; is_first && i < n; ++i) inverses_[i] = 1.0f;
    for (float* sums : {sums_, squares_, about_mean_}) fill(0.0f, head_dim_, sums);
    for (int i = 0; i < n; ++i) {
      const float inverse = inverses_[i];
      KVX_VECTOR_LOOP
      for (int c = 0; c < head_dim_; ++c) {
        const float number = row(i)[c] * inverse;
        sums_[c] += number;
        squares_[c] += number * number;
      }
    }
    for (int c = 0; c < head_dim_; ++c) sums_[c] /= static_cast<float>(n);
    for (int i = 0; i < n; ++i) {
      const float inverse = inverses_[i];
      KVX_VECTOR_LOOP
      for (int c = 0; c < head_dim_; ++c) {
        const float distance = row(i)[c] * inverse - sums_[c];
        about_mean_[c] += distance * distance;
      }
    }
    for (int c = 0; c < head_dim_; ++c) {
      channel_inverses_[c] =
          1.0f / format::dual_spread(about_mean_[c], squares_[c], n, format::kLeastOfChannel);
    }
  }

  // Each token's spread over the channels.
  void balance_tokens() {
    const float* inverses = channel_inverses_;
    for (int i = 0; i < num_rows_; ++i) {
      const float* x = row(i);
      const auto number = [=](int c) { return x[c] * inverses[c]; };
      const float mean = sum_of_channels(head_dim_, number) / static_cast<float>(head_dim_);
      const float squares =
          sum_of_channels(head_dim_, [=](int c) { return number(c) * number(c); });
      const float about_mean = sum_of_channels(head_dim_, [=](int c) {
        const float distance = number(c) - mean;
        return distance * distance;
      });
      spreads_[i] = format::dual_spread(about_mean, squares, head_dim_, format::kLeastOfToken);
      inverses_[i] = 1.0f / spreads_[i];
    }
  }

  void store_scales() {
    float squares = 0;
    for (int i = 0; i < num_rows_; ++i) squares += spreads_[i] * spreads_[i];
    const float mean = squares / static_cast<float>(num_rows_);
    const float factor = format::kDualScaleRms / format::square_root(mean);
    for (int i = 0; i < num_rows_; ++i) {
      const uint8_t bits = format::dual_scale_bits(spreads_[i] * factor);
      scale_byte(tokens_[i]) = bits;
      scales_[i] = format::E4M3::decode(bits);
      inverses_[i] = scales_[i] > 0 ? 1.0f / scales_[i] : 0.0f;
    }
  }

  // Each channel's smallest and largest number after the token scales. A token whose scale was
  // rounded to 0 has none.
  void find_ranges() {
    fill(format::kFloatMax, head_dim_, lows_);
    fill(-format::kFloatMax, head_dim_, highs_);
    for (int i = 0; i < num_rows_; ++i) {
      const float inverse = inverses_[i];
      if (inverse == 0) continue;
      KVX_VECTOR_LOOP
      for (int c = 0; c < head_dim_; ++c) {
        const float number = row(i)[c] * inverse;
        lows_[c] = number < lows_[c] ? number : lows_[c];
        highs_[c] = number > highs_[c] ? number : highs_[c];
      }
    }
  }

  void store_channels() {
    float largest = 0;
    for (int c = 0; c < head_dim_; ++c) {
      steps_[c] = format::dual_wanted_step<kBits>(lows_[c], highs_[c]);
      largest = steps_[c] > largest ? steps_[c] : largest;
    }
    const uint32_t factor_bits = unit_.factor_bits(largest);
    const float factor = unit_.factor(factor_bits);
    const float inverse_factor = unit_.inverse_factor(factor_bits);
    uint8_t* steps = params_.channels;
    uint8_t* zeros = steps + head_dim_;
    for (int c = 0; c < head_dim_; ++c) {
      const uint32_t bits = format::E4M3::encode(steps_[c] * inverse_factor);
      zeros[c] = format::dual_zero<kBits>(lows_[c], highs_[c], bits, factor);
      const uint32_t sign = c < 8 ? (factor_bits >> c & 1u) << 7 : 0u;
      steps[c] = static_cast<uint8_t>(bits | sign);
      const auto rounding =
          format::dual_rounding(format::dual_channel<kBits>(steps[c], zeros[c], factor));
      steps_[c] = rounding.channel.step;
      offsets_[c] = rounding.channel.offset;
      inverse_steps_[c] = rounding.inverse_step;
    }
  }

  format::DualRounding rounding(int c) const {
    return {{steps_[c], offsets_[c]}, inverse_steps_[c]};
  }

  // Whether feedback has weights of its errors, on the diagonal.
  bool has_error_weights() const { return params_.feedback != nullptr && *params_.feedback > 0; }

  // Rows [first, first + count): their codes, and their scales refitted to these.
  void round_rows(int first, int count) {
    for (int r = 0; r < count; ++r) {
      if (inverses_[first + r] == 0) memset(codes_[r], 0, sizeof(Code) * head_dim_);
    }
    if (params_.feedback == nullptr) {
      for (int r = 0; r < count; ++r) round_alone(first + r, codes_[r]);
    } else {
      round_fed(first, count);
    }
    for (int r = 0; r < count; ++r) {
      const int token = tokens_[first + r];
      if (inverses_[first + r] != 0) refit(first + r, r);
      format::pack<Format::kFacts.packing>(codes_[r], 0, head_dim_,
                                           params_.codes + token * params_.token_stride);
    }
  }

  void round_alone(int i, Code* codes) const {
    if (inverses_[i] == 0) return;
    for (int c = 0; c < head_dim_; ++c) {
      codes[c] = format::dual_code<kBits>(rounding(c), inverses_[i], row(i)[c]);
    }
  }

  // Some rows side by side, as FeedbackEncoder's: a code must be known before the next number is.
  void round_fed(int first, int count) {
    for (int r = 0; r < count; ++r) {
      memcpy(fed_ + r * head_dim_, row(first + r), sizeof(float) * head_dim_);
    }
    for (int c = 0; c < head_dim_; ++c) {
      const int next = (c + 1) / kPartNumbers * kPartNumbers;
      const float* weights = params_.feedback + int64_t{c} * head_dim_;
      for (int r = 0; r < count; ++r) {
        const int i = first + r;
        if (inverses_[i] == 0) continue;
        float* numbers = fed_ + r * head_dim_;
        const float number = numbers[c];
        const Code code = format::dual_code<kBits>(rounding(c), inverses_[i], number);
        const float value =
            format::dual_number(scales_[i], rounding(c).channel, Codec::decode(code));
        const float error = format::fed_code<Codec>(code, number, value).error;
        codes_[r][c] = code;
        errors_[r * head_dim_ + c] = error;
        add_error(error, weights, next, head_dim_, numbers);
      }
    }
  }

  void refit(int i, int r) {
    const float* x = row(i);
    const float scale = scales_[i];
    float squares, products;
    if (has_error_weights()) {
      const float* sums = fold_feedback(x);
      const float* errors = errors_ + r * head_dim_;
      const float* diagonal = params_.feedback;
      const int64_t stride = head_dim_ + 1;
      squares = sum_of_channels(head_dim_,
                                [=](int c) { return diagonal[c * stride] * sums[c] * sums[c]; });
      products = squares - sum_of_channels(head_dim_, [=](int c) {
                   return diagonal[c * stride] * sums[c] * errors[c];
                 });
    } else {
      const Code* codes = codes_[r];
      squares = sum_of_channels(head_dim_, [=](int c) { return x[c] * x[c]; });
      products = sum_of_channels(head_dim_, [=, this](int c) {
        return x[c] * format::dual_number(scale, {steps_[c], offsets_[c]}, Codec::decode(codes[c]));
      });
    }
    scale_byte(tokens_[i]) = format::refitted_scale_bits(scale, squares, products);
  }

  // The row as feedback sees it: what its errors would be if every number were rounded to 0.
  const float* fold_feedback(const float* x) {
    memcpy(folded_, x, sizeof(float) * head_dim_);
    for (int c = 0; c < head_dim_; ++c) {
      const int next = (c + 1) / kPartNumbers * kPartNumbers;
      const float sum = format::clamp(folded_[c], -format::kFeedbackLimit, format::kFeedbackLimit);
      add_error(sum, params_.feedback + int64_t{c} * head_dim_, next, head_dim_, folded_);
      folded_[c] = sum;
    }
    return folded_;
  }

  const EncodeParams& params_;
  const int head_dim_;
  float* next_;  // of the scratch
  format::DualUnit unit_ = {0};
  // Of the tokens with numbers: [num_rows_, head_dim] in the unit, and a number each.
  int num_rows_ = 0;
  float* numbers_;
  float* spreads_;
  float* inverses_;  // of spreads, then of scales
  float* scales_;
  int32_t* tokens_;  // in the block
  // A number a channel.
  float* sums_;
  float* squares_;
  float* about_mean_;
  float* channel_inverses_;
  float* lows_;
  float* highs_;
  float* steps_;
  float* offsets_;
  float* inverse_steps_;
  // Of the rows that are rounded side by side, [kFedRows, head_dim].
  float* fed_;
  float* errors_;
  float* folded_;  // [head_dim]
  Code codes_[kFedRows][format::kMaxHeadDim];
};

// Requires: params.first_token is 0.
template <class Format>
int64_t encode_dual(const EncodeParams& params) {
  DualEncoder<Format>(params).encode();
  return 0;  // what is not finite becomes NaN
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
