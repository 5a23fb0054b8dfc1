// Two GPUs in one process: caches and callers' layers on the second give what the first gives, and
// the thread's current device stays what it was. Without a second GPU these skip, counted.
#include <gmock/gmock.h>

#include <filesystem>
#include <numeric>

#include "device/cuda_caller.hpp"
#include "kv/files/transcode.hpp"
#include "kv/kv_step.hpp"
#include "tests/api/owned_cache.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/support/temporary_path.hpp"

namespace kvx::tests::two_devices_test {
namespace {

using testing::HasSubstr;

constexpr int kHeads = 2;
constexpr int kQHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kBlockSize = 64;
constexpr int kTokens = 5 * kBlockSize + 3;

class GpuTwoDevices : public GpuTest {
 protected:
  // The current device is 0 from here on.
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    const auto second = device::known_cuda_device(1);
    if (!second.ok()) GTEST_SKIP() << "a second GPU is needed: " << second.error().message;
    const auto current = device::CurrentCudaDevice::set(1);
    auto stream = device::OwnedCudaStream::create();
    ASSERT_TRUE(current.ok() && stream.ok());
    stream_.emplace(std::move(stream).value());
    second_ = {*second.value(), stream_->get()};
  }
  const ops::CudaContext& second() const { return second_; }
  void expect_first_is_current(std::string_view call) {
    const auto current = device::current_cuda_device();
    ASSERT_TRUE(current.ok());
    EXPECT_EQ(current.value(), 0) << call;
  }

  static std::unique_ptr<kv::KvCache> created(const ops::CudaContext& context,
                                              std::string_view recipe) {
    kv::KvCacheConfig config;
    config.geometry = {1, kHeads, kHeadDim, kHeadDim, {}};
    config.recipe = kv::parse_recipe(recipe).value();
    config.block_size = kBlockSize;
    config.max_sequences = 2;
    config.max_tokens_per_sequence = kTokens;
    config.cuda = kv::CudaPlacement{context};
    config.prefix.is_on = true;
    config.tiers = {{.budget_bytes = 1 << 20}};
    static const device::CpuLevel level = device::choose_cpu_level().value();
    const ops::CpuContext cpu{&ops::cpu::kernel_table(level), &serial_executor()};
    auto made = kv::KvCache::create(std::move(config), cpu);
    EXPECT_TRUE(made.ok()) << made.error().message;
    return std::move(made).value();
  }
  template <class Float>
  static auto rows(Float* data, int heads, int64_t token) {
    return dense_rows(data + token * heads * kHeadDim, DType::kF32, heads, kHeadDim);
  }
  // cuda_copy is for memory of the current device.
  template <class T>
  static T* mirrored(Mirror& mirror, std::vector<T>& host, int device) {
    const auto current = device::CurrentCudaDevice::set(device);
    EXPECT_TRUE(current.ok());
    return mirror.add(host);
  }
  // K's rows of all tokens, in binary32.
  static std::vector<float> gathered(kv::KvCache& cache, int sequence, int device) {
    const auto memory = cache::cuda_memory(device).value();
    Mirror mirror(*memory);
    std::vector<float> k(int64_t{kTokens} * kHeads * kHeadDim);
    float* const there = mirrored(mirror, k, device);
    EXPECT_TRUE(cache.gather(sequence, 0, 0, kTokens, rows(there, kHeads, 0), {}).ok());
    EXPECT_TRUE(cache.synchronize().ok());
    mirror.fetch(k);
    return k;
  }

  // Tokens one block at a time, then one by one, with a fork and what the fork holds; all outputs.
  // file: where the fork is saved, if anywhere.
  std::vector<float> run_cache(const ops::CudaContext& context, std::string_view recipe,
                               const std::string& file = "") {
    const auto made = created(context, recipe);
    kv::KvCache& cache = *made;
    expect_first_is_current("create");
    const auto rows_memory = cache::cuda_memory(context.device.index).value();
    expect_first_is_current("cuda_memory");
    Mirror mirror(*rows_memory);
    std::vector<float> k, v, q;
    for (int i = 0; i < kTokens * kHeads * kHeadDim; ++i) {
      k.push_back(std::sin(0.7f * static_cast<float>(i)));
      v.push_back(std::cos(0.3f * static_cast<float>(i)));
    }
    for (int i = 0; i < kTokens * kQHeads * kHeadDim; ++i) {
      q.push_back(std::sin(1.3f * static_cast<float>(i)));
    }
    std::vector<float> out(q.size());
    const float* const q_there = mirrored(mirror, q, context.device.index);
    const float* const k_there = mirrored(mirror, k, context.device.index);
    const float* const v_there = mirrored(mirror, v, context.device.index);
    float* const out_there = mirrored(mirror, out, context.device.index);
    const kv::AttentionParams params = {.num_q_heads = kQHeads, .softmax_scale = 0.1f};
    const int sequence = cache.create_sequence().value();
    int writer = sequence;
    for (int at = 0; at < kTokens;) {
      const int count = at < 5 * kBlockSize ? kBlockSize : 1;
      const kv::StepEntry entry{writer, count};
      EXPECT_TRUE(cache.begin_step({&entry, 1}).ok());
      const Status done =
          cache.append_and_attend(0, params, rows(q_there, kQHeads, at), rows(k_there, kHeads, at),
                                  rows(v_there, kHeads, at), rows(out_there, kQHeads, at));
      EXPECT_TRUE(done.ok()) << done.error().message;
      EXPECT_TRUE(cache.end_step().ok());
      expect_first_is_current("a step");
      at += count;
      if (at == kTokens - 1) writer = cache.fork_sequence(sequence).value();
    }
    EXPECT_TRUE(cache.synchronize().ok());
    mirror.fetch(out);
    const std::vector<float> k_held = gathered(cache, writer, context.device.index);
    out.insert(out.end(), k_held.begin(), k_held.end());
    if (!file.empty()) {
      std::vector<int32_t> ids(kTokens);
      std::iota(ids.begin(), ids.end(), 0);
      EXPECT_TRUE(cache.record_tokens(writer, ids).ok());
      const Status saved = cache.save_sequence(writer, file);
      EXPECT_TRUE(saved.ok()) << saved.error().message;
    }
    expect_first_is_current("gather");
    return out;
  }

