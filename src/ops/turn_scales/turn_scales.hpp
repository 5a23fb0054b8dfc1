// turn_scales: scales of engines' nvfp4 caches from one order to the other, in place. Linear ones
// are [tokens, groups] in each head of a block; in swizzled ones every four tokens' lie group by
// group, [tokens / 4, groups, 4] in the same rows.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "core/result.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// A block's tokens are whole fours; strides are bytes; a token's groups lie side by side.
struct ScaleRows {
  static constexpr int kTokens = 4;      // whose scales lie together when they are swizzled
  static constexpr int kMaxGroups = 64;  // of rows of 1024 numbers

  uint8_t* data = nullptr;
  int64_t num_blocks = 0;
  int num_heads = 0;
  int block_size = 0;  // tokens
  int num_groups = 0;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  int64_t num_fours() const { return num_blocks * num_heads * (block_size / kTokens); }
  // The first row of four tokens, of which head after head has those of a block.
  KVX_HOST_DEVICE uint8_t* four(int64_t i) const {
    const int fours = block_size / kTokens;
    const int64_t row = i / fours;
    return data + row / num_heads * block_stride + row % num_heads * head_stride +
           i % fours * kTokens * token_stride;
  }
  // Byte i of four rows.
  KVX_HOST_DEVICE int64_t byte(int i) const {
    return i / num_groups * token_stride + i % num_groups;
  }
  // Where byte i of the order that is made lies in the other one.
  KVX_HOST_DEVICE int source(int i, bool makes_linear) const {
    return makes_linear ? i % num_groups * kTokens + i / num_groups
                        : i % kTokens * num_groups + i / kTokens;
  }
};

void turn_scales(const ScaleRows& scales, bool makes_linear);
// The same in the device's memory.
Status turn_scales(const CudaContext& context, const ScaleRows& scales, bool makes_linear);

}  // namespace kvx::ops
