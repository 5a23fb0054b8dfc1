// Memory budgets: bytes, blocks and ratios, and what is refused.
#include "cache/pool/memory_budget.hpp"

#include <gtest/gtest.h>

namespace kvx::cache {
namespace {

int64_t bytes_of(std::string_view text, int64_t available = 1000, int64_t block_bytes = 10) {
  const Result<MemoryBudget> budget = parse_memory_budget(text);
  if (!budget.ok()) return -1;
  const Result<int64_t> bytes = resolve_budget(budget.value(), available, block_bytes);
  return bytes.ok() ? bytes.value() : -2;
}

TEST(MemoryBudget, IsBytesBlocksOrARatio) {
  EXPECT_EQ(bytes_of("4GiB"), int64_t{4} << 30);
  EXPECT_EQ(bytes_of("3MiB"), 3 << 20);
  EXPECT_EQ(bytes_of("100B"), 100);
  EXPECT_EQ(bytes_of("25"), 250);
  EXPECT_EQ(bytes_of("0.5"), 500);
  EXPECT_EQ(bytes_of("1.0"), 1000);
}

TEST(MemoryBudget, RefusesWhatItCannotRead) {
  for (const char* text : {"", "GiB", "-1GiB", "0", "-3", "1.5", "0.0", "nan.", "4 GiB", "4GB",
                           "99999999999TiB", "1000x"}) {
    EXPECT_EQ(bytes_of(text), -1) << text;
  }
}

TEST(MemoryBudget, SaysWhatOneBlockNeedsWhenItHoldsLess) {
  const auto refused = resolve_budget(BudgetRatio{0.001}, 1000, 10);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(refused.error().message, "the memory budget is 1 bytes; one block needs 10");
}

}  // namespace
}  // namespace kvx::cache
