// append's fast kernel: a warp walks over heads of its tokens, a row to some of its lanes, the next
// head's loads under way while it encodes this one's. copy_blocks and transcode use it for rows
// that are stored in 16 bits.
#pragma once

#include "ops/append/append_params.cuh"
#include "ops/append/encode_chunk.cuh"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::cuda {

// A warp takes the heads of a few tokens together, one head a step, then those of the next ones.
// Steps are shared out evenly to as many warps as the device holds at once: none is left for a
// second round, and each warp finds its first token and waits for it but once.
struct AppendWalks {
  static constexpr int kThreads = 128;
  uint32_t steps_of_warp = 0;
  FastDivide by_num_heads;
};

// Of K and V of a call, in one launch: blockIdx.y is the side.
struct AppendLaunch {
  AppendWalks walks;
  LaunchShape shape;

  // ctas_at_once: of a multiprocessor.
  static AppendLaunch of(const CudaContext& context, const AppendParams& params, int ctas_at_once) {
    constexpr int kWarpsOfCta = AppendWalks::kThreads / kWarp;
    const auto& [k, v] = params.sides;
    const int num_sides = k.is_stored() && v.is_stored() ? 2 : 1;
    const int lanes = 1 << std::max(k.chunks.log2_lanes, v.chunks.log2_lanes);
    const int64_t num_steps =
        ceil_div<int64_t>(params.num_tokens, kWarp / lanes) * params.num_heads;
    const int64_t warps_at_once =
        int64_t{context.device.num_multiprocessors} * ctas_at_once * kWarpsOfCta / num_sides;
    const int64_t steps_of_warp = ceil_div(num_steps, warps_at_once);
    const int64_t num_warps = ceil_div(num_steps, steps_of_warp);
    const auto num_ctas = static_cast<unsigned>(ceil_div<int64_t>(num_warps, kWarpsOfCta));
    return {{static_cast<uint32_t>(steps_of_warp), FastDivide(params.num_heads)},
            {dim3(num_ctas, 2), AppendWalks::kThreads}};
  }
};

struct AppendChunksParams {
  AppendParams append;
  AppendWalks walks;
};

// Keeps a number of the launch in a register from here on. The compiler would load it where it is
// used, which takes longer than using it.
template <class T>
__device__ __forceinline__ void hold(T& number) {
  if constexpr (sizeof(T) == 8) {
    auto bits = (long long)number;
    asm volatile("" : "+l"(bits));
    number = (T)bits;
  } else {
    auto bits = static_cast<int>(number);
    asm volatile("" : "+r"(bits));
    number = static_cast<T>(bits);
  }
}

// Everything but its slot that it takes to find a warp's first row, held in registers before there
// is a slot: in a decode step, where a warp has one row, all waits for that.
class FirstRow {
 public:
  // head: of the run.
  __device__ FirstRow(const AppendParams& params, const AppendSide& part, uint32_t token, int head)
      : slot(params.slot_mapping + token),
        is_simple(params.num_slots <= INT32_MAX && part.transform.block_offset == nullptr),
        codes_(part.side.codes(0, 0, head)),
        scales_(part.side.scales(0, 0, head)),
        codes_of_block_(part.side.view.codes.block_stride),
        codes_of_token_(part.side.view.codes.token_stride),
        scales_of_block_(part.side.view.scales.block_stride),
        scales_of_token_(part.side.view.scales.token_stride),
        num_slots_(static_cast<uint32_t>(params.num_slots)),
        by_block_size_(params.by_block_size) {
    hold(slot);
    hold(is_simple);
    hold(codes_);
    hold(scales_);
    hold(codes_of_block_);
    hold(codes_of_token_);
    hold(scales_of_block_);
    hold(scales_of_token_);
    hold(num_slots_);
    hold(by_block_size_.divisor);
    hold(by_block_size_.multiplier);
    hold(by_block_size_.shift);
  }
  __device__ bool holds(int64_t slot) const { return static_cast<uint64_t>(slot) < num_slots_; }
  // Requires: it is simple and holds the slot.
  __device__ RowTarget at(int64_t slot, float tensor_scale) const {
    const auto s = static_cast<uint32_t>(slot);
    const uint32_t block = by_block_size_.quotient(s);
    const uint32_t token = s - block * by_block_size_.divisor;
    return {codes_ + block * codes_of_block_ + token * codes_of_token_,
            scales_ + block * scales_of_block_ + token * scales_of_token_, tensor_scale};
  }

  const int64_t* slot;
  bool is_simple;  // else append_target finds the row

