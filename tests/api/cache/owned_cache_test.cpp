// Caches that own their memory: steps, attention, gather, and misuse.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

// A step of one sequence with the same rows in every layer; gives the last layer's output.
std::vector<float> step(api::Cache& cache, int32_t sequence, const std::vector<float>& q,
                        const std::vector<float>& k, const std::vector<float>& v) {
  begin(cache, sequence, static_cast<int32_t>(k.size()) / (kOwnedHeads * kOwnedDim));
  std::vector<float> out = step_layers(cache, q, k, v);
  EXPECT_TRUE(cache.end_step().ok()) << kvx_last_error();
  return out;
}

TEST(OwnedCache, AttendsToWhatItsStepsAppended) {
  const kvx_cache_config_t config = owned_config("f32");
  auto cache = api::Cache::create(config);
  ASSERT_TRUE(cache.ok()) << kvx_last_error();
  const int32_t sequence = *cache->create_sequence();
  std::vector<float> all_k;
  std::vector<float> all_v;
  for (int t = 0; t < 20; ++t) {
    const std::vector<float> k = test_rows(1, 2, 32, static_cast<float>(t));
    const std::vector<float> v = test_rows(1, 2, 32, static_cast<float>(t) + 0.5f);
    const std::vector<float> q = test_rows(1, kQHeads, 32, static_cast<float>(t) + 0.7f);
    all_k.insert(all_k.end(), k.begin(), k.end());
    all_v.insert(all_v.end(), v.begin(), v.end());
    const std::vector<float> out = step(*cache, sequence, q, k, v);
    ASSERT_LT(
        largest_difference(out, plain_attention(q, all_k, all_v, 1, t + 1, kQHeads, Geometry{})),
        2e-5)
        << t;
  }
  int64_t num_tokens = 0;
  int64_t max_step = 0;
  ASSERT_EQ(kvx_sequence_tokens(cache->handle(), sequence, &num_tokens, &max_step), KVX_STATUS_OK);
  EXPECT_EQ(num_tokens, 20);
  EXPECT_EQ(max_step, 44);

  std::vector<float> k(5 * 64);
  const kvx_rows_t rows = api::rows(k.data(), KVX_DTYPE_F32);
  ASSERT_EQ(kvx_sequence_gather(cache->handle(), sequence, 1, 7, 5, &rows, nullptr), KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(k, std::vector<float>(all_k.begin() + 7 * 64, all_k.begin() + 12 * 64));
}

TEST(OwnedCache, TakesRecipesWithFullPrecisionWindowAndThreads) {
  kvx_cache_config_t config = owned_config("int4:k.hadamard,sink=8,recent=16");
  config.num_threads = 2;
  auto cache = api::Cache::create(config);
  ASSERT_TRUE(cache.ok()) << kvx_last_error();
  const int32_t sequence = *cache->create_sequence();
  for (int t = 0; t < 40; ++t) {
    const std::vector<float> rows = test_rows(1, 2, 32, static_cast<float>(t));
    step(*cache, sequence, test_rows(1, kQHeads, 32, 1.0f), rows, rows);
  }
  EXPECT_TRUE(cache->free_sequence(sequence).ok());
}

TEST(OwnedCache, TakesAPromptOfManyBlocksInOneStepWithAFullPrecisionWindow) {
  constexpr int kPrompt = 100;
  constexpr int kBlock = 16;
  kvx_cache_config_t config = owned_config("int8:auto");
  config.block_size = kBlock;
  config.max_tokens_per_sequence = 200;
  const auto rows = [](int heads, int first, int count, float seed) {
    const std::vector<float> all = test_rows(kPrompt, heads, 32, seed);
    return std::vector<float>(all.begin() + first * heads * 32,
                              all.begin() + (first + count) * heads * 32);
  };
  const auto run = [&](api::Cache& cache, int32_t sequence, int first, int count) {
    return step(cache, sequence, rows(kQHeads, first, count, 1.0f), rows(2, first, count, 2.0f),
                rows(2, first, count, 3.0f));
  };
  auto at_once = api::Cache::create(config);
  auto by_blocks = api::Cache::create(config);
  ASSERT_TRUE(at_once.ok() && by_blocks.ok()) << kvx_last_error();
  const int32_t one = *at_once->create_sequence();
  const int32_t two = *by_blocks->create_sequence();
  int64_t num_tokens = 0;
  int64_t max_step = 0;
  ASSERT_EQ(kvx_sequence_tokens(at_once->handle(), one, &num_tokens, &max_step), KVX_STATUS_OK);
  EXPECT_EQ(max_step, 200);
  std::vector<float> expected;
  for (int first = 0; first < kPrompt; first += kBlock) {
    const auto some = run(*by_blocks, two, first, std::min(kBlock, kPrompt - first));
    expected.insert(expected.end(), some.begin(), some.end());
  }
  EXPECT_EQ(run(*at_once, one, 0, kPrompt), expected);
}

TEST(OwnedCache, GivesSequencesOutAndTakesThemBack) {
  kvx_cache_config_t config = owned_config("int8");
  config.max_sequences = 2;
  auto cache = api::Cache::create(config);
  ASSERT_TRUE(cache.ok());
  const int32_t first = *cache->create_sequence();
  ASSERT_TRUE(cache->create_sequence().ok());
  const auto third = cache->create_sequence();
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.failure().status, KVX_STATUS_OUT_OF_RANGE);
  EXPECT_TRUE(cache->free_sequence(first).ok());
  EXPECT_FALSE(cache->free_sequence(first).ok());
  const auto again = cache->create_sequence();
  ASSERT_TRUE(again.ok());
  EXPECT_NE(*again, first) << "a sequence's number is not given twice";
  EXPECT_FALSE(cache->free_sequence(first).ok());
  EXPECT_TRUE(cache->free_sequence(*again).ok());
}

