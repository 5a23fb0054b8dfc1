// Hashes against published values, and what a chain of them must keep apart.
#include "cache/prefix/content_hash.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>
#include <vector>

namespace kvx::cache {
namespace {

TEST(ContentHash, IsXxh3AndSha256AsPublished) {
  EXPECT_EQ(hex(checksum({})), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hex(hash_scope(HashAlgorithm::kXxh3, "")), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hex(hash_scope(HashAlgorithm::kSha256, "abc")), "ba7816bf8f01cfea414140de5dae2223");
}

TEST(ContentHash, AChainIsTheHashOfItsBytes) {
  // [parent: 16 bytes][1, 2 as little-endian int32]
  const ContentHash parent = checksum({});
  std::string bytes(parent.bytes.begin(), parent.bytes.end());
  bytes += std::string("\x01\0\0\0\x02\0\0\0", 8);
  const std::vector<int32_t> tokens = {1, 2};
  for (HashAlgorithm algorithm : {HashAlgorithm::kXxh3, HashAlgorithm::kSha256}) {
    EXPECT_EQ(hash_block(algorithm, parent, tokens), hash_scope(algorithm, bytes));
  }
}

RC_GTEST_PROP(ContentHash, ABlockDependsOnEveryTokenBeforeIt, ()) {
  const auto tokens = *rc::gen::nonEmpty(rc::gen::arbitrary<std::vector<int32_t>>());
  const auto changed_at = *rc::gen::inRange<size_t>(0, tokens.size());
  std::vector<int32_t> others = tokens;
  others[changed_at] ^= 1;
  for (HashAlgorithm algorithm : {HashAlgorithm::kXxh3, HashAlgorithm::kSha256}) {
    ContentHash one = hash_scope(algorithm, "scope");
    ContentHash two = one;
    for (size_t i = 0; i < tokens.size(); ++i) {  // blocks of one token
      one = hash_block(algorithm, one, std::span(&tokens[i], 1));
      two = hash_block(algorithm, two, std::span(&others[i], 1));
      RC_ASSERT((one == two) == (i < changed_at));
    }
  }
}

RC_GTEST_PROP(ContentHash, DifferentKeysAreDifferentScopes, ()) {
  // Few letters, so that keys run into each other where nothing separates them.
  const auto text = rc::gen::container<std::string>(rc::gen::element('1', ':', '\n'));
  std::vector<PrefixKeys> keys(2);
  for (PrefixKeys& one : keys) one = {*text, *text, *text};
  RC_ASSERT((scope_of("cache", keys[0]) == scope_of("cache", keys[1])) == (keys[0] == keys[1]));
  RC_ASSERT(scope_of("cache", keys[0]) != scope_of("another", keys[0]));
}

TEST(ContentHash, EveryNameNamesItsAlgorithm) {
  for (HashAlgorithm algorithm : {HashAlgorithm::kXxh3, HashAlgorithm::kSha256}) {
    EXPECT_EQ(hash_named(name_of(algorithm)), algorithm);
  }
  EXPECT_EQ(hash_named("md5"), std::nullopt);
}

}  // namespace
}  // namespace kvx::cache
