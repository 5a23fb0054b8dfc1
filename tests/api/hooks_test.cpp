// The caller's allocator and the caller's log function: the memory of a cache and the lines of the
// log.
#include <gmock/gmock.h>

#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {
namespace {

using testing::Contains;
using testing::HasSubstr;

// Hands out memory that is not zero, and remembers what is out.
struct CountingAllocator {
  struct Held {
    uint64_t bytes = 0;
    std::vector<uint8_t> memory;
  };
  CountingAllocator() {
    hook.user = this;
    hook.allocate = [](void* user, uint64_t bytes, uint64_t alignment) -> void* {
      auto& self = *static_cast<CountingAllocator*>(user);
      if (self.num_left-- == 0) return nullptr;
      Held one = {bytes, std::vector<uint8_t>(bytes + 2 * alignment, 0xCD)};
      void* data = one.memory.data();
      size_t room = one.memory.size();
      data = static_cast<uint8_t*>(std::align(alignment, bytes, data, room)) + self.shift;
      self.held[data] = std::move(one);
      self.num_allocated += 1;
      return data;
    };
    hook.free = [](void* user, void* data, uint64_t bytes) {
      auto& self = *static_cast<CountingAllocator*>(user);
      EXPECT_EQ(self.held[data].bytes, bytes);
      self.held.erase(data);
    };
  }
  CountingAllocator(const CountingAllocator&) = delete;

