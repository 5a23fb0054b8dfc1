// The plain attention kernel: every format, feature and shape, in binary32. A CTA takes a tile of
// query rows and a split of the tokens: it decodes a tile of keys and values into shared memory,
// scores, updates the softmax, adds up. The tensor cores' kernels are measured against it.
#include <algorithm>

#include "ops/attend/cuda/job.cuh"
#include "ops/attend/cuda/launch.hpp"
#include "ops/cuda/transform_row.cuh"
#include "ops/gather/decode_row.cuh"

namespace kvx::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = kPlainRows;
constexpr int kMaxTileTokens = 32;

// Shared memory of a CTA. Key rows are one number longer than they need to be, so that lanes that
// read one number of different tokens find it in different banks.
struct Tile {
  float* queries;  // [kRows, key_dim]
  float* keys;     // [tokens, key_dim + 1]
  float* values;   // [tokens, value_dim]
  float* scores;   // [kRows, kMaxTileTokens]
  float* offset;   // [kWarps, key_dim], only with a block offset
  int key_stride;
};

__host__ __device__ inline int tile_floats(int key_dim, int value_dim, int tokens,
                                           bool has_offset) {
  return kRows * key_dim + tokens * (key_dim + 1) + tokens * value_dim + kRows * kMaxTileTokens +
         (has_offset ? kWarps * key_dim : 0);
}

struct RowState {
  TokenRange seen;
  float bias;  // q . mean of K
  float max;   // units of log2
  float sum;
  float rescale;
};

constexpr int kStaticBytes = 512;  // of shared memory, beside what a launch asks for
static_assert(kRows * sizeof(RowState) + kMaxTileTokens <= kStaticBytes);

// What a tile of rows sees, one place after the other: a window's sinks, then, from place
// window.begin on, the tokens of that number. A piece takes some of the places.
struct Places {
  int num_sinks;
  TokenRange window;

  __device__ TokenRange all() const { return {window.begin - num_sinks, window.end}; }
  __device__ int token(int place) const {
    return place >= window.begin ? place : place - all().begin;
  }
};

__device__ Places places_of(const AttendJob& job, TokenRange seen) {
  return {min(job.args.window_sinks, seen.begin), seen};
}

// The piece's place in the call.
struct Piece {
  const AttendJob& job;
  SequenceShape shape;
  int sequence;
  int head;     // of the run
  int kv_head;  // of the layer
  int first_row;
  int num_rows;
};

__device__ void load_query(const Piece& piece, const Tile& tile, int r, RowState& state, int lane) {
  const AttendJob& job = piece.job;
  const QueryRowAt at = query_row(job, piece.kv_head, piece.first_row + r);
  const int dim = job.packed.k.view.head_dim;
  const uint8_t* source =
      job.args.q.data + ((int64_t{piece.shape.q_start} + at.new_token) * job.args.q.token_stride +
                         at.q_head * job.args.q.head_stride) *
                            bytes_of(job.args.q.dtype);
  const TransformRow k =
      transform_row(job.args.transform.k, piece.kv_head, job.num_kv_heads, dim, 0);
  float* query = tile.queries + r * dim;
  float bias = 0;
  for (int d = lane; d < dim; d += kWarp) {
    const float x = load_float(job.args.q.dtype, source, d);
    if (k.mean) bias += x * k.mean[d];
    query[d] = k.factor ? x / k.factor[d] : x;
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    bias += __shfl_xor_sync(kWholeWarp, bias, offset);
  }
  if (k.hadamard) hadamard_row(query, dim, lane);
  if (lane == 0) {
    state = {seen_by(job, piece.shape, at.new_token), bias, -INFINITY, 0.0f, 0.0f};
  }
}

// q . offset = q' . H(offset * factor): the keys of the block move by that.
__device__ void add_block_offset(const Piece& piece, int block, float* key, float* offset,
                                 int lane) {
  const AttendJob& job = piece.job;
  const int dim = job.packed.k.view.head_dim;
  const TransformRow k =
      transform_row(job.args.transform.k, piece.kv_head, job.num_kv_heads, dim, block);
  for (int d = lane; d < dim; d += kWarp) {
    offset[d] = k.factor ? k.offset[d] * k.factor[d] : k.offset[d];
  }
  if (k.hadamard) hadamard_row(offset, dim, lane);
  __syncwarp();
  for (int d = lane; d < dim; d += kWarp) key[d] += offset[d];
}

