// transcode on a GPU: K and V of the heads that both layers store alike in one launch, by chunks or
// a warp a row; under page-shared scales a warp a run of tokens.
#include <cuda_runtime.h>

#include <optional>

#include "device/cuda_error.hpp"
#include "ops/append/page_runs.cuh"
#include "ops/cuda/common_runs.hpp"
#include "ops/cuda/rows_launch.hpp"
#include "ops/segments.hpp"
#include "ops/transcode/transcode_chunks.cuh"
#include "ops/transcode/transcode_cuda.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

// The reference kernel: every head_dim, address and encoder option. blockIdx.y: K or V.
__global__ void __launch_bounds__(RowsLaunch::kThreads)
    transcode_rows(const __grid_constant__ TranscodeParams params) {
  extern __shared__ float shared[];
  const TranscodeSide side = params.side(blockIdx.y);
  const CudaSide& to = side.target.side;
  if (!side.target.is_stored()) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  constexpr uint32_t kWarps = RowsLaunch::kThreads / kWarp;
  float* x = shared + warp * static_cast<uint32_t>(to.view.head_dim);
  const auto num_heads = static_cast<uint32_t>(params.append.num_heads);
  for (uint32_t row = blockIdx.x * kWarps + warp; row < params.append.num_tokens * num_heads;
       row += gridDim.x * kWarps) {
    const uint32_t token = row / num_heads;
    const int head = static_cast<int>(row % num_heads);
    const bool counts = lane == 0 && head == 0 && params.append.first_head == 0;
    const int64_t slot = side.slot(token, counts);
    if (slot < 0) continue;
    side.load(token, head, x, lane);
    const AppendTarget target = {true, place_of_slot(params.append, slot)};
    RowTarget row_target = target.row(to, head);
    row_target.feedback = to.view.feedback_of(head);
    count_lost(params.append.counters, to, head, encode_row(to, row_target, x, lane));
  }
}

struct TranscodeTokens {
  const TranscodeSide& side;

  __device__ uint32_t num_tokens() const { return side.params.append.num_tokens; }
  __device__ int block_size() const { return side.params.append.block_size; }
  __device__ int64_t slot(uint32_t token) const { return side.slot(token, false); }
  __device__ TokenRun place(int64_t slot) const { return place_of_slot(side.params.append, slot); }
};

struct TranscodeRows {
  const TranscodeSide& side;
  int head;

  __device__ void load(uint32_t token, float* x, int lane) const {
    side.load(token, head, x, lane);
  }
};

// blockIdx: stripe, head, K or V.
__global__ void __launch_bounds__(PagesLaunch::kThreads)
    transcode_pages(const __grid_constant__ TranscodeParams params) {
  extern __shared__ float shared[];
  const TranscodeSide side = params.side(blockIdx.z);
  const CudaSide& to = side.target.side;
  if (!side.target.is_stored()) return;
  const int lane = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const bool counts = blockIdx.x == 0 && params.append.first_head + head == 0;
  for (auto t = static_cast<uint32_t>(lane); counts && t < params.append.num_tokens; t += kWarp) {
    side.slot(t, true);
  }
  const PageScratch scratch = page_scratch(to, shared);
  const TranscodeRows rows = {side, head};
  visit_format(to.id, [&]<class Format>() {
    if constexpr (has_pages<Format>()) {
      const PageEncoder<Format, TranscodeRows> encoder{to, rows, head, scratch, lane};
      const TranscodeTokens tokens = {side};
      const int nonfinite = encode_stripe(encoder, tokens, static_cast<int>(blockIdx.x));
      count_lost(params.append.counters, to, head, nonfinite, 0);
    }
  });
}

Status launch_rows(const CudaContext& context, const TranscodeParams& params) {
  const auto& [k, v] = params.append.sides;
  const int head_dim = std::max(k.side.view.head_dim, v.side.view.head_dim);
  const auto launch = RowsLaunch::of(params.append.num_tokens, params.append.num_heads, head_dim);
  const dim3 grid(ceil_div(launch.num_ctas, 2u), 2);
  transcode_rows<<<grid, RowsLaunch::kThreads, launch.shared_bytes,
                   static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("transcode_rows");
}

// Whether K and V, as far as they are stored, can go by chunks.
bool run_fits_chunks(const TranscodeParams& params) {
  for (int i = 0; i < 2; ++i) {
    const SideView& to = params.append.sides[i].side.view;
    if (!to.is_stored()) continue;
    const SideView& from = params.sources[i].side.view;
    if (from.spec.facts->element_bits > AnyStoredChunk::kMostBits) return false;
    if (!fits_chunks(from) || !encodes_by_chunks(to)) return false;
  }
  return params.append.num_tokens <=
         static_cast<uint32_t>(INT32_MAX / kWarp / params.append.num_heads);
}

// Makes the source's rows append's input, where all of them are of one 16-bit type and
// untransformed. The type, or none.
std::optional<DType> find_stored_input(TranscodeParams& params) {
  std::optional<DType> type;
  for (int i = 0; i < 2; ++i) {
    AppendSide& target = params.append.sides[i];
    if (!target.side.view.is_stored()) continue;
    const TranscodeSource& source = params.sources[i];
    const auto stored = stored_dtype(source.side.view.spec);
    if (source.is_transformed || !stored || bytes_of(*stored) != 2) return std::nullopt;
    if (type && *type != *stored) return std::nullopt;
    type = stored;
    const CodeAddress& c = source.side.view.codes;
    target.input = {c.base, *stored, c.token_stride / 2, c.head_stride / 2};
  }
  return type;
}

