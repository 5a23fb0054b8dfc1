// The plain attention kernel: every format, feature and shape, in binary32. A CTA takes a tile of
// query rows and a split of the tokens: it decodes a tile of keys and values into shared memory,
// scores, updates the softmax, adds up. The tensor cores' kernels are measured against it.
#include <algorithm>

#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/common/params.cuh"
#include "ops/cuda/transform_row.cuh"
#include "ops/gather/decode_row.cuh"

namespace kvx::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = kReferenceRows;
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
// window.begin on, the tokens of that number. A work tile takes some of the places.
struct Places {
  int num_sinks;
  TokenRange window;

  __device__ TokenRange all() const { return {window.begin - num_sinks, window.end}; }
  __device__ int token(int place) const {
    return place >= window.begin ? place : place - all().begin;
  }
};

__device__ Places places_of(const ReferenceParams& params, TokenRange seen) {
  return {min(params.window_sinks, seen.begin), seen};
}

// The work tile's place in the call.
struct WorkTile {
  const ReferenceParams& params;
  SequenceShape shape;
  int sequence;
  int head;     // of the run
  int kv_head;  // of the layer
  int first_row;
  int num_rows;
};

__device__ void load_query(const WorkTile& work_tile, const Tile& tile, int r, RowState& state,
                           int lane) {
  const ReferenceParams& params = work_tile.params;
  const QueryRowAt at = query_row(params, work_tile.kv_head, work_tile.first_row + r);
  const int dim = params.packed.k.view.head_dim;
  const uint8_t* source =
      params.q.data + ((int64_t{work_tile.shape.q_start} + at.new_token) * params.q.token_stride +
                       at.q_head * params.q.head_stride) *
                          bytes_of(params.q.dtype);
  const TransformRow k =
      transform_row(params.transform_k, work_tile.kv_head, params.num_kv_heads, dim, 0);
  float* query = tile.queries + r * params.key_dim;
  float bias = 0;
  for (int d = lane; d < dim; d += kWarp) {
    const float x = load_float(params.q.dtype, source, d);
    if (k.mean) bias += x * k.mean[d];
    query[d] = k.factor ? x / k.factor[d] : x;
  }
  for (int d = dim + lane; d < params.key_dim; d += kWarp) {
    query[d] = load_float(params.q.dtype, source, d);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    bias += __shfl_xor_sync(kWholeWarp, bias, offset);
  }
  if (k.hadamard) hadamard_row(query, dim, lane);
  if (lane == 0) {
    state = {seen_by(params, work_tile.shape, at.new_token), bias, -INFINITY, 0.0f, 0.0f};
  }
}

// q . offset = q' . H(offset * factor): the keys of the block move by that.
__device__ void add_block_offset(const WorkTile& work_tile, int block, float* key, float* offset,
                                 int lane) {
  const ReferenceParams& params = work_tile.params;
  const int dim = params.packed.k.view.head_dim;
  const TransformRow k =
      transform_row(params.transform_k, work_tile.kv_head, params.num_kv_heads, dim, block);
  for (int d = lane; d < dim; d += kWarp) {
    offset[d] = k.factor ? k.offset[d] * k.factor[d] : k.offset[d];
  }
  if (k.hadamard) hadamard_row(offset, dim, lane);
  __syncwarp();
  for (int d = lane; d < dim; d += kWarp) key[d] += offset[d];
}

// Decodes one token's key and value. False when its block is not there.
__device__ bool load_token(const WorkTile& work_tile, const Tile& tile, int token, int i, int warp,
                           int lane) {
  const ReferenceParams& params = work_tile.params;
  const int block = token / params.block_size;
  const int offset = token % params.block_size;
  const bool is_full_precision =
      params.num_sink_blocks && (block < params.num_sink_blocks[work_tile.sequence] ||
                                 block >= params.first_recent_block[work_tile.sequence]);
  const CudaRun& run = is_full_precision ? params.full_precision : params.packed;
  const int head = work_tile.kv_head - run.first_head;
  const int64_t id =
      params.block_table.ids[work_tile.sequence * params.block_table.row_stride + block];
  const bool has_offset = params.transform_k.block_offset != nullptr;
  const bool is_there =
      id >= 0 &&
      id < (is_full_precision ? params.num_full_precision_blocks : params.num_packed_blocks) &&
      (!has_offset || block < params.transform_k.num_offset_blocks);
  if (!is_there) {
    if (lane == 0) atomicAdd(&params.counters->out_of_range, 1ull);
    return false;
  }
  float* key = tile.keys + i * tile.key_stride;
  decode_row(run.k,
             {run.k.codes(id, offset, head), run.k.scales(id, offset, head),
              run.k.tensor_scale(head), run.k.channels(id, head)},
             format::DecodeFor::kAttend, key, lane);
  const CudaRun& more = is_full_precision ? params.full_precision_more : params.packed_more;
  if (more.num_heads > 0) {
    const int head_of_more = work_tile.kv_head - more.first_head;
    decode_row(more.k,
               {more.k.codes(id, offset, head_of_more), more.k.scales(id, offset, head_of_more),
                more.k.tensor_scale(head_of_more)},
               format::DecodeFor::kAttend, key + run.k.view.head_dim, lane);
  }
  __syncwarp();
  if (has_offset) {
    add_block_offset(work_tile, block, key, tile.offset + warp * run.k.view.head_dim, lane);
  }
  decode_row(run.v,
             {run.v.codes(id, offset, head), run.v.scales(id, offset, head),
              run.v.tensor_scale(head), run.v.channels(id, head)},
             format::DecodeFor::kAttend, tile.values + i * run.v.view.head_dim, lane);
  return true;
}

