// The kernel that turns dual-scale blocks, and the full-precision ones beside them, into rows of
// bf16, and rows of fp4_row and int4_row into fp8. A CTA has one block of a head, whose tokens the
// warps share out. Of a dual-scale block a lane keeps its channels' steps and offsets for all of
// them.
#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/prefill/expand/expand.hpp"
#include "ops/cuda/visit_format.cuh"
#include "ops/gather/decode_dual.cuh"

namespace kvx::ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostDim = 256;
constexpr int kMostPairs = kMostDim / 2 / kWarp;  // of neighbouring channels, a lane

struct ExpandParams {
  const int32_t* seq_lens;
  BlockTable block_table;
  int block_size;
  int64_t num_packed_blocks;
  int64_t num_full_precision_blocks;
  const int32_t* num_sink_blocks;  // null: all blocks are packed
  const int32_t* first_recent_block;
  CudaRun packed;
  CudaRun full_precision;
  CudaSide k;  // expanded
  CudaSide v;
  bool keeps_full_precision;  // where it is
  int32_t* ids;               // [num_sequences, blocks_of_sequence]
  int blocks_of_sequence;
};

__device__ uint32_t* row_of(const CudaSide& to, int64_t block, int token, int head) {
  return reinterpret_cast<uint32_t*>(to.codes(block, token, head));
}

struct Place {
  int64_t from_block;
  int from_head;
  int64_t to_block;
  int to_head;
  int num_tokens;
};

template <class Format>
__device__ void expand_side(const CudaSide& from, const CudaSide& to, const Place& place) {
  using Codec = typename Format::Codec;
  const int lane = threadIdx.x % kWarp, num_pairs = from.view.head_dim / 2;
  const uint8_t* bytes = from.channels(place.from_block, place.from_head);
  const float factor = format::dual_factor(bytes);
  format::DualChannel channels[kMostPairs][2];
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int pair = lane + i * kWarp;
    if (pair >= num_pairs) break;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = 2 * pair + j;
      channels[i][j] =
          format::dual_channel<Codec::kBits>(bytes[c], bytes[2 * num_pairs + c], factor);
    }
  }
  for (int token = threadIdx.x / kWarp; token < place.num_tokens; token += kWarps) {
    const uint8_t* codes = from.codes(place.from_block, token, place.from_head);
    const float scale =
        format::E4M3::decode(*from.scales(place.from_block, token, place.from_head));
    uint32_t* row = row_of(to, place.to_block, token, place.to_head);
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i) {
      const int pair = lane + i * kWarp;
      if (pair >= num_pairs) break;
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto code = static_cast<float>(dual_code_at<Format>(codes, 2 * pair + j));
        x[j] = format::dual_number(scale, channels[i][j], code);
      }
      row[pair] = MmaBf16::pack(x[0], x[1]);
    }
  }
}

__device__ void copy_side(const CudaSide& from, const CudaSide& to, const Place& place) {
  const int lane = threadIdx.x % kWarp;
  for (int token = threadIdx.x / kWarp; token < place.num_tokens; token += kWarps) {
    const auto* numbers =
        reinterpret_cast<const uint32_t*>(from.codes(place.from_block, token, place.from_head));
    uint32_t* row = row_of(to, place.to_block, token, place.to_head);
    for (int pair = lane; pair < to.view.head_dim / 2; pair += kWarp) row[pair] = numbers[pair];
  }
}

// The formats of 4 bits that have one scale a row.
struct RowScaleFormat {
  template <class Format>
  static constexpr bool accepts() {
    return Format::kFacts.id == format::FormatId::kFp4Row ||
           Format::kFacts.id == format::FormatId::kInt4Row;
  }
};

// E4M3's codes of the numbers that codes first to first + 7 of a format mean, a byte each.
template <class Format>
__device__ constexpr uint64_t e4m3_codes(int first) {
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) {
    const float number = Format::Codec::decode(static_cast<uint8_t>(first + i));
    bytes |= uint64_t{format::E4M3::encode(number)} << (8 * i);
  }
  return bytes;
}

// Four codes of 4 bits as E4M3.
template <class Format>
__device__ uint32_t e4m3_of(uint32_t codes) {
  constexpr uint64_t kLow = e4m3_codes<Format>(0), kHigh = e4m3_codes<Format>(8);
  uint32_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = codes >> (4 * i) & 15u;
    const uint64_t half = code < 8 ? kLow : kHigh;
    bytes |= static_cast<uint32_t>(half >> (code % 8 * 8) & 0xFFu) << (8 * i);
  }
  return bytes;
}