 private:
  uint8_t* codes_;
  uint8_t* scales_;
  int64_t codes_of_block_;
  int64_t codes_of_token_;
  int64_t scales_of_block_;
  int64_t scales_of_token_;
  uint32_t num_slots_;
  FastDivide by_block_size_;
};

// Where a walk's rows come from and go to. A ticket is what must be loaded to find that; it is
// loaded a token ahead. append's ticket is a slot.
struct SlotRows {
  using Ticket = int64_t;
  static constexpr bool kInputNeedsTicket = false;
  const AppendParams& params;

  __device__ uint32_t num_tokens() const { return params.num_tokens; }
  __device__ Ticket ticket(uint32_t token) const { return params.slot_mapping[token]; }
  __device__ bool has_input(uint32_t, const Ticket&) const { return true; }
  // Of head 0 of the run.
  __device__ const uint8_t* input(const AppendSide& part, uint32_t token, const Ticket&) const {
    return part.input_row(token, params.first_head);
  }
  __device__ AppendTarget target(const AppendSide& part, uint32_t token, const Ticket& slot,
                                 bool counts) const {
    return append_target(params, part, token, slot, counts);
  }
};

template <DType Input>
using InputChunk = uint32_t[kInputWords<Input>];

// One lane's walk.
template <DType Input, class Rows>
class AppendWalk {
 public:
  __device__ AppendWalk(const Rows& rows, const AppendSide& part, const AppendWalks& walks,
                        int num_heads)
      : is_transformed(part.is_transformed),
        rows_(rows),
        part_(part),
        num_heads_(num_heads),
        input_stride_(head_bytes(part)) {
    hold(is_transformed);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int lanes = part.chunks.lanes();
    place = {lane & (lanes - 1), part.chunks.log2_lanes_per_group, false};
    is_in_row_ = place.chunk < part.chunks.num_chunks;
    hold(is_in_row_);
    tokens_at_once_ = static_cast<uint32_t>(kWarp / lanes);
    const uint32_t warp = (blockIdx.x * AppendWalks::kThreads + threadIdx.x) / kWarp;
    const uint32_t first_step = warp * walks.steps_of_warp;
    const uint32_t group = walks.by_num_heads.quotient(first_step);
    head = static_cast<int>(first_step - group * static_cast<uint32_t>(num_heads));
    token_ = group * tokens_at_once_ + static_cast<uint32_t>(lane >> part.chunks.log2_lanes);
    const uint32_t num_groups = (rows.num_tokens() + tokens_at_once_ - 1) / tokens_at_once_;
    const uint32_t num_steps = num_groups * static_cast<uint32_t>(num_heads);
    steps_left_ = min(walks.steps_of_warp, num_steps - min(first_step, num_steps));
  }

  // Calls per_chunk(words) for every step. All lanes of a warp take as many.
  template <class PerChunk>
  __device__ __forceinline__ void run(const PerChunk& per_chunk) {
    if (steps_left_ == 0) return;
    const uint8_t* input = nullptr;
    InputChunk<Input> next = {};
    if constexpr (Rows::kInputNeedsTicket) {
      wait_for_earlier_launches();
      const Ticket ticket = ticket_of(token_);
      find_target(ticket);
      if (target.is_stored) {
        input = input_of(token_, head, ticket);
        load_words(input, next);
      }
    } else {
      // What needs nothing of earlier launches is done before they are waited for.
      input = input_of(token_, head, {});
      const FirstRow first(rows_.params, part_, token_, head);
      bool has_first_row = has_row(token_);
      hold(has_first_row);
      wait_for_earlier_launches();
      if (has_first_row) {
        load_words(input, next);
        find_first_target(first);
      }
    }
    const bool changes_token = head + static_cast<int>(steps_left_) > num_heads_;
    if (changes_token) next_ticket_ = ticket_of(token_ + tokens_at_once_);
#pragma unroll 1
    for (; steps_left_ > 0; --steps_left_) {
      InputChunk<Input> words;
#pragma unroll
      for (int w = 0; w < kInputWords<Input>; ++w) words[w] = next[w];
      const bool is_last_head = head + 1 == num_heads_;
      if (steps_left_ > 1) {
        const uint32_t token = token_ + (is_last_head ? tokens_at_once_ : 0);
        input = is_last_head ? input_of(token, 0, next_ticket_) : input + input_stride_;
        const bool has_input = is_last_head ? rows_.has_input(token, next_ticket_)
                                            : target.is_stored || !Rows::kInputNeedsTicket;
        if (has_row(token) && has_input) load_words(input, next);
        next_tensor_scale_ = part_.side.tensor_scale(is_last_head ? 0 : head + 1);
      }
      place.is_inside = target.is_stored;
      per_chunk(words);
      if (steps_left_ > 1) advance(is_last_head);
    }
  }