  kvx_allocator_t hook = sized<kvx_allocator_t>();
  std::map<void*, Held> held;
  int num_allocated = 0;
  int num_left = -1;  // -1: without end
  int shift = 0;      // bytes by which addresses are wrong
};

// Full-precision window: two classes of blocks, which are two regions.
kvx_cache_config_t small_config(const kvx_allocator_t* allocator) {
  auto config = sized<kvx_cache_config_t>();
  config.num_layers = 1;
  config.num_kv_heads = 2;
  config.k_head_dim = config.v_head_dim = 32;
  config.block_size = 8;
  config.max_sequences = 1;
  config.max_tokens_per_sequence = 64;
  config.recipe = "int8:sink=8,recent=8";
  config.allocator = allocator;
  return config;
}

// Appends one token and attends; the output's status is the first error.
void append_one(kvx_cache_t cache, float value) {
  int32_t sequence = 0;
  ASSERT_EQ(kvx_sequence_create(cache, &sequence), KVX_STATUS_OK) << kvx_last_error();
  const int32_t one = 1;
  ASSERT_EQ(kvx_step_begin(cache, 1, &sequence, &one), KVX_STATUS_OK) << kvx_last_error();
  std::vector<float> rows(64, value);
  std::vector<float> output(64);
  const kvx_rows_t in = api::rows(rows.data(), KVX_DTYPE_F32);
  const kvx_rows_t out = api::rows(output.data(), KVX_DTYPE_F32);
  auto args = sized<kvx_step_layer_args_t>();
  args.num_q_heads = 2;
  args.q = args.k = args.v = &in;
  args.out = &out;
  ASSERT_EQ(kvx_step_layer(cache, &args), KVX_STATUS_OK) << kvx_last_error();
  ASSERT_EQ(kvx_step_end(cache), KVX_STATUS_OK) << kvx_last_error();
}

TEST(Allocator, HoldsAllPoolsAndGetsThemBack) {
  CountingAllocator allocator;
  const kvx_cache_config_t config = small_config(&allocator.hook);
  kvx_cache_t cache = nullptr;
  ASSERT_EQ(kvx_cache_create(&config, &cache), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(allocator.num_allocated, 2) << "packed and full_precision blocks";
  append_one(cache, 0.5f);
  EXPECT_EQ(allocator.num_allocated, 2) << "no step allocates";
  bool is_written = false;
  for (const auto& [data, held] : allocator.held) {
    const auto* begin = static_cast<const uint8_t*>(data);
    for (uint64_t i = 0; i < held.bytes; ++i) is_written = is_written || begin[i] != 0;
  }
  EXPECT_TRUE(is_written) << "the token's rows lie in the caller's memory";
  kvx_cache_free(cache);
  EXPECT_TRUE(allocator.held.empty());
}

TEST(Allocator, ThatHasNothingLeftEndsTheCreation) {
  for (int num_left : {0, 1}) {
    CountingAllocator allocator;
    allocator.num_left = num_left;
    const kvx_cache_config_t config = small_config(&allocator.hook);
    kvx_cache_t cache = nullptr;
    EXPECT_EQ(kvx_cache_create(&config, &cache), KVX_STATUS_OUT_OF_RANGE) << num_left;
    EXPECT_THAT(kvx_last_error(), HasSubstr("the allocator returned null for"));
    EXPECT_EQ(cache, nullptr);
    EXPECT_TRUE(allocator.held.empty()) << "what was given has come back";
  }
}

TEST(Allocator, ThatIgnoresTheAlignmentEndsTheCreation) {
  CountingAllocator allocator;
  allocator.shift = 8;
  const kvx_cache_config_t config = small_config(&allocator.hook);
  kvx_cache_t cache = nullptr;
  EXPECT_EQ(kvx_cache_create(&config, &cache), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("expected a multiple of 64"));
  EXPECT_TRUE(allocator.held.empty());
}

TEST(Allocator, NeedsBothFunctions) {
  CountingAllocator allocator;
  allocator.hook.free = nullptr;
  const kvx_cache_config_t config = small_config(&allocator.hook);
  kvx_cache_t cache = nullptr;
  EXPECT_EQ(kvx_cache_create(&config, &cache), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_STREQ(kvx_last_error(), "allocator.free is null");
}

// A log function that keeps its lines. It is removed when the test ends.
struct LogKeeper {
  explicit LogKeeper(uint32_t least = 0) {
    auto hook = sized<kvx_log_t>();
    hook.least = least;
    hook.user = this;
    hook.write = [](void* user, uint32_t level, const char* text) {
      static_cast<LogKeeper*>(user)->lines.push_back({level, text});
    };
    EXPECT_EQ(kvx_set_log(&hook), KVX_STATUS_OK) << kvx_last_error();
  }
  LogKeeper(const LogKeeper&) = delete;
  ~LogKeeper() { EXPECT_EQ(kvx_set_log(nullptr), KVX_STATUS_OK); }

  std::vector<std::pair<uint32_t, std::string>> lines;
};

auto line(uint32_t level, const std::string& part) {
  return testing::Pair(level, HasSubstr(part));
}

TEST(Log, BeginsWithTheKernelsThatTheLibraryHasChosen) {
  const LogKeeper log;
  EXPECT_THAT(log.lines, testing::ElementsAre(line(KVX_LOG_INFO, "kvx 1.2.0 computes with its ")));
}

TEST(Log, TellsTheBlocksOfANewCache) {
  const LogKeeper log;
  const kvx_cache_config_t config = small_config(nullptr);
  kvx_cache_t cache = nullptr;
  ASSERT_EQ(kvx_cache_create(&config, &cache), KVX_STATUS_OK) << kvx_last_error();
  kvx_cache_free(cache);
  EXPECT_THAT(log.lines, Contains(line(KVX_LOG_INFO, "group 0 packed")));
  EXPECT_THAT(log.lines, Contains(line(KVX_LOG_INFO, "group 0 full_precision")));
}

// A page-shared scale cannot represent an infinity.
void warn_of_an_infinity() {
  kvx_cache_config_t config = small_config(nullptr);
  config.recipe = "int8:source=page";
  kvx_cache_t cache = nullptr;
  ASSERT_EQ(kvx_cache_create(&config, &cache), KVX_STATUS_OK) << kvx_last_error();
  append_one(cache, std::numeric_limits<float>::infinity());
  kvx_cache_free(cache);
}

// A cache logs it once, not in every step.
TEST(Log, WarnsOnceOfInputsThatTheFormatCannotSay) {
  const LogKeeper log(KVX_LOG_WARNING);
  warn_of_an_infinity();
  EXPECT_THAT(log.lines, testing::ElementsAre(line(KVX_LOG_WARNING, "NaN or infinite inputs")));
}

TEST(Log, SaysNothingBelowItsLevelNorAfterItIsTakenAway) {
  int calls = 0;
  auto hook = sized<kvx_log_t>();
  hook.least = KVX_LOG_WARNING;
  hook.user = &calls;
  hook.write = [](void* user, uint32_t, const char*) { ++*static_cast<int*>(user); };
  ASSERT_EQ(kvx_set_log(&hook), KVX_STATUS_OK);
  EXPECT_EQ(calls, 0);
  ASSERT_EQ(kvx_set_log(nullptr), KVX_STATUS_OK);
  warn_of_an_infinity();
  EXPECT_EQ(calls, 0);
}

TEST(Log, IsNotSetByAHook) {
  static kvx_status_t answer;
  auto hook = sized<kvx_log_t>();
  hook.write = [](void*, uint32_t, const char*) { answer = kvx_set_log(nullptr); };
  ASSERT_EQ(kvx_set_log(&hook), KVX_STATUS_OK);
  EXPECT_EQ(answer, KVX_STATUS_INVALID_ARGUMENT);
  ASSERT_EQ(kvx_set_log(nullptr), KVX_STATUS_OK);
}

TEST(Log, RefusesAHookThatCannotHear) {
  auto hook = sized<kvx_log_t>();
  EXPECT_EQ(kvx_set_log(&hook), KVX_STATUS_INVALID_ARGUMENT);
  hook.write = [](void*, uint32_t, const char*) {};
  hook.least = 4;
  EXPECT_EQ(kvx_set_log(&hook), KVX_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kvx::api_test