TEST(OwnedCache, RefusesConfigurationsThatCannotBe) {
  const auto refused = [](auto change, kvx_status_t status = KVX_STATUS_INVALID_ARGUMENT) {
    kvx_cache_config_t config = owned_config("int8");
    change(config);
    kvx_cache_t cache = nullptr;
    EXPECT_EQ(kvx_cache_create(&config, &cache), status) << kvx_last_error();
    EXPECT_EQ(cache, nullptr);
    EXPECT_STRNE(kvx_last_error(), "");
  };
  refused([](auto& config) { config.recipe = nullptr; });
  refused([](auto& config) { config.recipe = "int9"; });
  refused([](auto& config) { config.num_layers = 0; });
  refused([](auto& config) { config.num_layers = UINT32_MAX; });
  refused([](auto& config) { config.num_kv_heads = 0; });
  refused([](auto& config) { config.k_head_dim = 0; });
  refused([](auto& config) { config.k_head_dim = UINT32_MAX; });
  refused([](auto& config) { config.v_head_dim = 4096; });
  refused([](auto& config) { config.v_head_dim = 0; });  // attention needs one
  refused([](auto& config) { config.block_size = 4096; });
  refused([](auto& config) { config.max_sequences = 0; });
  refused([](auto& config) { config.max_tokens_per_sequence = -1; });
  refused([](auto& config) { config.size = 0; });
  refused([](auto& config) { config.memory_budget_bytes = 100; }, KVX_STATUS_OUT_OF_RANGE);
  const kvx_cache_config_t config = owned_config("int8");
  EXPECT_EQ(kvx_cache_create(&config, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  kvx_cache_t cache = nullptr;
  EXPECT_EQ(kvx_cache_create(nullptr, &cache), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(OwnedCache, ALayerThatIsRefusedHasWrittenNothing) {
  // A page's scale would grow for louder rows, and stay so.
  const std::vector<float> rows = test_rows(3, kOwnedHeads, kOwnedDim, 1.0f);
  const std::vector<float> q = test_rows(3, kQHeads, kOwnedDim, 2.0f);
  std::vector<float> loud = rows;
  for (float& x : loud) x *= 100;
  std::vector<float> out(q.size());
  const kvx_rows_t loud_rows = api::rows(loud.data(), KVX_DTYPE_F32);
  const kvx_rows_t q_rows = api::rows(q.data(), KVX_DTYPE_F32);
  const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
  const auto gathered = [&](bool tries_others) {
    auto cache = api::Cache::create(owned_config("int8:source=page,immediate"));
    EXPECT_TRUE(cache.ok()) << kvx_last_error();
    const int32_t sequence = *cache->create_sequence();
    begin(*cache, sequence, 3);
    auto args = sized<kvx_step_layer_args_t>();
    args.q = &q_rows;
    args.k = args.v = &loud_rows;
    args.out = &out_rows;
    for (const auto& spoil : std::vector<std::function<void(kvx_step_layer_args_t&)>>{
             [](auto& a) { a.num_q_heads = 3; }, [](auto& a) { a.softcap = -1; },
             [](auto& a) { a.softcap = NAN; }, [](auto& a) { a.softmax_scale = INFINITY; }}) {
      args.num_q_heads = kQHeads;
      args.softcap = args.softmax_scale = 0;
      spoil(args);
      if (tries_others) {
        EXPECT_FALSE(cache->step_layer(args).ok());
      }
    }
    step_layers(*cache, q, rows, rows);
    EXPECT_TRUE(cache->end_step().ok());
    std::vector<float> k(rows.size());
    const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
    EXPECT_EQ(kvx_sequence_gather(cache->handle(), sequence, 0, 0, 3, &k_rows, nullptr),
              KVX_STATUS_OK);
    return k;
  };
  EXPECT_EQ(gathered(true), gathered(false));
}

TEST(OwnedCache, AStepEndsWhenEveryLayerHasItsRows) {
  auto cache = api::Cache::create(owned_config("int8"));
  ASSERT_TRUE(cache.ok());
  const int32_t sequence = *cache->create_sequence();
  begin(*cache, sequence, 1);
  const std::vector<float> rows = test_rows(1, kQHeads, kOwnedDim, 1.0f);
  std::vector<float> out(rows.size());
  const kvx_rows_t in = api::rows(rows.data(), KVX_DTYPE_F32);
  const kvx_rows_t result = api::rows(out.data(), KVX_DTYPE_F32);
  auto args = sized<kvx_step_layer_args_t>();
  args.num_q_heads = kQHeads;
  args.q = args.k = args.v = &in;
  args.out = &result;
  ASSERT_TRUE(cache->step_layer(args).ok()) << kvx_last_error();
  EXPECT_FALSE(cache->end_step().ok());
  EXPECT_STREQ(kvx_last_error(),
               "layer 1 has no rows of this step; expected rows for each of 2 layers");
  args.layer = 1;
  ASSERT_TRUE(cache->step_layer(args).ok()) << kvx_last_error();
  EXPECT_TRUE(cache->end_step().ok()) << kvx_last_error();
}

TEST(OwnedCache, ARangeThatAWindowHasLeftBehindIsRefused) {
  kvx_cache_config_t config = owned_config("int8");
  const int32_t windows[] = {0, 8};
  config.layer_windows = windows;
  auto cache = api::Cache::create(config);
  ASSERT_TRUE(cache.ok()) << kvx_last_error();
  const int32_t sequence = *cache->create_sequence();
  for (int t = 0; t < 40; ++t) {
    const std::vector<float> rows = test_rows(1, kOwnedHeads, kOwnedDim, 1.0f);
    step(*cache, sequence, test_rows(1, kQHeads, kOwnedDim, 1.0f), rows, rows);
  }
  std::vector<float> k(40 * 64);
  const kvx_rows_t rows = api::rows(k.data(), KVX_DTYPE_F32);
  EXPECT_EQ(kvx_sequence_gather(cache->handle(), sequence, 0, 0, 40, &rows, nullptr),
            KVX_STATUS_OK);
  EXPECT_EQ(kvx_sequence_gather(cache->handle(), sequence, 1, 0, 40, &rows, nullptr),
            KVX_STATUS_OUT_OF_RANGE);
  EXPECT_STREQ(kvx_last_error(),
               "40 tokens from 0 are wanted; the window of layer 1 has left tokens 0 to 7 behind");
  EXPECT_EQ(kvx_sequence_gather(cache->handle(), sequence, 1, 36, 4, &rows, nullptr),
            KVX_STATUS_OK);
  EXPECT_EQ(kvx_sequence_gather(cache->handle(), sequence, 0, 1, INT64_MAX, &rows, nullptr),
            KVX_STATUS_OUT_OF_RANGE);
}

TEST(OwnedCache, RefusesCallsOutOfOrderAndNullHandles) {
  auto cache = api::Cache::create(owned_config("int8"));
  ASSERT_TRUE(cache.ok());
  const int32_t sequence = *cache->create_sequence();
  EXPECT_FALSE(cache->end_step().ok());
  const std::vector<float> q = test_rows(1, kQHeads, 32, 0);
  const kvx_rows_t rows = api::rows(q.data(), KVX_DTYPE_F32);
  auto args = sized<kvx_step_layer_args_t>();
  args.num_q_heads = kQHeads;
  args.q = args.k = args.v = args.out = &rows;
  EXPECT_FALSE(cache->step_layer(args).ok()) << "no step is open";
  const int32_t twice[] = {sequence, sequence};
  const int32_t counts[] = {1, 1};
  EXPECT_FALSE(cache->begin_step(twice, counts).ok());
  const int32_t unknown[] = {1};
  const int32_t one[] = {1};
  EXPECT_FALSE(cache->begin_step(unknown, one).ok());
  const int32_t living[] = {sequence};
  ASSERT_TRUE(cache->begin_step(living, one).ok());
  args.layer = 2;
  EXPECT_FALSE(cache->step_layer(args).ok());
  args.layer = 0;
  args.k = nullptr;
  EXPECT_FALSE(cache->step_layer(args).ok());

  int32_t number = 0;
  int64_t count = 0;
  EXPECT_EQ(kvx_sequence_create(nullptr, &number), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_create(cache->handle(), nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_free(nullptr, 0), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_tokens(nullptr, 0, &count, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_tokens(cache->handle(), 7, &count, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_step_begin(nullptr, 0, nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_step_begin(cache->handle(), 1, nullptr, one), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_step_layer(nullptr, &args), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_step_end(nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_gather(nullptr, 0, 0, 0, 0, nullptr, nullptr),
            KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_gather(cache->handle(), sequence, 9, 0, 0, nullptr, nullptr),
            KVX_STATUS_INVALID_ARGUMENT);
  kvx_cache_free(nullptr);
}

}  // namespace
}  // namespace kvx::api_test
