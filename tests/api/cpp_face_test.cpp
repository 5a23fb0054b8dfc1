// The C++ face: results, layers of an engine's pages, executors, sequences and steps that own what
// they hold.
#include "tests/api/caller_layer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

TEST(CppFace, ResultsGiveTheirValueOrAnother) {
  const api::Result<int> seven = 7;
  const api::Result<int> failed = api::Failure{KVX_STATUS_UNSUPPORTED, "no such thing"};
  EXPECT_EQ(seven.value(), 7);
  EXPECT_EQ(seven.value_or(1), 7);
  EXPECT_EQ(failed.value_or(1), 1);
  try {
    (void)failed.value();
    FAIL() << "nothing was thrown";
  } catch (const api::Error& error) {
    EXPECT_STREQ(error.what(), "no such thing");
    EXPECT_EQ(error.status, KVX_STATUS_UNSUPPORTED);
  }
}

TEST(CppFace, ReportsVersionFeaturesAndFormats) {
  EXPECT_EQ(api::version().value().abi_minor, uint32_t{KVX_ABI_VERSION_MINOR});
  EXPECT_TRUE(api::features().value().formats >> KVX_FORMAT_NVFP4 & 1);
  EXPECT_EQ(api::format_info({KVX_FORMAT_INT8}, 64).value().code_bytes_per_row, 64u);
  EXPECT_THAT(api::format_info({KVX_FORMAT_NVFP4}, 40).failure().text,
              HasSubstr("head_dim is 40; nvfp4 needs a multiple of 16"));
}

TEST(CppFace, RecipesTellTheirFormatsAndTheirCost) {
  const api::Recipe plain = api::Recipe::parse("int8/int4", 64).value();
  EXPECT_EQ(plain.info().k_format, uint32_t{KVX_FORMAT_INT8});
  EXPECT_EQ(plain.info().v_format, uint32_t{KVX_FORMAT_INT4});
  EXPECT_FALSE(plain.has_window());
  const auto k = api::format_info({KVX_FORMAT_INT8}, 64).value();
  const auto v = api::format_info({KVX_FORMAT_INT4}, 64).value();
  const uint64_t token =
      k.code_bytes_per_row + k.scale_bytes_per_row + v.code_bytes_per_row + v.scale_bytes_per_row;
  EXPECT_EQ(plain.bytes(100), 100 * token);

  const api::Recipe window = api::Recipe::parse("nvfp4:k.hadamard,sink=16,recent=64", 64).value();
  EXPECT_EQ(window.info().k_has_hadamard, 1u);
  EXPECT_EQ(window.info().v_has_hadamard, 0u);
  EXPECT_EQ(window.info().sink_tokens, 16u);
  EXPECT_EQ(window.info().recent_tokens, 64u);
  EXPECT_EQ(window.info().window_bytes_per_token, 2u * 64 * 2);
  EXPECT_EQ(window.bytes(100), 80 * 256 + 20 * window.info().bytes_per_token);
  EXPECT_EQ(window.bytes(10), 10u * 256);

  EXPECT_THAT(api::Recipe::parse("int9", 64).failure().text, HasSubstr("int9"));
  EXPECT_THAT(api::Recipe::parse("nvfp4", 40).failure().text, HasSubstr("multiple of 16"));
}

