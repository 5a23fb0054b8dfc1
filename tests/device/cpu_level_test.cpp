// Which CPU level is chosen, and what KVX_CPU may say.
#include "device/cpu_level.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/support/environment.hpp"

namespace kvx::device {
namespace {

using testing::HasSubstr;

class KvxCpu : public testing::Test {
 protected:
  // The environment is this process's own; what it held comes back.
  void SetUp() override {
    if (const char* value = std::getenv("KVX_CPU")) before_ = value;
  }
  void TearDown() override { before_.empty() ? tests::unset_variable("KVX_CPU") : set(before_); }

  static void set(const std::string& value) { tests::set_variable("KVX_CPU", value); }

  std::string before_;
};

TEST_F(KvxCpu, ForcesAnyLevelThatTheMachineRuns) {
  for (const CpuLevel level : kAllCpuLevels) {
    set(std::string(name_of(level)));
    const Result<CpuLevel> chosen = choose_cpu_level();
    if (supports(level)) {
      ASSERT_TRUE(chosen.ok()) << chosen.error().message;
      EXPECT_EQ(chosen.value(), level);
    } else {
      ASSERT_FALSE(chosen.ok());
      EXPECT_EQ(chosen.error().code, ErrorCode::kUnsupported);
      EXPECT_THAT(chosen.error().message, HasSubstr(std::string(name_of(level))));
    }
  }
}

TEST_F(KvxCpu, ChoosesTheBestLevelWhenItIsUnsetOrEmpty) {
  CpuLevel best = CpuLevel::kScalar;
  for (const CpuLevel level : kAllCpuLevels) best = supports(level) ? level : best;
  tests::unset_variable("KVX_CPU");
  EXPECT_EQ(choose_cpu_level().value(), best);
  set("");
  EXPECT_EQ(choose_cpu_level().value(), best);
}

TEST_F(KvxCpu, NamesAValueThatIsNoLevel) {
  for (const char* wrong : {"AVX2", "avx", "avx5122", "avx512:", "amx", " scalar", "0"}) {
    set(wrong);
    const Result<CpuLevel> chosen = choose_cpu_level();
    ASSERT_FALSE(chosen.ok()) << wrong;
    EXPECT_EQ(chosen.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(chosen.error().message, HasSubstr(std::string("KVX_CPU is ") + wrong));
    EXPECT_THAT(chosen.error().message, HasSubstr("avx512, avx512:amx, neon or dotprod"));
  }
}

TEST(CpuLevels, EveryMachineRunsTheScalarLevelAndNoneSkipsOne) {
  EXPECT_TRUE(supports(CpuLevel::kScalar));
  EXPECT_TRUE(!supports(CpuLevel::kAvxVnni) || supports(CpuLevel::kAvx2));
  EXPECT_TRUE(!supports(CpuLevel::kAvx512) || supports(CpuLevel::kAvx2));
  EXPECT_TRUE(!supports(CpuLevel::kAvx512Amx) || supports(CpuLevel::kAvx512));
}

}  // namespace
}  // namespace kvx::device