  int head = 0;  // of the run
  AppendTarget target;
  RowTarget to = {};  // of this head, as far as it is stored
  ChunkPlace place;
  bool is_transformed;

 private:
  using Ticket = typename Rows::Ticket;

  __device__ static int64_t head_bytes(const AppendSide& part) {
    return part.input.head_stride * bytes_of(Input);
  }
  __device__ bool has_row(uint32_t token) const {
    return token < rows_.num_tokens() && is_in_row_;
  }
  __device__ Ticket ticket_of(uint32_t token) const {
    return has_row(token) ? rows_.ticket(token) : Ticket{};
  }
  // Of this lane's chunk.
  __device__ const uint8_t* input_of(uint32_t token, int of_head, const Ticket& ticket) const {
    return rows_.input(part_, token, ticket) + of_head * input_stride_ +
           place.chunk * kInputWords<Input> * 4;
  }
  __device__ void find_target(const Ticket& ticket) {
    target = {};
    if (!has_row(token_)) return;
    target = rows_.target(part_, token_, ticket, place.chunk == 0 && head == 0);
    if (target.is_stored) to = target.row(part_.side, head);
  }
  __device__ void find_first_target(const FirstRow& first) {
    const Ticket slot = *first.slot;
    const float tensor_scale = part_.side.tensor_scale(head);
    if (!first.is_simple || (slot >= 0 && !first.holds(slot))) return find_target(slot);
    target.is_stored = slot >= 0;
    if (target.is_stored) to = first.at(slot, tensor_scale);
  }
  __device__ void advance(bool is_last_head) {
    if (is_last_head) {
      head = 0;
      token_ += tokens_at_once_;
      const Ticket ticket = next_ticket_;
      next_ticket_ = ticket_of(token_ + tokens_at_once_);
      find_target(ticket);
    } else {
      ++head;
      to.codes += part_.side.view.codes.head_stride;
      to.scales += part_.side.view.scales.head_stride;
      to.tensor_scale = next_tensor_scale_;
    }
  }

  const Rows rows_;
  const AppendSide& part_;
  const int num_heads_;
  const int64_t input_stride_;
  bool is_in_row_;  // this lane's chunk
  uint32_t tokens_at_once_;
  uint32_t token_;
  uint32_t steps_left_;
  Ticket next_ticket_ = {};
  float next_tensor_scale_ = 1.0f;
};

template <class Format, DType Input, class Walk>
__device__ inline void append_chunk(const AppendParams& params, const AppendSide& part,
                                    const CudaSide& side, const Walk& walk,
                                    const InputChunk<Input>& words) {
  Chunk chunk = numbers_of<Input>(words);
  if (walk.is_transformed) {
    apply_transform_chunk(append_transform(params, part, walk.head, walk.target.position_block),
                          walk.place, part.side.view.head_dim, chunk);
  }
  const LostNumbers lost = encode_chunk_of<Format>(side, walk.to, walk.place, chunk);
  if (walk.place.is_inside) count_lost(params.counters, part.side, walk.head, lost);
}

template <DType Input, class Rows>
__device__ __forceinline__ void append_walk(const AppendParams& params, const AppendWalks& walks,
                                            const AppendSide& part, const Rows& rows) {
  AppendWalk<Input, Rows> walk(rows, part, walks, params.num_heads);
  if (part.keeps_bits) {
    walk.run([&](const InputChunk<Input>& words) {
      const int at = walk.place.chunk * kInputWords<Input> * 4;
      store_words_of_warp(words, walk.place.is_inside, walk.to.codes + at);
    });
    return;
  }
  visit_chunk_format(part.side.id, [&]<class Format>() {
    CudaSide side = part.side;
    hold(side.view.spec.scale_source);
    hold(side.view.spec.scale_type);
    walk.run([&](const InputChunk<Input>& words) {
      append_chunk<Format, Input>(params, part, side, walk, words);
    });
  });
}

// Registers for fewer CTAs spill nothing but wait more, for more they spill more: 6 and 8 were
// slower in most formats.
inline constexpr int kAppendCtasPerMultiprocessor = 7;

// blockIdx.y: K or V.
template <DType Input>
__global__ void __launch_bounds__(AppendWalks::kThreads, kAppendCtasPerMultiprocessor)
    append_chunks(const __grid_constant__ AppendChunksParams params) {
  const AppendSide& part = params.append.sides[blockIdx.y];
  if (part.is_stored())
    append_walk<Input>(params.append, params.walks, part, SlotRows{params.append});
}

}  // namespace kvx::ops::cuda
