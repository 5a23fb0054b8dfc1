// The text that names tiers.
#include "tier/chain/tier_config.hpp"

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

TEST(TierConfig, NamesStoresWithTheirOptions) {
  const auto tiers = parse_tiers(
                         "host(1MiB), folder(/mnt/kvx, timeout=200ms), redis(rediss://u:p@h:1/2, "
                         "ttl=1d, key_env=KEY, password_env=PASSWORD, ca=/ca.pem)")
                         .value();
  ASSERT_EQ(tiers.size(), 3u);
  EXPECT_EQ(tiers[1].kind, TierKind::kFolder);
  EXPECT_EQ(tiers[1].folder, "/mnt/kvx");
  EXPECT_EQ(tiers[1].timeout_ms, 200);
  EXPECT_EQ(tiers[2].kind, TierKind::kRedis);
  EXPECT_EQ(tiers[2].url, "rediss://u:p@h:1/2");
  EXPECT_EQ(tiers[2].ttl_ms, 86'400'000);
  EXPECT_EQ(tiers[2].timeout_ms, 1000);
  EXPECT_EQ(tiers[2].key_env, "KEY");
  EXPECT_EQ(tiers[2].password_env, "PASSWORD");
  EXPECT_EQ(tiers[2].ca_file, "/ca.pem");
}

TEST(TierConfig, SaysWhatIsWrongAndHowItIsWritten) {
  const std::pair<const char*, const char*> kCases[] = {
      {"host", "tiers has 'host'; expected tiers as host(8GiB)"},
      {"host(8GiB", "tiers has 'host(8GiB'; expected tiers as"},
      {"host(8GiB) disk(/a, 1GiB)", "expected tiers as"},
      {"host(8GiB),", "expected tiers as"},
      {"tape(8GiB)", "tiers has a tier 'tape'; expected host, disk"},
      {"host()", "tiers has 'host()'; expected host(BYTES)"},
      {"host(8)", "tiers has the size '8' in 'host(8)'; expected bytes with a unit"},
      {"host(0.5)", "tiers has the size '0.5'"},
      {"host(99999999999TiB)", "tiers has the size"},
      {"disk(/a)", "expected disk(FOLDER, BYTES)"},
      {"disk(, 1GiB)", "expected disk(FOLDER, BYTES)"},
      {"host(8GiB, policy=fifo)", "tiers has policy=fifo; expected lru, lfu or 2q"},
      {"host(8GiB, ttl=1d)", "tiers has 'ttl=1d' in 'host(8GiB, ttl=1d)'"},
      {"host(8GiB, policy=lru, policy=lru)", "tiers has 'policy=lru' in"},
      {"folder()", "expected folder(FOLDER)"},
      {"folder(/a, ttl=1d)", "tiers has 'ttl=1d' in"},
      {"redis(redis://h, policy=lru)", "tiers has 'policy=lru' in"},
      {"redis(redis://h, ttl=1y)", "tiers has ttl=1y; expected a time as 200ms"},
      {"redis(redis://h, ttl=0s)", "tiers has ttl=0s"},
      {"redis(redis://h, timeout=9999999999d)", "tiers has timeout=9999999999d"},
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
