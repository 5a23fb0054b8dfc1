// copy_blocks on a GPU: a warp a row, as stored where both sides store alike, else decoded and
// encoded again.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/append/encode_row.cuh"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/cuda/rows_launch.hpp"
#include "ops/gather/decode_row.cuh"

namespace kvx::ops {
namespace cuda {
namespace {

struct CopySide {
  CudaSide from;
  CudaSide to;
  bool is_alike;    // the same bytes mean the same numbers, tensor scales aside
  bool is_skipped;  // not stored, or a part of other rows
};

struct CopyJob {
  CopySide k;
  CopySide v;
  int num_heads;
  int block_size;
  int64_t num_from_blocks;
  int64_t num_to_blocks;
  CudaBlockCopies copies;
  int64_t num_rows;
  CudaFindings* findings;
};

__device__ void copy_bytes(const uint8_t* from, int num_bytes, uint8_t* to, int lane) {
  for (int i = lane; i < num_bytes; i += kWarp) to[i] = from[i];
}

// A row's place on both sides.
struct CopyRow {
  const uint8_t* from_codes;
  const uint8_t* from_scales;
  uint8_t* to_codes;
  uint8_t* to_scales;
};

// Given scales are not written, so they must be equal already.
__device__ bool has_equal_scales(const CopySide& side, const CopyRow& row, int lane) {
  bool is_equal = true;
  const int bytes = side.from.scale_bytes;
  for (int i = lane; i < side.from.num_groups * bytes; i += kWarp) {
    const int64_t group = i / bytes;
    is_equal &= row.from_scales[group * side.from.view.scales.group_stride + i % bytes] ==
                row.to_scales[group * side.to.view.scales.group_stride + i % bytes];
  }
  return __all_sync(kWholeWarp, is_equal);
}

__device__ void copy_as_stored(const CopySide& side, const CopyRow& row, int lane) {
  copy_bytes(row.from_codes, side.from.code_bytes, row.to_codes, lane);
  if (side.from.view.spec.scale_source == format::ScaleSource::kGiven) return;
  const int bytes = side.from.scale_bytes;
  for (int i = lane; i < side.from.num_groups * bytes; i += kWarp) {
    const int64_t group = i / bytes;
    row.to_scales[group * side.to.view.scales.group_stride + i % bytes] =
        row.from_scales[group * side.from.view.scales.group_stride + i % bytes];
  }
}

__device__ void copy_row(const CopyJob& job, const CopySide& side, const BlockCopy& copy, int token,
                         int head, float* x, int lane) {
  const CopyRow row = {
      side.from.codes(copy.from_block, token, head), side.from.scales(copy.from_block, token, head),
      side.to.codes(copy.to_block, token, head), side.to.scales(copy.to_block, token, head)};
  const float from_scale = side.from.tensor_scale(head);
  const float to_scale = side.to.tensor_scale(head);
  const bool is_given = side.from.view.spec.scale_source == format::ScaleSource::kGiven;
  if (side.is_alike && from_scale == to_scale && (!is_given || has_equal_scales(side, row, lane))) {
    return copy_as_stored(side, row, lane);
  }
  __syncwarp();
  decode_row(side.from, {row.from_codes, row.from_scales, from_scale}, cpu::DecodeFor::kGather, x,
             lane);
  const int counted = encode_row(side.to, {row.to_codes, row.to_scales, to_scale}, x, lane);
  if (counted > 0) {
    atomicAdd(&job.findings->nonfinite_inputs, static_cast<unsigned long long>(counted));
  }
}

__device__ bool is_inside(const CopyJob& job, const BlockCopy& copy) {
  return copy.from_block >= 0 && copy.from_block < job.num_from_blocks && copy.to_block >= 0 &&
         copy.to_block < job.num_to_blocks && copy.num_tokens >= 0 &&
         copy.num_tokens <= job.block_size;
}

__device__ BlockCopy copy_at(const CopyJob& job, int64_t i) {
  const CudaBlockCopies& copies = job.copies;
  if (copies.list) return copies.list[i];
  return {copies.from_blocks[i], copies.to_blocks[i],
          copies.num_tokens ? copies.num_tokens[i] : job.block_size};
}

// Rows are (copy, token of the block, side, head).
__global__ void __launch_bounds__(RowsLaunch::kThreads)
    copy_rows(const __grid_constant__ CopyJob job) {
  extern __shared__ float shared[];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps_per_cta = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * max(job.k.from.view.head_dim, job.v.from.view.head_dim);
  for (int64_t row = int64_t{blockIdx.x} * warps_per_cta + warp; row < job.num_rows;
       row += int64_t{gridDim.x} * warps_per_cta) {
    const int64_t unit = row / (2 * job.num_heads);
    const int in_unit = static_cast<int>(row % (2 * job.num_heads));
    const BlockCopy copy = copy_at(job, unit / job.block_size);
    const int token = static_cast<int>(unit % job.block_size);
    if (!is_inside(job, copy)) {
      if (token == 0 && in_unit == 0 && lane == 0) atomicAdd(&job.findings->out_of_range, 1ull);
      continue;
    }
    const bool is_key = in_unit < job.num_heads;
    const CopySide& side = is_key ? job.k : job.v;
    if (token >= copy.num_tokens || side.is_skipped) continue;
    copy_row(job, side, copy, token, is_key ? in_unit : in_unit - job.num_heads, x, lane);
  }
}

CopySide copy_side(const SideView& from, const SideView& to) {
  format::FormatSpec read_as = from.spec;
  read_as.scale_choice = to.spec.scale_choice;
  return {cuda_side(from), cuda_side(to), read_as == to.spec, to.head_dim == 0 || to.is_alias};
}

Status check_side(const char* name, const SideView& from, const SideView& to) {
  if (from.head_dim != to.head_dim) {
    return invalid_argument("{} head_dim is {} in from and {} in to; expected the same", name,
                            from.head_dim, to.head_dim);
  }
  const bool is_shared = to.spec.scale_source == format::ScaleSource::kPageShared ||
                         from.spec.scale_source == format::ScaleSource::kPageShared;
  if (to.head_dim == 0 || !is_shared) return {};
  return unsupported("{} has page-shared scales: copy_blocks on CUDA copies scales of rows", name);
}

Status check(const LayerView& from, const LayerView& to) {
  if (from.block_size != to.block_size || from.num_kv_heads != to.num_kv_heads ||
      from.runs.size() != to.runs.size()) {
    return invalid_argument(
        "from has block_size {}, {} KV heads in {} runs, to {}, {} in {}; expected the same",
        from.block_size, from.num_kv_heads, from.runs.size(), to.block_size, to.num_kv_heads,
        to.runs.size());
  }
  for (size_t r = 0; r < from.runs.size(); ++r) {
    if (from.runs[r].num_heads != to.runs[r].num_heads) {
      return invalid_argument("run {} has {} heads in from and {} in to; expected the same", r,
                              from.runs[r].num_heads, to.runs[r].num_heads);
    }
    KVX_RETURN_IF_ERROR(check_side("k", from.runs[r].k, to.runs[r].k));
    KVX_RETURN_IF_ERROR(check_side("v", from.runs[r].v, to.runs[r].v));
  }
  return {};
}

}  // namespace
}  // namespace cuda

Status copy_blocks(const CudaContext& context, const LayerView& from, const LayerView& to,
                   const CudaBlockCopies& copies, CudaFindings* findings) {
  KVX_RETURN_IF_ERROR(cuda::check(from, to));
  if (copies.count == 0) return {};
  for (size_t r = 0; r < from.runs.size(); ++r) {
    const HeadRun& source = from.runs[r];
    const HeadRun& target = to.runs[r];
    const auto launch = cuda::RowsLaunch::of(copies.count * from.block_size, source.num_heads,
                                             std::max(source.k.head_dim, source.v.head_dim));
    const cuda::CopyJob job = {
        .k = cuda::copy_side(source.k, target.k),
        .v = cuda::copy_side(source.v, target.v),
        .num_heads = source.num_heads,
        .block_size = from.block_size,
        .num_from_blocks = from.num_blocks,
        .num_to_blocks = to.num_blocks,
        .copies = copies,
        .num_rows = launch.num_rows,
        .findings = findings,
    };
    cuda::copy_rows<<<launch.num_ctas, cuda::RowsLaunch::kThreads, launch.shared_bytes,
                      static_cast<cudaStream_t>(context.stream)>>>(job);
    KVX_RETURN_IF_ERROR(device::cuda_launch_status("copy_blocks"));
  }
  return {};
}

}  // namespace kvx::ops
