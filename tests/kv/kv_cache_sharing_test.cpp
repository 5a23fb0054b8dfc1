// Sharing in the assembled cache: forks, cuts, partial acceptance and prefix hits give the bytes
// that a sequence of its own would have.
#include <gtest/gtest.h>

#include "tests/kv/stream.hpp"

namespace kvx::kv::kv_cache_sharing_test {
namespace {

constexpr int kBlockSize = 16;

std::unique_ptr<KvCache> shared_cache(std::string_view recipe, std::vector<int> windows = {}) {
  KvCacheConfig config = config_of(recipe, kBlockSize);
  config.geometry.layer_windows = std::move(windows);
  config.max_sequences = 4;
  config.prefix.is_on = true;
  return created(std::move(config));
}

// The stream's token ids: any numbers, equal where the rows are equal.
std::vector<int32_t> token_ids(int count, int32_t first = 0) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

// Feeds tokens [first, last) and records them.
std::vector<float> feed_and_record(KvCache& cache, int sequence, const Stream& stream, int first,
                                   int last) {
  std::vector<float> out = feed(cache, sequence, stream, first, last, 1000);
  const std::vector<int32_t> ids = token_ids(last - first, first);
  const Status recorded = cache.record_tokens(sequence, ids);
  EXPECT_TRUE(recorded.ok()) << recorded.error().message;
  return out;
}

std::vector<float> outputs_of_its_own(std::string_view recipe, const Stream& stream, int first,
                                      int last, std::vector<int> windows = {}) {
  auto cache = shared_cache(recipe, std::move(windows));
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, first, 1000);
  return feed(*cache, sequence, stream, first, last, 1000);
}

// A stream that has the first num_common tokens of another, then its own.
Stream branch_of(const Stream& stream, int num_common, int num_tokens, uint32_t seed) {
  Stream branch(num_tokens, seed);
  const auto copy = [num_common](const std::vector<float>& from, std::vector<float>& to,
                                 int heads) {
    std::copy_n(from.begin(), static_cast<size_t>(num_common) * heads * kHeadDim, to.begin());
  };
  copy(stream.q, branch.q, kNumQHeads);
  copy(stream.k, branch.k, kNumKvHeads);
  copy(stream.v, branch.v, kNumKvHeads);
  return branch;
}

constexpr const char* kRecipes[] = {"bf16", "int8/int4", "nvfp4:immediate", "nvfp4:auto",
                                    "int4:sink=10,recent=40,full_precision=f16"};

TEST(Fork, IsBitwiseASequenceOfItsOwn) {
  const Stream stream(130);
  for (const char* recipe : kRecipes) {
    for (int fork_at : {0, 16, 41, 100}) {
      auto cache = shared_cache(recipe);
      const int one = cache->create_sequence().value();
      feed(*cache, one, stream, 0, fork_at, 1000);
      const int two = cache->fork_sequence(one).value();
      EXPECT_EQ(cache->num_tokens(two), fork_at);
      // Both write, in turns; each sees its own tokens alone.
      const Stream branch = branch_of(stream, fork_at, 130, 7);
      const auto out_two = feed(*cache, two, branch, fork_at, 130, 1000);
      const auto out_one = feed(*cache, one, stream, fork_at, 130, 1000);
      EXPECT_EQ(out_one, outputs_of_its_own(recipe, stream, fork_at, 130)) << recipe << fork_at;
      EXPECT_EQ(out_two, outputs_of_its_own(recipe, branch, fork_at, 130)) << recipe << fork_at;
    }
  }
}

TEST(Fork, SharesFullBlocksAndCopiesOnlyTheOpenOne) {
  const Stream stream(60);
  auto cache = shared_cache("bf16");
  const int one = cache->create_sequence().value();
  feed(*cache, one, stream, 0, 40, 1000);
  const int64_t used = cache->snapshot().classes[0].num_active;
  const int two = cache->fork_sequence(one).value();
  EXPECT_EQ(cache->snapshot().classes[0].num_active, used);
  feed(*cache, two, stream, 40, 41, 1);
  EXPECT_EQ(cache->snapshot().classes[0].num_active, used + 1);
  ASSERT_TRUE(cache->free_sequence(one).ok());
  ASSERT_TRUE(cache->free_sequence(two).ok());
  EXPECT_EQ(cache->snapshot().classes[0].num_active, 0);
}

TEST(Truncate, IsBitwiseAsIfTheTokensHadNeverCome) {
  const Stream stream(130);
  for (const char* recipe : kRecipes) {
    const bool has_full_precision_window = parse_recipe(recipe).value().has_full_precision_window;
    for (int cut : {37, 90, 96, 100}) {
      // With full-precision window bit for bit as long as no block left the window for the tokens
      // that go.
      if (has_full_precision_window && cut < 96) continue;
      auto cache = shared_cache(recipe);
      const int sequence = cache->create_sequence().value();
      feed_and_record(*cache, sequence, stream, 0, 104);
      const Status status = cache->truncate_sequence(sequence, cut);
      ASSERT_TRUE(status.ok()) << recipe << ": " << status.error().message;
      const Stream branch = branch_of(stream, cut, 130, 9);
      EXPECT_EQ(feed(*cache, sequence, branch, cut, 130, 1000),
                outputs_of_its_own(recipe, branch, cut, 130))
          << recipe << " cut to " << cut;
    }
  }
}

TEST(Truncate, ReachesBackAsFarAsTheWindowDoes) {
  const Stream stream(130);
  for (const char* recipe : {"nvfp4:auto", "int8:sink=10,recent=40"}) {
    auto cache = shared_cache(recipe);
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 104, 1000);
    ASSERT_TRUE(cache->truncate_sequence(sequence, 90).ok()) << recipe;
    // A block that had left the window by token 104 stays packed; the rows of others are exact.
    EXPECT_LT(relative_rms(feed(*cache, sequence, stream, 90, 130, 1000),
                           outputs_of_its_own(recipe, stream, 90, 130)),
              0.15)
        << recipe;
  }
}

