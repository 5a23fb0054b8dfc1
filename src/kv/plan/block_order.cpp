// deinterleave_nibbles and interleave_nibbles walk over a block's rows.
#include "kv/plan/block_order.hpp"

#include <cstring>

#include "format/interleaved_order.hpp"

namespace kvx::kv {
namespace {

template <class Convert>
void convert_row(uint8_t* row, int bytes, const Convert& convert) {
  for (int i = 0; i < bytes; i += 4) {
    uint32_t word;
    std::memcpy(&word, row + i, 4);
    word = convert(word);
    std::memcpy(row + i, &word, 4);
  }
}

template <class Convert>
void convert_block(std::span<const InterleavedRows> all, std::span<uint8_t> block,
                   const Convert& convert) {
  for (const InterleavedRows& rows : all) {
    for (int head = 0; head < rows.num_heads; ++head) {
      for (int token = 0; token < rows.num_tokens; ++token) {
        convert_row(
            block.data() + rows.offset + token * rows.token_stride + head * rows.head_stride,
            rows.row_bytes, convert);
      }
    }
  }
}

}  // namespace

std::vector<InterleavedRows> interleaved_rows(const ops::LayerView& layer, const uint8_t* pool) {
  std::vector<InterleavedRows> all;
  for (const ops::HeadRun& run : layer.runs) {
    for (const ops::SideView* side : {&run.k, &run.v}) {
      if (!side->is_interleaved) continue;
      all.push_back({side->codes.base - pool, side->codes.token_stride, side->codes.head_stride,
                     layer.block_size, run.num_heads,
                     format::code_bytes_per_row(side->spec, side->head_dim)});
    }
  }
  return all;
}

void deinterleave_nibbles(std::span<const InterleavedRows> rows, std::span<uint8_t> block) {
  convert_block(rows, block, format::nibbles_from_interleaved);
}

void interleave_nibbles(std::span<const InterleavedRows> rows, std::span<uint8_t> block) {
  convert_block(rows, block, format::interleaved_from_nibbles);
}

}  // namespace kvx::kv
