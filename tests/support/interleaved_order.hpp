// The rows of a layer, as they lie in memory, from one order of codes to the other.
#pragma once

#include <cstring>

#include "format/interleaved_order.hpp"
#include "ops/cache_view.hpp"

namespace kvx::tests {

// convert: of eight codes. Rows of whole words.
template <class Convert>
void convert_codes(const ops::SideView& side, int64_t num_blocks, int block_size, int num_heads,
                   const Convert& convert) {
  const int row_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int token = 0; token < block_size; ++token) {
      for (int head = 0; head < num_heads; ++head) {
        uint8_t* row = side.codes.at(block, token, head);
        for (int i = 0; i < row_bytes; i += 4) {
          uint32_t word;
          memcpy(&word, row + i, 4);
          word = convert(word);
          memcpy(row + i, &word, 4);
        }
      }
    }
  }
}

}  // namespace kvx::tests
