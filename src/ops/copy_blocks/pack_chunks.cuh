// copy_blocks from rows of 16 bits to packed ones: blocks that leave the recent window. It is
// append with another place for its rows to come from.
#pragma once

#include "ops/append/append_chunks.cuh"
#include "ops/copy_blocks/copy_params.cuh"

namespace kvx::ops::cuda {

struct PackChunksParams {
  AppendChunksParams append;  // its input: the rows of block 0, as the side they come from has them
  CopyParams copy;
  int64_t block_strides[2];  // bytes of the input; K, V
};

// Tokens are (copy, token of the block).
struct BlockRows {
  struct Ticket {
    BlockCopy copy;
  };
  static constexpr bool kInputNeedsTicket = true;
  const PackChunksParams& params;
  const int side;
  const bool counts_copies;  // one side of the call does

  __device__ uint32_t num_tokens() const { return params.append.append.num_tokens; }
  __device__ Ticket ticket(uint32_t token) const { return {copy_at(params.copy, copy_of(token))}; }
  __device__ bool has_input(uint32_t token, const Ticket& ticket) const {
    return is_inside(params.copy, ticket.copy) &&
           token_of_block(token) < static_cast<uint32_t>(ticket.copy.num_tokens);
  }
  __device__ const uint8_t* input(const AppendSide& part, uint32_t token,
                                  const Ticket& ticket) const {
    return part.input_row(token_of_block(token), 0) +
           ticket.copy.from_block * params.block_strides[side];
  }
  __device__ AppendTarget target(const AppendSide&, uint32_t token, const Ticket& ticket,
                                 bool counts) const {
    const uint32_t at = token_of_block(token);
    if (counts && counts_copies && at == 0 && !is_inside(params.copy, ticket.copy)) {
      count_outside(params.copy);
    }
    AppendTarget target;
    target.is_stored = has_input(token, ticket);
    target.place = {ticket.copy.to_block, static_cast<int>(at), 1};
    return target;
  }

 private:
  __device__ uint32_t copy_of(uint32_t token) const {
    return params.copy.by_block_size.quotient(token);
  }
  __device__ uint32_t token_of_block(uint32_t token) const {
    return token - copy_of(token) * params.copy.by_block_size.divisor;
  }
};

inline constexpr int kPackCtasPerMultiprocessor = 6;  // as measured; append has 7

// blockIdx.y: K or V.
template <DType Input>
__global__ void __launch_bounds__(AppendWalks::kThreads, kPackCtasPerMultiprocessor)
    pack_chunks(const __grid_constant__ PackChunksParams params) {
  const auto side = static_cast<int>(blockIdx.y);
  const AppendSide& part = params.append.append.sides[side];
  if (!part.is_stored()) return;
  const bool is_first = side == 0 || !params.append.append.sides[0].is_stored();
  append_walk<Input>(params.append.append, params.append.walks, part,
                     BlockRows{params, side, is_first});
}

}  // namespace kvx::ops::cuda
