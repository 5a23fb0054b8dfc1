// Rows of a side through the CPU kernels, also those that lie in fragments, and the verbs' scratch.
#include "ops/side_rows.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "format/q4_0.hpp"

namespace kvx::ops {
namespace {

// Calls move(row's bytes, code's index, count) for every fragment of a row.
template <class Byte, class Move>
void for_each_fragment(const CodeAddress& address, Byte* row, int num_bytes, Move move) {
  for (int i = 0; i < num_bytes; i += address.fragment_bytes) {
    move(row, i, static_cast<size_t>(std::min(address.fragment_bytes, num_bytes - i)));
    row += address.fragment_stride;
  }
}

}  // namespace

void load_codes(const CodeAddress& address, const uint8_t* row, int num_bytes, uint8_t* codes) {
  if (!address.is_fragmented()) {
    memcpy(codes, row, static_cast<size_t>(num_bytes));
    return;
  }
  for_each_fragment(address, row, num_bytes, [codes](const uint8_t* fragment, int i, size_t count) {
    memcpy(codes + i, fragment, count);
  });
}

void store_codes(const CodeAddress& address, const uint8_t* codes, int num_bytes, uint8_t* row) {
  if (!address.is_fragmented()) {
    memcpy(row, codes, static_cast<size_t>(num_bytes));
    return;
  }
  for_each_fragment(address, row, num_bytes, [codes](uint8_t* fragment, int i, size_t count) {
    memcpy(fragment, codes + i, count);
  });
}

namespace {

// Calls visit(codes, scale, index of the first number) for every q4_0 block of a token's row.
template <class Visit>
void for_each_q4_0_block(const SideView& side, int64_t block, int token, int head, Visit visit) {
  uint8_t* codes = side.codes.at(block, token, head);
  uint8_t* scale = side.scales.at(block, token, head);
  for (int i = 0; i < side.head_dim; i += format::q4_0::kGroup) {
    visit(codes, scale, i);
    codes += side.codes.fragment_stride;
    scale += side.scales.group_stride;
  }
}

HeadCounts encode_q4_0(const SideView& side, int head, const TokenRun& tokens,
                       const EncodeRows& rows) {
  HeadCounts counts;
  for (int t = 0; t < tokens.num_tokens; ++t) {
    const float* row = rows.data + t * rows.row_stride;
    for_each_q4_0_block(side, tokens.block, tokens.first_token + t, head,
                        [&](uint8_t* codes, uint8_t* scale, int i) {
                          counts.saturated += format::q4_0::encode(row + i, codes, scale);
                        });
  }
  return counts;
}

void decode_q4_0(const SideView& side, int head, const TokenRun& tokens, float* rows) {
  for (int t = 0; t < tokens.num_tokens; ++t) {
    float* row = rows + int64_t{t} * side.head_dim;
    for_each_q4_0_block(side, tokens.block, tokens.first_token + t, head,
                        [row](const uint8_t* codes, const uint8_t* scale, int i) {
                          format::q4_0::decode(codes, scale, row + i);
                        });
  }
}

// Fragments are put together token by token, so that the kernels see contiguous rows only.
HeadCounts encode_and_count(const cpu::KernelTable& kernels, const SideView& side, int head,
                            const TokenRun& tokens, const EncodeRows& rows) {
  if (has_q4_0_blocks(side)) return encode_q4_0(side, head, tokens, rows);
  const cpu::FormatKernels& format = kernels.of(side.spec);
  HeadCounts counts;
  if (!side.codes.is_fragmented()) {
    cpu::EncodeParams params = encode_params(side, head, tokens, rows);
    params.saturated = &counts.saturated;
    counts.nonfinite = format.encode_rows(params);
    return counts;
  }
  const int row_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
  uint8_t codes[kMaxRowBytes];
  for (int t = 0; t < tokens.num_tokens; ++t) {
    const int token = tokens.first_token + t;
    cpu::EncodeParams params = encode_params(side, head, {tokens.block, 0, 1}, rows);
    params.saturated = &counts.saturated;
    params.rows = rows.data + t * rows.row_stride;
    params.codes = codes;
    params.scales = side.scales.at(tokens.block, token, head);
    counts.nonfinite += format.encode_rows(params);
    store_codes(side.codes, codes, row_bytes, side.codes.at(tokens.block, token, head));
  }
  return counts;
}

// Only what was found is written: the common case touches no shared memory.
void add_counts(const HeadCounts& found, HeadCounts& sum) {
  const auto add = [](int64_t number, int64_t& total) {
    if (number != 0) std::atomic_ref(total).fetch_add(number, std::memory_order_relaxed);
  };
  add(found.nonfinite, sum.nonfinite);
  add(found.saturated, sum.saturated);
}

}  // namespace

int64_t encode_rows(const cpu::KernelTable& kernels, const SideView& side, int head,
                    const TokenRun& tokens, const EncodeRows& rows) {
  const HeadCounts found = encode_and_count(kernels, side, head, tokens, rows);
  if (side.counts != nullptr) add_counts(found, side.counts[head]);
  return found.nonfinite;
}

HeadCounts load_counts(HeadCounts& counts) {
  const auto load = [](int64_t& number) {
    return std::atomic_ref(number).load(std::memory_order_relaxed);
  };
  return {load(counts.nonfinite), load(counts.saturated)};
}

void decode_rows(const cpu::KernelTable& kernels, const SideView& side, int head,
                 const TokenRun& tokens, format::DecodeFor purpose, float* rows) {
  if (has_q4_0_blocks(side)) return decode_q4_0(side, head, tokens, rows);
  const cpu::FormatKernels& format = kernels.of(side.spec);
  if (!side.codes.is_fragmented()) {
    format.decode_rows(decode_params(side, head, tokens, purpose, rows));
    return;
  }
  const int row_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
  uint8_t codes[kMaxRowBytes];
  for (int t = 0; t < tokens.num_tokens; ++t) {
    const int token = tokens.first_token + t;
    load_codes(side.codes, side.codes.at(tokens.block, token, head), row_bytes, codes);
    cpu::DecodeParams params = decode_params(side, head, {tokens.block, 0, 1}, purpose, rows);
    params.rows = rows + int64_t{t} * side.head_dim;
    params.codes = codes;
    params.scales = side.scales.at(tokens.block, token, head);
    format.decode_rows(params);
  }
}

std::optional<DType> stored_dtype(const format::FormatSpec& spec) {
  switch (spec.facts->id) {
    case format::FormatId::kF32:
      return DType::kF32;
    case format::FormatId::kF16:
      return DType::kF16;
    case format::FormatId::kBF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

int tokens_encoded_at_once(const LayerView& layer) {
  for (const HeadRun& run : layer.runs) {
    for (const SideView* side : {&run.k, &run.v}) {
      const bool is_made_at_once =
          side->spec.scale_source == format::ScaleSource::kPageShared || side->spec.is_dual();
      if (is_made_at_once) return layer.block_size;
    }
  }
  return std::min(layer.block_size, kTokensAtOnce);
}

const format::FormatSpec* dual_format_of(const LayerView& layer) {
  for (const HeadRun& run : layer.runs) {
    for (const SideView* side : {&run.k, &run.v}) {
      if (side->is_stored() && side->spec.is_dual()) return &side->spec;
    }
  }
  return nullptr;
}

float* scratch_floats(int64_t num_floats) {
  thread_local std::vector<float> scratch;
  if (scratch.size() < static_cast<size_t>(num_floats)) scratch.resize(num_floats);
  return scratch.data();
}

}  // namespace kvx::ops
