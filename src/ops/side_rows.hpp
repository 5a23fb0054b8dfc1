// Rows of one head of a view, as the CPU kernels take them, and the scratch that verbs decode into.
#pragma once

#include <cassert>
#include <optional>

#include "ops/cache_view.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops {

// The run of heads that `head` of the layer is in. Requires: the runs cover it.
inline const HeadRun& run_of_head(const LayerView& layer, int head) {
  const HeadRun* run = layer.runs.data();
  while (head >= run->first_head + run->num_heads) ++run;
  return *run;
}

// A side of a run from its head number `head` on. A pool without blocks has no memory yet.
inline SideView side_from(SideView side, int head) {
  if (side.codes.base != nullptr) side.codes.base += head * side.codes.head_stride;
  if (side.scales.base != nullptr) side.scales.base += head * side.scales.head_stride;
  if (side.channels.base != nullptr) side.channels.base += head * side.channels.head_stride;
  if (side.tensor_scales != nullptr) side.tensor_scales += head;
  if (side.counts != nullptr) side.counts += head;
  side.feedback = side.feedback_of(head);
  return side;
}

// Numbers of one token in all heads, K and V.
inline int64_t floats_per_token(const LayerView& layer) {
  int64_t floats = 0;
  for (const HeadRun& run : layer.runs) {
    floats += int64_t{run.num_heads} * (run.k.head_dim + run.v.head_dim);
  }
  return floats;
}

// The dual-scale format of rows that the layer stores, or null: such blocks are quantised whole.
const format::FormatSpec* dual_format_of(const LayerView& layer);

// Tokens [first_token, first_token + num_tokens) of a block.
struct TokenRun {
  int64_t block = 0;
  int first_token = 0;
  int num_tokens = 0;
};

// f32 rows of one head, row_stride floats apart.
struct EncodeRows {
  const float* data;
  int64_t row_stride;
};

// Whether the rows are ggml's q4_0 blocks (format/q4_0.hpp).
inline bool has_q4_0_blocks(const SideView& side) {
  return side.is_interleaved && side.codes.is_fragmented();
}

// For rows that do not lie in fragments. head counts from the run's first head, as in SideView.
// rows: [tokens.num_tokens, head_dim].
inline cpu::EncodeParams encode_params(const SideView& side, int head, const TokenRun& tokens,
                                       const EncodeRows& rows) {
  assert(!side.is_interleaved);
  return {
      .spec = &side.spec,
      .head_dim = side.head_dim,
      .tensor_scale = side.tensor_scale(head),
      .rows = rows.data,
      .first_token = tokens.first_token,
      .num_tokens = tokens.num_tokens,
      .codes = side.codes.at(tokens.block, 0, head),
      .token_stride = side.codes.token_stride,
      .scales = side.scales.at(tokens.block, 0, head),
      .scale_token_stride = side.scales.token_stride,
      .scale_group_stride = side.scales.group_stride,
      .row_stride = rows.row_stride,
      .feedback = side.feedback_of(head),
      .channels = side.channels.at(tokens.block, head),
  };
}

inline cpu::DecodeParams decode_params(const SideView& side, int head, const TokenRun& tokens,
                                       format::DecodeFor purpose, float* rows) {
  assert(!side.is_interleaved);
  return {
      .spec = &side.spec,
      .head_dim = side.head_dim,
      .tensor_scale = side.tensor_scale(head),
      .purpose = purpose,
      .rows = rows,
      .first_token = tokens.first_token,
      .num_tokens = tokens.num_tokens,
      .codes = side.codes.at(tokens.block, 0, head),
      .token_stride = side.codes.token_stride,
      .scales = side.scales.at(tokens.block, 0, head),
      .scale_token_stride = side.scales.token_stride,
      .scale_group_stride = side.scales.group_stride,
      .channels = side.channels.at(tokens.block, head),
  };
}

// The same for any rows. encode_rows returns the number of non-finite inputs that no code can
// express, and adds to the side's counts.
int64_t encode_rows(const cpu::KernelTable& kernels, const SideView& side, int head,
                    const TokenRun& tokens, const EncodeRows& rows);
// Reads counts that others may be adding to.
HeadCounts load_counts(HeadCounts& counts);
void decode_rows(const cpu::KernelTable& kernels, const SideView& side, int head,
                 const TokenRun& tokens, format::DecodeFor purpose, float* rows);

// A row's codes, [num_bytes], from where it lies and to there. row: address.at(...).
void load_codes(const CodeAddress& address, const uint8_t* row, int num_bytes, uint8_t* codes);
void store_codes(const CodeAddress& address, const uint8_t* codes, int num_bytes, uint8_t* row);

// The most bytes that a row's codes take: the scratch for a row in fragments.
inline constexpr int kMaxRowBytes = format::kMaxHeadDim * static_cast<int>(sizeof(float));

// The caller's type whose bits the format stores unchanged, if any.
std::optional<DType> stored_dtype(const format::FormatSpec& spec);

// How many tokens of a block are handled at once: few enough for their rows to stay in a core's
// first cache (16 KiB of f32 at head_dim 128).
inline constexpr int kTokensAtOnce = 32;

// The same for a verb that encodes into the layer: a page-shared scale, and a dual-scale block, are
// made from a whole run.
int tokens_encoded_at_once(const LayerView& layer);

// This thread's scratch, [num_floats] at least; it grows to the largest call's size and stays.
float* scratch_floats(int64_t num_floats);

}  // namespace kvx::ops
