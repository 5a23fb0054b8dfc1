// Hopper's conversions against format/'s definitions: every binary32 product, every scale, every
// code, every pair of F16 numbers.
#include "ops/append/encode_chunk.cuh"
#include "tests/gpu/gpu.hpp"

namespace kvx::tests {
namespace {

using format::ScaleType;
using namespace ops::cuda;

// What a sweep found: how many cases differ, and one of them.
struct Differences {
  unsigned long long compared = 0;
  unsigned long long count = 0;
  uint32_t example = 0;

  __device__ void compare(bool is_equal, uint32_t what) {
    if (!is_equal) {
      atomicAdd(&count, 1ull);
      example = what;
    }
  }
};

// Calls body(n) for all n below count, and counts them.
template <class Body>
__global__ void sweep(uint64_t count, Differences* found, Body body) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (uint64_t n = first; n < count; n += stride) body(n, found);
  if (first < count) {
    atomicAdd(&found->compared, (count - first + stride - 1) / stride);
  }
}

// Words of products whose bits are i * odd: all 2^32 once, mixed.
template <class Codec>
struct WordsOfProducts {
  __device__ void operator()(uint64_t n, Differences* found) const {
    constexpr int kCodes = 32 / Codec::kBits;
    constexpr auto kMask = static_cast<uint32_t>((uint64_t{1} << Codec::kBits) - 1);
    float products[kCodes];
    for (int i = 0; i < kCodes; ++i) {
      const float p = __uint_as_float(static_cast<uint32_t>(n * kCodes + i) * 0x9E3779B1u);
      products[i] = fabsf(p) < HardwareCodes<Codec>::kMost ? p : 0.0f;  // not for a NaN either
    }
    const uint32_t word = HardwareCodes<Codec>::word(products);
    for (int i = 0; i < kCodes; ++i) {
      const uint32_t code = word >> (i * Codec::kBits) & kMask;
      found->compare(code == Codec::encode(products[i]), __float_as_uint(products[i]));
    }
  }
};

struct RoundScales {
  ScaleType type;
  __device__ void operator()(uint64_t n, Differences* found) const {
    const float exact = __uint_as_float(static_cast<uint32_t>(n));
    found->compare(hardware_round_scale(type, exact).bits == format::round_scale(type, exact).bits,
                   static_cast<uint32_t>(n));
  }
};

struct DecodeScales {
  ScaleType type;
  __device__ void operator()(uint64_t n, Differences* found) const {
    const format::StoredScale scale = {static_cast<uint32_t>(n)};
    const float expected = format::decode_scale(type, scale);
    if (!(expected == expected)) return;
    found->compare(__float_as_uint(hardware_decode_scale(type, scale)) == __float_as_uint(expected),
                   scale.bits);
  }
};

// Both halves of words of inputs, all but NaNs.
template <DType Type>
struct Numbers {
  __device__ void operator()(uint64_t n, Differences* found) const {
    const uint32_t bits = static_cast<uint32_t>(n);
    uint32_t words[kInputWords<Type>] = {};
    words[6] = bits | (bits ^ 0x5555u) << 16;
    const Chunk chunk = numbers_of<Type>(words);
    for (int i = 0; i < 2; ++i) {
      const auto half = static_cast<uint16_t>(i == 0 ? bits : bits ^ 0x5555u);
      const float expected = Type == DType::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
      if (!(expected == expected)) continue;
      found->compare(__float_as_uint(chunk.x[12 + i]) == __float_as_uint(expected), half);
    }
  }
};

__device__ __half half_of(uint64_t bits) {
  return __ushort_as_half(static_cast<uint16_t>(bits));
}

// A difference times an inverse, all of both: code of (x - 0) * inverse and of (x - zero) * 1.
template <class Codec, bool kVariesZero>
struct AffineCodes {
  __device__ void operator()(uint64_t n, Differences* found) const {
    const uint64_t other = n >> 16;
    const __half2 x = __halves2half2(half_of(n), half_of(n ^ 0x8001));
    const __half zero = half_of(kVariesZero ? other : 0);
    const __half inverse = half_of(kVariesZero ? 0x3C00 : other);
    const format::AffineEncoder encoder = {
        {}, f16_to_f32(__half_as_ushort(zero)), f16_to_f32(__half_as_ushort(inverse)), false};
    const uint32_t codes = affine_codes_f16<Codec>(x, __half2half2(zero), __half2half2(inverse));
    for (int i = 0; i < 2; ++i) {
      const auto bits = static_cast<uint16_t>(i == 0 ? n : n ^ 0x8001);
      const uint32_t expected =
          format::encode_affine_number<Codec, ScaleType::kF16>(encoder, f16_to_f32(bits));
      found->compare((codes >> (16 * i) & 0xFFFFu) == (0x6400u | expected),
                     static_cast<uint32_t>(n));
    }
  }
};

class GpuHardwareCodes : public GpuTest {
 protected:
  template <class Body>
  void expect_none(const char* what, uint64_t count, const Body& body) {
    SCOPED_TRACE(what);
    auto region = memory().allocate(sizeof(Differences), "differences");
    ASSERT_TRUE(region.ok());
    auto* found = reinterpret_cast<Differences*>(region.value().data());
    ASSERT_TRUE(device::cuda_fill(found, 0, sizeof *found).ok());
    sweep<<<4096, 256, 0, static_cast<cudaStream_t>(context().stream)>>>(count, found, body);
    synchronize();
    Differences differences;
    ASSERT_TRUE(device::cuda_copy(&differences, found, sizeof differences).ok());
    EXPECT_EQ(differences.compared, count);
    EXPECT_EQ(differences.count, 0u) << "for instance " << std::hex << differences.example;
  }
  static constexpr uint64_t kAllFloats = uint64_t{1} << 32;
  // Up to infinity.
  static constexpr uint64_t kPositiveFloats = 0x7F800001;
};

TEST_F(GpuHardwareCodes, AreTheDefinitionsForEveryProduct) {
  expect_none("int8", kAllFloats / 4, WordsOfProducts<format::Int8Codec>{});
  expect_none("int4", kAllFloats / 8, WordsOfProducts<format::Int4Codec>{});
  expect_none("E4M3", kAllFloats / 4, WordsOfProducts<format::E4M3Codec>{});
  expect_none("E5M2", kAllFloats / 4, WordsOfProducts<format::E5M2Codec>{});
  expect_none("F32", kAllFloats, WordsOfProducts<format::F32Codec>{});
  expect_none("F16", kAllFloats / 2, WordsOfProducts<format::F16Codec>{});
  expect_none("BF16", kAllFloats / 2, WordsOfProducts<format::BF16Codec>{});
  expect_none("E2M1", kAllFloats / 8, WordsOfProducts<format::E2M1Codec>{});
}

TEST_F(GpuHardwareCodes, RoundAndDecodeEveryScaleAsTheDefinition) {
  expect_none("F16", kPositiveFloats, RoundScales{ScaleType::kF16});
  expect_none("E4M3", kPositiveFloats, RoundScales{ScaleType::kE4M3});
  expect_none("F16 bits", 0x10000, DecodeScales{ScaleType::kF16});
  expect_none("E4M3 bits", 0x100, DecodeScales{ScaleType::kE4M3});
}

TEST_F(GpuHardwareCodes, ReadEveryInputAsTheDefinition) {
  expect_none("F16", 0x10000, Numbers<DType::kF16>{});
  expect_none("BF16", 0x10000, Numbers<DType::kBF16>{});
}

TEST_F(GpuHardwareCodes, AreTheDefinitionsForEveryPairOfAffineNumbers) {
  expect_none("uint8, inverses", kAllFloats, AffineCodes<format::UInt8Codec, false>{});
  expect_none("uint8, zeros", kAllFloats, AffineCodes<format::UInt8Codec, true>{});
  expect_none("uint4, inverses", kAllFloats, AffineCodes<format::UInt4Codec, false>{});
  expect_none("uint4, zeros", kAllFloats, AffineCodes<format::UInt4Codec, true>{});
}

}  // namespace
}  // namespace kvx::tests
