// rope_offsets: block offsets of K from its mean before RoPE (docs/numbers.md, section 6). The mean
// and the frequencies take few bytes at any length; the offsets take a row a block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::kv {

// RopePairs says which two numbers of a row RoPE rotates as a pair.
enum class RopePairs : uint8_t {
  kHalves,       // (i, i + n), as in transformers' Llama
  kInterleaved,  // (2i, 2i + 1), as in GGUF files of Llama
};

// How a model turns K by its position: pair i by position * inv_freq[i] radians, n pairs in the
// first 2n numbers of a row, which are then multiplied by attention_scaling. The other numbers
// stay as they are.
struct Rope {
  RopePairs pairs = RopePairs::kHalves;
  std::vector<double> inv_freq;    // [n], 0 to pi
  double attention_scaling = 1.0;  // positive and finite

  friend bool operator==(const Rope&, const Rope&) = default;
};

// INVALID_ARGUMENT names the field and its value. `name` stands in front: "layer 3 k_rope".
Status check_rope(const std::string& name, const Rope& rope, int head_dim);

// [num_blocks, num_kv_heads, head_dim]: of block p the mean over its positions j of R_j m, where m
// is rope_mean [num_kv_heads, head_dim] and R_j the rotation of position j. Block 0 has zeros: its
// first tokens attract attention and lie far from the mean. A block's offset does not depend on
// num_blocks. Requires: check_rope().
std::vector<float> rope_block_offsets(const Rope& rope, const std::vector<float>& rope_mean,
                                      int num_kv_heads, int head_dim, int block_size,
                                      int64_t num_blocks);

}  // namespace kvx::kv
