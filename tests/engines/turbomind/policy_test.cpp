// quant_policy: bits, precedence, architectures, and nothing that falls back unasked.
#include "engines/turbomind/policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvx::engines::turbomind {
namespace {

using ::testing::HasSubstr;

KvCacheMode mode_of(int quant_policy, int sm_version, const KvCacheModeOptions& options = {}) {
  const Result<KvCacheMode> mode = get_kv_cache_mode(quant_policy, sm_version, options);
  if (mode.ok()) return mode.value();
  ADD_FAILURE() << "policy " << quant_policy << " on " << sm_version << ": "
                << mode.error().message;
  return KvCacheMode::kNone;
}

TEST(TurboMindPolicy, IsABitmaskAndNeverABitWidth) {
  EXPECT_EQ(mode_of(0, 90), KvCacheMode::kNone);
  EXPECT_EQ(mode_of(4, 90), KvCacheMode::kInt4);
  EXPECT_EQ(mode_of(8, 90), KvCacheMode::kInt8);
  EXPECT_EQ(mode_of(16, 90), KvCacheMode::kFp4Mx);
  EXPECT_EQ(q_bits(mode_of(16, 90), DType::kF16), 4);
}

TEST(TurboMindPolicy, PrefersFp4ToInt8ToInt4) {
  EXPECT_EQ(mode_of(4 | 8, 90), KvCacheMode::kInt8);
  EXPECT_EQ(mode_of(4 | 16, 90), KvCacheMode::kFp4Mx);
  EXPECT_EQ(mode_of(8 | 16, 100), KvCacheMode::kFp4Nv);
  EXPECT_EQ(mode_of(4 | 8 | 16, 100), KvCacheMode::kFp4Nv);
}

TEST(TurboMindPolicy, RefusesReservedAndUnknownBitsAndNamesTheValue) {
  for (const int policy : {1, 2, 3, 5, 9, 17, 32, 48, 128, -1, -16}) {
    const Result<KvCacheMode> mode = get_kv_cache_mode(policy, 90);
    ASSERT_FALSE(mode.ok()) << policy;
    EXPECT_EQ(mode.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(mode.error().message, HasSubstr("quant_policy is " + std::to_string(policy)));
  }
}

TEST(TurboMindPolicy, ChoosesByFamilySoThat103And110AreNoGaps) {
  for (const int sm : {100, 101, 103, 110, 120, 121, 130}) {
    EXPECT_EQ(mode_of(16, sm), KvCacheMode::kFp4Nv) << sm;
  }
  for (const int sm : {89, 90}) EXPECT_EQ(mode_of(16, sm), KvCacheMode::kFp4Mx) << sm;
}

TEST(TurboMindPolicy, TakesAnExplicitFormatOnEveryGpuWeSupportAndOnTheCpu) {
  for (const int sm : {kCpu, 80, 86, 89, 90, 100, 121}) {
    EXPECT_EQ(mode_of(16, sm, {.fp4_format = Fp4Format::kMx}), KvCacheMode::kFp4Mx) << sm;
    EXPECT_EQ(mode_of(16, sm, {.fp4_format = Fp4Format::kNv}), KvCacheMode::kFp4Nv) << sm;
  }
  EXPECT_EQ(mode_of(16, kCpu), KvCacheMode::kFp4Mx);
}

// The public fork returns kNone here: the user selects FP4 and silently gets no quantisation.
TEST(TurboMindPolicy, RefusesFp4OnAnUnsupportedArchitectureInsteadOfStoringUnquantised) {
  for (const int sm : {70, 75, 80, 86, 87}) {
    const Result<KvCacheMode> mode = get_kv_cache_mode(16, sm);
    ASSERT_FALSE(mode.ok()) << sm;
    EXPECT_EQ(mode.error().code, ErrorCode::kUnsupported);
    EXPECT_THAT(mode.error().message, HasSubstr("sm_version is " + std::to_string(sm)));
  }
  EXPECT_FALSE(get_kv_cache_mode(16, 75, {.fp4_format = Fp4Format::kMx}).ok());
}

TEST(TurboMindPolicy, FallsBackOnlyWhenAskedAndThenToTheBitsThatAreLeft) {
  const KvCacheModeOptions fall_back = {.on_unsupported = OnUnsupported::kFallBack};
  EXPECT_EQ(mode_of(16, 75, fall_back), KvCacheMode::kNone);
  EXPECT_EQ(mode_of(16 | 4, 75, fall_back), KvCacheMode::kInt4);
  EXPECT_EQ(mode_of(16 | 8 | 4, 75, fall_back), KvCacheMode::kInt8);
  EXPECT_EQ(mode_of(16, 90, fall_back), KvCacheMode::kFp4Mx);
  EXPECT_FALSE(get_kv_cache_mode(16 | 32, 75, fall_back).ok());
}

TEST(TurboMindPolicy, RefusesAnArchitectureThatIsNone) {
  for (const int sm : {-1, 9, 900, 1000}) {
    const Result<KvCacheMode> mode = get_kv_cache_mode(16, sm);
    ASSERT_FALSE(mode.ok()) << sm;
    EXPECT_EQ(mode.error().code, ErrorCode::kInvalidArgument);
  }
}

TEST(TurboMindPolicy, SaysHowWideNumbersAndParametersAre) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    EXPECT_EQ(q_bits(KvCacheMode::kNone, dtype), 16);
    EXPECT_EQ(q_bits(KvCacheMode::kInt8, dtype), 8);
    EXPECT_EQ(q_bits(KvCacheMode::kInt4, dtype), 4);
    EXPECT_EQ(q_bits(KvCacheMode::kFp4Mx, dtype), 4);
    EXPECT_EQ(q_bits(KvCacheMode::kFp4Nv, dtype), 4);
    EXPECT_EQ(t_bits(KvCacheMode::kNone, dtype), 0);
    EXPECT_EQ(t_bits(KvCacheMode::kInt8, dtype), 16);
    EXPECT_EQ(t_bits(KvCacheMode::kInt4, dtype), 16);
    EXPECT_EQ(t_bits(KvCacheMode::kFp4Mx, dtype), 0);
    EXPECT_EQ(t_bits(KvCacheMode::kFp4Nv, dtype), 0);
  }
}

// "Fake NVFP4" is E2M1 under exponent bytes with NVFP4's name.
TEST(TurboMindPolicy, NvStoresE4M3ScalesAndMxStoresExponents) {
  const auto nv = format_of(KvCacheMode::kFp4Nv, DType::kF16);
  const auto mx = format_of(KvCacheMode::kFp4Mx, DType::kF16);
  ASSERT_TRUE(nv.ok() && mx.ok());
  EXPECT_EQ(nv.value().scale_type, format::ScaleType::kE4M3);
  EXPECT_EQ(mx.value().scale_type, format::ScaleType::kE8M0);
  EXPECT_EQ(nv.value().group_size, 16);
  EXPECT_EQ(mx.value().group_size, 16);
}

TEST(TurboMindPolicy, RefusesAComputeTypeThatTurboMindHasNot) {
  const auto spec = format_of(KvCacheMode::kInt8, DType::kF32);
  ASSERT_FALSE(spec.ok());
  EXPECT_THAT(spec.error().message, HasSubstr("dtype is f32"));
}

}  // namespace
}  // namespace kvx::engines::turbomind