// Decodes one token's key and value. False when its block is not there.
__device__ bool load_token(const Piece& piece, const Tile& tile, int token, int i, int warp,
                           int lane) {
  const AttendJob& job = piece.job;
  const int block = token / job.block_size;
  const int offset = token % job.block_size;
  const AttendArgs& args = job.args;
  const bool is_wide = args.wide_head_blocks && (block < args.wide_head_blocks[piece.sequence] ||
                                                 block >= args.wide_tail_block[piece.sequence]);
  const CudaRun& run = is_wide ? job.wide : job.packed;
  const int head = piece.kv_head - run.first_head;
  const int64_t id = args.block_table.ids[piece.sequence * args.block_table.row_stride + block];
  const bool has_offset = args.transform.k.block_offset != nullptr;
  const bool is_there = id >= 0 && id < (is_wide ? job.num_wide_blocks : job.num_packed_blocks) &&
                        (!has_offset || block < args.transform.k.num_offset_blocks);
  if (!is_there) {
    if (lane == 0) atomicAdd(&job.findings->out_of_range, 1ull);
    return false;
  }
  float* key = tile.keys + i * tile.key_stride;
  decode_row(
      run.k,
      {run.k.codes(id, offset, head), run.k.scales(id, offset, head), run.k.tensor_scale(head)},
      cpu::DecodeFor::kAttend, key, lane);
  __syncwarp();
  if (has_offset) {
    add_block_offset(piece, block, key, tile.offset + warp * run.k.view.head_dim, lane);
  }
  decode_row(
      run.v,
      {run.v.codes(id, offset, head), run.v.scales(id, offset, head), run.v.tensor_scale(head)},
      cpu::DecodeFor::kAttend, tile.values + i * run.v.view.head_dim, lane);
  return true;
}

__device__ bool sees(const Piece& piece, const RowState& state, int r, int token) {
  const AttendArgs& args = piece.job.args;
  const bool is_before = token < state.seen.begin && token >= args.window_sinks;
  if (is_before || token >= state.seen.end) return false;
  const int j = token - piece.shape.first_new_token();
  if (!args.tree_mask || j < 0) return true;
  const int new_token = (piece.first_row + r) / piece.job.q_per_kv;
  return args.tree_mask[(int64_t{piece.shape.q_start} + new_token) * args.tree_mask_stride + j] !=
         0;
}

// Scores of row r and this lane's token, in units of log2; -infinity when it does not see it.
__device__ float score(const Piece& piece, const Tile& tile, const RowState& state, int r, int lane,
                       bool is_there, int token) {
  if (!is_there || !sees(piece, state, r, token)) return -INFINITY;
  const int dim = piece.job.packed.k.view.head_dim;
  const float* query = tile.queries + r * dim;
  const float* key = tile.keys + lane * tile.key_stride;
  float sum = 0;
  for (int d = 0; d < dim; ++d) sum += query[d] * key[d];
  float x = (sum + state.bias) * piece.job.args.softmax_scale;
  const float cap = piece.job.args.softcap;
  if (cap > 0) x = cap * tanhf(x / cap);
  return x * kLog2E;
}

// Turns a tile's scores into weights and moves the row's softmax on. One warp a row, a lane a
// token.
__device__ void absorb(float* scores, RowState& state, int lane, float score) {
  float max = score;
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kWholeWarp, max, offset));
  }
  max = fmaxf(max, state.max);
  const float weight = score == -INFINITY ? 0.0f : exp2f(score - max);
  float sum = weight;
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, offset);
  }
  scores[lane] = weight;
  __syncwarp();
  if (lane == 0) {
    state.rescale = state.sum == 0 ? 0.0f : exp2f(state.max - max);
    state.sum = state.sum * state.rescale + sum;
    state.max = max;
  }
}

// Thread t adds up value column t % columns (and the ones 256 further) of every groups-th row.
template <int Columns>
struct Sums {
  float at[Columns][kRows];
};

template <int Columns>
__device__ void add_values(const Tile& tile, const RowState* states, int num_tokens, int value_dim,
                           int columns, int groups, int group, int column, Sums<Columns>& sums) {
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
    const int d = column + c * kThreads;
    if (d >= value_dim) continue;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = group + i * groups;
      if (r >= kRows) break;
      const float* weights = tile.scores + r * kMaxTileTokens;
      float sum = states[r].rescale == 0 ? 0.0f : sums.at[c][i] * states[r].rescale;
      for (int t = 0; t < num_tokens; ++t) {
        // A hidden token has weight 0, but 0 * NaN is NaN.
        if (weights[t] != 0) sum += weights[t] * tile.values[t * value_dim + d];
      }
      sums.at[c][i] = sum;
    }
  }
}