TEST(Truncate, LeavesWhatThePrefixIndexHoldsAsItIs) {
  const Stream stream(64);
  auto cache = shared_cache("int8");
  const int one = cache->create_sequence().value();
  feed_and_record(*cache, one, stream, 0, 64);
  ASSERT_TRUE(cache->truncate_sequence(one, 40).ok());  // cuts a block that can be found
  feed(*cache, one, branch_of(stream, 40, 64, 5), 40, 64, 1000);
  const int two = cache->create_sequence_from({}, token_ids(65)).value();
  EXPECT_EQ(cache->num_tokens(two), 64);
  std::vector<float> k(64 * kNumKvHeads * kHeadDim), expected(k.size());
  ASSERT_TRUE(
      gather(*cache, two, 0, 0, 64, dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim), {})
          .ok());
  auto own = shared_cache("int8");
  const int sequence = own->create_sequence().value();
  feed(*own, sequence, stream, 0, 64, 1000);
  ASSERT_TRUE(gather(*own, sequence, 0, 0, 64,
                     dense_rows(expected.data(), DType::kF32, kNumKvHeads, kHeadDim), {})
                  .ok());
  EXPECT_EQ(k, expected);
}

TEST(Truncate, RefusesACutInsideAPackedBlock) {
  const Stream stream(130);
  auto cache = shared_cache("int4:sink=10,recent=40");
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 130, 1000);
  const Status refused = cache->truncate_sequence(sequence, 50);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(cache->num_tokens(sequence), 130);
  EXPECT_TRUE(cache->truncate_sequence(sequence, 48).ok());  // whole blocks may go
}

TEST(Truncate, RefusesACutInsideAPageThatMayHaveGrownAndAForkSavesIt) {
  const Stream stream(60);
  const char* recipe = "int8:source=page,immediate";
  auto cache = shared_cache(recipe);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 40, 1000);
  const int saved = cache->fork_sequence(sequence).value();  // before a speculative append
  feed(*cache, sequence, stream, 40, 44, 1000);
  const Status refused = cache->truncate_sequence(sequence, 40);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("shared scale"), std::string::npos);
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  const Stream branch = branch_of(stream, 40, 60, 3);
  EXPECT_EQ(feed(*cache, saved, branch, 40, 60, 1000), outputs_of_its_own(recipe, branch, 40, 60));
}

TEST(PartialAcceptance, KeepsTheFirstTokensOfAStep) {
  const Stream stream(60);
  for (const char* recipe : kRecipes) {
    auto cache = shared_cache(recipe);
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 40, 1000);
    const Stream guess = branch_of(stream, 42, 60, 8);  // two of five guesses are right
    const StepEntry entry{sequence, 5};
    ASSERT_TRUE(cache->begin_step({&entry, 1}).ok());
    std::vector<float> out(5 * kNumQHeads * kHeadDim);
    for (int layer = 0; layer < kNumLayers; ++layer) {
      ASSERT_TRUE(append_and_attend(*cache, 5, layer, params(), guess.rows(guess.q, kNumQHeads, 40),
                                    guess.rows(guess.k, kNumKvHeads, 40),
                                    guess.rows(guess.v, kNumKvHeads, 40),
                                    dense_rows(out.data(), DType::kF32, kNumQHeads, kHeadDim))
                      .ok());
    }
    const int too_many = 6;
    EXPECT_FALSE(cache->end_step({&too_many, 1}).ok());
    const int kept = 2;
    ASSERT_TRUE(cache->end_step({&kept, 1}).ok());
    EXPECT_EQ(cache->num_tokens(sequence), 42);
    EXPECT_EQ(feed(*cache, sequence, stream, 42, 60, 1000),
              outputs_of_its_own(recipe, stream, 42, 60))
        << recipe;
  }
}

