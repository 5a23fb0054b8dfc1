// NVFP4 rows as vLLM and TensorRT-LLM keep them, and the order in which trtllm-gen reads V's
// scales.
//
// A row is head_dim / 2 bytes of E2M1 codes, the even element in the low nibble, and head_dim / 16
// E4M3 scales in a region of their own; value = code * scale * tensor scale. K's scales are
// [tokens, groups] in each head. For the trtllm-gen kernels of SM100 and SM103 V's are swizzled:
// every four tokens' lie group by group, as [tokens / 4, groups, 4]. No stride reaches that, so a
// layer of kvx reads linear ones.
#pragma once

#include "kvx/engines/tensor.hpp"

namespace kvx::api::engines::nvfp4 {

constexpr int64_t kGroup = 16;

// Scales of one side of a layer. Strides are bytes; a token's groups lie side by side.
struct Scales {
  uint8_t* data = nullptr;
  int64_t blocks = 0, heads = 0, tokens = 0, groups = 0;
  int64_t block_stride = 0, head_stride = 0, token_stride = 0;
  uint32_t memory = KVX_MEMORY_HOST;  // where a GPU has them: KVX_MEMORY_DEVICE or UNIFIED
};

namespace detail {

inline Result<int64_t> checked_head_dim(const Tensor& tensor, const std::string& name,
                                        int64_t head_dim) {
  if (tensor.dtype != KVX_DTYPE_U8) return engines::detail::bad(name + " is not U8, as nvfp4 is");
  if (head_dim < kGroup || head_dim % kGroup != 0) {
    return engines::detail::bad("head_dim is " + std::to_string(head_dim) +
                                "; nvfp4 needs a multiple of 16");
  }
  return head_dim;
}

// Rows of codes at `codes`, strides of (block, token, head) in bytes, with their scales.
inline Side side(void* codes, const std::array<int64_t, 3>& strides, const Scales& scales,
                 const float* tensor_scales) {
  Side side;
  side.format.format = KVX_FORMAT_NVFP4;
  side.head_dim = static_cast<uint32_t>(scales.groups * kGroup);
  side.codes = codes;
  side.code_block_stride = strides[0];
  side.code_token_stride = strides[1];
  side.code_head_stride = strides[2];
  side.scales = scales.data;
  side.scale_block_stride = scales.block_stride;
  side.scale_token_stride = scales.token_stride;
  side.scale_head_stride = scales.head_stride;
  side.scale_group_stride = 1;
  side.tensor_scales = tensor_scales;
  return side;
}

inline Status turn(const Scales& scales, uint32_t order, void* stream) {
  auto args = sized<kvx_turn_scales_args_t>();
  args.order = order;
  args.scales = scales.data;
  args.block_stride = scales.block_stride;
  args.token_stride = scales.token_stride;
  args.head_stride = scales.head_stride;
  args.num_blocks = scales.blocks;
  args.num_heads = static_cast<uint32_t>(scales.heads);
  args.block_size = static_cast<uint32_t>(scales.tokens);
  args.num_groups = static_cast<uint32_t>(scales.groups);
  args.memory = scales.memory;
  return to_status(kvx_turn_scales(&args, stream));
}

}  // namespace detail

// Turns swizzled scales of V to linear ones, in place. stream: a CUDA stream, for scales on a GPU,
// behind whose earlier work and before whose later work they are turned.
inline Status linear_scales(const Scales& v_scales, void* stream = nullptr) {
  return detail::turn(v_scales, KVX_SCALE_ORDER_LINEAR, stream);
}

// The inverse of linear_scales.
inline Status swizzled_scales(const Scales& v_scales, void* stream = nullptr) {
  return detail::turn(v_scales, KVX_SCALE_ORDER_SWIZZLED, stream);
}

}  // namespace kvx::api::engines::nvfp4
