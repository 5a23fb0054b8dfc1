// append with error feedback: one or some lanes take a row, which stays in shared memory. Rounding
// a row is a chain of head_dim steps; a warp has up to 32 such chains under way, of one head, so
// that its lanes read the same weights.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/append/append_fed.hpp"
#include "ops/append/append_rows.cuh"
#include "ops/append/encode_fed.cuh"

namespace kvx::ops::cuda {
namespace {

// Lanes: that share a row. One where rows fill the device; more add a row's errors in less time.
template <int Lanes>
struct FedLaunch {
  static constexpr int kRows = kWarp / Lanes;

  // [kRows][numbers of a row, steps of its groups], rows on different banks
  static KVX_HOST_DEVICE int row_stride(const CudaSide& side) { return side.view.head_dim | 1; }
  static int shared_bytes(const CudaSide& side) {
    return static_cast<int>(sizeof(float)) * kRows * (row_stride(side) + side.num_groups);
  }
};

// encode_row as a function of its own: all kernels' rows without feedback share its code.
static __device__ __noinline__ LostNumbers encode_row_apart(const CudaSide& side,
                                                            const RowTarget& to, float* x,
                                                            int lane) {
  return encode_row(side, to, x, lane);
}

// A warp's rows: consecutive tokens of one head.
template <int Lanes>
class FedRows {
 public:
  static constexpr int kRows = FedLaunch<Lanes>::kRows;

  __device__ FedRows(const AppendParams& params, float* shared)
      : params_(params),
        side_(params.sides[0].side),
        shared_(shared),
        stride_(FedLaunch<Lanes>::row_stride(side_)),
        head_(static_cast<int>(blockIdx.y)),
        first_token_(blockIdx.x * kRows),
        lane_(static_cast<int>(threadIdx.x)) {
    const uint32_t token = first_token_ + static_cast<uint32_t>(lane_ / Lanes);
    if (token >= params.num_tokens) return;
    const bool counts = head_ == 0 && lane_ % Lanes == 0;
    target_ = append_target(params, params.sides[0], token, params.slot_mapping[token], counts);
    if (target_.is_stored) to_ = target_.row(side_, head_);
  }

  __device__ void append() {
    load();
    transform();
    visit_chunk_format(side_.id, [&]<class Format>() {
      if constexpr (!format::is_plain<Format>()) encode<Format>();
    });
  }

 private:
  __device__ float* row(int r) const { return shared_ + r * stride_; }
  __device__ float* own_row() const { return row(lane_ / Lanes); }
  __device__ float* own_steps() const {
    return shared_ + kRows * stride_ + lane_ / Lanes * side_.num_groups;
  }

  // All rows' loads are under way together.
  __device__ void load() const {
    const AppendSide& part = params_.sides[0];
    const uint8_t* input = part.input_row(first_token_, params_.first_head + head_);
    const int64_t stride = part.input.token_stride * bytes_of(part.input.dtype);
    const int num_rows = static_cast<int>(min(params_.num_tokens - first_token_, uint32_t{kRows}));
    for (int d = lane_; d < side_.view.head_dim; d += kWarp) {
      if (part.input.dtype == DType::kF32) {
        load_column<uint32_t>(input, stride, num_rows, d);
      } else {
        load_column<uint16_t>(input, stride, num_rows, d);
      }
    }
    __syncwarp();
  }
  template <class Bits>
  __device__ __forceinline__ void load_column(const uint8_t* input, int64_t stride, int num_rows,
                                              int d) const {
    Bits bits[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      bits[r] = r < num_rows ? reinterpret_cast<const Bits*>(input + r * stride)[d] : Bits{0};
    }
    [[maybe_unused]] const DType type = params_.sides[0].input.dtype;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (sizeof(Bits) == 4) {
        row(r)[d] = __uint_as_float(bits[r]);
      } else {
        row(r)[d] = type == DType::kF16 ? f16_to_f32(bits[r]) : bf16_to_f32(bits[r]);
      }
    }
  }

  __device__ void transform() const {
    if (!params_.sides[0].is_transformed) return;
    const int64_t own_block = target_.is_stored ? target_.position_block : 0;
    for (int r = 0; r < kRows; ++r) {
      const int64_t block = __shfl_sync(kWholeWarp, own_block, r * Lanes);
      apply_transform_row(append_transform(params_, params_.sides[0], head_, block), row(r),
                          side_.view.head_dim, lane_);
    }
    __syncwarp();
  }

