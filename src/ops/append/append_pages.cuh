// append under page-shared scales: docs/numbers.md, section 2. A warp takes a head's runs of
// tokens in the call's order, as one scale's history is; blocks are shared out to stripes of warps.
#pragma once

#include "ops/append/append_job.cuh"
#include "ops/cuda/floats.cuh"
#include "ops/cuda/visit_format.cuh"

namespace kvx::ops::cuda {

struct AppendPagesLaunch {
  static constexpr int kThreads = 32;
  static constexpr int kStripes = 64;

  // PageScratch, one after the other.
  static int shared_bytes(const CudaSide& side) {
    return static_cast<int>(sizeof(float)) * (side.view.head_dim + 4 * side.num_groups);
  }
};

// Consecutive tokens of the call in consecutive slots of one block.
struct PageRun {
  uint32_t first_row;  // of the call
  TokenRun tokens;
};

// What a warp keeps in shared memory.
struct PageScratch {
  float* x;         // [head_dim], one transformed row
  uint32_t* amax;   // [num_groups], the run's largest finite magnitudes as bits
  int* grown;       // [num_groups], whether the page's scale grew
  float* old_step;  // [num_groups]
  float* step;      // [num_groups], the page's now
};

// The token's slot, or -1 where it has none that is valid.
__device__ inline int64_t valid_slot(const AppendJob& job, const AppendSide& part, uint32_t token) {
  const int64_t slot = job.slot_mapping[token];
  return append_target(job, part, token, slot, false).is_stored ? slot : -1;
}

__device__ inline bool begins_run(const AppendJob& job, const AppendSide& part, uint32_t token,
                                  int64_t slot) {
  if (slot < 0) return false;
  if (token == 0 || slot % job.block_size == 0) return true;
  return valid_slot(job, part, token - 1) != slot - 1;
}

__device__ inline PageRun run_at(const AppendJob& job, const AppendSide& part, uint32_t token,
                                 int64_t slot) {
  const TokenRun place = place_of_slot(job, slot);
  const int room = job.block_size - place.first_token;
  int n = 1;
  while (n < room && token + n < job.num_tokens && valid_slot(job, part, token + n) == slot + n) {
    ++n;
  }
  return {token, {place.block, place.first_token, n}};
}

template <class Format>
struct PageEncoder {
  using Codec = typename Format::Codec;
  static constexpr int kCodes = codes_per_word<Format>();

  const AppendJob& job;
  const AppendSide& part;
  int head;  // of the run of heads
  const PageScratch& scratch;
  int lane;

  __device__ int append(const PageRun& run) const {
    make_scales(run);
    for (int t = 0; t < run.tokens.first_token; ++t) requantize_row(codes_of(run, t));
    int counted = 0;
    for (int i = 0; i < run.tokens.num_tokens; ++i) {
      load_row(run, i);
      counted += encode_row(codes_of(run, run.tokens.first_token + i));
      __syncwarp();
    }
    return counted;
  }

 private:
  __device__ uint8_t* codes_of(const PageRun& run, int token) const {
    return part.side.codes(run.tokens.block, token, head);
  }

  __device__ void load_row(const PageRun& run, int i) const {
    const uint32_t token = run.first_row + static_cast<uint32_t>(i);
    const int head_dim = part.side.view.head_dim;
    const uint8_t* input = part.input_row(token, job.first_head + head);
    for (int d = lane; d < head_dim; d += kWarp) {
      scratch.x[d] = load_float(part.input.dtype, input, d);
    }
    const int64_t block = part.transform.block_offset ? job.positions[token] / job.block_size : 0;
    apply_transform_row(append_transform(job, part, head, block), scratch.x, head_dim, lane);
    __syncwarp();
  }

