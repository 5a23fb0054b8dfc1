// Affine rows in vectors, for rows that are whole parts. Same bytes as encode_rows.hpp's loops.
#pragma once

#include "ops/append/encode_parts.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// The ranges of some rows, their parameters side by side, the codes.
template <class Format, format::ScaleType T>
class AffinePartEncoder {
 public:
  explicit AffinePartEncoder(const EncodeParams& params) : params_(params) {}

  void encode_all() {
    const int rows_together = std::clamp(kNumbersTogether / params_.head_dim, 1, kMostRows);
    for (int t = 0; t < params_.num_tokens; t += rows_together) {
      const int n = std::min(rows_together, params_.num_tokens - t);
      find_ranges(t, n);
      make_parameters();
      for (int i = 0; i < n; ++i) write(encode_row(params_, params_.first_token + t + i), i);
    }
  }

 private:
  using Codec = typename Format::Codec;
  static constexpr format::Packing kPacking = Format::kFacts.packing;
  static constexpr int kMostRows = kLanes<Widest>;
  static constexpr int kNumbersTogether = 2048;
  static_assert(kNumbersTogether >= format::kMaxHeadDim);

  // Stores the rows' numbers, in the parameters' type, in rounded_.
  KVX_INLINE void find_ranges(int first_token, int n) {
    LaneInts highs[kMostRows] = {};
    LaneInts lows[kMostRows] = {};
    for (int i = 0; i < n; ++i) {
      const float* source = source_row(params_, first_token + i);
      float* target = rounded_ + i * params_.head_dim;
      highs[i] = lows[i] = ordered_lanes(round_to_param<T>(load<Widest>(source)));
      for (int d = 0; d < params_.head_dim; d += kLanes<Widest>) {
        const Widest x = round_to_param<T>(load<Widest>(source + d));
        store<Widest>(x, target + d);
        const LaneInts ordered = ordered_lanes(x);
        highs[i] = larger_of(highs[i], ordered);
        lows[i] = smaller_of(lows[i], ordered);
      }
    }
    high_ = fold_each(highs, [](const LaneInts& a, const LaneInts& b) { return larger_of(a, b); });
    low_ = fold_each(lows, [](const LaneInts& a, const LaneInts& b) { return smaller_of(a, b); });
  }

  // format::affine_encoder, a row a lane.
  KVX_INLINE void make_parameters() {
    constexpr int32_t kInfinity = 0x7F800000;
    const LaneInts is_finite = (high_ < kInfinity) & (low_ > ~kInfinity);
    const Widest high =
        __builtin_bit_cast(Widest, ordered_lanes(__builtin_bit_cast(Widest, high_)));
    const Widest low = __builtin_bit_cast(Widest, ordered_lanes(__builtin_bit_cast(Widest, low_)));
    const Widest scale = round_to_param<T>((high - low) / Codec::kQmax);
    const auto store_bits = [](const auto& lanes, auto* target) {
      __builtin_memcpy(target, &lanes, sizeof lanes);
    };
    store_bits(is_finite, is_finite_);
    store_bits(param_bits<T>(scale), scales_);
    store_bits(param_bits<T>(low), zeros_);
    store<Widest>(low, lows_);
    store<Widest>(round_to_param<T>(1.0f / scale), inverses_);
  }

  KVX_INLINE void write(const EncodeRow& row, int i) {
    if (is_finite_[i] == 0) return write_nan(row);
    store_parameters(row, scales_[i], zeros_[i]);
    const float* rounded = rounded_ + i * params_.head_dim;
    const auto product = [&](int number) {
      const Widest above = round_to_param<T>(load<Widest>(rounded + number) - lows_[i]);
      return round_to_param<T>(above * inverses_[i]);
    };
    int number = 0;
    for (; number + kQuadNumbers <= params_.head_dim; number += kQuadNumbers) {
      Widest products[kQuadVectors];
      for (int v = 0; v < kQuadVectors; ++v) products[v] = product(number + v * kLanes<Widest>);
      encode_quad<Codec, kPacking>(products, number, row.codes);
    }
    for (; number < params_.head_dim; number += kPartNumbers) {
      LaneBits codes[kPartVectors];
      for (int v = 0; v < kPartVectors; ++v) {
        codes[v] = LanesCodec<Codec>::codes(product(number + v * kLanes<Widest>));
      }
      store_codes<kPacking>(low_bytes(codes), number, row.codes);
    }
  }

  KVX_INLINE void write_nan(const EncodeRow& row) {
    const uint32_t nan = format::nan_scale(T).bits;
    store_parameters(row, nan, nan);
    encode_zeros<kPacking>({row.x, 0, params_.head_dim}, row.codes);
  }

  KVX_INLINE static void store_parameters(const EncodeRow& row, uint32_t scale, uint32_t zero) {
    const format::AffineParams affine = {static_cast<uint16_t>(scale), static_cast<uint16_t>(zero)};
    memcpy(row.scales, &affine.scale, 2);
    memcpy(row.scales + 2, &affine.zero, 2);
  }

  const EncodeParams& params_;
  // Of the rows at hand, a lane or an element each.
  LaneInts high_;
  LaneInts low_;
  int32_t is_finite_[kMostRows];
  uint32_t scales_[kMostRows];
  uint32_t zeros_[kMostRows];
  float lows_[kMostRows];
  float inverses_[kMostRows];
  alignas(64) float rounded_[kNumbersTogether];  // [rows, head_dim]
};

template <class Format, format::ScaleType T>
void encode_affine_parts(const EncodeParams& params) {
  AffinePartEncoder<Format, T>(params).encode_all();
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