TEST(Prefix, AHitIsBitwiseARecomputationWithImmediateAppend) {
  const Stream stream(120);
  for (const char* recipe : {"bf16", "int8/int4", "nvfp4:immediate", "fp8_e4m3"}) {
    auto cache = shared_cache(recipe);
    const int one = cache->create_sequence().value();
    feed_and_record(*cache, one, stream, 0, 90);
    const Stream branch = branch_of(stream, 80, 120, 4);
    std::vector<int32_t> wanted = token_ids(120);
    for (int t = 80; t < 120; ++t) wanted[t] += 1000;
    const int two = cache->create_sequence_from({}, wanted).value();
    ASSERT_EQ(cache->num_tokens(two), 80) << recipe;  // while the first is still in use
    EXPECT_EQ(feed(*cache, two, branch, 80, 120, 1000), outputs_of_its_own(recipe, branch, 80, 120))
        << recipe;
  }
}

TEST(Prefix, AContinuationIsBitwiseARecomputationWithFullPrecisionWindow) {
  const Stream stream(150);
  for (const char* recipe : {"nvfp4:auto", "int4:sink=10,recent=40"}) {
    auto cache = shared_cache(recipe);
    const int one = cache->create_sequence().value();
    feed_and_record(*cache, one, stream, 0, 112);  // seven blocks; the last ones are full-precision
    ASSERT_TRUE(cache->free_sequence(one).ok());
    const int two = cache->create_sequence_from({}, token_ids(150)).value();
    ASSERT_EQ(cache->num_tokens(two), 112) << recipe;
    EXPECT_EQ(feed(*cache, two, stream, 112, 150, 1000),
              outputs_of_its_own(recipe, stream, 112, 150))
        << recipe;
  }
}

TEST(Prefix, ABranchWithFullPrecisionWindowIsCloseToARecomputation) {
  // The branch leaves before the first one's window: its last blocks are cached packed.
  const Stream stream(160);
  auto cache = shared_cache("int8:sink=10,recent=40");
  const int one = cache->create_sequence().value();
  feed_and_record(*cache, one, stream, 0, 160);
  ASSERT_TRUE(
      cache->clear_prefixes().ok());  // full-precision blocks that were left behind on the way
  ASSERT_TRUE(cache->free_sequence(one).ok());
  const int again = cache->create_sequence().value();
  feed(*cache, again, stream, 0, 160, 1000);
  ASSERT_TRUE(cache->record_tokens(again, token_ids(160)).ok());  // packed ones alone
  const Stream branch = branch_of(stream, 64, 100, 4);
  std::vector<int32_t> wanted = token_ids(100);
  for (int t = 64; t < 100; ++t) wanted[t] += 1000;
  const int two = cache->create_sequence_from({}, wanted).value();
  ASSERT_EQ(cache->num_tokens(two), 64);
  EXPECT_LT(relative_rms(feed(*cache, two, branch, 64, 100, 1000),
                         outputs_of_its_own("int8:sink=10,recent=40", branch, 64, 100)),
            0.02);
}

TEST(Prefix, WindowsOfSomeLayersChangeNothing) {
  const Stream stream(120);
  for (const char* recipe : {"bf16", "int8", "nvfp4:auto"}) {
    auto cache = shared_cache(recipe, {0, 30});
    const int one = cache->create_sequence().value();
    feed_and_record(*cache, one, stream, 0, 96);
    ASSERT_TRUE(cache->free_sequence(one).ok());
    const int two = cache->create_sequence_from({}, token_ids(120)).value();
    ASSERT_EQ(cache->num_tokens(two), 96) << recipe;
    EXPECT_EQ(feed(*cache, two, stream, 96, 120, 1000),
              outputs_of_its_own(recipe, stream, 96, 120, {0, 30}))
        << recipe;
  }
}

TEST(Prefix, ATenantNeverSeesAnothersBlocks) {
  const Stream stream(64);
  KvCacheConfig config = config_of("int8", kBlockSize);
  config.prefix = {true, cache::HashAlgorithm::kSha256, "model"};
  auto cache = created(config);
  const int one = cache->create_sequence_from({"", "", "alice"}, {}).value();
  feed_and_record(*cache, one, stream, 0, 64);
  ASSERT_TRUE(cache->free_sequence(one).ok());
  const int other = cache->create_sequence_from({"", "", "bob"}, token_ids(64)).value();
  EXPECT_EQ(cache->num_tokens(other), 0);
  ASSERT_TRUE(cache->free_sequence(other).ok());
  const int same = cache->create_sequence_from({"", "", "alice"}, token_ids(64)).value();
  EXPECT_EQ(cache->num_tokens(same), 48);  // the last token is left to compute
}

