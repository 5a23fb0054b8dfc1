// transcode's fast kernels: a warp walks over heads of its tokens, a row to some of its lanes, the
// next head's bytes under way while it decodes and encodes this one's. Rows of 16 bits without a
// transform are append's walk with another place for its rows to come from.
#pragma once

#include "ops/append/append_chunks.cuh"
#include "ops/gather/decode_chunk.cuh"
#include "ops/transcode/transcode_params.cuh"

namespace kvx::ops::cuda {

struct TranscodeChunksParams {
  TranscodeParams transcode;
  AppendWalks walks;
};

// A chunk as it is stored in any format of up to 16 bits, with its group's scale. The loop holds
// one for all of them: with a loop for each, there would be as many as pairs of formats.
struct AnyStoredChunk {
  static constexpr int kMostBits = 16;  // of a number; binary32 would cost the others registers
  static constexpr int kMostWords = kChunk * kMostBits / 32;
  uint32_t words[kMostWords];
  uint32_t scale;
};

// from.codes, from.scales: of the row. Zeros outside, which are numbers.
__device__ inline AnyStoredChunk load_any_chunk(const CudaSide& side, int bytes,
                                                const RowSource& from, const ChunkPlace& place) {
  AnyStoredChunk stored = {};
  if (!place.is_inside) return stored;
  const uint8_t* codes = from.codes + place.chunk * bytes;
  if (bytes == 8) {
    uint32_t words[2];
    load_words(codes, words);
    stored.words[0] = words[0];
    stored.words[1] = words[1];
  }
#pragma unroll
  for (int w = 0; w < AnyStoredChunk::kMostWords; w += 4) {
    if (4 * w + 16 > bytes) continue;
    uint32_t words[4];
    load_words(codes + 4 * w, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) stored.words[w + i] = words[i];
  }
  if (side.scale_bytes > 0) {
    const uint8_t* scale = from.scales + place.group() * side.view.scales.group_stride;
    stored.scale = scale_bits(scale, side.scale_bytes);
  }
  return stored;
}

__device__ inline Chunk decode_any_chunk(const CudaSide& side, const AnyStoredChunk& any,
                                         float tensor_scale) {
  Chunk chunk = {};
  visit_chunk_format(side.id, [&]<class Format>() {
    if constexpr (kChunkWords<Format> <= AnyStoredChunk::kMostWords) {
      StoredChunk<Format> stored;
#pragma unroll
      for (int w = 0; w < kChunkWords<Format>; ++w) stored.words[w] = any.words[w];
      stored.scale = any.scale;
      chunk = decode_stored(side, stored, tensor_scale);
    }
  });
  return chunk;
}

// One lane's walk.
class TranscodeWalk {
 public:
  __device__ TranscodeWalk(const TranscodeSide& side, const AppendWalks& walks)
      : side_(side), chunk_bytes_(side.source.side.code_bytes / side.source.chunks.num_chunks) {
    const AppendParams& append = side.params.append;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int lanes = side.source.chunks.lanes();
    place = {lane & (lanes - 1), side.target.chunks.log2_lanes_per_group, false};
    tokens_at_once_ = static_cast<uint32_t>(kWarp / lanes);
    const auto num_heads = static_cast<uint32_t>(append.num_heads);
    const uint32_t warp = (blockIdx.x * AppendWalks::kThreads + threadIdx.x) / kWarp;
    const uint32_t first_step = warp * walks.steps_of_warp;
    const uint32_t group = walks.by_num_heads.quotient(first_step);
    next_head_ = static_cast<int>(first_step - group * num_heads);
    token_ = group * tokens_at_once_ + static_cast<uint32_t>(lane >> side.source.chunks.log2_lanes);
    const uint32_t num_groups = (append.num_tokens + tokens_at_once_ - 1) / tokens_at_once_;
    const uint32_t num_steps = num_groups * num_heads;
    steps_left_ = min(walks.steps_of_warp, num_steps - min(first_step, num_steps));
  }

  // Calls per_chunk(stored) for every step. All lanes of a warp take as many.
  template <class PerChunk>
  __device__ __forceinline__ void run(const PerChunk& per_chunk) {
    if (steps_left_ == 0) return;
    find_row(slots_of(token_));
    AnyStoredChunk next = load();
    const bool changes_token = next_head_ + static_cast<int>(steps_left_) > num_heads();
    if (changes_token) next_slots_ = slots_of(token_ + tokens_at_once_);
#pragma unroll 1
    for (; steps_left_ > 0; --steps_left_) {
      const AnyStoredChunk stored = next;
      head = next_head_;
      from_tensor_scale = from_.tensor_scale;
      to = next_to_;
      place.is_inside = is_moved_;
      if (steps_left_ > 1) {
        advance();
        next = load();
      }
      per_chunk(stored);
    }
  }

  // Of this step.
  int head = 0;  // of the run
  float from_tensor_scale = 1.0f;
  RowTarget to = {};
  ChunkPlace place;  // in the target's groups

