// Query rows on their way into registers: asked for early, since behind the cache's first copies of
// a whole device they would come late; then transformed as K was, brought into the 16-bit type's
// range and laid out as the B operand that meets the keys.
//
// Lane 4 g + t has the channels of row g that it owns of a key: Keys::owned_channel(i, t), 16 of
// them a part.
#pragma once

#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/common/rotate_row.cuh"
#include "ops/attend/cuda/decode_mma/keys.cuh"

namespace kvx::ops::cuda {

// Rows of any length are transformed in shared memory: one function for all formats, which in
// registers would take long to compile and in local memory 50 us. A row there: [Dim] numbers,
// q . mean, and room that keeps rows out of each other's banks.
constexpr int transformed_row_bytes(int dim) {
  return 4 * dim + 16;
}

// A work tile's query rows.
struct QueryWorkTile {
  int q_start;  // of the sequence
  int kv_head;
  int first_row;  // of the sequence and KV head
  int num_rows;
};

// By one warp, which then waits for itself. to: shared memory, num_rows rows.
template <int Dim>
__device__ __noinline__ void transform_queries(const DecodeMmaParams& params,
                                               QueryWorkTile work_tile, uint32_t to, int lane) {
  const FloatRows& q = params.q;
  const int dim = params.key_dim;
  const TransformRow k =
      transform_row(params.transform_k, work_tile.kv_head, params.num_kv_heads, dim, 0);
#pragma unroll 1
  for (int r = 0; r < work_tile.num_rows; ++r) {
    const QueryRowAt at = query_row(params, work_tile.kv_head, work_tile.first_row + r);
    const int64_t from = (int64_t{work_tile.q_start} + at.new_token) * q.token_stride +
                         int64_t{at.q_head} * q.head_stride;
    const uint8_t* numbers = q.data + from * bytes_of(q.dtype);
    const uint32_t row_at = to + r * transformed_row_bytes(Dim);
    auto* row = static_cast<float*>(__cvta_shared_to_generic(row_at));
    float bias = 0;
#pragma unroll
    for (int i = 0; i < Dim / kWarp; ++i) {
      const int d = i * kWarp + lane;
      float x = d < dim ? load_float(q.dtype, numbers, d) : 0.0f;
      if (d < dim && k.mean) bias += x * k.mean[d];
      if (d < dim && k.factor) x = __fdividef(x, k.factor[d]);
      row[d] = x;
    }
    for (int offset = 1; offset < kWarp; offset *= 2) {
      bias += __shfl_xor_sync(kWholeWarp, bias, offset);
    }
    if (lane == 0) row[Dim] = bias;
    __syncwarp();
    if (k.hadamard) rotate_row(row, dim, lane);
  }
}

// Queries on their way from the walk over packed tokens to that over full-precision ones, which
// meets its keys in another order of channels: in shared memory, in bf16, as they were before they
// were brought into f16's range. To read and transform them once more would take 800 instructions
// that run once, where nothing else is left to run beside them.
template <int Dim>
struct FullPrecisionQueries {
  static constexpr int kRowBytes = 2 * Dim;
  static constexpr int bytes(int columns) { return columns * kNTileRows * kRowBytes; }

  // to: of the column's row 0. sign: what rows are multiplied by.
  template <class Keys, class TheQueries>
  __device__ static void store(const TheQueries& queries, int column, float sign, uint32_t to,
                               int lane) {
    const float by = __fdividef(sign, queries.scale(column));
    const uint32_t row = to + lane / 4 * kRowBytes;
    constexpr int kSteps = Keys::kStepsOfNeighbours, kNumbers = 4 * kSteps;
#pragma unroll
    for (int i = 0; i < Dim / 16 / kSteps; ++i) {
      float x[kNumbers];
#pragma unroll
      for (int j = 0; j < 2 * kSteps; ++j) {
        const int s = kSteps * i + j / 2, r = j % 2;
        const uint2 both = queries.operand(column, s);
        const int2 c = Keys::channels(s, r);
        const float2 two = Keys::Mma::unpack(r == 0 ? both.x : both.y);
        x[c.x % kNumbers] = two.x * (by / Keys::factor(s, r));
        x[c.y % kNumbers] = two.y * (by / Keys::factor(s, r));
      }
#pragma unroll
      for (int n = 0; n < kNumbers; n += 8) {
        const int channel = Keys::owned_channel(kNumbers * i + n, lane % 4);
        store_shared_16(row + channel * 2,
                        {MmaBf16::pack(x[n], x[n + 1]), MmaBf16::pack(x[n + 2], x[n + 3]),
                         MmaBf16::pack(x[n + 4], x[n + 5]), MmaBf16::pack(x[n + 6], x[n + 7])});
      }
    }
  }

