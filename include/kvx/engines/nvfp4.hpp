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
};

namespace detail {

constexpr int64_t kTokens = 4;  // whose scales lie together when they are swizzled

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

// Rewrites the scales of every head of every block in the other order.
template <bool kToLinear>
Status turn(const Scales& scales) {
  if (scales.data == nullptr || scales.tokens < 1 || scales.tokens % kTokens != 0) {
    return engines::detail::bad("v_scales has " + std::to_string(scales.tokens) +
                                " tokens a block; expected a multiple of 4, and an address");
  }
  std::vector<uint8_t> copy(static_cast<size_t>(scales.tokens * scales.groups));
  for (int64_t block = 0; block < scales.blocks; ++block) {
    for (int64_t head = 0; head < scales.heads; ++head) {
      uint8_t* rows = scales.data + block * scales.block_stride + head * scales.head_stride;
      const auto at = [&](int64_t i) -> uint8_t& {  // the i-th scale of the head, row by row
        return rows[i / scales.groups * scales.token_stride + i % scales.groups];
      };
      for (size_t i = 0; i < copy.size(); ++i) copy[i] = at(static_cast<int64_t>(i));
      for (int64_t token = 0; token < scales.tokens; ++token) {
        for (int64_t group = 0; group < scales.groups; ++group) {
          const int64_t linear = token * scales.groups + group;
          const int64_t swizzled =
              token / kTokens * kTokens * scales.groups + group * kTokens + token % kTokens;
          at(kToLinear ? linear : swizzled) =
              copy[static_cast<size_t>(kToLinear ? swizzled : linear)];
        }
      }
    }
  }
  return std::monostate{};
}

}  // namespace detail

// Turns swizzled scales of V to linear ones, in place, in host memory.
inline Status linear_scales(const Scales& v_scales) {
  return detail::turn<true>(v_scales);
}

// The inverse of linear_scales.
inline Status swizzled_scales(const Scales& v_scales) {
  return detail::turn<false>(v_scales);
}

}  // namespace kvx::api::engines::nvfp4
