// DualBlock: a CTA quantises one head's K or V of a dual-scale block, whose rows lie in shared
// memory. The arithmetic is format/dual_scale.hpp's; sums are added in the order of
// docs/numbers.md, section 9: along tokens by a thread a channel, along channels by sixteen lanes a
// token.
#pragma once

#include "format/dual_scale.hpp"
#include "format/feedback.hpp"
#include "ops/append/dual_scale/packed_byte.hpp"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

inline constexpr int kDualThreads = 256;
inline constexpr int kDualWarps = kDualThreads / kWarp;
inline constexpr int kDualTokens = 128;  // the largest block

// Where the block goes, and what it is rounded with.
struct DualTarget {
  uint8_t* codes;  // of token 0
  int64_t token_stride;
  uint8_t* scales;
  int64_t scale_token_stride;
  uint8_t* channels;
  const float* feedback;  // of the head, [head_dim, head_dim], or null
};

// A CTA's shared memory.
struct DualShared {
  float* rows;         // [num_tokens, head_dim]
  float* channels[4];  // [head_dim] each: inverse spreads, then lows; highs; steps; offsets
  float* inverse_steps;
  float* fed;      // [kDualWarps, head_dim], a row that is being rounded
  float* errors;   // [kDualWarps, head_dim]
  float* spreads;  // [kDualTokens] each
  float* inverses;
  float* scales;
  int* tokens;        // [kDualTokens], those with numbers
  uint32_t* largest;  // bits of a number that is not negative
  int* num_rows;
  uint8_t* codes;  // [kDualWarps, head_dim]

  __host__ __device__ static int bytes(int num_tokens, int head_dim) {
    return static_cast<int>(sizeof(float)) *
               (num_tokens * head_dim + (5 + 2 * kDualWarps) * head_dim + 4 * kDualTokens + 2) +
           kDualWarps * head_dim;
  }
  __device__ DualShared(float* memory, int num_tokens, int head_dim) {
    const auto take = [&memory](int count) {
      float* taken = memory;
      memory += count;
      return taken;
    };
    rows = take(num_tokens * head_dim);
    for (float*& channel : channels) channel = take(head_dim);
    inverse_steps = take(head_dim);
    fed = take(kDualWarps * head_dim);
    errors = take(kDualWarps * head_dim);
    spreads = take(kDualTokens);
    inverses = take(kDualTokens);
    scales = take(kDualTokens);
    tokens = reinterpret_cast<int*>(take(kDualTokens));
    largest = reinterpret_cast<uint32_t*>(take(1));
    num_rows = reinterpret_cast<int*>(take(1));
    codes = reinterpret_cast<uint8_t*>(memory);
  }
};

// Sixteen lanes' sums, then halves; both halves of the warp have the same.
template <class Term>
__device__ inline float sum_of_channels(int head_dim, int lane, const Term& term) {
  float sum = 0;
  for (int c = lane % 16; c < head_dim; c += 16) sum += term(c);
  for (int offset = 8; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, offset);
  }
  return sum;
}