  // from: of the column's row 0.
  template <class Keys>
  __device__ static void load(uint32_t from, int lane, Queries<Dim>& queries) {
    static_assert(Keys::kRun == 16 && std::is_same_v<typename Keys::Mma, MmaBf16>);
#pragma unroll
    for (int i = 0; i < Dim / 32; ++i) {
      const int channel = Keys::owned_channel(8 * i, lane % 4);
      const uint4 x = load_shared_16(from + lane / 4 * kRowBytes + channel * 2);
      queries.b[2 * i][0] = x.x, queries.b[2 * i][1] = x.y;
      queries.b[2 * i + 1][0] = x.z, queries.b[2 * i + 1][1] = x.w;
    }
  }
};

template <class Keys, int Dim>
class QueryNTile {
 public:
  // is_there: whether the work tile has this lane's row, row `row` of the sequence and KV head.
  __device__ void request(const DecodeMmaParams& params, const SequenceShape& shape, int kv_head,
                          int row, bool is_there, int lane) {
    if (!is_there) return;
    const FloatRows& q = params.q;
    dim_ = Keys::kIsPadded ? params.key_dim : Dim;
    const QueryRowAt at = query_row(params, kv_head, row);
    const int64_t row_at = (int64_t{shape.q_start} + at.new_token) * q.token_stride +
                           int64_t{at.q_head} * q.head_stride;
    row_ = q.data + row_at * bytes_of(q.dtype);
    is_here_ = q.dtype != DType::kF32 && reinterpret_cast<uintptr_t>(row_) % 16 == 0;
    if (!is_here_) return;
#pragma unroll
    for (int i = 0; i < kParts * 2; ++i) {
      const int d = Keys::owned_channel(8 * i, lane % 4);
      bits_[i] = d < dim_ ? load_global_16(row_ + d * 2) : uint4{};
    }
  }

  // key_scale: of all of the head's keys. A row that is not there becomes zeros. transformed: the
  // lane's row as transform_queries left it, of a padded row.
  // score_scale, bias: what brings scores of columns 2t and 2t + 1 to their size and is added then;
  // without a cap, in units of log2.
  __device__ void finish(const DecodeMmaParams& params, int kv_head, float key_scale,
                         uint32_t transformed, int lane, Queries<Dim>& queries, float2& score_scale,
                         float2& bias) const {
    const int t = lane % 4;
    float numbers[kParts][16] = {};
    const bool is_transformed = params.transforms_k;
    float added = 0;
    if (Keys::kIsPadded && is_transformed) {
      if (row_) added = load_transformed(transformed, t, numbers);
    } else {
      if (row_) load(params.q.dtype, lane, numbers);
    }
    if constexpr (!Keys::kIsPadded) {
      if (is_transformed) added = fold_transform(params, kv_head, lane, numbers);
    }
    // Scores are compared before they are multiplied, so the factor's sign goes into the queries.
    const float factor = params.softmax_scale * Keys::unit() * key_scale;
    const float sign = factor < 0 ? -1.0f : 1.0f;
    constexpr bool kHasFactors = Keys::kHasOffset && Keys::kRowBytes < Dim;  // sixteenths
    float scale = 1.0f;
    if (Keys::Mma::kScalesQueries && (Keys::kScalesAllQueries || kHasFactors || is_transformed ||
                                      params.q.dtype != DType::kF16)) {
      scale = range_scale(numbers);
    }
    queries.scale = scale * sign;
    float sum = 0;
    float starts[kParts] = {};
#pragma unroll
    for (int s = 0; s < Dim / 16; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int2 c = Keys::channels(s, r);
        const float x = numbers[s / 4][c.x] * queries.scale;
        const float y = numbers[s / 4][c.y] * queries.scale;
        const float factor_of_key = Keys::factor(s, r);
        queries.b[s][r] = Keys::Mma::pack(x * factor_of_key, y * factor_of_key);
        if constexpr (Keys::template kHasLowQueries<1>) {
          const float2 high = Keys::Mma::unpack(queries.b[s][r]);
          queries.low[s][r] = Keys::Mma::pack(x - high.x, y - high.y);
        }
        if constexpr (Keys::kHasOffset) {
          // Of what the codes meet, so that a row's zero takes away what its codes bring.
          const float2 rounded = Keys::Mma::unpack(queries.b[s][r]);
          sum += (rounded.x + rounded.y) / factor_of_key;
          starts[Keys::part(s)] -= Keys::offset(s, r) * (rounded.x + rounded.y);
        }
      }
    }
    if constexpr (Keys::kHasOffset) {
      queries.sums = of_columns(sum, t);
#pragma unroll
      for (int i = 0; i < kParts; ++i) queries.starts[i] = of_columns(starts[i], t);
    }
    const float log2 = params.softcap == 0 ? kLog2E : 1.0f;
    const float by = fabsf(factor) / scale * log2;
    score_scale = {__shfl_sync(kWholeWarp, by, 8 * t), __shfl_sync(kWholeWarp, by, 8 * t + 4)};
    bias = is_transformed ? of_columns(added * params.softmax_scale * log2, t) : float2{};
  }

 private:
  static constexpr int kParts = Dim / 64;