template <class Format>
__device__ void expand_row_side(const CudaSide& from, const CudaSide& to, const Place& place) {
  static_assert(Format::kFacts.packing == format::Packing::kWords);
  const format::ScaleType scale_type = from.view.spec.scale_type;
  const int lane = threadIdx.x % kWarp, num_words = from.view.head_dim / 8;
  for (int token = threadIdx.x / kWarp; token < place.num_tokens; token += kWarps) {
    const uint8_t* codes = from.codes(place.from_block, token, place.from_head);
    auto* row = reinterpret_cast<uint2*>(to.codes(place.to_block, token, place.to_head));
    for (int i = lane; i < num_words; i += kWarp) {
      uint32_t word = 0;
      memcpy(&word, codes + 4 * i, sizeof word);  // a caller's rows lie anywhere
      row[i] = {e4m3_of<Format>(word), e4m3_of<Format>(word >> 16)};
    }
    if (lane != 0) continue;
    const uint8_t* scale = from.scales(place.from_block, token, place.from_head);
    *reinterpret_cast<float*>(to.scales(place.to_block, token, place.to_head)) =
        format::decode_scale(scale_type, format::load_scale(scale_type, scale));
  }
}

// blockIdx: {block of the sequence, head of the run, sequence}.
__global__ void __launch_bounds__(kThreads)
    expand_rows(const __grid_constant__ ExpandParams params) {
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int sequence = static_cast<int>(blockIdx.z);
  const int num_tokens =
      min(params.seq_lens[sequence] - block * params.block_size, params.block_size);
  if (num_tokens <= 0) return;
  const bool is_full_precision =
      params.num_sink_blocks &&
      (block < params.num_sink_blocks[sequence] || block >= params.first_recent_block[sequence]);
  const int64_t id =
      params.block_table.ids[int64_t{sequence} * params.block_table.row_stride + block];
  const bool is_there = id >= 0 && id < (is_full_precision ? params.num_full_precision_blocks
                                                           : params.num_packed_blocks);
  const int64_t to_block = int64_t{sequence} * params.blocks_of_sequence + block;
  if (head == 0 && threadIdx.x == 0) {
    const bool stays = is_full_precision && params.keeps_full_precision;
    params.ids[to_block] = !is_there ? -1 : static_cast<int32_t>(stays ? id : to_block);
  }
  if (!is_there || (is_full_precision && params.keeps_full_precision)) return;
  const CudaRun& run = is_full_precision ? params.full_precision : params.packed;
  const Place place = {id, params.packed.first_head + head - run.first_head, to_block, head,
                       num_tokens};
  if (is_full_precision) {
    copy_side(run.k, params.k, place);
    copy_side(run.v, params.v, place);
    return;
  }
  visit_dual_format(run.k.id, [&]<class Format>() { expand_side<Format>(run.k, params.k, place); });
  visit_dual_format(run.v.id, [&]<class Format>() { expand_side<Format>(run.v, params.v, place); });
  visit_format_of<RowScaleFormat>(
      run.k.id, [&]<class Format>() { expand_row_side<Format>(run.k, params.k, place); });
  visit_format_of<RowScaleFormat>(
      run.v.id, [&]<class Format>() { expand_row_side<Format>(run.v, params.v, place); });
}

}  // namespace

cudaError_t launch_expand_rows(const AttendArgs& args, const HeadRun& of_call,
                               const AttendArgs& expanded, cudaStream_t stream) {
  if (joins_fragments(of_call)) return launch_join_fragments(args, of_call, expanded, stream);
  ExpandParams params = {};
  params.seq_lens = args.seq_lens;
  params.block_table = args.block_table;
  params.block_size = args.packed.block_size;
  params.num_packed_blocks = args.packed.num_blocks;
  params.packed = cuda_run(of_call);
  params.keeps_full_precision = expands_to_fp8(of_call);
  if (args.num_sink_blocks) {
    params.num_full_precision_blocks = args.full_precision.num_blocks;
    params.num_sink_blocks = args.num_sink_blocks;
    params.first_recent_block = args.first_recent_block;
    params.full_precision = cuda_run(args.full_precision.runs.front());
  }
  params.k = cuda_side(expanded.packed.runs.front().k);
  params.v = cuda_side(expanded.packed.runs.front().v);
  params.ids = const_cast<int32_t*>(expanded.block_table.ids);
  params.blocks_of_sequence = static_cast<int>(expanded.max_blocks_per_sequence);
  const dim3 grid(static_cast<unsigned>(params.blocks_of_sequence),
                  static_cast<unsigned>(of_call.num_heads),
                  static_cast<unsigned>(args.num_sequences));
  expand_rows<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kvx::ops::cuda
