// A model whose steps run on the GPU as a whole against the same model on the CPU.
#include "runner/gpu_forward.hpp"

#include "device/cpu_level.hpp"
#include "runner/collecting_attention.hpp"
#include "runner/kv_attention.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/runner/forward_pass.hpp"

namespace kvx::tests::gpu_forward_test {
namespace {

using runner::GpuProducts;
using runner::KvAttention;
using runner::KvAttentionOptions;
using runner::Model;

const std::vector<int> kTokens = {1, 7, 30, 2, 2, 19, 38, 11, 5, 0, 23, 16};

// The backend takes one step at a time of so many tokens, and may hide that it takes rows on a GPU.
class CutSteps final : public runner::AttentionBackend {
 public:
  CutSteps(KvAttention& attention, int64_t most, bool hides_gpu)
      : attention_(attention), most_(most), hides_gpu_(hides_gpu) {}
  int64_t num_tokens() const override { return attention_.num_tokens(); }
  int64_t max_step_tokens() const override { return std::min(most_, attention_.max_step_tokens()); }
  Status begin_step(int num_tokens) override { return attention_.begin_step(num_tokens); }
  Status append_and_attend(int layer, int num_tokens, const float* q, const float* k,
                           const float* v, float* out) override {
    ++host_calls;
    return attention_.append_and_attend(layer, num_tokens, q, k, v, out);
  }
  std::optional<device::CudaStream> gpu_stream() const override {
    return hides_gpu_ ? std::nullopt : attention_.gpu_stream();
  }
  Status append_and_attend_on_gpu(int layer, int num_tokens, FloatRows q, FloatRows k, FloatRows v,
                                  MutableFloatRows out) override {
    ++gpu_calls;
    return attention_.append_and_attend_on_gpu(layer, num_tokens, q, k, v, out);
  }
  Status end_step() override { return attention_.end_step(); }

  int host_calls = 0;
  int gpu_calls = 0;

 private:
  KvAttention& attention_;
  int64_t most_;
  bool hides_gpu_;
};

// extras: biases, an output of its own, half a head that rotates.
class GpuForwardTest : public GpuTest, public testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto products = GpuProducts::create();
    if (!products.ok()) GTEST_SKIP() << products.error().message;  // a machine without cuBLAS
  }

  static std::unique_ptr<Model> load_model(DType weights, bool on_gpu) {
    const TemporaryFile file(tiny_llama(GetParam()).file());
    std::unique_ptr<GpuProducts> products;
    if (on_gpu) products = GpuProducts::create().value();
    auto model = Model::load(file.path(), weights, serial_executor(), std::move(products));
    EXPECT_TRUE(model.ok()) << model.error().message;
    return std::move(model).value();
  }

  static std::unique_ptr<KvAttention> make_attention(const Model& model, bool on_gpu) {
    KvAttentionOptions options;
    options.recipe = kv::parse_recipe("f32").value();
    options.block_size = 4;
    options.max_tokens = 64;
    options.on_gpu = on_gpu;
    auto attention = KvAttention::create(model.config(), options, serial_executor());
    EXPECT_TRUE(attention.ok()) << attention.error().message;
    return std::move(attention).value();
  }

  static void expect_near(const std::vector<float>& found, const std::vector<float>& expected,
                          float tolerance) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], tolerance) << "logit " << i;
    }
  }
};

TEST_P(GpuForwardTest, HasTheCpusLogits) {
  const auto on_cpu = load_model(DType::kF32, false);
  const auto cpu_attention = make_attention(*on_cpu, false);
  const std::vector<float> expected = all_logits(*on_cpu, *cpu_attention, kTokens);
  const auto model = load_model(DType::kF32, true);
  for (const int64_t step : {12, 5, 1}) {
    SCOPED_TRACE(step);
    const auto attention = make_attention(*model, true);
    CutSteps backend(*attention, step, false);
    expect_near(all_logits(*model, backend, kTokens), expected, 2e-5f);
    EXPECT_GT(backend.gpu_calls, 0);
    EXPECT_EQ(backend.host_calls, 0);
  }
}

// Rounded in the same places: near the logits of steps whose rows pass the host between products.
TEST_P(GpuForwardTest, RoundsInBf16WhereTheHostDoes) {
  const auto model = load_model(DType::kBF16, true);
  const auto stepped_attention = make_attention(*model, true);
  CutSteps stepped(*stepped_attention, 1, true);
  const std::vector<float> expected = all_logits(*model, stepped, kTokens);
  EXPECT_EQ(stepped.gpu_calls, 0);
  const auto attention = make_attention(*model, true);
  CutSteps backend(*attention, 1, false);
  expect_near(all_logits(*model, backend, kTokens), expected, 2e-4f);
  EXPECT_EQ(backend.host_calls, 0);
}