  template <class Format>
  __device__ void encode() {
    const FedRow<Lanes> row = {own_row(), side_.view.feedback_of(head_), side_.view.head_dim,
                               lane_ % Lanes};
    if constexpr (!format::is_affine<Format>()) {
      encode_others(make_scales<Format>());
      const auto rounding_of = [&](int chunk) {
        const float step = own_steps()[chunk * kChunk / side_.group_length];
        return ChunkRounding<Format>{step, format::reciprocal(step), step < 0};
      };
      const format::ScaleMaker maker =
          format::scale_maker<Format>(side_.view.spec, to_.tensor_scale);
      count_fed(row.template encode<Format>(
          rounding_of, stores<Format>(),
          format::saturation_limit<typename Format::Codec>(side_.view.spec.scale_source, maker)));
    } else if (side_.view.spec.scale_type == format::ScaleType::kF16) {
      encode_affine<Format, format::ScaleType::kF16>(row);
    } else {
      encode_affine<Format, format::ScaleType::kBF16>(row);
    }
  }

  template <class Format>
  __device__ auto stores() const {
    return [this](int chunk, const typename Format::Codec::Code(&codes)[kChunk]) {
      constexpr int kBytes = 4 * kChunkWords<Format>;
      if (!is_fed_) return;
      store_chunk_codes<Format>(codes, side_.view.is_interleaved, to_.codes + chunk * kBytes);
    };
  }

  // Over the lanes of a row.
  template <class T, class Combine>
  __device__ static T reduce_row(T value, const Combine& combine) {
#pragma unroll
    for (int offset = 1; offset < Lanes; offset *= 2) {
      value = combine(value, __shfl_xor_sync(kWholeWarp, value, offset));
    }
    return value;
  }

