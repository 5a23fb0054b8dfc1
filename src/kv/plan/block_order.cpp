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
void convert_block(const ops::LayerView& layer, const uint8_t* pool, std::span<uint8_t> block,
                   const Convert& convert) {
  for (const ops::HeadRun& run : layer.runs) {
    for (const ops::SideView* side : {&run.k, &run.v}) {
      if (!side->is_interleaved) continue;
      const int row_bytes = format::code_bytes_per_row(side->spec, side->head_dim);
      for (int head = 0; head < run.num_heads; ++head) {
        for (int token = 0; token < layer.block_size; ++token) {
          convert_row(block.data() + (side->codes.at(0, token, head) - pool), row_bytes, convert);
        }
      }
    }
  }
}

}  // namespace

void deinterleave_nibbles(const ops::LayerView& layer, const uint8_t* pool,
                          std::span<uint8_t> block) {
  convert_block(layer, pool, block, format::nibbles_from_interleaved);
}

void interleave_nibbles(const ops::LayerView& layer, const uint8_t* pool,
                        std::span<uint8_t> block) {
  convert_block(layer, pool, block, format::interleaved_from_nibbles);
}

}  // namespace kvx::kv
