// One group of numbers to codes and a scale, and back: the one definition of the arithmetic for
// symmetric formats, on the CPU at every level and on the GPU (docs/numbers.md, sections 2, 3 and
// 5).
#pragma once

#include "format/scale.hpp"

namespace kvx::format {

// How the encoder picks a group's scale. Readers do not depend on it.
enum class ScaleChoice : uint8_t { kAmax, k4Over6, kSearch };

constexpr std::string_view name_of(ScaleChoice choice) {
  constexpr std::string_view kNames[] = {"amax", "4over6", "search"};
  return kNames[static_cast<int>(choice)];
}

struct GroupMagnitude {
  float amax;
  bool has_nonfinite;
};

// Magnitudes compare as unsigned integers; a NaN or an infinity is above every number.
KVX_INLINE GroupMagnitude group_magnitude(const float* x, int n) {
  uint32_t largest = 0;
  KVX_VECTOR_LOOP
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return {std::bit_cast<float>(largest), largest >= 0x7F800000u};
}

KVX_INLINE bool is_finite(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu) < 0x7F800000u;
}

// What one number adds to a group's squared error.
template <class Codec>
KVX_INLINE float square_of_error(float step, float inverse_step, float value) {
  const float error = value - Codec::rounded(value * inverse_step) * step;
  return error * error;
}

// The sum of squared errors in the one order that every machine uses: sixteen lanes, then halves.
template <class Codec>
KVX_INLINE float squared_error(float step, const float* x, int n) {
  const float inverse_step = reciprocal(step);
  float lanes[16] = {};
  int first = 0;
  for (; first + 16 <= n; first += 16) {
    KVX_VECTOR_LOOP
    for (int lane = 0; lane < 16; ++lane) {
      lanes[lane] += square_of_error<Codec>(step, inverse_step, x[first + lane]);
    }
  }
  for (int lane = 0; first + lane < n; ++lane) {
    lanes[lane] += square_of_error<Codec>(step, inverse_step, x[first + lane]);
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Tries the choice's candidates in order; the first with the smallest error wins. error_of(step) is
// the group's squared error: a loop here, a warp together on a GPU.
// Requires: amax is positive and finite.
template <class Codec, class ErrorOf>
KVX_INLINE StoredScale choose_scale(const ScaleMaker& maker, ScaleChoice choice, float amax,
                                    const ErrorOf& error_of) {
  constexpr float kCandidates4Over6[] = {1.0f, 1.5f};
  constexpr float kCandidatesSearch[] = {1.0f, 0.7f, 0.8f, 0.9f, 1.1f, 1.2f, 1.3f, 1.5f};
  StoredScale best = maker.make(Codec::kQmax, amax);
  if (choice == ScaleChoice::kAmax) return best;
  const bool is_search = choice == ScaleChoice::kSearch;
  const int num_candidates = is_search ? 8 : 2;
  float best_error = error_of(maker.step(best));
  for (int c = 1; c < num_candidates; ++c) {
    const float target = amax * (is_search ? kCandidatesSearch[c] : kCandidates4Over6[c]);
    const StoredScale scale = maker.make(Codec::kQmax, target > kFloatMax ? kFloatMax : target);
    const float error = error_of(maker.step(scale));
    if (error < best_error) {
      best_error = error;
      best = scale;
    }
  }
  return best;
}

// No lambda: its name would be the same at every CPU level.
template <class Codec>
struct ErrorOfGroup {
  const float* x;  // [n]
  int n;
  KVX_INLINE float operator()(float step) const { return squared_error<Codec>(step, x, n); }
};

// Quantising is two steps, so that the second runs over a whole row whatever its groups are: the
// products x * inv of each group, then one code a product.

// Makes the group's scale. x: [n]; products: [n].
template <class Codec>
KVX_INLINE StoredScale scale_group(const ScaleMaker& maker, ScaleChoice choice, const float* x,
                                   int n, float* products) {
  const GroupMagnitude group = group_magnitude(x, n);
  if (group.has_nonfinite || group.amax == 0) {
    KVX_VECTOR_LOOP
    for (int i = 0; i < n; ++i) products[i] = 0;  // +0, so that every code is 0
    return group.has_nonfinite ? nan_scale(maker.type) : StoredScale{0};
  }
  const StoredScale scale =
      choose_scale<Codec>(maker, choice, group.amax, ErrorOfGroup<Codec>{x, n});
  const float inverse_step = reciprocal(maker.step(scale));
  KVX_VECTOR_LOOP
  for (int i = 0; i < n; ++i) products[i] = x[i] * inverse_step;
  return scale;
}

// The same under a step that is already fixed (a given or page-shared scale). A step of 0 makes
// every product +0, so that every code is 0.
KVX_INLINE void scale_group_with_step(float step, const float* x, int n, float* products) {
  const float inverse_step = reciprocal(step);
  KVX_VECTOR_LOOP
  for (int i = 0; i < n; ++i) products[i] = step > 0 ? x[i] * inverse_step : 0.0f;
}

template <class Codec>
KVX_INLINE void encode_products(const float* products, int n, typename Codec::Code* codes) {
  for (int i = 0; i < n; ++i) codes[i] = Codec::encode(products[i]);
}

// After scale_group_with_step and encode_products: the codes of NaN and infinite inputs. Returns
// how many of them no code can express.
template <class Codec>
KVX_INLINE int encode_nonfinite(const float* x, int n, typename Codec::Code* codes) {
  if (!group_magnitude(x, n).has_nonfinite) return 0;
  int counted = 0;
  for (int i = 0; i < n; ++i) {
    if (is_finite(x[i])) continue;
    codes[i] = Codec::encode_nonfinite(x[i]);
    counted += Codec::kCountsNonfinite ? 1 : 0;
  }
  return counted;
}

// Dequantising is two steps as well: one number a code, then the group's step.
template <class Codec>
KVX_INLINE void decode_codes(const typename Codec::Code* codes, int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] = Codec::decode(codes[i]);
}

KVX_INLINE void multiply_group(float step, int n, float* x) {
  KVX_VECTOR_LOOP
  for (int i = 0; i < n; ++i) x[i] *= step;
}

// Both at once. codes: [n]; x: [n].
template <class Codec>
KVX_INLINE void dequantize_group(float step, const typename Codec::Code* codes, int n, float* x) {
  for (int i = 0; i < n; ++i) x[i] = Codec::decode(codes[i]) * step;
}

}  // namespace kvx::format
