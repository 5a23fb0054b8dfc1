// The kernel that joins rows of 16 bits whose words lie in fragments, as in [head_dim, tokens]. A
// CTA has some tokens of a block and head: it reads K's and then V's words in the order in which
// they lie, and writes whole rows.
#include "core/checked.hpp"
#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/prefill/expand/expand.hpp"

namespace kvx::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 32;    // of a CTA
constexpr int kMostDim = 256;  // of the kernels that read the rows
constexpr int kPad = 2;        // words, so that neighbour tokens' lie in different banks

struct JoinParams {
  const int32_t* seq_lens;
  BlockTable block_table;
  int block_size;
  int parts_of_block;
  int64_t num_packed_blocks;
  int64_t num_full_precision_blocks;
  const int32_t* num_sink_blocks;  // null: all blocks are packed
  const int32_t* first_recent_block;
  CudaSide from[2];  // K, V
  CudaSide to[2];
  int32_t* ids;  // [num_sequences, blocks_of_sequence]
  int blocks_of_sequence;
};

// K's or V's rows of `num_tokens` tokens of a block, from token `first` on.
__device__ void join_side(const CudaSide& from, const CudaSide& to, int64_t from_block,
                          int64_t to_block, int head, int first, int num_tokens, uint16_t* shared) {
  const CodeAddress& a = from.view.codes;
  const int row_words = from.view.head_dim;
  const int fragment_words = a.fragment_bytes == 0 ? row_words : a.fragment_bytes / 2;
  const int row_stride = row_words + kPad;
  const uint8_t* rows = from.codes(from_block, first, head);
  for (int i = static_cast<int>(threadIdx.x); i < num_tokens * row_words; i += kThreads) {
    const int word = i % fragment_words;
    const int at = i / fragment_words;
    const int token = at % num_tokens;
    const int fragment = at / num_tokens;
    shared[token * row_stride + fragment * fragment_words + word] =
        *reinterpret_cast<const uint16_t*>(rows + fragment * a.fragment_stride +
                                           token * a.token_stride + 2 * word);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_tokens * row_words / 2; i += kThreads) {
    const int token = i / (row_words / 2);
    const int pair = i % (row_words / 2);
    auto* row = reinterpret_cast<uint32_t*>(to.codes(to_block, first + token, head));
    row[pair] = *reinterpret_cast<const uint32_t*>(shared + token * row_stride + 2 * pair);
  }
  __syncthreads();
}

// blockIdx: {part of a block of the sequence, head of the run, sequence}.
__global__ void __launch_bounds__(kThreads)
    join_fragments(const __grid_constant__ JoinParams params) {
  __shared__ __align__(4) uint16_t shared[kTokens * (kMostDim + kPad)];
  const int block = static_cast<int>(blockIdx.x) / params.parts_of_block;
  const int first = static_cast<int>(blockIdx.x) % params.parts_of_block * kTokens;
  const int head = static_cast<int>(blockIdx.y);
  const int sequence = static_cast<int>(blockIdx.z);
  const int tokens_of_block =
      min(params.seq_lens[sequence] - block * params.block_size, params.block_size);
  if (tokens_of_block <= 0) return;
  const bool stays = params.num_sink_blocks && (block < params.num_sink_blocks[sequence] ||
                                                block >= params.first_recent_block[sequence]);
  const int64_t id =
      params.block_table.ids[int64_t{sequence} * params.block_table.row_stride + block];
  const bool is_there =
      id >= 0 && id < (stays ? params.num_full_precision_blocks : params.num_packed_blocks);
  const int64_t to_block = int64_t{sequence} * params.blocks_of_sequence + block;
  if (first == 0 && head == 0 && threadIdx.x == 0) {
    params.ids[to_block] = !is_there ? -1 : static_cast<int32_t>(stays ? id : to_block);
  }
  const int num_tokens = min(tokens_of_block - first, kTokens);
  if (!is_there || stays || num_tokens <= 0) return;
  join_side(params.from[0], params.to[0], id, to_block, head, first, num_tokens, shared);
  join_side(params.from[1], params.to[1], id, to_block, head, first, num_tokens, shared);
}

}  // namespace

cudaError_t launch_join_fragments(const AttendArgs& args, const HeadRun& of_call,
                                  const AttendArgs& expanded, cudaStream_t stream) {
  JoinParams params = {};
  params.seq_lens = args.seq_lens;
  params.block_table = args.block_table;
  params.block_size = args.packed.block_size;
  params.parts_of_block = ceil_div(params.block_size, kTokens);
  params.num_packed_blocks = args.packed.num_blocks;
  if (args.num_sink_blocks) {
    params.num_full_precision_blocks = args.full_precision.num_blocks;
    params.num_sink_blocks = args.num_sink_blocks;
    params.first_recent_block = args.first_recent_block;
  }
  params.from[0] = cuda_side(of_call.k);
  params.from[1] = cuda_side(of_call.v);
  params.to[0] = cuda_side(expanded.packed.runs.front().k);
  params.to[1] = cuda_side(expanded.packed.runs.front().v);
  params.ids = const_cast<int32_t*>(expanded.block_table.ids);
  params.blocks_of_sequence = static_cast<int>(expanded.max_blocks_per_sequence);
  const dim3 grid(static_cast<unsigned>(params.blocks_of_sequence) *
                      static_cast<unsigned>(params.parts_of_block),
                  static_cast<unsigned>(of_call.num_heads),
                  static_cast<unsigned>(args.num_sequences));
  join_fragments<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kvx::ops::cuda