  __device__ void make_scales(const PageRun& run) const {
    for (int g = lane; g < part.side.num_groups; g += kWarp) scratch.amax[g] = 0;
    for (int i = 0; i < run.tokens.num_tokens; ++i) {
      __syncwarp();
      load_row(run, i);
      for (int d = lane; d < part.side.view.head_dim; d += kWarp) {
        const uint32_t magnitude = __float_as_uint(scratch.x[d]) & 0x7FFFFFFFu;
        if (magnitude < 0x7F800000u) {
          atomicMax(&scratch.amax[d / part.side.group_length], magnitude);
        }
      }
    }
    __syncwarp();
    uint8_t* scales = part.side.scales(run.tokens.block, 0, head);
    for (int g = lane; g < part.side.num_groups; g += kWarp) {
      make_scale(run, g, scales + g * part.side.view.scales.group_stride);
    }
    __syncwarp();
  }

  __device__ void make_scale(const PageRun& run, int g, uint8_t* scale) const {
    const format::ScaleMaker maker =
        cpu::scale_maker<Format>(part.side.view.spec, part.side.tensor_scale(head));
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
    const int head_dim = part.side.view.head_dim;
    for (int first = lane * kCodes; first < head_dim; first += kWarp * kCodes) {
      const int group = first / part.side.group_length;
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

  __device__ int encode_row(uint8_t* row) const {
    const int head_dim = part.side.view.head_dim;
    int counted = 0;
    for (int first = lane * kCodes; first < head_dim; first += kWarp * kCodes) {
      const int group = first / part.side.group_length;
      // A step of 0 encodes every finite input as 0, as an all-zero group must be.
      const float step = scratch.amax[group] > 0 ? scratch.step[group] : 0.0f;
      counted += encode_codes(step, scratch.x + first, first, min(kCodes, head_dim - first), row);
    }
    return counted;
  }
};

template <class Format>
__device__ inline void append_pages_of(const AppendJob& job, const AppendSide& part, int head,
                                       int stripe, const PageScratch& scratch, int lane) {
  if constexpr (Format::kFacts.scale_sources.allows(format::ScaleSource::kPageShared)) {
    const PageEncoder<Format> encoder{job, part, head, scratch, lane};
    for (uint32_t base = 0; base < job.num_tokens; base += kWarp) {
      const uint32_t token = base + static_cast<uint32_t>(lane);
      const int64_t slot = token < job.num_tokens ? valid_slot(job, part, token) : -1;
      const bool is_mine = begins_run(job, part, token, slot) &&
                           slot / job.block_size % AppendPagesLaunch::kStripes == stripe;
      unsigned starts = __ballot_sync(kWholeWarp, is_mine);
      for (; starts != 0; starts &= starts - 1) {
        const int from = __ffs(static_cast<int>(starts)) - 1;
        const int64_t first_slot = __shfl_sync(kWholeWarp, slot, from);
        const PageRun run = run_at(job, part, base + static_cast<uint32_t>(from), first_slot);
        count_nonfinite(job, encoder.append(run));
      }
    }
  }
}

// Counts what append_target finds out of range, once a token.
__device__ inline void count_out_of_range(const AppendJob& job, const AppendSide& part, int lane) {
  for (uint32_t token = static_cast<uint32_t>(lane); token < job.num_tokens; token += kWarp) {
    append_target(job, part, token, job.slot_mapping[token], true);
  }
}

// blockIdx: stripe, head, K or V.
__global__ void __launch_bounds__(AppendPagesLaunch::kThreads)
    append_pages(const __grid_constant__ AppendJob job) {
  extern __shared__ float shared[];
  const AppendSide& part = job.sides[blockIdx.z];
  if (!part.is_stored()) return;
  const int lane = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  float* after_row = shared + part.side.view.head_dim;
  const int num_groups = part.side.num_groups;
  const PageScratch scratch = {shared, reinterpret_cast<uint32_t*>(after_row),
                               reinterpret_cast<int*>(after_row + num_groups),
                               after_row + 2 * num_groups, after_row + 3 * num_groups};
  if (blockIdx.x == 0 && head == 0) count_out_of_range(job, part, lane);
  visit_format(part.side.id, [&]<class Format>() {
    append_pages_of<Format>(job, part, head, static_cast<int>(blockIdx.x), scratch, lane);
  });
}

}  // namespace kvx::ops::cuda
