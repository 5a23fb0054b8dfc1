// gather's fast kernel: a warp walks over heads of its tokens, a row to some of its lanes, the next
// head's loads under way while it decodes this one's.
#pragma once

#include "ops/append/encode_chunk.cuh"
#include "ops/cuda/overlapping_launch.cuh"
#include "ops/gather/decode_chunk.cuh"
#include "ops/gather/gather_params.cuh"

namespace kvx::ops::cuda {

// A warp takes the heads of a few tokens together, one head a step, then those of the next ones.
// The steps of a range are shared out evenly to its warps.
struct GatherWalks {
  static constexpr int kThreads = 128;
  static constexpr int kCtasPerMultiprocessor = 6;  // what registers allow

  // CTAs of a range: so many that short ranges leave room to long ones, but with walks that are
  // worth their beginning, and as many as fill whole rounds of the device. lanes: of a row, K's or
  // V's, whichever has more.
  static unsigned num_ctas(int num_multiprocessors, int64_t num_ranges, int64_t max_tokens,
                           int num_heads, int lanes) {
    constexpr int64_t kMostCtas = 8192;
    constexpr int kStepsOfWalk = 8;
    const int64_t num_steps = ceil_div<int64_t>(max_tokens, kWarp / lanes) * num_heads;
    const int64_t most =
        std::clamp<int64_t>(ceil_div<int64_t>(num_steps, kThreads / kWarp * kStepsOfWalk), 1,
                            std::max<int64_t>(kMostCtas / num_ranges, 1));
    const int64_t at_once = int64_t{num_multiprocessors} * kCtasPerMultiprocessor;
    const int64_t rounds = 2 * num_ranges * most / at_once;
    if (rounds == 0) return static_cast<unsigned>(most);
    return static_cast<unsigned>(std::clamp<int64_t>(rounds * at_once / (2 * num_ranges), 1, most));
  }
};

struct GatherChunksParams {
  GatherParams gather;
  FastDivide by_num_heads;
};

// A chunk in a caller's type, which is a format without scales.
__device__ inline void store_numbers(DType type, uint8_t* row, const ChunkPlace& place,
                                     const Chunk& chunk) {
  const RowTarget to = {row, nullptr, 1.0f};
  if (type == DType::kF32) encode_plain_chunk<format::F32>(to, place, chunk);
  if (type == DType::kF16) encode_plain_chunk<format::F16>(to, place, chunk);
  if (type == DType::kBF16) encode_plain_chunk<format::BF16>(to, place, chunk);
}

// One lane's walk over a range. Requires: the range is inside, its steps fit 31 bits.
class GatherWalk {
 public:
  __device__ GatherWalk(const GatherChunksParams& chunks, const GatherSide& part,
                        const GatherRange& range)
      : params_(chunks.gather), part_(part), range_(range) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int lanes = part.chunks.lanes();
    place = {lane & (lanes - 1), part.chunks.log2_lanes_per_group, false};
    num_tokens_ = static_cast<uint32_t>(min(range.num_tokens, params_.max_tokens));
    tokens_at_once_ = static_cast<uint32_t>(kWarp / lanes);
    const auto num_heads = static_cast<uint32_t>(params_.num_heads);
    const uint32_t num_groups = (num_tokens_ + tokens_at_once_ - 1) / tokens_at_once_;
    const uint32_t num_steps = num_groups * num_heads;
    constexpr uint32_t kWarps = GatherWalks::kThreads / kWarp;
    const uint32_t steps_of_warp = ceil_div(num_steps, gridDim.x * kWarps);
    const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarp;
    const uint32_t first_step = warp * steps_of_warp;
    const uint32_t group = chunks.by_num_heads.quotient(first_step);
    next_head_ = static_cast<int>(first_step - group * num_heads);
    token_ = group * tokens_at_once_ + static_cast<uint32_t>(lane >> part.chunks.log2_lanes);
    steps_left_ = min(steps_of_warp, num_steps - min(first_step, num_steps));
  }