  __device__ void load(DType type, int lane, float (&x)[kParts][16]) const {
    if (!is_here_) {
      for (int p = 0; p < kParts; ++p) {
        for (int i = 0; i < 16; ++i) {
          const int d = Keys::owned_channel(16 * p + i, lane % 4);
          if (d < dim_) x[p][i] = load_float(type, row_, d);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kParts * 2; ++i) {
      const uint32_t words[4] = {bits_[i].x, bits_[i].y, bits_[i].z, bits_[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 both =
            type == DType::kF16 ? MmaF16::unpack(words[w]) : MmaBf16::unpack(words[w]);
        x[i / 2][i % 2 * 8 + 2 * w] = both.x;
        x[i / 2][i % 2 * 8 + 2 * w + 1] = both.y;
      }
    }
  }

  // What the score has beside the row, q . mean, is lane 0's of the quad.
  __device__ static float load_transformed(uint32_t row, int t, float (&x)[kParts][16]) {
#pragma unroll
    for (int i = 0; i < kParts * 4; ++i) {
      const uint4 bits = load_shared_16(row + Keys::owned_channel(4 * i, t) * 4);
      x[i / 4][i % 4 * 4] = __uint_as_float(bits.x);
      x[i / 4][i % 4 * 4 + 1] = __uint_as_float(bits.y);
      x[i / 4][i % 4 * 4 + 2] = __uint_as_float(bits.z);
      x[i / 4][i % 4 * 4 + 3] = __uint_as_float(bits.w);
    }
    return t == 0 ? __uint_as_float(load_shared_4(row + Dim * 4)) : 0.0f;
  }

  // The query as it meets K's transformed rows, and what the score has beside them: q . mean.
  __device__ static float fold_transform(const DecodeMmaParams& params, int kv_head, int lane,
                                         float (&x)[kParts][16]) {
    const TransformRow k = transform_row(params.transform_k, kv_head, params.num_kv_heads, Dim, 0);
    float bias = 0;
    if (k.mean) {
#pragma unroll
      for (int i = 0; i < kParts * 16; ++i) {
        bias += x[i / 16][i % 16] * k.mean[Keys::owned_channel(i, lane % 4)];
      }
    }
    if (k.factor) {
#pragma unroll
      for (int i = 0; i < kParts * 16; ++i) {
        float& number = x[i / 16][i % 16];
        number = __fdividef(number, k.factor[Keys::owned_channel(i, lane % 4)]);
      }
    }
    if (k.hadamard) rotate(x, lane);
    return bias;
  }
  // Hadamard: within a run, over the four lanes' runs, over runs.
  __device__ static void rotate(float (&x)[kParts][16], int lane) {
    constexpr int kBlock = hadamard_block(Dim);
    static_assert(kBlock >= 4 * Keys::kRun);
    constexpr int kNumbers = kParts * 16;
    const auto step = [&x](int stride) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        if ((i & stride) == 0)
          butterfly(x[i / 16][i % 16], x[(i + stride) / 16][(i + stride) % 16]);
      }
    };
#pragma unroll
    for (int stride = 1; stride < Keys::kRun; stride *= 2) step(stride);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        float& own = x[i / 16][i % 16];
        const float other = __shfl_xor_sync(kWholeWarp, own, lanes);
        own = (lane & lanes) == 0 ? own + other : other - own;
      }
    }
#pragma unroll
    for (int stride = Keys::kRun; stride < kBlock / 4; stride *= 2) step(stride);
    const float norm = hadamard_norm(kBlock);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) x[i / 16][i % 16] *= norm;
  }
  // The power of two that brings the row's largest number to [1, 2).
  __device__ static float range_scale(const float (&x)[kParts][16]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kParts * 16; ++i) largest = fmaxf(largest, fabsf(x[i / 16][i % 16]));
    largest = over_quad(largest, [](float a, float b) { return fmaxf(a, b); });
    return largest > 0 && largest < INFINITY ? exp2f(-static_cast<float>(ilogbf(largest))) : 1.0f;
  }

  // Row g's facts go to the lanes whose columns are 2t and 2t + 1.
  __device__ static float2 of_columns(float x, int t) {
    x = over_quad(x, [](float a, float b) { return a + b; });
    return {__shfl_sync(kWholeWarp, x, 8 * t), __shfl_sync(kWholeWarp, x, 8 * t + 4)};
  }
  template <class Combine>
  __device__ static float over_quad(float x, const Combine& combine) {
    x = combine(x, __shfl_xor_sync(kWholeWarp, x, 1));
    return combine(x, __shfl_xor_sync(kWholeWarp, x, 2));
  }

  // Rows of 16 bits on 16 bytes come as they are; others are read when they are needed.
  const uint8_t* row_ = nullptr;  // null: not there
  int dim_ = Dim;                 // channels of a key; the others of Dim are zeros
  bool is_here_ = false;
  uint4 bits_[kParts * 2];
};

}  // namespace kvx::ops::cuda