Status launch_chunks(const CudaContext& context, TranscodeParams transcode) {
  const auto launch = AppendLaunch::of(context, transcode.append, kTranscodeCtasPerMultiprocessor);
  const std::optional<DType> stored = find_stored_input(transcode);
  const auto kernel = stored == DType::kF16    ? transcode_stored<DType::kF16>
                      : stored == DType::kBF16 ? transcode_stored<DType::kBF16>
                                               : transcode_chunks;
  return launch_overlapping(context, "transcode_chunks", kernel, launch.shape,
                            {transcode, launch.walks});
}

Status launch_pages(const CudaContext& context, const TranscodeParams& params) {
  const auto& [k, v] = params.append.sides;
  const int shared_bytes =
      std::max(PagesLaunch::shared_bytes(k.side), PagesLaunch::shared_bytes(v.side));
  const dim3 grid(kPageStripes, static_cast<unsigned>(params.append.num_heads), 2);
  transcode_pages<<<grid, PagesLaunch::kThreads, shared_bytes,
                    static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("transcode_pages");
}

AppendSide target_side(const SideView& view, const SideTransform& transform) {
  AppendSide side = {};
  if (!view.is_stored()) return side;
  side.side = cuda_side(view);
  side.transform = transform;
  side.chunks = chunk_rows(view);
  side.is_transformed = !transform.is_identity();
  return side;
}

TranscodeSource source_side(const SideView& view, const SideTransform& transform) {
  if (view.head_dim == 0) return {};
  return {cuda_side(view), transform, chunk_rows(view), !transform.is_identity()};
}

TranscodeParams transcode_params(const TranscodeArgs& args, const HeadRun& from, const HeadRun& to,
                                 DeviceCounters* counters) {
  TranscodeParams params = {};
  params.append.sides[0] = target_side(to.k, args.to_transform.k);
  params.append.sides[1] = target_side(to.v, args.to_transform.v);
  params.append.first_head = to.first_head;
  params.append.num_heads = to.num_heads;
  params.append.num_kv_heads = args.to.num_kv_heads;
  params.append.num_slots = args.to.num_blocks * args.to.block_size;
  params.append.block_size = args.to.block_size;
  params.append.by_block_size = FastDivide(args.to.block_size);
  params.append.slot_mapping = args.to_slots;
  params.append.num_tokens = static_cast<uint32_t>(args.num_tokens);
  params.append.counters = counters;
  params.sources[0] = source_side(from.k, args.from_transform.k);
  params.sources[1] = source_side(from.v, args.from_transform.v);
  params.num_from_slots = args.from.num_blocks * args.from.block_size;
  params.by_from_block_size = FastDivide64(args.from.block_size);
  params.from_slots = args.from_slots;
  return params;
}

// One launch, or two where one side alone has page-shared scales.
Status launch(const CudaContext& context, const TranscodeParams& params) {
  TranscodeParams rows = params;
  TranscodeParams pages = params;
  for (int i = 0; i < 2; ++i) {
    const SideView& to = params.append.sides[i].side.view;
    const bool is_shared = to.spec.scale_source == format::ScaleSource::kPageShared;
    (is_shared ? rows : pages).append.sides[i] = {};
  }
  const auto is_empty = [](const TranscodeParams& part) {
    const auto& [k, v] = part.append.sides;
    return k.side.view.head_dim == 0 && v.side.view.head_dim == 0;
  };
  if (!is_empty(pages)) KVX_RETURN_IF_ERROR(launch_pages(context, pages));
  if (is_empty(rows)) return {};
  return run_fits_chunks(rows) ? launch_chunks(context, rows) : launch_rows(context, rows);
}

// As check_same_segments: the CPU takes rows that are cut into other segments, through binary32.
Status check_cut_alike(const TranscodeArgs& args) {
  const Status same = check_same_segments("from", args.from, "to", args.to);
  if (same.ok()) return {};
  return unsupported("{}, as a GPU's transcode takes each segment by itself", same.error().message);
}

Status transcode_segment(const CudaContext& context, const TranscodeArgs& args,
                         DeviceCounters* counters) {
  return for_each_common_run(args.from, args.to, [&](const HeadRun& source, const HeadRun& target) {
    return launch(context, transcode_params(args, source, target, counters));
  });
}

}  // namespace
}  // namespace cuda

Status transcode(const CudaContext& context, const TranscodeArgs& args, DeviceCounters* counters) {
  if (args.num_tokens > INT32_MAX / args.to.num_kv_heads) {
    return invalid_argument("{} tokens of {} heads are more rows than one call can take",
                            args.num_tokens, args.to.num_kv_heads);
  }
  KVX_RETURN_IF_ERROR(cuda::check_cut_alike(args));
  if (args.num_tokens == 0) return {};
  KVX_RETURN_IF_ERROR(cuda::transcode_segment(context, args, counters));
  TranscodeArgs segment = args;
  segment.from_transform = segment.to_transform = {};  // those of the first segment alone
  while (segment.to.next_segment != nullptr) {
    segment.from = *segment.from.next_segment;
    segment.to = *segment.to.next_segment;
    KVX_RETURN_IF_ERROR(cuda::transcode_segment(context, segment, counters));
  }
  return {};
}

}  // namespace kvx::ops