TEST(Prefix, TenantsNeedSha256) {
  auto cache = shared_cache("int8");
  const auto refused = cache->create_sequence_from({"", "", "alice"}, {});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().message,
            "tenant is 'alice' and the hash is xxh3; expected sha256 where tenants share");
  EXPECT_EQ(cache->snapshot().num_sequences, 0);
}

TEST(Prefix, EventsTellWhatComesAndGoes) {
  const Stream stream(200);
  KvCacheConfig config = config_of("int8", kBlockSize);
  config.max_tokens_per_sequence = 64;
  config.max_sequences = 1;  // five blocks in all
  config.prefix.is_on = true;
  auto cache = created(config);
  std::vector<std::pair<cache::PrefixEvent::Kind, int32_t>> events;  // with the first token
  cache->set_prefix_listener([&](const cache::PrefixEvent& event) {
    events.emplace_back(event.kind, event.tokens.empty() ? -1 : event.tokens[0]);
  });
  const int one = cache->create_sequence().value();
  feed_and_record(*cache, one, stream, 0, 48);
  ASSERT_TRUE(cache->free_sequence(one).ok());
  const int two = cache->create_sequence().value();
  feed(*cache, two, stream, 0, 48, 1000);  // takes the free blocks and evicts the chain's last
  using Kind = cache::PrefixEvent::Kind;
  const std::vector<std::pair<Kind, int32_t>> expected = {
      {Kind::kStored, 0}, {Kind::kStored, 16}, {Kind::kStored, 32}, {Kind::kRemoved, 32}};
  EXPECT_EQ(events, expected);
  const KvCacheSnapshot seen = cache->snapshot();
  EXPECT_EQ(seen.classes[0].num_evicted, 1);
  EXPECT_EQ(seen.classes[0].num_cached, 2);
  ASSERT_TRUE(cache->clear_prefixes().ok());
  EXPECT_EQ(events.back().first, Kind::kAllCleared);
  EXPECT_EQ(cache->snapshot().classes[0].num_cached, 0);
}

// A block that two chains name would be served for tokens that it does not hold.
TEST(Prefix, SequencesThatShareABlockCannotRecordOtherTokensForIt) {
  for (const char* recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    const Stream stream(60);
    auto cache = shared_cache(recipe);
    const int first = cache->create_sequence().value();
    feed_and_record(*cache, first, stream, 0, 16);
    feed(*cache, first, stream, 16, 60, 1000);
    const int fork = cache->fork_sequence(first).value();
    const int late = cache->fork_sequence(first).value();
    ASSERT_TRUE(cache->record_tokens(first, token_ids(44, 16)).ok());
    std::vector<int32_t> others = token_ids(44, 16);
    others[20] = 7000;  // of the second of these blocks
    const Status refused = cache->record_tokens(fork, others);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(refused.error().message.find("block 2 "), std::string::npos)
        << refused.error().message;
    EXPECT_TRUE(cache->record_tokens(fork, token_ids(44, 16)).ok()) << "nothing was recorded";
    // Known only by its end: the blocks before are compared too.
    ASSERT_TRUE(cache->record_tokens(late, token_ids(16, 16)).ok());
    others = token_ids(28, 32);
    others[0] = 7000;
    EXPECT_FALSE(cache->record_tokens(late, others).ok());
    for (const int sequence : {first, fork, late}) {
      ASSERT_TRUE(cache->free_sequence(sequence).ok());
    }
    const int found = cache->create_sequence_from({}, token_ids(60)).value();
    EXPECT_EQ(cache->num_tokens(found), 48);
  }
}

TEST(Prefix, AStepThatFindsNoBlocksChangesNothing) {
  const Stream stream(64);
  KvCacheConfig config = config_of("int8", kBlockSize);
  config.max_sequences = 2;
  config.memory_budget_bytes = 1;
  const auto needs = KvCache::create(config, context());
  ASSERT_FALSE(needs.ok());
  config.memory_budget_bytes = 0;
  config.max_tokens_per_sequence = 64;
  auto cache = created(config);
  const int one = cache->create_sequence().value();
  feed(*cache, one, stream, 0, 40, 1000);
  const int fork = cache->fork_sequence(one).value();
  const KvCacheSnapshot before = cache->snapshot();
  const StepEntry entry{fork, 25};  // beyond the sequence
  EXPECT_FALSE(cache->begin_step({&entry, 1}).ok());
  EXPECT_EQ(cache->snapshot().classes[0].num_active, before.classes[0].num_active);
  EXPECT_EQ(feed(*cache, fork, stream, 40, 64, 1000).size(), 24u * kNumQHeads * kHeadDim);
}

}  // namespace
}  // namespace kvx::kv::kv_cache_sharing_test