 private:
  std::optional<device::OwnedCudaStream> stream_;
  ops::CudaContext second_;
};

TEST_F(GpuTwoDevices, CachesOnBothGiveTheSame) {
  for (const char* recipe : {"bf16", "int8", "nvfp4", "int4:auto"}) {
    SCOPED_TRACE(recipe);
    const std::vector<float> on_first = run_cache(context(), recipe);
    EXPECT_EQ(on_first, run_cache(second(), recipe));
    EXPECT_TRUE(std::any_of(on_first.begin(), on_first.end(), [](float x) { return x != 0; }));
  }
}

// Its rows are staged in pinned memory, which is written again when the copy before has ended: on
// the second GPU's default stream, not on the current one's.
TEST_F(GpuTwoDevices, AFileOfAnotherRecipeIsLoadedOnTheSecondsDefaultStream) {
  const std::string file = tests::temporary_path("two_devices_test.kvx");
  run_cache(context(), "bf16", file);
  const auto loaded = [&](const ops::CudaContext& context) {
    const auto cache = created(context, "int8");
    const Result<int> sequence = kv::transcode_sequence(*cache, file);
    if (!sequence.ok()) {
      ADD_FAILURE() << sequence.error().message;
      return std::vector<float>();
    }
    return gathered(*cache, sequence.value(), context.device.index);
  };
  const std::vector<float> on_first = loaded(context());
  ASSERT_FALSE(on_first.empty());
  EXPECT_EQ(on_first, loaded({second().device, nullptr}));
  std::filesystem::remove(file);
}

TEST_F(GpuTwoDevices, TheAbisCallsRunWhereTheirMemoryLies) {
  auto options = api::sized<kvx_cache_options_t>();
  options.memory = KVX_MEMORY_DEVICE;
  options.device = 1;
  options.max_step_tokens = 8;
  const auto cache = api::Cache::create(api_test::owned_config("int8"), &options);
  EXPECT_TRUE(cache.ok()) << kvx_last_error();
  expect_first_is_current("kvx_cache_create");

  api_test::Filled filled(KVX_FORMAT_INT8);
  const auto there = cache::cuda_memory(1).value();
  Mirror mirror(*there);
  Mirror first(memory());
  api_test::PagedLayer pages(filled.geometry, api_test::in_page(KVX_FORMAT_INT8),
                             api_test::in_page(KVX_FORMAT_INT8));
  mirrored(mirror, pages.memory, 1);
  for (kvx_side_t* side : {&pages.k, &pages.v}) {
    side->codes = mirror.at(static_cast<uint8_t*>(side->codes));
    side->scales = mirror.at(static_cast<uint8_t*>(side->scales));
  }
  pages.layer.memory = KVX_MEMORY_DEVICE;
  std::vector<int64_t> slots = api_test::slots_of(filled.sequence, filled.geometry.block_size);
  kvx_rows_t k = api::rows(mirrored(mirror, filled.k, 1), KVX_DTYPE_F32);
  const kvx_rows_t v = api::rows(mirrored(mirror, filled.v, 1), KVX_DTYPE_F32);
  auto args = api::sized<kvx_append_args_t>();
  args.layer = &pages.layer;
  args.k = &k;
  args.v = &v;
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = mirrored(mirror, slots, 1);
  args.num_tokens = std::ssize(slots);
  ASSERT_EQ(kvx_append(&args, second().stream), KVX_STATUS_OK) << kvx_last_error();
  expect_first_is_current("kvx_append");
  ASSERT_TRUE(device::cuda_synchronize(second().stream).ok());
  mirror.fetch(pages.memory);
  EXPECT_EQ(pages.memory, filled.layer.memory);

  k.data = first.add(filled.k);
  EXPECT_EQ(kvx_append(&args, second().stream), KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(kvx_last_error(), HasSubstr("a call runs on one device"));
}

}  // namespace
}  // namespace kvx::tests::two_devices_test