  // Calls per_chunk(stored) for every step. All lanes of a warp take as many.
  template <class Format, class PerChunk>
  __device__ __forceinline__ void run(const PerChunk& per_chunk) {
    if (steps_left_ == 0) return;
    find_row(block_of(token_));
    StoredChunk<Format> next = load_chunk<Format>(part_.side, from_, next_place());
    const bool changes_token = next_head_ + static_cast<int>(steps_left_) > params_.num_heads;
    if (changes_token) next_block_ = block_of(token_ + tokens_at_once_);
#pragma unroll 1
    for (; steps_left_ > 0; --steps_left_) {
      const StoredChunk<Format> stored = next;
      head = next_head_;
      position_block = next_position_block_;
      tensor_scale = from_.tensor_scale;
      output = next_output_;
      place.is_inside = is_read_;
      if (steps_left_ > 1) {
        advance();
        next = load_chunk<Format>(part_.side, from_, next_place());
      }
      per_chunk(stored);
    }
  }

  // Of this step.
  int head = 0;  // of the run
  int64_t position_block = 0;
  float tensor_scale = 1.0f;
  uint8_t* output = nullptr;
  ChunkPlace place;

 private:
  __device__ ChunkPlace next_place() const {
    return {place.chunk, place.log2_lanes_per_group, is_read_};
  }
  __device__ bool has_row(uint32_t token) const {
    return token < num_tokens_ && place.chunk < part_.chunks.num_chunks;
  }
  __device__ int32_t block_of(uint32_t token) const {
    return has_row(token) ? block_of_token(params_, range_, token) : 0;
  }
  __device__ void find_row(int32_t block) {
    is_read_ = false;
    if (!has_row(token_)) return;
    const bool counts = place.chunk == 0 && next_head_ == 0;
    const GatherSource source = gather_source(params_, part_, range_, token_, block, counts);
    is_read_ = source.is_read;
    if (!is_read_) return;
    from_ = source.row(part_.side, next_head_);
    next_position_block_ = source.position_block;
    next_output_ = part_.output_row(range_.first_row + token_, params_.first_head + next_head_);
  }
  __device__ void advance() {
    if (++next_head_ == params_.num_heads) {
      next_head_ = 0;
      token_ += tokens_at_once_;
      const int32_t block = next_block_;
      next_block_ = block_of(token_ + tokens_at_once_);
      find_row(block);
    } else {
      from_.codes += part_.side.view.codes.head_stride;
      from_.scales += part_.side.view.scales.head_stride;
      from_.tensor_scale = part_.side.tensor_scale(next_head_);
      next_output_ += part_.output.head_stride * bytes_of(part_.output.dtype);
    }
  }

  const GatherParams& params_;
  const GatherSide& part_;
  const GatherRange& range_;
  uint32_t num_tokens_;
  uint32_t tokens_at_once_;
  uint32_t token_;
  uint32_t steps_left_;
  int32_t next_block_ = 0;
  // Of the step whose loads are under way.
  int next_head_;
  bool is_read_ = false;
  RowSource from_ = {nullptr, nullptr, 1.0f};
  int64_t next_position_block_ = 0;
  uint8_t* next_output_ = nullptr;
};

// Whole warps come here together.
template <class Format>
__device__ inline void gather_chunk(const GatherParams& params, const GatherSide& part,
                                    const GatherWalk& walk, const StoredChunk<Format>& stored) {
  if (part.keeps_bits) return store_codes<Format>(stored.words, walk.place, walk.output);
  Chunk chunk = decode_stored(part.side, stored, walk.tensor_scale);
  if (part.is_transformed) {
    undo_transform_chunk(gather_transform(params, part, walk.head, walk.position_block), walk.place,
                         part.side.view.head_dim, chunk);
  }
  store_numbers(part.output.dtype, walk.output, walk.place, chunk);
}

// blockIdx: warps of the range, the range, K or V.
__global__ void __launch_bounds__(GatherWalks::kThreads, GatherWalks::kCtasPerMultiprocessor)
    gather_chunks(const __grid_constant__ GatherChunksParams chunks) {
  wait_for_earlier_launches();
  const GatherParams& params = chunks.gather;
  const GatherSide& part = params.sides[blockIdx.z];
  const GatherRange range = range_at(params.ranges, static_cast<int>(blockIdx.y));
  if (!is_inside(params, range)) {
    const bool counts = blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0;
    if (counts) atomicAdd(&params.counters->out_of_range, 1ull);
    return;
  }
  if (!part.is_wanted()) return;
  GatherWalk walk(chunks, part, range);
  visit_chunk_format(part.side.id, [&]<class Format>() {
    walk.run<Format>([&](const StoredChunk<Format>& stored) {
      gather_chunk<Format>(params, part, walk, stored);
    });
  });
}

}  // namespace kvx::ops::cuda