TEST(CppFace, RecipeInfoIsWrittenAsFarAsTheCallerHasRoom) {
  auto info = sized<kvx_recipe_info_t>();
  info.size = 8;
  info.v_format = 99;
  ASSERT_EQ(kvx_recipe_info("int8", 64, 64, &info), KVX_STATUS_OK);
  EXPECT_EQ(info.size, 8u);
  EXPECT_EQ(info.k_format, uint32_t{KVX_FORMAT_INT8});
  EXPECT_EQ(info.v_format, 99u);
  EXPECT_EQ(kvx_recipe_info(nullptr, 64, 64, &info), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_recipe_info("int8", 64, 64, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  info.size = 0;
  EXPECT_EQ(kvx_recipe_info("int8", 64, 64, &info), KVX_STATUS_INVALID_ARGUMENT);
}

// An engine's pages with a batch of sequences in them.
struct EnginePages {
  static constexpr uint32_t kBlockSize = 16, kKvHeads = 2, kDim = 64, kQHeads = 4;

  explicit EnginePages(const api::Format& k, const api::Format& v, int num_blocks = 8)
      : pages{kBlockSize, kDim, k, v},
        memory(api::page_bytes_per_token(pages).value() * kBlockSize * kKvHeads * num_blocks),
        layer(api::Layer::of_pages(pages, memory.data(), num_blocks, kKvHeads).value()) {}

  api::AppendArgs rows(const std::vector<float>& k, const std::vector<int64_t>& slots) const {
    api::AppendArgs args;
    args.k = args.v = api::rows(k.data());
    args.slots = slots;
    return args;
  }
  api::AttendArgs attention(const std::vector<float>& q, std::vector<float>& out) const {
    api::AttendArgs args;
    args.num_q_heads = kQHeads;
    args.q = api::rows(q.data());
    args.out = api::rows(out.data());
    return args;
  }

  api::Pages pages;
  std::vector<uint8_t> memory;
  api::Layer layer;
};

std::vector<int64_t> slots_from(int64_t first, int count) {
  std::vector<int64_t> slots;
  for (int i = 0; i < count; ++i) slots.push_back(first + i);
  return slots;
}

TEST(CppFace, AppendsGathersAndAttendsOverAnEnginesPages) {
  const EnginePages engine({KVX_FORMAT_INT8}, {KVX_FORMAT_INT8});
  const std::vector<float> k = test_rows(20, 2, 64, 0.3f);
  std::vector<int64_t> slots = slots_from(5 * 16, 16);
  for (const int64_t slot : slots_from(2 * 16, 4)) slots.push_back(slot);
  ASSERT_TRUE(api::append(engine.layer, engine.rows(k, slots)).ok());

  const std::vector<int32_t> ids = {5, 2}, lengths = {20};
  std::vector<float> seen(k.size());
  api::GatherArgs gather;
  gather.block_table = api::packed_table(ids, 2);
  gather.seq_lens = api::seq_lens(lengths);
  gather.k = api::rows(seen.data());
  ASSERT_TRUE(api::gather(engine.layer, gather).ok());
  for (size_t i = 0; i < k.size(); ++i) ASSERT_NEAR(seen[i], k[i], 0.02f) << i;

  const std::vector<int32_t> starts = {0, 2};
  std::vector<float> ragged(k.size());
  gather.block_table = api::ragged_table(ids, starts);
  gather.k = api::rows(ragged.data());
  ASSERT_TRUE(api::gather(engine.layer, gather).ok()) << kvx_last_error();
  EXPECT_EQ(ragged, seen);

  const std::vector<float> q(4 * 64, 0.0f);
  std::vector<float> out(q.size());
  api::AttendArgs attend = engine.attention(q, out);
  attend.block_table = gather.block_table;
  attend.seq_lens = gather.seq_lens;
  EXPECT_EQ(api::attend_workspace(engine.layer, attend).value(), 0u);
  EXPECT_EQ(api::attend_workspace_up_to(engine.layer, attend, {8, 64, 1024, 16}).value(), 0u);
  EXPECT_EQ(api::PreparedLayer::make(engine.layer).failure().status, KVX_STATUS_UNSUPPORTED);
  ASSERT_TRUE(api::attend(engine.layer, attend).ok()) << kvx_last_error();
  double mean = 0;  // of V, which is K here: queries of zeros see every token alike
  for (int t = 0; t < 20; ++t) mean += seen[static_cast<size_t>(t) * 2 * 64] / 20.0;
  EXPECT_NEAR(out[0], mean, 1e-4);
}

TEST(CppFace, LayersStayValidWhereTheyAreMoved) {
  EnginePages engine({KVX_FORMAT_NVFP4}, {KVX_FORMAT_INT4});
  const std::vector<float> k = test_rows(4, 2, 64, 0.3f);
  const std::vector<int64_t> slots = slots_from(0, 4);
  std::vector<api::Layer> layers;
  layers.push_back(std::move(engine.layer));
  layers.reserve(100);
  EXPECT_TRUE(api::append(layers.front(), engine.rows(k, slots)).ok()) << kvx_last_error();
}

TEST(CppFace, APaddingSequenceOfNoTokensIsZeroAndLeavesTheOthersAlone) {
  const EnginePages engine({KVX_FORMAT_INT8}, {KVX_FORMAT_INT8});
  const std::vector<float> k = test_rows(10, 2, 64, 0.7f);
  const std::vector<int64_t> slots = slots_from(3 * 16, 10);
  ASSERT_TRUE(api::append(engine.layer, engine.rows(k, slots)).ok());
  const std::vector<float> q = test_rows(3, 4, 64, 0.2f);
  std::vector<float> padded(q.size(), 9.0f), alone(q.size(), 9.0f), lse(3 * 4, 9.0f);

  const std::vector<int32_t> ids = {-1, 3, -1}, lengths = {0, 10, 0};
  api::AttendArgs args = engine.attention(q, padded);
  args.block_table = api::packed_table(ids, 1);
  args.seq_lens = api::seq_lens(lengths);
  args.lse = lse.data();
  ASSERT_TRUE(api::attend(engine.layer, args).ok()) << kvx_last_error();

  const std::vector<float> own_q(q.begin() + 4 * 64, q.begin() + 2 * 4 * 64);
  args = engine.attention(own_q, alone);
  args.block_table = api::packed_table({ids.data() + 1, 1}, 1);
  args.seq_lens = api::seq_lens({lengths.data() + 1, 1});
  ASSERT_TRUE(api::attend(engine.layer, args).ok()) << kvx_last_error();
  for (int i = 0; i < 4 * 64; ++i) {
    ASSERT_EQ(padded[i], 0.0f);
    ASSERT_EQ(padded[4 * 64 + i], alone[i]);
    ASSERT_EQ(padded[2 * 4 * 64 + i], 0.0f);
  }
  EXPECT_EQ(lse[0], -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isfinite(lse[4]));
}

TEST(CppFace, ExecutorsOfBothKindsRunTheSameBytes) {
  const std::vector<float> k = test_rows(2048, 2, 64, 0.3f);
  const std::vector<int64_t> slots = slots_from(0, 2048);
  EnginePages alone({KVX_FORMAT_INT8}, {KVX_FORMAT_INT4}, 128);
  ASSERT_TRUE(api::append(alone.layer, alone.rows(k, slots)).ok());

  std::atomic<int> num_calls = 0;
  const api::Executor callers(2, [&](uint32_t num_tasks, const api::Executor::Task& task) {
    ++num_calls;
    std::thread odd([&] {
      for (uint32_t i = 1; i < num_tasks; i += 2) task(i);
    });
    for (uint32_t i = 0; i < num_tasks; i += 2) task(i);
    odd.join();
  });
  api::Executor pool = api::Executor::thread_pool(3).value();
  EXPECT_EQ(pool.num_threads(), 3u);
  EXPECT_GE(api::Executor::thread_pool().value().num_threads(), 1u);
  for (const api::Executor* executor : {&callers, static_cast<const api::Executor*>(&pool)}) {
    EnginePages helped({KVX_FORMAT_INT8}, {KVX_FORMAT_INT4}, 128);
    api::AppendArgs args = helped.rows(k, slots);
    args.executor = executor;
    ASSERT_TRUE(api::append(helped.layer, args).ok()) << kvx_last_error();
    EXPECT_EQ(helped.memory, alone.memory);
  }
  EXPECT_GT(num_calls, 0);
  const api::Executor moved = std::move(pool);
  EnginePages helped({KVX_FORMAT_INT8}, {KVX_FORMAT_INT4}, 128);
  api::AppendArgs args = helped.rows(k, slots);
  args.executor = &moved;
  EXPECT_TRUE(api::append(helped.layer, args).ok());
}

TEST(CppFace, ThreadPoolsRefuseWhatIsNotTheirs) {
  auto executor = sized<kvx_executor_t>();
  EXPECT_EQ(kvx_thread_pool_create(0, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_thread_pool_create(5000, &executor), KVX_STATUS_INVALID_ARGUMENT);
  executor.size = 8;
  EXPECT_EQ(kvx_thread_pool_create(1, &executor), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(executor.user, nullptr);
  EXPECT_EQ(kvx_thread_pool_free(nullptr), KVX_STATUS_OK);
  executor = sized<kvx_executor_t>();
  EXPECT_EQ(kvx_thread_pool_free(&executor), KVX_STATUS_OK);
  ASSERT_EQ(kvx_thread_pool_create(2, &executor), KVX_STATUS_OK);
  kvx_executor_t foreign = executor;
  foreign.parallel_for = [](void*, uint32_t, void (*)(void*, uint32_t), void*) {};
  EXPECT_EQ(kvx_thread_pool_free(&foreign), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_thread_pool_free(&executor), KVX_STATUS_OK);
  EXPECT_EQ(executor.user, nullptr);
  EXPECT_EQ(kvx_thread_pool_free(&executor), KVX_STATUS_OK);
}

TEST(CppFace, LogHearsTheLibraryUntilItEnds) {
  std::vector<std::string> lines;
  {
    const auto log = api::Log::create([&](uint32_t, const char* text) { lines.emplace_back(text); },
                                      KVX_LOG_INFO);
    ASSERT_TRUE(log.ok());
    ASSERT_FALSE(lines.empty());
    EXPECT_THAT(lines.front(), HasSubstr("kernels"));
  }
  const size_t heard = lines.size();
  const auto other = api::Log::create([](uint32_t, const char*) {});
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(lines.size(), heard);
}

class CppFaceCache : public testing::Test {
 protected:
  static api::Cache make(const std::string& recipe) {
    api::CacheConfig config;
    config.num_layers = 1;
    config.num_kv_heads = 2;
    config.head_dim = 32;
    config.block_size = 8;
    config.recipe = recipe;
    config.max_sequences = 3;
    config.max_tokens_per_sequence = 64;
    return api::Cache::create(config).value();
  }
  // Appends rows of ones; the step's layer.
  api::Status append(api::Step& step, int num_tokens) {
    rows_.assign(static_cast<size_t>(num_tokens) * 2 * 32, 1.0f);
    out_.resize(rows_.size());
    api::StepRows rows;
    rows.num_q_heads = 2;
    rows.q = rows.k = rows.v = api::rows(rows_.data());
    rows.out = api::rows(out_.data());
    return step.append_and_attend(0, rows);
  }
  std::vector<float> rows_;
  std::vector<float> out_;
};

TEST_F(CppFaceCache, StepsKeepTheirTokensOnlyWhenTheyEnd) {
  api::Cache cache = make("int8");
  const api::Sequence sequence = api::Sequence::create(cache).value();
  {
    api::Step step = api::Step::begin(cache, {{sequence, 5}}).value();
    ASSERT_TRUE(append(step, 5).ok()) << kvx_last_error();
  }
  EXPECT_EQ(sequence.num_tokens().value(), 0) << "a step that went without end() is cancelled";
  api::Step step = api::Step::begin(cache, {{sequence, 5}}).value();
  ASSERT_TRUE(append(step, 5).ok());
  EXPECT_NEAR(out_[0], 1.0f, 1e-2f);
  ASSERT_TRUE(step.end().ok());
  EXPECT_FALSE(step.end().ok()) << "the step is over";
  EXPECT_EQ(sequence.num_tokens().value(), 5);
}

TEST_F(CppFaceCache, SequencesForkTruncateAndFreeThemselves) {
  api::Cache cache = make("int8");
  std::optional<api::Sequence> first = api::Sequence::create(cache).value();
  api::Step step = api::Step::begin(cache, {{*first, 12}}).value();
  ASSERT_TRUE(append(step, 12).ok());
  ASSERT_TRUE(step.end().ok());
  api::Sequence fork = first->fork().value();
  ASSERT_TRUE(fork.truncate(8).ok());
  EXPECT_EQ(fork.num_tokens().value(), 8);
  EXPECT_EQ(first->num_tokens().value(), 12);
  EXPECT_EQ(cache.snapshot().value().num_sequences, 2);
  first.reset();
  EXPECT_EQ(cache.snapshot().value().num_sequences, 1);
  const api::Sequence moved = std::move(fork);
  EXPECT_EQ(moved.num_tokens().value(), 8);
  std::vector<float> k(8 * 2 * 32);
  ASSERT_TRUE(moved.gather(0, 0, 8, api::rows(k.data()), {}).ok()) << kvx_last_error();
  EXPECT_NEAR(k.back(), 1.0f, 1e-2f);
}

TEST_F(CppFaceCache, SequencesOutliveTheirCacheWithoutHarm) {
  std::optional<api::Cache> cache = make("int8");
  const api::Sequence sequence = api::Sequence::create(*cache).value();
  cache.reset();
  EXPECT_EQ(sequence.num_tokens().failure().status, KVX_STATUS_INVALID_ARGUMENT);
}

TEST_F(CppFaceCache, ConfigurationsAreRefusedWithTheFieldsName) {
  api::CacheConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 1;
  config.head_dim = 40;
  config.recipe = "nvfp4";
  config.max_tokens_per_sequence = 8;
  EXPECT_THAT(api::Cache::create(config).failure().text, HasSubstr("multiple of 16"));
  config.head_dim = 64;
  config.layer_windows = {8};
  EXPECT_THAT(api::Cache::create(config).failure().text, HasSubstr("layer_windows"));
  config.layer_windows.clear();
  EXPECT_TRUE(api::Cache::create(config).ok()) << kvx_last_error();
}

TEST_F(CppFaceCache, StepsReportHowManyTokensTheyTake) {
  api::Cache cache = make("int8");
  const api::Sequence sequence = api::Sequence::create(cache).value();
  EXPECT_EQ(api::Step::max_step_tokens(sequence).value(),
            cache.max_step_tokens(sequence.number()).value());
  EXPECT_GE(sequence.max_step_tokens().value(), 8);
}

}  // namespace
}  // namespace kvx::api_test