template <int Columns>
__global__ void __launch_bounds__(kThreads)
    attend_plain(const __grid_constant__ AttendJob job, int tile_tokens) {
  extern __shared__ float shared[];
  __shared__ RowState states[kRows];
  __shared__ bool is_there[kMaxTileTokens];

  const int head = blockIdx.x % job.packed.num_heads;
  const int first_row = blockIdx.x / job.packed.num_heads * kRows;
  const int split = blockIdx.y;
  const int sequence = blockIdx.z;
  const SequenceShape shape = sequence_shape(job, sequence);
  const int num_rows = min(kRows, shape.q_len * job.q_per_kv - first_row);
  if (!shape.is_valid) {
    return leave_empty(job, shape, job.packed.first_head + head, first_row, num_rows, split, false);
  }
  if (num_rows <= 0) return;
  const Places places = places_of(job, seen_by_rows(job, shape, first_row, num_rows));
  const TokenRange own = split_of(places.all(), job.num_splits, split, tile_tokens);
  const Piece piece = {job,       shape,   sequence, head, job.packed.first_head + head,
                       first_row, num_rows};

  const int key_dim = job.packed.k.view.head_dim;
  const int value_dim = job.packed.v.view.head_dim;
  Tile tile;
  tile.key_stride = key_dim + 1;
  tile.queries = shared;
  tile.keys = tile.queries + kRows * key_dim;
  tile.values = tile.keys + tile_tokens * tile.key_stride;
  tile.scores = tile.values + tile_tokens * value_dim;
  tile.offset = tile.scores + kRows * kMaxTileTokens;

  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  for (int r = warp; r < kRows; r += kWarps) {
    if (r < num_rows) {
      load_query(piece, tile, r, states[r], lane);
    } else if (lane == 0) {
      states[r] = {{0, 0}, 0.0f, -INFINITY, 0.0f, 0.0f};
    }
  }
  const int columns = min(value_dim, kThreads);
  const int groups = kThreads / columns;
  const int group = threadIdx.x / columns;
  const int column = group < groups ? threadIdx.x % columns : value_dim;  // value_dim: idle
  Sums<Columns> sums = {};
  __syncthreads();

  for (int first = own.begin; first < own.end; first += tile_tokens) {
    const int n = min(tile_tokens, own.end - first);
    for (int i = warp; i < n; i += kWarps) {
      const bool found = load_token(piece, tile, places.token(first + i), i, warp, lane);
      if (lane == 0) is_there[i] = found;
    }
    __syncthreads();
    for (int r = warp; r < kRows; r += kWarps) {
      const float x = lane < n && r < num_rows ? score(piece, tile, states[r], r, lane,
                                                       is_there[lane], places.token(first + lane))
                                               : -INFINITY;
      absorb(tile.scores + r * kMaxTileTokens, states[r], lane, x);
    }
    __syncthreads();
    add_values(tile, states, n, value_dim, columns, groups, min(group, groups - 1), column, sums);
    __syncthreads();
  }

  for (int c = 0; c < Columns; ++c) {
    const int d = column + c * kThreads;
    if (d >= value_dim) continue;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = group + i * groups;
      if (r >= num_rows) break;
      const QueryRowAt at = query_row(job, piece.kv_head, first_row + r);
      const int64_t index = partial_index(job, shape.q_start + at.new_token, at.q_head, split);
      job.partial_out[index * value_dim + d] = sums.at[c][i];
      if (d == 0) job.partial_softmax[index] = {states[r].max, states[r].sum};
    }
  }
}

template <int Columns>
cudaError_t launch(const AttendJob& job, int shared_bytes_there, cudaStream_t stream) {
  const int key_dim = job.packed.k.view.head_dim;
  const int value_dim = job.packed.v.view.head_dim;
  constexpr int kMostSharedBytes = 200 << 10;
  const int most = std::min(shared_bytes_there - kStaticBytes, kMostSharedBytes);
  int tokens = kMaxTileTokens;
  const bool has_offset = job.args.transform.k.block_offset != nullptr;
  while (tile_floats(key_dim, value_dim, tokens, has_offset) * 4 > most) tokens /= 2;
  const int shared_bytes = tile_floats(key_dim, value_dim, tokens, has_offset) * 4;
  // What is allowed belongs to the kernel, and other threads launch it too: the same for all calls.
  const cudaError_t set = cudaFuncSetAttribute(attend_plain<Columns>,
                                               cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (set != cudaSuccess) return set;
  const dim3 grid(job.packed.num_heads * job.num_row_tiles, job.num_splits, job.args.num_sequences);
  attend_plain<Columns><<<grid, kThreads, shared_bytes, stream>>>(job, tokens);
  return cudaGetLastError();
}

}  // namespace

int least_plain_shared_bytes(int key_dim, int value_dim, bool has_block_offset) {
  return tile_floats(key_dim, value_dim, 1, has_block_offset) * 4 + kStaticBytes;
}

// Requires: shared_bytes >= least_plain_shared_bytes.
cudaError_t launch_attend_plain(const AttendJob& job, int shared_bytes, cudaStream_t stream) {
  return job.packed.v.view.head_dim <= kThreads ? launch<1>(job, shared_bytes, stream)
                                                : launch<4>(job, shared_bytes, stream);
}

}  // namespace kvx::ops::cuda