// All methods are the whole CTA's, which is in step when one begins.
template <class Format>
class DualBlock {
 public:
  __device__ DualBlock(const DualTarget& to, const DualShared& shared, int num_tokens, int head_dim)
      : to_(to),
        shared_(shared),
        num_tokens_(num_tokens),
        head_dim_(head_dim),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % kWarp),
        warp_(thread_ / kWarp) {}

  // Requires: shared.rows hold the tokens' numbers.
  __device__ void encode() {
    find_tokens();
    if (num_rows_ == 0) {
      for (int c = thread_; c < 2 * head_dim_; c += kDualThreads) to_.channels[c] = 0;
      return;
    }
    for (int round = 0; round < 2; ++round) {
      balance_channels(round == 0);
      balance_tokens();
    }
    store_scales();
    find_ranges();
    store_channels();
    for (int i = warp_; i < num_rows_; i += kDualWarps) round_row(i);
  }

 private:
  using Codec = typename Format::Codec;
  static constexpr int kBits = Codec::kBits;

  __device__ float* row(int i) const { return shared_.rows + shared_.tokens[i] * head_dim_; }
  __device__ uint8_t& scale_byte(int token) const {
    return to_.scales[token * to_.scale_token_stride];
  }

  // A token's largest magnitude as bits.
  __device__ uint32_t magnitude_of(int token) const {
    uint32_t largest = 0;
    const float* x = shared_.rows + token * head_dim_;
    for (int c = lane_; c < head_dim_; c += kWarp) {
      largest = max(largest, __float_as_uint(x[c]) & 0x7FFFFFFFu);
    }
    return __reduce_max_sync(kWholeWarp, largest);
  }

  __device__ void find_tokens() {
    auto* magnitudes = reinterpret_cast<uint32_t*>(shared_.spreads);
    for (int t = warp_; t < num_tokens_; t += kDualWarps) {
      const uint32_t magnitude = magnitude_of(t);
      if (lane_ == 0) magnitudes[t] = magnitude;
    }
    __syncthreads();
    if (thread_ == 0) {
      int count = 0;
      uint32_t largest = 0;
      for (int t = 0; t < num_tokens_; ++t) {
        if (!has_numbers(magnitudes[t])) continue;
        shared_.tokens[count++] = t;
        largest = max(largest, magnitudes[t]);
      }
      *shared_.num_rows = count;
      *shared_.largest = largest;
    }
    for (int t = warp_; t < num_tokens_; t += kDualWarps) {
      if (!has_numbers(magnitudes[t])) store_without_numbers(t, magnitudes[t]);
    }
    __syncthreads();
    num_rows_ = *shared_.num_rows;
    if (num_rows_ == 0) return;
    unit_ = format::DualUnit::of(__uint_as_float(*shared_.largest));
    const float inverse = unit_.inverse();
    for (int i = warp_; i < num_rows_; i += kDualWarps) {
      float* x = row(i);
      for (int c = lane_; c < head_dim_; c += kWarp) x[c] *= inverse;
    }
    __syncthreads();
    if (thread_ == 0) *shared_.largest = 0;  // of the wanted steps, from here on
  }
  __device__ static bool has_numbers(uint32_t magnitude) {
    return magnitude != 0 && magnitude < __float_as_uint(format::kDualLimit);
  }
  __device__ void store_without_numbers(int token, uint32_t magnitude) const {
    uint8_t* codes = to_.codes + token * to_.token_stride;
    for (int i = lane_; i < head_dim_ * kBits / 8; i += kWarp) codes[i] = 0;
    if (lane_ == 0) scale_byte(token) = magnitude == 0 ? 0 : format::E4M3::kNanCode;
  }

  __device__ void balance_channels(bool is_first) const {
    const auto n = static_cast<float>(num_rows_);
    for (int c = thread_; c < head_dim_; c += kDualThreads) {
      const auto number = [&](int i) {
        return is_first ? row(i)[c] : row(i)[c] * shared_.inverses[i];
      };
      float sum = 0, squares = 0, about_mean = 0;
      for (int i = 0; i < num_rows_; ++i) {
        const float x = number(i);
        sum += x;
        squares += x * x;
      }
      const float mean = sum / n;
      for (int i = 0; i < num_rows_; ++i) {
        const float distance = number(i) - mean;
        about_mean += distance * distance;
      }
      shared_.channels[0][c] =
          1.0f / format::dual_spread(about_mean, squares, num_rows_, format::kLeastOfChannel);
    }
    __syncthreads();
  }

  __device__ void balance_tokens() const {
    const float* inverses = shared_.channels[0];
    for (int i = warp_; i < num_rows_; i += kDualWarps) {
      const float* x = row(i);
      const auto number = [=](int c) { return x[c] * inverses[c]; };
      const float mean = sum_of_channels(head_dim_, lane_, number) / static_cast<float>(head_dim_);
      const float squares =
          sum_of_channels(head_dim_, lane_, [=](int c) { return number(c) * number(c); });
      const float about_mean = sum_of_channels(head_dim_, lane_, [=](int c) {
        const float distance = number(c) - mean;
        return distance * distance;
      });
      if (lane_ != 0) continue;
      shared_.spreads[i] =
          format::dual_spread(about_mean, squares, head_dim_, format::kLeastOfToken);
      shared_.inverses[i] = 1.0f / shared_.spreads[i];
    }
    __syncthreads();
  }

  __device__ void store_scales() const {
    float squares = 0;  // every thread adds them, in order
    for (int i = 0; i < num_rows_; ++i) squares += shared_.spreads[i] * shared_.spreads[i];
    const float mean = squares / static_cast<float>(num_rows_);
    const float factor = format::kDualScaleRms / format::square_root(mean);
    for (int i = thread_; i < num_rows_; i += kDualThreads) {
      const uint8_t bits = format::dual_scale_bits(shared_.spreads[i] * factor);
      scale_byte(shared_.tokens[i]) = bits;
      const float scale = format::E4M3::decode(bits);
      shared_.scales[i] = scale;
      shared_.inverses[i] = scale > 0 ? 1.0f / scale : 0.0f;
    }
    __syncthreads();
  }

  __device__ void find_ranges() const {
    for (int c = thread_; c < head_dim_; c += kDualThreads) {
      float low = format::kFloatMax;
      float high = -format::kFloatMax;
      for (int i = 0; i < num_rows_; ++i) {
        if (shared_.inverses[i] == 0) continue;
        const float number = row(i)[c] * shared_.inverses[i];
        low = number < low ? number : low;
        high = number > high ? number : high;
      }
      shared_.channels[0][c] = low;
      shared_.channels[1][c] = high;
      atomicMax(shared_.largest, __float_as_uint(format::dual_wanted_step<kBits>(low, high)));
    }
    __syncthreads();
  }

  __device__ void store_channels() const {
    const uint32_t factor_bits = unit_.factor_bits(__uint_as_float(*shared_.largest));
    const float factor = unit_.factor(factor_bits);
    const float inverse_factor = unit_.inverse_factor(factor_bits);
    for (int c = thread_; c < head_dim_; c += kDualThreads) {
      const float low = shared_.channels[0][c];
      const float high = shared_.channels[1][c];
      const float wanted = format::dual_wanted_step<kBits>(low, high);
      const uint32_t bits = format::E4M3::encode(wanted * inverse_factor);
      const uint8_t zero = format::dual_zero<kBits>(low, high, bits, factor);
      const uint32_t sign = c < 8 ? (factor_bits >> c & 1u) << 7 : 0u;
      to_.channels[c] = static_cast<uint8_t>(bits | sign);
      to_.channels[head_dim_ + c] = zero;
      const auto rounding = format::dual_rounding(
          format::dual_channel<kBits>(static_cast<uint8_t>(bits), zero, factor));
      shared_.channels[2][c] = rounding.channel.step;
      shared_.channels[3][c] = rounding.channel.offset;
      shared_.inverse_steps[c] = rounding.inverse_step;
    }
    __syncthreads();
  }

  __device__ format::DualRounding rounding(int c) const {
    return {{shared_.channels[2][c], shared_.channels[3][c]}, shared_.inverse_steps[c]};
  }

  // By a warp: the codes of one row, and its scale refitted to them.
  __device__ void round_row(int i) const {
    uint8_t* codes = shared_.codes + warp_ * head_dim_;
    const bool has_scale = shared_.inverses[i] != 0;
    __syncwarp();
    if (!has_scale) {
      for (int c = lane_; c < head_dim_; c += kWarp) codes[c] = 0;
    } else if (to_.feedback == nullptr) {
      for (int c = lane_; c < head_dim_; c += kWarp) {
        codes[c] = format::dual_code<kBits>(rounding(c), shared_.inverses[i], row(i)[c]);
      }
    } else {
      round_fed(i, codes);
    }
    __syncwarp();
    const int token = shared_.tokens[i];
    uint8_t* packed = to_.codes + token * to_.token_stride;
    for (int b = lane_; b < head_dim_ * kBits / 8; b += kWarp) {
      packed[b] = packed_byte<Format::kFacts.packing>(codes, b);
    }
    if (!has_scale) return;
    const uint8_t bits = refitted(i, codes);
    if (lane_ == 0) scale_byte(token) = bits;
  }

  // Numbers in order; a lane adds to every 32nd of those to come.
  __device__ void round_fed(int i, uint8_t* codes) const {
    float* x = shared_.fed + warp_ * head_dim_;
    float* errors = shared_.errors + warp_ * head_dim_;
    for (int c = lane_; c < head_dim_; c += kWarp) x[c] = row(i)[c];
    const float* weights = to_.feedback;
    for (int c = 0; c < head_dim_; ++c, weights += head_dim_) {
      __syncwarp();
      const float number = x[c];
      const auto how = rounding(c);
      const uint8_t code = format::dual_code<kBits>(how, shared_.inverses[i], number);
      const float value = format::dual_number(shared_.scales[i], how.channel, Codec::decode(code));
      const float error = format::fed_code<Codec>(code, number, value).error;
      if (lane_ == 0) {
        codes[c] = code;
        errors[c] = error;
      }
      add_error(error, weights, c, x);
    }
    __syncwarp();
  }
  // To the numbers after c.
  __device__ void add_error(float error, const float* weights, int c, float* x) const {
    int next = c / kWarp * kWarp + lane_;
    if (next <= c) next += kWarp;
    for (; next < head_dim_; next += kWarp) x[next] += error * weights[next];
  }

  __device__ uint8_t refitted(int i, const uint8_t* codes) const {
    const float* x = row(i);
    const float scale = shared_.scales[i];
    float squares, products;
    if (to_.feedback != nullptr && *to_.feedback > 0) {
      const float* sums = fold_feedback(x);
      const float* errors = shared_.errors + warp_ * head_dim_;
      const float* diagonal = to_.feedback;
      const int64_t stride = head_dim_ + 1;
      squares = sum_of_channels(head_dim_, lane_,
                                [=](int c) { return diagonal[c * stride] * sums[c] * sums[c]; });
      products = squares - sum_of_channels(head_dim_, lane_, [=](int c) {
                   return diagonal[c * stride] * sums[c] * errors[c];
                 });
    } else {
      squares = sum_of_channels(head_dim_, lane_, [=](int c) { return x[c] * x[c]; });
      products = sum_of_channels(head_dim_, lane_, [=, this](int c) {
        return x[c] * format::dual_number(scale, rounding(c).channel, Codec::decode(codes[c]));
      });
    }
    return format::refitted_scale_bits(scale, squares, products);
  }

  // What the errors would be if every number were rounded to 0.
  __device__ const float* fold_feedback(const float* x) const {
    float* folded = shared_.fed + warp_ * head_dim_;
    for (int c = lane_; c < head_dim_; c += kWarp) folded[c] = x[c];
    const float* weights = to_.feedback;
    for (int c = 0; c < head_dim_; ++c, weights += head_dim_) {
      __syncwarp();
      const float sum = format::clamp(folded[c], -format::kFeedbackLimit, format::kFeedbackLimit);
      add_error(sum, weights, c, folded);
      __syncwarp();
      if (lane_ == 0) folded[c] = sum;
    }
    __syncwarp();
    return folded;
  }

  const DualTarget& to_;
  const DualShared& shared_;
  int num_tokens_;
  int head_dim_;
  int thread_;
  int lane_;
  int warp_;
  int num_rows_ = 0;
  format::DualUnit unit_ = {0};
};

}  // namespace kvx::ops::cuda
