// What fails on a device: more memory than it has, and a context that an earlier launch broke. The
// error says so, and what the host knows stays as it was.
#include <gmock/gmock.h>

#include "device/cuda_bandwidth.hpp"
#include "kv/kv_step.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/gpu/test_kernels.hpp"

namespace kvx::tests::faults_test {
namespace {

using testing::HasSubstr;

constexpr int kHeads = 2;
constexpr int kHeadDim = 64;
constexpr int kBlockSize = 16;
constexpr int kTokens = 4 * kBlockSize;

// Its first block and its last two are in 16 bits.
kv::KvCacheConfig config_on(const ops::CudaContext& context) {
  kv::KvCacheConfig config;
  config.geometry = {1, kHeads, kHeadDim, kHeadDim, {}};
  config.recipe = kv::parse_recipe("int8:sink=16,recent=32").value();
  config.block_size = kBlockSize;
  config.max_tokens_per_sequence = 4 * kTokens;
  config.cuda = kv::CudaPlacement{context};
  return config;
}

ops::CpuContext cpu_context() {
  static const device::CpuLevel level = device::choose_cpu_level().value();
  return {&ops::cpu::kernel_table(level), &serial_executor()};
}

using GpuFaults = GpuTest;

TEST_F(GpuFaults, MoreMemoryThanThereIsIsRefusedByItsBytes) {
  const auto region = memory().allocate(int64_t{1} << 50, "a mirror");
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(region.error().message,
            "a mirror: CUDA device 0 has no 1125899906842624 bytes of memory left");

  kv::KvCacheConfig config = config_on(context());
  config.memory_budget_bytes = int64_t{1} << 42;
  config.max_tokens_per_sequence = int64_t{1} << 30;
  const auto cache = kv::KvCache::create(std::move(config), cpu_context());
  ASSERT_FALSE(cache.ok());
  EXPECT_EQ(cache.error().code, ErrorCode::kOutOfRange);
  EXPECT_THAT(cache.error().message, HasSubstr("bytes of memory left"));

  // CUDA's error is nobody else's. (Free memory says nothing: other processes take of it too.)
  EXPECT_TRUE(memory().allocate(1 << 20, "a mirror").ok());
  synchronize();
}

TEST_F(GpuFaults, ACallThatCudaRefusesIsNoLaterLaunchsError) {
  // The default stream cannot be captured.
  const auto refused = device::CudaGraph::capture(nullptr, [] { return Status(); });
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kInternal);
  const Status launched = device::cuda_launch_nothing(context().stream);
  EXPECT_TRUE(launched.ok()) << launched.error().message;
  synchronize();
}

// Ends the process at the first thing that is not as it should be.
void expect(bool is_so, std::string_view what) {
  if (is_so) return;
  fmt::print(stderr, "not so: {}\n", what);
  std::_Exit(1);
}
void expect_cudas_text(const Status& status, const std::string& text, std::string_view call) {
  expect(!status.ok(), fmt::format("{} fails", call));
  expect(status.error().code == ErrorCode::kInternal,
         fmt::format("{} is INTERNAL_ERROR, not {}", call, status.error().message));
  expect(status.error().message.find(text) != std::string::npos,
         fmt::format("{} has '{}' in '{}'", call, text, status.error().message));
}
template <class T>
Status status_of(const Result<T>& result) {
  return result.ok() ? Status() : Status(result.error());
}

int64_t num_free_blocks(const kv::KvCache& cache) {
  int64_t num_free = 0;
  for (const cache::BlockClassSnapshot& blocks : cache.snapshot().classes) {
    num_free += blocks.num_free;
  }
  return num_free;
}

// A cache whose next step quantises a block, and a step of another sequence that is open when the
// context breaks.
void use_a_broken_context(const ops::CudaContext& context, cache::Memory& memory) {
  kv::KvCacheConfig config = config_on(context);
  config.max_sequences = 2;
  auto cache = kv::KvCache::create(std::move(config), cpu_context()).value();
  Mirror mirror(memory);
  std::vector<float> rows(static_cast<size_t>(kTokens) * kHeads * kHeadDim, 0.5f);
  std::vector<float> attended(rows.size());
  const float* in_data = mirror.add(rows);
  const FloatRows in = dense_rows(in_data, DType::kF32, kHeads, kHeadDim);
  const MutableFloatRows out = dense_rows(mirror.add(attended), DType::kF32, kHeads, kHeadDim);
  const kv::AttentionParams params = {.num_q_heads = kHeads, .softmax_scale = 0.125f};
  const int full = cache->create_sequence().value();
  const int open = cache->create_sequence().value();
  kv::KvStep step(*cache);
  const auto begin = [&](kv::KvStep& one, int sequence, int num_tokens) {
    const kv::StepEntry entry{sequence, num_tokens};
    return one.begin({&entry, 1});
  };
  for (int first = 0; first < kTokens; first += kBlockSize) {
    expect(begin(step, full, kBlockSize).ok(), "a step begins");
    expect(step.append_and_attend(0, params, in, in, in, out).ok(), "a layer attends");
    expect(step.end().ok(), "the step ends");
  }
  kv::KvStep open_step(*cache);
  const int64_t num_free = num_free_blocks(*cache);
  expect(begin(open_step, open, 1).ok(), "another step begins");
  expect(cache->synchronize().ok(), "all is well");

  const std::string text = break_context(context);
  expect(!text.empty(), "the context is broken");
  expect_cudas_text(open_step.append_and_attend(0, params, in, in, in, out), text, "attend");
  expect(open_step.cancel().ok(), "the open step is left");
  expect_cudas_text(begin(step, full, kBlockSize), text, "a step that quantises a block");
  expect_cudas_text(begin(step, open, 1), text, "a step whose tables go up");
  expect_cudas_text(cache->gather(full, 0, 0, kTokens, out, out), text, "gather");
  expect_cudas_text(cache->synchronize(), text, "synchronize");
  expect_cudas_text(status_of(memory.allocate(1 << 20, "a mirror")), text, "allocate");
  expect_cudas_text(status_of(kv::KvCache::create(config_on(context), cpu_context())), text,
                    "create");
  expect(cache->num_tokens(full) == kTokens, "the sequence has its tokens");
  expect(cache->num_tokens(open) == 0, "the other has none");
  expect(num_free_blocks(*cache) == num_free, "all blocks came back");
  expect(cache->free_sequence(full).ok() && cache->free_sequence(open).ok(), "both are freed");
}

using GpuFaultsDeathTest = GpuTest;

// In a process of its own, which CUDA is lost to.
TEST_F(GpuFaultsDeathTest, AfterAFailedLaunchEveryCallSaysCudasText) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto use_and_end = [this] {
    use_a_broken_context(context(), memory());
    std::_Exit(0);
  };
  EXPECT_EXIT(use_and_end(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace kvx::tests::faults_test
