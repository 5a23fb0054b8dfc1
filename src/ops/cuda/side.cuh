// Views as kernels take them: by value, with addresses that device code computes. Files of the
// host's compiler fill them.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "format/codec.hpp"
#include "format/interleaved_order.hpp"
#include "ops/cache_view.hpp"
#include "ops/transform.hpp"

namespace kvx::ops::cuda {

inline constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
inline constexpr int kWarp = 32;

// Whether a side's codes may lie in interleaved order.
template <class Format>
inline constexpr bool kMayHaveInterleaved =
    std::is_same_v<typename Format::Codec, format::E2M1Codec>;

// K or V of a run of heads. spec.facts points to the host's memory and is not followed here.
struct CudaSide {
  SideView view;
  int num_groups = 0;
  int group_length = 0;  // numbers in a full group
  int code_bytes = 0;    // of a row
  int scale_bytes = 0;   // of a group
  format::FormatId id = format::FormatId::kF32;

  __device__ uint8_t* codes(int64_t block, int64_t token, int head) const {
    const CodeAddress& a = view.codes;
    return a.base + block * a.block_stride + token * a.token_stride + head * a.head_stride;
  }
  __device__ uint8_t* scales(int64_t block, int64_t token, int head) const {
    const ScaleAddress& a = view.scales;
    return a.base + block * a.block_stride + token * a.token_stride + head * a.head_stride;
  }
  // Null + 0 where the format has none.
  __device__ uint8_t* channels(int64_t block, int head) const {
    const ChannelAddress& a = view.channels;
    return a.base + block * a.block_stride + head * a.head_stride;
  }
  __device__ float tensor_scale(int head) const {
    return view.tensor_scales ? view.tensor_scales[head] : 1.0f;
  }
};

inline CudaSide cuda_side(const SideView& view) {
  CudaSide side;
  side.view = view;
  if (view.head_dim == 0) return side;
  side.num_groups = format::groups_per_row(view.spec, view.head_dim);
  side.group_length = format::group_length(view.spec, view.head_dim);
  side.code_bytes = format::code_bytes_per_row(view.spec, view.head_dim);
  side.scale_bytes = format::scale_bytes_per_group(view.spec);
  side.id = view.spec.facts->id;
  return side;
}

// The run's K and V.
struct CudaRun {
  int first_head = 0;
  int num_heads = 0;
  CudaSide k;
  CudaSide v;
};

inline CudaRun cuda_run(const HeadRun& run) {
  return {run.first_head, run.num_heads, cuda_side(run.k), cuda_side(run.v)};
}

}  // namespace kvx::ops::cuda