  // Steps into shared memory, -1 where every code is 0; computed scales into the cache. Returns
  // whether feedback applies to the row.
  template <class Format>
  __device__ bool make_scales() const {
    using Codec = typename Format::Codec;
    const format::ScaleMaker maker = format::scale_maker<Format>(side_.view.spec, to_.tensor_scale);
    uint32_t largest = 0;
    for (int g = lane_ % Lanes; g < side_.num_groups; g += Lanes) {
      const int first = g * side_.group_length;
      const int n = min(side_.group_length, side_.view.head_dim - first);
      const float* x = own_row() + first;
      const format::GroupMagnitude group = format::group_magnitude(x, n);
      largest = max(largest, __float_as_uint(group.amax));
      const bool is_zero = group.amax == 0;
      uint8_t* scale = to_.scales + g * side_.view.scales.group_stride;
      format::StoredScale stored = {0};
      if (side_.view.spec.scale_source == format::ScaleSource::kGiven) {
        if (target_.is_stored) stored = format::load_scale(maker.type, scale);
      } else if (!is_zero && !group.has_nonfinite) {
        stored = format::choose_scale<Codec>(maker, side_.view.spec.scale_choice, group.amax,
                                             ErrorOfChunks<Codec>{x, n});
        if (target_.is_stored) format::store_scale(maker.type, stored, scale);
      } else if (target_.is_stored) {
        format::store_scale(maker.type, stored, scale);  // or a NaN, by encode_others
      }
      own_steps()[g] = is_zero ? -1.0f : maker.step(stored);
    }
    largest = reduce_row(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
    __syncwarp();
    return largest < __float_as_uint(format::kFeedbackLimit);
  }

  // Rows without feedback, one by one, by the reference.
  __device__ void encode_others(bool takes_feedback) {
    is_fed_ = target_.is_stored && takes_feedback;
    const bool is_other = target_.is_stored && !takes_feedback && lane_ % Lanes == 0;
    for (unsigned left = __ballot_sync(kWholeWarp, is_other); left != 0; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1;
      const auto of_row = [from](uint8_t* pointer) {
        const auto bits = reinterpret_cast<unsigned long long>(pointer);
        return reinterpret_cast<uint8_t*>(__shfl_sync(kWholeWarp, bits, from));
      };
      const RowTarget to = {of_row(to_.codes), of_row(to_.scales),
                            __shfl_sync(kWholeWarp, to_.tensor_scale, from)};
      count_lost(params_.counters, side_, head_,
                 encode_row_apart(side_, to, row(from / Lanes), lane_));
    }
  }

  // saturated: of a row, the same in all of its lanes.
  __device__ void count_fed(int saturated) const {
    if (is_fed_ && lane_ % Lanes == 0) count_lost(params_.counters, side_, head_, 0, saturated);
  }

  template <class Format, format::ScaleType T>
  __device__ void encode_affine(const FedRow<Lanes>& row) {
    using Codec = typename Format::Codec;
    int32_t low = 0x7FFFFFFF;
    int32_t high = -0x7FFFFFFF - 1;
    uint32_t largest = 0;
    for (int d = lane_ % Lanes; d < side_.view.head_dim; d += Lanes) {
      const float x = own_row()[d];
      const int32_t bits = format::ordered_bits(format::ParamFloat<T>::round(x));
      low = min(low, bits), high = max(high, bits);
      largest = max(largest, __float_as_uint(x) & 0x7FFFFFFFu);
    }
    low = reduce_row(low, [](int32_t a, int32_t b) { return min(a, b); });
    high = reduce_row(high, [](int32_t a, int32_t b) { return max(a, b); });
    largest = reduce_row(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
    const auto encoder = format::affine_encoder<Codec, T>(format::affine_range(low, high));
    // row parameters: [scale: 2 bytes][zero: 2 bytes]
    if (target_.is_stored && lane_ % Lanes == 0) memcpy(to_.scales, &encoder.params, 4);
    encode_others(!encoder.has_nonfinite && largest < __float_as_uint(format::kFeedbackLimit));
    const AffineRounding<Format, T> rounding = {encoder};
    row.template encode<Format>([&](int) { return rounding; }, stores<Format>(),
                                {format::kFloatMax, false});
  }

  const AppendParams& params_;
  const CudaSide& side_;
  float* shared_;
  int stride_;
  int head_;  // of the run
  uint32_t first_token_;
  int lane_;
  AppendTarget target_;  // of this lane's row
  RowTarget to_ = {nullptr, nullptr, 1.0f};
  bool is_fed_ = false;
};

// blockIdx: tokens, head, K or V. V goes row by row by the reference; where it has many rows, it
// has a launch of its own.
template <int Lanes>
__global__ void __launch_bounds__(kWarp) append_fed(const __grid_constant__ AppendParams params) {
  extern __shared__ float shared[];
  if (blockIdx.z == 0) return FedRows<Lanes>(params, shared).append();
  constexpr uint32_t kRows = FedLaunch<Lanes>::kRows;
  const uint32_t end = min(params.num_tokens, (blockIdx.x + 1) * kRows);
  for (uint32_t token = blockIdx.x * kRows; token < end; ++token) {
    append_row(params, params.sides[1], token, static_cast<int>(blockIdx.y), shared,
               static_cast<int>(threadIdx.x), encode_row_apart);
  }
}

constexpr int kSharedBytes = 48 * 1024;  // that a launch has without asking

template <int Lanes>
Status launch(const CudaContext& context, const AppendParams& params) {
  using Launch = FedLaunch<Lanes>;
  const auto& [k, v] = params.sides;
  const int v_bytes = v.side.view.head_dim * static_cast<int>(sizeof(float));
  const dim3 grid(ceil_div(params.num_tokens, uint32_t{Launch::kRows}),
                  static_cast<unsigned>(params.num_heads), v.is_stored() ? 2 : 1);
  append_fed<Lanes><<<grid, kWarp, std::max(Launch::shared_bytes(k.side), v_bytes),
                      static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("append_fed");
}

}  // namespace

Status launch_fed(const CudaContext& context, AppendParams& params) {
  AppendParams fed = params;
  params.sides[0] = {};
  // A lane a row takes twice as long for a row, and a third of the instructions.
  const int64_t num_rows = int64_t{params.num_tokens} * params.num_heads;
  const bool fills_device = num_rows > int64_t{64} * context.device.num_multiprocessors;
  if (fills_device && FedLaunch<1>::shared_bytes(fed.sides[0].side) <= kSharedBytes) {
    fed.sides[1] = {};
    return launch<1>(context, fed);
  }
  if (fills_device) {
    fed.sides[1] = {};
  } else {
    params.sides[1] = {};
  }
  return launch<8>(context, fed);
}

}  // namespace kvx::ops::cuda