__device__ bool sees(const WorkTile& work_tile, const RowState& state, int r, int token) {
  const ReferenceParams& params = work_tile.params;
  const bool is_before = token < state.seen.begin && token >= params.window_sinks;
  if (is_before || token >= state.seen.end) return false;
  const int j = token - work_tile.shape.first_new_token();
  if (!params.tree_mask || j < 0) return true;
  const int new_token = (work_tile.first_row + r) / params.q_per_kv;
  return params.tree_mask[(int64_t{work_tile.shape.q_start} + new_token) * params.tree_mask_stride +
                          j] != 0;
}

// Scores of row r and this lane's token, in units of log2; -infinity when it does not see it.
__device__ float score(const WorkTile& work_tile, const Tile& tile, const RowState& state, int r,
                       int lane, bool is_there, int token) {
  if (!is_there || !sees(work_tile, state, r, token)) return -INFINITY;
  const int dim = work_tile.params.key_dim;
  const float* query = tile.queries + r * dim;
  const float* key = tile.keys + lane * tile.key_stride;
  float sum = 0;
  for (int d = 0; d < dim; ++d) sum += query[d] * key[d];
  float x = (sum + state.bias) * work_tile.params.softmax_scale;
  const float cap = work_tile.params.softcap;
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
    attend_reference(const __grid_constant__ ReferenceParams params, int tile_tokens) {
  extern __shared__ float shared[];
  __shared__ RowState states[kRows];
  __shared__ bool is_there[kMaxTileTokens];

  const int head = blockIdx.x % params.packed.num_heads;
  const int first_row = blockIdx.x / params.packed.num_heads * kRows;
  const int split = blockIdx.y;
  const int sequence = blockIdx.z;
  const SequenceShape shape = sequence_shape(params, sequence);
  const int num_rows = min(kRows, shape.q_len * params.q_per_kv - first_row);
  if (!shape.is_valid) {
    return store_empty_rows(params, shape, params.packed.first_head + head, first_row, num_rows,
                            split, false);
  }
  if (num_rows <= 0) return;
  const Places places = places_of(params, seen_by_rows(params, shape, first_row, num_rows));
  const TokenRange own = split_of(places.all(), params.num_splits, split, tile_tokens);
  const WorkTile work_tile = {params,    shape,   sequence, head, params.packed.first_head + head,
                              first_row, num_rows};

  const int key_dim = params.key_dim;
  const int value_dim = params.packed.v.view.head_dim;
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
      load_query(work_tile, tile, r, states[r], lane);
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
      const bool found = load_token(work_tile, tile, places.token(first + i), i, warp, lane);
      if (lane == 0) is_there[i] = found;
    }
    __syncthreads();
    for (int r = warp; r < kRows; r += kWarps) {
      const float x = lane < n && r < num_rows ? score(work_tile, tile, states[r], r, lane,
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
      const QueryRowAt at = query_row(params, work_tile.kv_head, first_row + r);
      const int64_t index = partial_index(params, shape.q_start + at.new_token, at.q_head, split);
      params.partial_out[index * value_dim + d] = sums.at[c][i];
      if (d == 0) params.partial_softmax[index] = {states[r].max, states[r].sum};
    }
  }
}

template <int Columns>
cudaError_t launch(const ReferenceLaunch& launch, const LaunchGrid& grid,
                   const ReferenceParams& params, cudaStream_t stream) {
  // The limit belongs to the kernel, and other threads launch it too: it is the same for all calls.
  const cudaError_t set =
      cudaFuncSetAttribute(attend_reference<Columns>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           launch.most_shared_bytes);
  if (set != cudaSuccess) return set;
  attend_reference<Columns>
      <<<dim3(grid.x, grid.y, grid.z), kThreads, launch.shared_bytes, stream>>>(params,
                                                                                launch.tile_tokens);
  return cudaGetLastError();
}

}  // namespace

int least_reference_shared_bytes(int key_dim, int value_dim, bool has_block_offset) {
  return tile_floats(key_dim, value_dim, 1, has_block_offset) * 4 + kStaticBytes;
}

ReferenceLaunch plan_reference_launch(int key_dim, int value_dim, bool has_block_offset,
                                      int shared_bytes_per_cta) {
  constexpr int kMostSharedBytes = 200 << 10;
  ReferenceLaunch launch;
  launch.most_shared_bytes = std::min(shared_bytes_per_cta - kStaticBytes, kMostSharedBytes);
  launch.tile_tokens = kMaxTileTokens;
  const auto bytes = [&] {
    return tile_floats(key_dim, value_dim, launch.tile_tokens, has_block_offset) * 4;
  };
  while (launch.tile_tokens > 0 && bytes() > launch.most_shared_bytes) launch.tile_tokens /= 2;
  launch.shared_bytes = bytes();
  return launch;
}

cudaError_t launch_attend_reference(const ReferenceLaunch& plan, const LaunchGrid& grid,
                                    const ReferenceParams& params, cudaStream_t stream) {
  return params.value_dim <= kThreads ? launch<1>(plan, grid, params, stream)
                                      : launch<4>(plan, grid, params, stream);
}

}  // namespace kvx::ops::cuda
