// Which formats a prefill kernel is compiled for, and what queries' type changes: needs no GPU, but
// CUDA's headers.
#if KVX_HAS_CUDA
#include <gtest/gtest.h>

#include "ops/attend/cuda/prefill/launch.hpp"

namespace kvx::tests {
namespace {

using namespace ops::cuda;
using format::FormatId;

constexpr FormatId kIntegers[] = {FormatId::kInt8, FormatId::kInt4, FormatId::kInt8Affine,
                                  FormatId::kInt4Affine};
constexpr PrefillDims kUsual = {128, 128};
constexpr PrefillDims kLong[] = {{192, 128}, {256, 256}};

PrefillKernel find(FormatId k, FormatId v, const PrefillDims& dims, bool may_round,
                   PrefillEngine engine = PrefillEngine::kWgmma) {
  return find_prefill_kernel(engine, {.k = {k, false},
                                      .v = {v, false},
                                      .dims = dims,
                                      .has_full_precision_window = false,
                                      .may_round = may_round});
}

TEST(FindPrefillKernel, IntegersThatMayBeRoundedTakeE2M1sInstance) {
  for (const PrefillEngine engine : {PrefillEngine::kWgmma, PrefillEngine::kMmaSync}) {
    const PrefillKernel e2m1 = find(FormatId::kNvfp4, FormatId::kMxfp4, kUsual, false, engine);
    ASSERT_NE(e2m1.function, nullptr);
    for (const FormatId id : kIntegers) {
      const PrefillKernel exact = find(id, id, kUsual, false, engine);
      ASSERT_NE(exact.function, nullptr);
      EXPECT_NE(exact.function, e2m1.function);
      EXPECT_EQ(find(id, id, kUsual, true, engine).function, e2m1.function);
      EXPECT_EQ(find(id, FormatId::kNvfp4, kUsual, true, engine).function, e2m1.function);
      EXPECT_EQ(find(id, FormatId::kNvfp4, kUsual, false, engine).function, nullptr);
    }
  }
}

TEST(FindPrefillKernel, RoundingOpensLongRowsToGroupsOf64) {
  for (const PrefillDims& dims : kLong) {
    for (const FormatId id : kIntegers) {
      const bool has_groups = id == FormatId::kInt8 || id == FormatId::kInt4;
      EXPECT_EQ(find(id, id, dims, false).function == nullptr, has_groups);
      EXPECT_NE(find(id, id, dims, true).function, nullptr);
      EXPECT_EQ(find(id, id, dims, true, PrefillEngine::kMmaSync).function, nullptr);
    }
  }
}

TEST(FindPrefillKernel, RoundingChangesNothingElse) {
  for (const FormatId id : {FormatId::kBF16, FormatId::kF16, FormatId::kFp8E4M3, FormatId::kFp8E5M2,
                            FormatId::kNvfp4, FormatId::kMxfp4G16}) {
    for (const PrefillDims& dims : {kUsual, kLong[0], kLong[1]}) {
      const PrefillKernel exact = find(id, id, dims, false);
      EXPECT_NE(exact.function, nullptr);
      EXPECT_EQ(find(id, id, dims, true).function, exact.function);
    }
  }
  // A scale a row goes to the scores, whatever stands beside it.
  EXPECT_EQ(find(FormatId::kFp8E4M3, FormatId::kInt8, kUsual, true).function,
            find(FormatId::kFp8E4M3, FormatId::kInt8, kUsual, false).function);
}

}  // namespace
}  // namespace kvx::tests
#endif
