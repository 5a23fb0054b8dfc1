// A cache holds, saves and reads back the same bytes wherever its blocks lie. In kv_test both
// caches are the host's; in kv_test_on_gpu one of them lies on the GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/kv/stream.hpp"

namespace kvx::kv::place_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int kNumTokens = 150;
struct Kind {
  const char* recipe;
  int block_size = 16;
};
// The last ones' E2M1 codes lie in interleaved order on a GPU.
constexpr Kind kKinds[] = {{"bf16"},
                           {"f32"},
                           {"int8/int4"},
                           {"nvfp4:auto"},
                           {"fp8_e4m3"},
                           {"int4:sink=10,recent=40,full_precision=f16"},
                           {"mxfp4:hadamard"},
                           {"int4_affine:auto"},
                           {"int8:recent=16,full_precision=f32"},
                           {"int8:source=page,immediate"},
                           {"int4:source=page,sink=10,recent=40"},
                           {"nvfp4", 64},
                           {"mxfp4:auto", 64}};

KvCacheConfig here(const Kind& kind) {
  KvCacheConfig config = config_of(kind.recipe, kind.block_size);
  config.overrides = {parse_head_override("0:1=int8").value()};
  config.geometry.layer_windows = {0, 50};
  config.prefix = {true, cache::HashAlgorithm::kXxh3, "a model"};
  return config;
}

KvCacheConfig on_host(const Kind& kind) {
  KvCacheConfig config = here(kind);
  config.cuda.reset();
  return config;
}

std::vector<int32_t> token_ids(int count) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(i);
  return ids;
}

int fed_sequence(KvCache& cache, const Stream& stream, int num_tokens, int step_tokens) {
  const int sequence = cache.create_sequence().value();
  feed(cache, sequence, stream, 0, num_tokens, step_tokens);
  EXPECT_TRUE(cache.record_tokens(sequence, token_ids(num_tokens)).ok());
  return sequence;
}

// K, then V, of the tokens that every layer still has.
std::vector<float> stored_rows(const KvCache& cache, int sequence, int layer) {
  constexpr int kFirst = 112;
  std::vector<float> rows(2 * static_cast<size_t>(kNumTokens - kFirst) * kNumKvHeads * kHeadDim);
  const auto of = [](float* data) {
    return dense_rows(static_cast<void*>(data), DType::kF32, kNumKvHeads, kHeadDim);
  };
  const Status done = gather(cache, sequence, layer, kFirst, kNumTokens - kFirst, of(rows.data()),
                             of(rows.data() + rows.size() / 2));
  EXPECT_TRUE(done.ok()) << done.error().message;
  return rows;
}

TEST(Place, HoldsTheHostsNumbersAndAttendsToThem) {
  const Stream stream(kNumTokens);
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(fmt::format("{}, blocks of {}", kind.recipe, kind.block_size));
    const auto expected = created(on_host(kind));
    const auto cache = created(here(kind));
    const int on_host = expected->create_sequence().value();
    const int sequence = cache->create_sequence().value();
    EXPECT_LT(relative_rms(feed(*cache, sequence, stream, 0, kNumTokens, 40),
                           feed(*expected, on_host, stream, 0, kNumTokens, 40)),
              4e-3);
    for (int layer = 0; layer < kNumLayers; ++layer) {
      EXPECT_EQ(stored_rows(*cache, sequence, layer), stored_rows(*expected, on_host, layer));
    }
    EXPECT_EQ(cache->nonfinite_inputs(), 0);
    EXPECT_TRUE(cache->synchronize().ok());
  }
}

TEST(Place, SavesTheHostsFileAndEachReadsTheOthers) {
  const Stream stream(kNumTokens);
  const std::string paths[] = {
      (fs::temp_directory_path() / ("kvx_place_a_" + std::to_string(getpid()))).string(),
      (fs::temp_directory_path() / ("kvx_place_b_" + std::to_string(getpid()))).string()};
  const auto bytes_of_file = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::vector<char>{std::istreambuf_iterator<char>(file), {}};
  };
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(fmt::format("{}, blocks of {}", kind.recipe, kind.block_size));
    const KvCacheConfig configs[] = {here(kind), on_host(kind)};
    for (int i = 0; i < 2; ++i) {
      const auto cache = created(configs[i]);
      const int sequence = fed_sequence(*cache, stream, 107, 1000);
      const Status saved = cache->save_sequence(sequence, paths[i]);
      ASSERT_TRUE(saved.ok()) << saved.error().message;
    }
    EXPECT_EQ(bytes_of_file(paths[0]), bytes_of_file(paths[1]));
    std::vector<float> outputs[2];
    for (int i = 0; i < 2; ++i) {
      const auto cache = created(configs[i]);
      const auto loaded = cache->load_sequence(paths[1 - i]);
      ASSERT_TRUE(loaded.ok()) << loaded.error().message;
      outputs[i] = feed(*cache, loaded.value(), stream, 107, kNumTokens, 1000);
    }
    EXPECT_LT(relative_rms(outputs[0], outputs[1]), 4e-3);
  }
  for (const std::string& path : paths) fs::remove(path);
}

TEST(Place, ZeroesFreedBlocksWhereTheyLie) {
  const Stream stream(32);
  KvCacheConfig config = config_of("f32");
  config.zeroes_on_free = true;
  config.max_sequences = 1;
  config.max_tokens_per_sequence = 32;
  const auto cache = created(config);
  const int first = cache->create_sequence().value();
  feed(*cache, first, stream, 0, 32, 32);
  ASSERT_TRUE(cache->free_sequence(first).ok());
  // A step that writes nothing makes the freed blocks another sequence's.
  const int second = cache->create_sequence().value();
  const StepEntry entry{second, 32};
  ASSERT_TRUE(cache->begin_step({&entry, 1}).ok());
  ASSERT_TRUE(cache->end_step().ok());
  std::vector<float> k(32 * kNumKvHeads * kHeadDim, 1.0f);
  ASSERT_TRUE(
      gather(*cache, second, 0, 0, 32, dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim), {})
          .ok());
  EXPECT_EQ(k, std::vector<float>(k.size(), 0.0f));
}

// What a GPU does not do is refused by its field, before anything is asked of a device.
TEST(Place, RefusesForAGpuWhatItDoesNotDo) {
  const auto refusal = [](auto change) {
    KvCacheConfig config = config_of("int8");
    config.cuda = CudaPlacement{};
    change(config);
    const auto cache = KvCache::create(std::move(config), context());
    return cache.ok() ? "accepted" : cache.error().message;
  };
  EXPECT_THAT(refusal([](KvCacheConfig& c) {
                c.cuda->max_step_tokens = 8;
                c.max_speculative_tokens = 9;
              }),
              HasSubstr("max_speculative_tokens is 9; expected 0 to cuda.max_step_tokens, 8"));
  EXPECT_THAT(refusal([](KvCacheConfig& c) { c.cuda->max_step_tokens = 1; }),
              HasSubstr("cuda.max_step_tokens is 1; expected at least max_sequences, 2"));
  EXPECT_THAT(refusal([](KvCacheConfig& c) { c.memory = &cache::host_memory(); }),
              HasSubstr("memory and cuda are both given"));
}

}  // namespace
}  // namespace kvx::kv::place_test
