// Small caches with tiers, and sequences that come, compute what is not found, and go: what the
// tests of stores share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/kv/stream.hpp"

namespace kvx::kv {

inline constexpr int kBlockSize = 16;
inline constexpr int kNumTokens = 112;
inline constexpr int64_t kNumFound = kNumTokens - kBlockSize;

inline std::vector<int32_t> token_ids(int first) {
  std::vector<int32_t> ids(kNumTokens);
  for (int i = 0; i < kNumTokens; ++i) ids[i] = first + i;
  return ids;
}

struct CacheFacts {
  std::string tiers;
  std::string recipe = "int8";
  std::string model = "a model";
};

inline Result<std::unique_ptr<KvCache>> try_cache(const CacheFacts& facts) {
  KvCacheConfig config = config_of(facts.recipe, kBlockSize);
  config.max_sequences = 1;
  config.max_tokens_per_sequence = kNumTokens;
  config.prefix = {true, cache::HashAlgorithm::kSha256, facts.model};
  config.tiers = tier::parse_tiers(facts.tiers).value();
  // Where a test names no timeout, none is its subject: a machine may stall.
  const bool names_timeout = facts.tiers.find("timeout=") != std::string::npos;
  for (tier::TierConfig& tier : config.tiers) {
    if (!names_timeout) tier.timeout_ms = 60'000;
  }
  return KvCache::create(std::move(config), context());
}

inline std::unique_ptr<KvCache> cache_of(const CacheFacts& facts) {
  auto cache = try_cache(facts);
  EXPECT_TRUE(cache.ok()) << cache.error().message;
  return std::move(cache).value();
}

// A sequence of stream `seed` comes, computes what is not found, and goes; what its last block
// gave.
inline std::vector<float> come_and_go(KvCache& cache, int seed, int64_t& num_found,
                                      const cache::PrefixKeys& keys = {}) {
  const std::vector<int32_t> ids = token_ids(1000 * seed);
  const Result<int> sequence = cache.create_sequence_from(keys, ids);
  EXPECT_TRUE(sequence.ok()) << sequence.error().message;
  num_found = cache.num_tokens(sequence.value());
  const Stream stream(kNumTokens, seed);
  const int first = static_cast<int>(num_found);
  if (first < kNumFound) feed(cache, sequence.value(), stream, first, kNumFound, 1000);
  const auto out = feed(cache, sequence.value(), stream, kNumFound, kNumTokens, 1000);
  EXPECT_TRUE(
      cache.record_tokens(sequence.value(), std::span(ids).subspan(static_cast<size_t>(first)))
          .ok());
  EXPECT_TRUE(cache.free_sequence(sequence.value()).ok());
  return out;
}

inline int64_t num_found(KvCache& cache, int seed, const cache::PrefixKeys& keys = {}) {
  int64_t found = 0;
  come_and_go(cache, seed, found, keys);
  return found;
}

}  // namespace kvx::kv
