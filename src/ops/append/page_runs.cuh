// A call's tokens as runs under page-shared scales: blocks are shared out to stripes of warps, and
// a warp takes a head's runs in the call's order, as one scale's history is.
#pragma once

#include "ops/append/encode_page.cuh"

namespace kvx::ops::cuda {

inline constexpr int kPageStripes = 64;

// Tokens: num_tokens(), block_size(), slot(token), which is -1 where nothing is
// stored, and place(slot).
template <class Tokens>
__device__ inline bool begins_run(const Tokens& tokens, uint32_t token, int64_t slot) {
  if (slot < 0) return false;
  if (token == 0 || slot % tokens.block_size() == 0) return true;
  return tokens.slot(token - 1) != slot - 1;
}

template <class Tokens>
__device__ inline PageRun run_at(const Tokens& tokens, uint32_t token, int64_t slot) {
  const TokenRun place = tokens.place(slot);
  const int room = tokens.block_size() - place.first_token;
  int n = 1;
  while (n < room && token + n < tokens.num_tokens() && tokens.slot(token + n) == slot + n) ++n;
  return {token, {place.block, place.first_token, n}};
}

// The runs of one stripe. Returns the lane's count of non-finite numbers.
template <class Encoder, class Tokens>
__device__ inline int encode_stripe(const Encoder& encoder, const Tokens& tokens, int stripe) {
  int counted = 0;
  for (uint32_t base = 0; base < tokens.num_tokens(); base += kWarp) {
    const uint32_t token = base + static_cast<uint32_t>(encoder.lane);
    const int64_t slot = token < tokens.num_tokens() ? tokens.slot(token) : -1;
    const bool is_mine =
        begins_run(tokens, token, slot) && slot / tokens.block_size() % kPageStripes == stripe;
    unsigned starts = __ballot_sync(kWholeWarp, is_mine);
    for (; starts != 0; starts &= starts - 1) {
      const int from = __ffs(static_cast<int>(starts)) - 1;
      const int64_t first_slot = __shfl_sync(kWholeWarp, slot, from);
      counted += encoder.encode(run_at(tokens, base + static_cast<uint32_t>(from), first_slot));
    }
  }
  return counted;
}

}  // namespace kvx::ops::cuda