 private:
  __device__ int num_heads() const {
    return side_.params.append.num_heads;
  }
  __device__ bool has_row(uint32_t token) const {
    return token < side_.params.append.num_tokens && place.chunk < side_.source.chunks.num_chunks;
  }
  __device__ TranscodeSlots slots_of(uint32_t token) const {
    return has_row(token) ? side_.slots(token) : TranscodeSlots{-1, -1};
  }
  __device__ void find_row(const TranscodeSlots& slots) {
    const bool counts = place.chunk == 0 && next_head_ == 0 && side_.params.append.first_head == 0;
    is_moved_ = side_.is_moved(slots, counts);
    if (!is_moved_) return;
    from_ = side_.row(slots.from, next_head_);
    const AppendTarget target = {true, place_of_slot(side_.params.append, slots.to)};
    next_to_ = target.row(side_.target.side, next_head_);
  }
  __device__ AnyStoredChunk load() const {
    return load_any_chunk(side_.source.side, chunk_bytes_, from_,
                          {place.chunk, side_.source.chunks.log2_lanes_per_group, is_moved_});
  }
  __device__ void advance() {
    if (++next_head_ == num_heads()) {
      next_head_ = 0;
      token_ += tokens_at_once_;
      const TranscodeSlots slots = next_slots_;
      next_slots_ = slots_of(token_ + tokens_at_once_);
      find_row(slots);
      return;
    }
    const SideView& from = side_.source.side.view;
    const SideView& target = side_.target.side.view;
    from_.codes += from.codes.head_stride;
    from_.scales += from.scales.head_stride;
    from_.tensor_scale = side_.source.side.tensor_scale(next_head_);
    next_to_.codes += target.codes.head_stride;
    next_to_.scales += target.scales.head_stride;
    next_to_.tensor_scale = side_.target.side.tensor_scale(next_head_);
  }

  const TranscodeSide& side_;
  const int chunk_bytes_;
  uint32_t tokens_at_once_;
  uint32_t token_;
  uint32_t steps_left_;
  TranscodeSlots next_slots_ = {-1, -1};
  // Of the step whose loads are under way.
  int next_head_;
  bool is_moved_ = false;
  RowSource from_ = {nullptr, nullptr, 1.0f};
  RowTarget next_to_ = {};
};

inline constexpr int kTranscodeCtasPerMultiprocessor = 6;  // what registers allow

// blockIdx.y: K or V.
__global__ void __launch_bounds__(AppendWalks::kThreads, kTranscodeCtasPerMultiprocessor)
    transcode_chunks(const __grid_constant__ TranscodeChunksParams params) {
  wait_for_earlier_launches();
  const TranscodeSide side = params.transcode.side(blockIdx.y);
  if (!side.target.is_stored()) return;
  TranscodeWalk walk(side, params.walks);
  walk.run([&](const AnyStoredChunk& stored) {
    const AppendParams& append = side.params.append;
    const int head_dim = side.target.side.view.head_dim;
    Chunk chunk = decode_any_chunk(side.source.side, stored, walk.from_tensor_scale);
    if (side.source.is_transformed) {
      undo_transform_chunk(side.source_transform(walk.head), walk.place, head_dim, chunk);
    }
    if (side.target.is_transformed) {
      apply_transform_chunk(append_transform(append, side.target, walk.head, 0), walk.place,
                            head_dim, chunk);
    }
    const LostNumbers lost = encode_chunk(side.target.side, walk.to, walk.place, chunk);
    if (walk.place.is_inside) count_lost(append.counters, side.target.side, walk.head, lost);
  });
}

// Rows of 16 bits, as append's walk takes them.
struct StoredRows {
  using Ticket = TranscodeSlots;
  static constexpr bool kInputNeedsTicket = true;
  const TranscodeSide& side;

  __device__ uint32_t num_tokens() const { return side.params.append.num_tokens; }
  __device__ Ticket ticket(uint32_t token) const { return side.slots(token); }
  __device__ bool has_input(uint32_t, const Ticket& slots) const {
    return side.is_moved(slots, false);
  }
  __device__ const uint8_t* input(const AppendSide&, uint32_t, const Ticket& slots) const {
    return side.row(slots.from, 0).codes;
  }
  __device__ AppendTarget target(const AppendSide&, uint32_t, const Ticket& slots,
                                 bool counts) const {
    if (!side.is_moved(slots, counts && side.params.append.first_head == 0)) return {};
    return {true, place_of_slot(side.params.append, slots.to)};
  }
};

// blockIdx.y: K or V.
template <DType Input>
__global__ void __launch_bounds__(AppendWalks::kThreads, kTranscodeCtasPerMultiprocessor)
    transcode_stored(const __grid_constant__ TranscodeChunksParams params) {
  const TranscodeSide side = params.transcode.side(blockIdx.y);
  if (!side.target.is_stored()) return;
  append_walk<Input>(params.transcode.append, params.walks, side.target, StoredRows{side});
}

}  // namespace kvx::ops::cuda