TEST_P(GpuForwardTest, HasTheLastTokensLogitsWithoutItsHiddenRow) {
  const auto model = load_model(DType::kF32, true);
  const auto attention = make_attention(*model, true);
  const std::vector<float> all = all_logits(*model, *attention, kTokens);
  const size_t vocab = model->config().vocab_size;
  const std::vector<float> expected(all.end() - vocab, all.end());
  ASSERT_TRUE(attention->reset().ok());
  std::vector<float> logits(vocab);
  const Status status = model->forward_to_logits(kTokens, *attention, logits.data());
  ASSERT_TRUE(status.ok()) << status.error().message;
  expect_near(logits, expected, 2e-5f);
}

// Caches have a stream each, and the model one set of buffers: a step that nobody has waited for is
// not overwritten by the next cache's.
TEST_P(GpuForwardTest, CachesTakeTurnsWithoutWaitingForEachOther) {
  const auto model = load_model(DType::kF32, true);
  const auto alone = make_attention(*model, true);
  const std::vector<float> expected = all_logits(*model, *alone, kTokens);
  std::vector<std::unique_ptr<KvAttention>> caches;
  for (int i = 0; i < 4; ++i) caches.push_back(make_attention(*model, true));
  for (size_t t = 0; t + 1 < kTokens.size(); ++t) {
    for (const auto& cache : caches) {
      ASSERT_TRUE(model->forward(std::span(kTokens).subspan(t, 1), *cache, nullptr).ok());
    }
  }
  const size_t vocab = model->config().vocab_size;
  for (const auto& cache : caches) {
    std::vector<float> logits(vocab);
    ASSERT_TRUE(model->forward_to_logits(std::span(kTokens).last(1), *cache, logits.data()).ok());
    expect_near(logits, {expected.end() - static_cast<int64_t>(vocab), expected.end()}, 2e-5f);
  }
}

TEST_P(GpuForwardTest, ReadsKeysBackAsTheCpusCacheDoes) {
  const auto on_cpu = load_model(DType::kF32, false);
  const auto cpu_attention = make_attention(*on_cpu, false);
  ASSERT_TRUE(on_cpu->forward(kTokens, *cpu_attention, nullptr).ok());
  const auto model = load_model(DType::kF32, true);
  const auto attention = make_attention(*model, true);
  ASSERT_TRUE(model->forward(kTokens, *attention, nullptr).ok());
  for (int layer = 0; layer < model->config().num_layers; ++layer) {
    std::vector<float> expected, keys;
    ASSERT_TRUE(cpu_attention->read_keys(layer, expected).ok());
    ASSERT_TRUE(attention->read_keys(layer, keys).ok());
    expect_near(keys, expected, 2e-5f);
  }
}

// Rows are counted where they are: the statistics are those of rows that come to the host.
TEST_P(GpuForwardTest, CountsTheRowsOfAStepOnTheGpu) {
  const auto model = load_model(DType::kF32, true);
  const auto count = [&](bool on_gpu) {
    tune::Statistics statistics = runner::make_statistics(model->config()).value();
    auto counted = tune::DeviceStatistics::create(statistics.config(), 0).value();
    const auto attention = make_attention(*model, true);
    const ops::CpuContext context{&ops::cpu::kernel_table(device::choose_cpu_level().value()),
                                  &serial_executor()};
    runner::CollectingAttention collecting(*attention, statistics, context);
    if (on_gpu) collecting.count_on_gpu(counted.get());
    EXPECT_EQ(collecting.gpu_stream().has_value(), on_gpu);
    EXPECT_TRUE(model->forward(kTokens, collecting, nullptr).ok());
    EXPECT_TRUE(counted->drain(statistics).ok());
    return statistics;
  };
  const tune::Statistics expected = count(false);
  const tune::Statistics found = count(true);
  for (int layer = 0; layer < model->config().num_layers; ++layer) {
    EXPECT_TRUE(found.check_queries_of(layer).ok());
    for (const tune::Side side : {tune::Side::kK, tune::Side::kV}) {
      EXPECT_EQ(found.of(layer, side).num_rows, std::ssize(kTokens));
      expect_near(found.of(layer, side).largest, expected.of(layer, side).largest, 2e-5f);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PlainAndWithExtras, GpuForwardTest, testing::Bool());

TEST(GpuForward, LeavesLatentModelsAndExpertsToTheHost) {
  runner::ModelConfig config;
  config.head_dim = 64;
  EXPECT_TRUE(runner::GpuForward::takes(config));
  config.latent.latent_dim = 512;
  EXPECT_FALSE(runner::GpuForward::takes(config));
  config.latent.latent_dim = 0;
  config.experts.num_experts = 8;
  EXPECT_FALSE(runner::GpuForward::takes(config));
}

}  // namespace
}  // namespace kvx::tests::gpu_forward_test
