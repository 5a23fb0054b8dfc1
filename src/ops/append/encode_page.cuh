// PageEncoder: a run of a block's tokens under page-shared scales, by one warp (docs/numbers.md,
// section 2). Its caller (append, copy_blocks, transcode) defines where the rows come from.
#pragma once

#include "ops/append/encode_row.cuh"
#include "ops/side_rows.hpp"

namespace kvx::ops::cuda {

struct PagesLaunch {
  static constexpr int kThreads = 32;

  // PageScratch, one after the other.
  static int shared_bytes(const CudaSide& side) {
    return static_cast<int>(sizeof(float)) * (side.view.head_dim + 4 * side.num_groups);
  }
};

// What a warp keeps in shared memory.
struct PageScratch {
  float* x;         // [head_dim], one row as it is stored
  uint32_t* amax;   // [num_groups], the run's largest finite magnitudes as bits
  int* grown;       // [num_groups], whether the page's scale grew
  float* old_step;  // [num_groups]
  float* step;      // [num_groups], the page's now
};

__device__ inline PageScratch page_scratch(const CudaSide& side, float* shared) {
  float* after_row = shared + side.view.head_dim;
  const int num_groups = side.num_groups;
  return {shared, reinterpret_cast<uint32_t*>(after_row),
          reinterpret_cast<int*>(after_row + num_groups), after_row + 2 * num_groups,
          after_row + 3 * num_groups};
}

// Consecutive rows of the call for consecutive tokens of one block.
struct PageRun {
  uint32_t first_row;  // of the call
  TokenRun tokens;
};

// Rows: load(row, x, lane), by the whole warp, puts what is to be encoded into x.
template <class Format, class Rows>
struct PageEncoder {
  using Codec = typename Format::Codec;
  static constexpr int kCodes = codes_at_once<Format>();

  const CudaSide& side;
  const Rows& rows;
  int head;  // of the run of heads
  const PageScratch& scratch;
  int lane;

  // Returns the lane's count of non-finite numbers that no code can express.
  __device__ int encode(const PageRun& run) const {
    make_scales(run);
    for (int t = 0; t < run.tokens.first_token; ++t) requantize_row(codes_of(run, t));
    int counted = 0;
    for (int i = 0; i < run.tokens.num_tokens; ++i) {
      load_row(run, i);
      uint8_t* row = codes_of(run, run.tokens.first_token + i);
      counted += feeds_back() ? feed_back(row) : encode_row(row);
      __syncwarp();
    }
    return counted;
  }

 private:
  __device__ uint8_t* codes_of(const PageRun& run, int token) const {
    return side.codes(run.tokens.block, token, head);
  }

  __device__ void load_row(const PageRun& run, int i) const {
    rows.load(run.first_row + static_cast<uint32_t>(i), scratch.x, lane);
    __syncwarp();
  }

  __device__ void make_scales(const PageRun& run) const {
    for (int g = lane; g < side.num_groups; g += kWarp) scratch.amax[g] = 0;
    for (int i = 0; i < run.tokens.num_tokens; ++i) {
      __syncwarp();
      load_row(run, i);
      for (int d = lane; d < side.view.head_dim; d += kWarp) {
        const uint32_t magnitude = __float_as_uint(scratch.x[d]) & 0x7FFFFFFFu;
        if (magnitude < 0x7F800000u) atomicMax(&scratch.amax[d / side.group_length], magnitude);
      }
    }
    __syncwarp();
    uint8_t* scales = side.scales(run.tokens.block, 0, head);
    for (int g = lane; g < side.num_groups; g += kWarp) {
      make_scale(run, g, scales + g * side.view.scales.group_stride);
    }
    __syncwarp();
  }

  __device__ void make_scale(const PageRun& run, int g, uint8_t* scale) const {
    const format::ScaleMaker maker =
        format::scale_maker<Format>(side.view.spec, side.tensor_scale(head));
    const float amax = __uint_as_float(scratch.amax[g]);
    const bool is_first_run = run.tokens.first_token == 0;
    const format::StoredScale old =
        is_first_run ? format::StoredScale{0} : format::load_scale(maker.type, scale);
    const format::StoredScale wanted =
        amax > 0 ? maker.make(Codec::kQmax, amax) : format::StoredScale{0};
    const bool grows = is_first_run || maker.step(wanted) > maker.step(old);
    if (grows) format::store_scale(maker.type, wanted, scale);
    scratch.grown[g] = grows;
    scratch.old_step[g] = maker.step(old);
    scratch.step[g] = maker.step(grows ? wanted : old);
  }

  // Codes of numbers [first, first + n), all in one group, under a step.
  __device__ int encode_codes(float step, const float* x, int first, int n, uint8_t* row) const {
    float products[kCodes];
    typename Codec::Code codes[kCodes];
    format::scale_group_with_step(step, x, n, products);
    format::encode_products<Codec>(products, n, codes);
    const int counted = format::encode_nonfinite<Codec>(x, n, codes);
    format::pack<Format::kFacts.packing>(codes, first, n, row);
    return counted;
  }

  // An earlier token's row moves from the old steps to larger ones.
  __device__ void requantize_row(uint8_t* row) const {
    const int head_dim = side.view.head_dim;
    for (int first = lane * kCodes; first < head_dim; first += kWarp * kCodes) {
      const int group = first / side.group_length;
      if (!scratch.grown[group]) continue;
      const int n = min(kCodes, head_dim - first);
      typename Codec::Code codes[kCodes];
      float values[kCodes];
      format::unpack<Format::kFacts.packing>(row, first, n, codes);
      format::dequantize_group<Codec>(scratch.old_step[group], codes, n, values);
      encode_codes(scratch.step[group], values, first, n, row);
    }
    __syncwarp();
  }

  __device__ bool feeds_back() const {
    return side.view.feedback != nullptr && takes_feedback(scratch.x, side.view.head_dim, lane);
  }

  // The row is finite: every number has a code.
  __device__ int feed_back(uint8_t* row) const {
    const auto step_of = [this](int group) { return scratch.step[group]; };
    GroupRounding<Format, decltype(step_of)> rounding(
        side, groups_with_numbers(side, scratch.x, lane), step_of, {format::kFloatMax, false});
    feed_back_row(side.view.feedback_of(head), side.view.head_dim, scratch.x, lane, rounding);
    pack_fed_row<Format>(side, {row, nullptr, 1.0f}, scratch.x, lane);
    return 0;
  }

  __device__ int encode_row(uint8_t* row) const {
    const int head_dim = side.view.head_dim;
    int counted = 0;
    for (int first = lane * kCodes; first < head_dim; first += kWarp * kCodes) {
      const int group = first / side.group_length;
      // A step of 0 encodes every finite input as 0, as an all-zero group must be.
      const float step = scratch.amax[group] > 0 ? scratch.step[group] : 0.0f;
      counted += encode_codes(step, scratch.x + first, first, min(kCodes, head_dim - first), row);
    }
    return counted;
  }
};

template <class Format>
constexpr bool has_pages() {
  return Format::kFacts.scale_sources.allows(format::ScaleSource::kPageShared);
}

}  // namespace kvx::ops::cuda
