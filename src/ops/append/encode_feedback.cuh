// Error feedback by one warp, a row in shared memory (docs/numbers.md, section 8). The arithmetic
// is format/feedback.hpp's.
#pragma once

#include "format/feedback.hpp"
#include "format/packing.hpp"
#include "format/saturation.hpp"
#include "format/traits.hpp"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

// Whether feedback applies to a row: it is finite and not too large.
__device__ inline bool takes_feedback(const float* x, int head_dim, int lane) {
  uint32_t largest = 0;
  for (int d = lane; d < head_dim; d += kWarp) {
    largest = max(largest, __float_as_uint(x[d]) & 0x7FFFFFFFu);
  }
  return __reduce_max_sync(kWholeWarp, largest) < __float_as_uint(format::kFeedbackLimit);
}

// A bit a group of the row: whether a number of it is not zero. Groups have sixteen numbers at
// least, rows kMaxHeadDim at most.
__device__ inline uint64_t groups_with_numbers(const CudaSide& side, const float* x, int lane) {
  static_assert(format::kMaxHeadDim / 16 <= 64);
  uint64_t groups = 0;
  for (int d = lane; d < side.view.head_dim; d += kWarp) {
    if (x[d] != 0) groups |= uint64_t{1} << (d / side.group_length);
  }
  const uint32_t low = __reduce_or_sync(kWholeWarp, static_cast<uint32_t>(groups));
  const uint32_t high = __reduce_or_sync(kWholeWarp, static_cast<uint32_t>(groups >> 32));
  return uint64_t{high} << 32 | low;
}

// How the numbers of a row of groups are rounded, in order. StepOf: the step of a group's number.
template <class Format, class StepOf>
class GroupRounding {
 public:
  using Codec = typename Format::Codec;
  __device__ GroupRounding(const CudaSide& side, uint64_t groups, const StepOf& step_of,
                           const format::SaturationLimit& limit)
      : group_length_(side.group_length), groups_(groups), step_of_(step_of), limit_(limit) {}

  __device__ format::FedCode<Codec> operator()(float number) {
    if (left_ == 0) {
      step_ = step_of_(group_);
      inverse_ = format::reciprocal(step_);
      is_zero_ = (groups_ >> group_ & 1) == 0;
      left_ = group_length_;
      ++group_;
    }
    --left_;
    saturated_ += !is_zero_ && limit_.is_exceeded_by(number, inverse_);
    return format::round_fed<Codec>(step_, inverse_, is_zero_, number);
  }

  // How many of the numbers that were rounded are saturated.
  __device__ int num_saturated() const { return saturated_; }

 private:
  int group_length_;
  uint64_t groups_;
  const StepOf& step_of_;
  format::SaturationLimit limit_;
  int saturated_ = 0;
  int group_ = 0;
  int left_ = 0;
  float step_ = 0;
  float inverse_ = 0;
  bool is_zero_ = false;
};

// Rounds x, [head_dim] in shared memory, whose numbers become the bits of their codes. A lane adds
// to every 32nd number. weights: of the head, [head_dim, head_dim].
template <class Rounding>
__device__ inline void feed_back_row(const float* weights, int head_dim, float* x, int lane,
                                     Rounding&& rounding) {
  uint32_t code = 0;  // of the number before
  for (int i = 0; i < head_dim; ++i, weights += head_dim) {
    __syncwarp();
    const auto fed = rounding(x[i]);
    if (lane == 0 && i > 0) x[i - 1] = __uint_as_float(code);
    code = fed.code;
    int d = i / kWarp * kWarp + lane;
    if (d <= i) d += kWarp;
    for (; d < head_dim; d += kWarp) x[d] += fed.error * weights[d];
  }
  if (lane == 0) x[head_dim - 1] = __uint_as_float(code);
  __syncwarp();
}

}  // namespace kvx::ops::cuda
