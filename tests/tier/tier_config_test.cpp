// The text that names tiers.
#include "tier/tier_config.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvx::tier {
namespace {

using testing::HasSubstr;

TEST(TierConfig, NamesTiersInTheUsersOrder) {
  const auto tiers = parse_tiers(" host(8GiB) , disk(/nvme/kvx, 200GiB, policy=2q)").value();
  ASSERT_EQ(tiers.size(), 2u);
  EXPECT_EQ(tiers[0].kind, TierKind::kHost);
  EXPECT_EQ(tiers[0].budget_bytes, int64_t{8} << 30);
  EXPECT_EQ(tiers[0].eviction, cache::EvictionKind::kLru);
  EXPECT_EQ(tiers[1].kind, TierKind::kDisk);
  EXPECT_EQ(tiers[1].folder, "/nvme/kvx");
  EXPECT_EQ(tiers[1].budget_bytes, int64_t{200} << 30);
  EXPECT_EQ(tiers[1].eviction, cache::EvictionKind::k2Q);
}

TEST(TierConfig, NamesNoneWithNothing) {
  EXPECT_TRUE(parse_tiers("").value().empty());
  EXPECT_TRUE(parse_tiers("  \n").value().empty());
}

TEST(TierConfig, QuotesKeepAFoldersCommasAndParentheses) {
  const auto tiers = parse_tiers(R"(disk("/a, b (c)=d", 1MiB))").value();
  ASSERT_EQ(tiers.size(), 1u);
  EXPECT_EQ(tiers[0].folder, "/a, b (c)=d");
}

TEST(TierConfig, SaysWhatIsWrongAndHowItIsWritten) {
  const std::pair<const char*, const char*> kCases[] = {
      {"host", "tiers has 'host'; expected tiers as host(8GiB)"},
      {"host(8GiB", "tiers has 'host(8GiB'; expected tiers as"},
      {"host(8GiB) disk(/a, 1GiB)", "expected tiers as"},
      {"host(8GiB),", "expected tiers as"},
      {"tape(8GiB)", "tiers has a tier 'tape'; expected host or disk"},
      {"host()", "tiers has 'host()'; expected host(BYTES)"},
      {"host(8)", "tiers has the size '8' in 'host(8)'; expected bytes with a unit"},
      {"host(0.5)", "tiers has the size '0.5'"},
      {"host(99999999999TiB)", "tiers has the size"},
      {"disk(/a)", "expected disk(FOLDER, BYTES)"},
      {"disk(, 1GiB)", "expected disk(FOLDER, BYTES)"},
      {"host(8GiB, policy=fifo)", "tiers has policy=fifo; expected lru, lfu or 2q"},
      {"host(8GiB, ttl=1d)", "tiers has 'ttl=1d' in 'host(8GiB, ttl=1d)'"},
      {"host(8GiB, policy=lru, policy=lru)", "tiers has 'policy=lru' in"},
  };
  for (const auto& [text, expected] : kCases) {
    const auto tiers = parse_tiers(text);
    ASSERT_FALSE(tiers.ok()) << text;
    EXPECT_EQ(tiers.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(tiers.error().message, HasSubstr(expected));
  }
}

}  // namespace
}  // namespace kvx::tier
