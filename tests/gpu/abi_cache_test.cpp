// Owned caches of the ABI in a GPU's memory: the host cache's rows and attention.
#include <limits>

#include "tests/api/owned_cache.hpp"
#include "tests/gpu/gpu.hpp"

namespace kvx::tests::abi_cache_test {
namespace {

using api_test::kOwnedDim;
using api_test::kOwnedHeads;
using api_test::kQHeads;
using api_test::sized;
using api_test::test_rows;

constexpr int kTokens = 30;  // over several blocks of 8

void begin(api::Cache& cache, int32_t sequence) {
  api_test::begin(cache, sequence, kTokens);
}

class GpuAbiCache : public GpuTest {
 protected:
  api::Result<api::Cache> device_cache(const char* recipe) {
    auto options = sized<kvx_cache_options_t>();
    options.memory = KVX_MEMORY_DEVICE;
    options.max_step_tokens = kTokens;
    options.stream = context().stream;
    return api::Cache::create(api_test::owned_config(recipe), &options);
  }

  void expect_the_hosts_rows(const char* recipe) {
    auto found = device_cache(recipe);
    ASSERT_TRUE(found.ok()) << kvx_last_error();
    api::Cache on_device = std::move(*found);
    api::Cache on_host = api_test::sharing_cache(recipe);
    std::vector<float> q = test_rows(kTokens, kQHeads, kOwnedDim, 0.7f);
    std::vector<float> k = test_rows(kTokens, kOwnedHeads, kOwnedDim, 0.0f);
    std::vector<float> v = test_rows(kTokens, kOwnedHeads, kOwnedDim, 0.5f);

    const int32_t host_sequence = *on_host.create_sequence();
    begin(on_host, host_sequence);
    const std::vector<float> expected = api_test::step_layers(on_host, q, k, v);
    ASSERT_TRUE(on_host.end_step().ok());

    Mirror mirror(memory());
    std::vector<float> out(q.size());
    const int32_t sequence = *on_device.create_sequence();
    begin(on_device, sequence);
    api_test::step_layers(
        on_device, api::rows(mirror.add(q), KVX_DTYPE_F32), api::rows(mirror.add(k), KVX_DTYPE_F32),
        api::rows(mirror.add(v), KVX_DTYPE_F32), api::rows(mirror.add(out), KVX_DTYPE_F32));
    ASSERT_TRUE(on_device.end_step().ok());
    ASSERT_TRUE(on_device.synchronize().ok()) << kvx_last_error();
    mirror.fetch(out);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[i], 2e-3) << i;

    // Codes and scales are the host's, so the rows are, bit for bit.
    std::vector<float> gathered(k.size());
    const kvx_rows_t gathered_rows = api::rows(mirror.add(gathered), KVX_DTYPE_F32);
    ASSERT_EQ(
        kvx_sequence_gather(on_device.handle(), sequence, 1, 0, kTokens, &gathered_rows, nullptr),
        KVX_STATUS_OK)
        << kvx_last_error();
    ASSERT_TRUE(on_device.synchronize().ok()) << kvx_last_error();
    mirror.fetch(gathered);
    std::vector<float> host_rows = api_test::rows_of(on_host, host_sequence);
    host_rows.resize(gathered.size());  // K without V
    EXPECT_EQ(gathered, host_rows);
  }
};

// E4M3 under a scale of 1 ends at 448; the counts are read when somebody asks.
TEST_F(GpuAbiCache, CountsWhatAHeadCouldNotStore) {
  auto made = device_cache("fp8_e4m3");
  ASSERT_TRUE(made.ok()) << kvx_last_error();
  api::Cache cache = std::move(*made);
  EXPECT_EQ(cache.snapshot()->saturated_inputs, 0);
  std::vector<float> q = test_rows(kTokens, kQHeads, kOwnedDim, 0.7f);
  std::vector<float> k = test_rows(kTokens, kOwnedHeads, kOwnedDim, 0.0f);
  std::vector<float> v = test_rows(kTokens, kOwnedHeads, kOwnedDim, 0.5f);
  k[kOwnedDim + 3] = 500.0f;  // head 1
  k[kOwnedDim + 5] = -1e6f;
  v[2] = 470.0f;  // head 0
  v[3] = std::numeric_limits<float>::quiet_NaN();
  begin(cache, *cache.create_sequence());
  Mirror mirror(memory());
  std::vector<float> out(q.size());
  api_test::step_layers(
      cache, api::rows(mirror.add(q), KVX_DTYPE_F32), api::rows(mirror.add(k), KVX_DTYPE_F32),
      api::rows(mirror.add(v), KVX_DTYPE_F32), api::rows(mirror.add(out), KVX_DTYPE_F32));
  ASSERT_TRUE(cache.end_step().ok());
  const kvx_head_counts_t first = *cache.head_counts(1, 0);
  const kvx_head_counts_t second = *cache.head_counts(1, 1);
  EXPECT_EQ(first.k_saturated, 0);
  EXPECT_EQ(first.v_saturated, 1);
  EXPECT_EQ(second.k_saturated, 2);
  EXPECT_EQ(second.v_saturated, 0);
  EXPECT_EQ(cache.snapshot()->saturated_inputs, 3 * api_test::kOwnedLayers);
}

TEST_F(GpuAbiCache, HoldsAndAttendsToTheHostsRows) {
  expect_the_hosts_rows("int8");
}

TEST_F(GpuAbiCache, TakesPagesThatShareAScale) {
  expect_the_hosts_rows("int8:source=page,immediate");
}

TEST_F(GpuAbiCache, KeepsTurboMindsBlocks) {
  for (const char* recipe : {"f16:order=turbomind", "int4_affine:order=turbomind",
                             "int8_affine:order=turbomind", "mxfp4_g16:order=turbomind"}) {
    SCOPED_TRACE(recipe);
    expect_the_hosts_rows(recipe);
  }
}

}  // namespace
}  // namespace kvx::tests::abi_cache_test
