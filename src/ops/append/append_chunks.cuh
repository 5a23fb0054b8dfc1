// append's fast kernel: a warp walks over heads of its tokens, a row to some of its lanes, the next
// head's loads under way while it encodes this one's. copy_blocks uses it to pack 16-bit blocks.
#pragma once

#include "ops/append/append_job.cuh"
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

  // num_ctas_at_once: of the device. lanes: of a row, K's or V's, whichever has more. num_sides:
  // that are stored.
  static AppendWalks of(int num_ctas_at_once, int64_t num_tokens, int num_heads, int lanes,
                        int num_sides) {
    const int64_t num_warps = int64_t{num_ctas_at_once} * (kThreads / kWarp) / num_sides;
    const int64_t num_steps = ceil_div<int64_t>(num_tokens, kWarp / lanes) * num_heads;
    return {static_cast<uint32_t>(ceil_div(num_steps, num_warps)), FastDivide(num_heads)};
  }
  unsigned num_ctas(int64_t num_tokens, int num_heads, int lanes) const {
    const int64_t num_steps = ceil_div<int64_t>(num_tokens, kWarp / lanes) * num_heads;
    const int64_t num_warps = ceil_div<int64_t>(num_steps, steps_of_warp);
    return static_cast<unsigned>(ceil_div<int64_t>(num_warps, kThreads / kWarp));
  }
};

struct AppendChunksJob {
  AppendJob append;
  AppendWalks walks;
};

// Where a walk's rows come from and go to. A ticket is what must be loaded to know that; it is
// asked for a token ahead. These are append's: a slot.
struct SlotRows {
  using Ticket = int64_t;
  static constexpr bool kInputNeedsTicket = false;
  const AppendJob& job;

  __device__ uint32_t num_tokens() const { return job.num_tokens; }
  __device__ Ticket ticket(uint32_t token) const { return job.slot_mapping[token]; }
  __device__ bool has_input(uint32_t, const Ticket&) const { return true; }
  // Of head 0 of the run.
  __device__ const uint8_t* input(const AppendSide& part, uint32_t token, const Ticket&) const {
    return part.input_row(token, job.first_head);
  }
  __device__ AppendTarget target(const AppendSide& part, uint32_t token, const Ticket& slot,
                                 bool counts) const {
    return append_target(job, part, token, slot, counts);
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
      : rows_(rows), part_(part), num_heads_(num_heads), input_stride_(head_bytes(part)) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int lanes = part.chunks.lanes();
    place = {lane & (lanes - 1), part.chunks.log2_lanes_per_group, false};
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
    const uint8_t* input = Rows::kInputNeedsTicket ? nullptr : input_of(token_, head, {});
    wait_for_earlier_launches();  // what needs nothing of theirs has been done before
    InputChunk<Input> next = {};
    if (!Rows::kInputNeedsTicket && has_row(token_)) load_words(input, next);
    const Ticket ticket = ticket_of(token_);
    find_target(ticket);
    if (Rows::kInputNeedsTicket && target.is_stored) {
      input = input_of(token_, head, ticket);
      load_words(input, next);
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

 private:
  using Ticket = typename Rows::Ticket;

  __device__ static int64_t head_bytes(const AppendSide& part) {
    return part.input.head_stride * bytes_of(Input);
  }
  __device__ bool has_row(uint32_t token) const {
    return token < rows_.num_tokens() && place.chunk < part_.chunks.num_chunks;
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
  uint32_t tokens_at_once_;
  uint32_t token_;
  uint32_t steps_left_;
  Ticket next_ticket_ = {};
  float next_tensor_scale_ = 1.0f;
};

template <class Format, DType Input, class Walk>
__device__ inline void append_chunk(const AppendJob& job, const AppendSide& part, const Walk& walk,
                                    const InputChunk<Input>& words) {
  Chunk chunk = numbers_of<Input>(words);
  if (part.is_transformed) {
    apply_transform_chunk(append_transform(job, part, walk.head, walk.target.position_block),
                          walk.place, part.side.view.head_dim, chunk);
  }
  const int counted = encode_chunk_of<Format>(part.side, walk.to, walk.place, chunk);
  if (walk.place.is_inside) count_nonfinite(job, counted);
}

template <DType Input, class Rows>
__device__ __forceinline__ void append_walk(const AppendChunksJob& job, const AppendSide& part,
                                            const Rows& rows) {
  AppendWalk<Input, Rows> walk(rows, part, job.walks, job.append.num_heads);
  if (part.keeps_bits) {
    walk.run([&](const InputChunk<Input>& words) {
      const int at = walk.place.chunk * kInputWords<Input> * 4;
      if (walk.place.is_inside) store_words(words, walk.to.codes + at);
    });
    return;
  }
  visit_format(part.side.id, [&]<class Format>() {
    walk.run([&](const InputChunk<Input>& words) {
      append_chunk<Format, Input>(job.append, part, walk, words);
    });
  });
}

// Registers for fewer CTAs spill nothing but wait more, for more they spill more: 6 and 8 were
// slower in most formats.
inline constexpr int kAppendCtasPerMultiprocessor = 7;

// blockIdx.y: K or V.
template <DType Input>
__global__ void __launch_bounds__(AppendWalks::kThreads, kAppendCtasPerMultiprocessor)
    append_chunks(const __grid_constant__ AppendChunksJob job) {
  const AppendSide& part = job.append.sides[blockIdx.y];
  if (part.is_stored()) append_walk<Input>(job, part, SlotRows{job.append});
}

}  // namespace kvx::ops::cuda
