// kvx_contiguous_*: preallocated caches and rings of equally long sequences, packed words,
// attention in both directions, and what they refuse.
#include <gmock/gmock.h>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::contiguous_test {
namespace {

using testing::HasSubstr;

constexpr int kBatch = 2;
constexpr int kHeads = 2;
constexpr int kDim = 32;
constexpr int kLength = 16;

struct Contiguous {
  explicit Contiguous(const char* recipe, uint32_t flags = 0, int32_t window = 0) {
    config.num_layers = 1;
    config.num_q_heads = kQHeads;
    config.num_kv_heads = kHeads;
    config.k_head_dim = kDim;
    config.batch_size = kBatch;
    config.max_seq_len = kLength;
    config.flags = flags;
    config.recipe = recipe;
    windows[0] = window;
    config.layer_windows = windows;
    status = kvx_contiguous_create(&config, &cache);
  }
  Contiguous(const Contiguous&) = delete;
  ~Contiguous() { kvx_contiguous_free(cache); }

  // Tokens first to first + count of both sequences, as one step.
  kvx_status_t feed(int first, int count) {
    const std::vector<float> k = rows_of(first, count, 0.3f);
    const std::vector<float> v = rows_of(first, count, 1.9f);
    const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F32);
    const auto number = static_cast<uint32_t>(count);
    const kvx_status_t appended = kvx_contiguous_append(cache, 0, number, &k_rows, &v_rows);
    return appended == KVX_STATUS_OK ? kvx_contiguous_advance(cache, number) : appended;
  }
  // [sequence, token, head, dim]: the second sequence's tokens are others.
  static std::vector<float> rows_of(int first, int count, float seed) {
    std::vector<float> rows;
    for (int s = 0; s < kBatch; ++s) {
      const std::vector<float> all =
          test_rows(first + count, kHeads, kDim, seed + 10.0f * static_cast<float>(s));
      rows.insert(rows.end(), all.begin() + first * kHeads * kDim, all.end());
    }
    return rows;
  }
  std::vector<float> gathered(int num_held) {
    std::vector<float> rows(static_cast<size_t>(kBatch * num_held * kHeads * kDim));
    const kvx_rows_t k = api::rows(rows.data(), KVX_DTYPE_F32);
    EXPECT_EQ(kvx_contiguous_gather(cache, 0, &k, nullptr), KVX_STATUS_OK) << kvx_last_error();
    return rows;
  }
  kvx_contiguous_facts_t facts() const {
    auto result = sized<kvx_contiguous_facts_t>();
    EXPECT_EQ(kvx_contiguous_facts(cache, 0, &result), KVX_STATUS_OK) << kvx_last_error();
    return result;
  }

  int32_t windows[1] = {0};
  kvx_contiguous_config_t config = sized<kvx_contiguous_config_t>();
  kvx_contiguous_t cache = nullptr;
  kvx_status_t status;
};

TEST(ContiguousCache, HoldsWhatWasAppended) {
  Contiguous cache("f32");
  ASSERT_EQ(cache.status, KVX_STATUS_OK) << kvx_last_error();
  ASSERT_EQ(cache.feed(0, 9), KVX_STATUS_OK) << kvx_last_error();
  ASSERT_EQ(cache.feed(9, 1), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(cache.gathered(10), Contiguous::rows_of(0, 10, 0.3f));
  const kvx_contiguous_facts_t facts = cache.facts();
  EXPECT_EQ(facts.seq_len, 10u);
  EXPECT_EQ(facts.num_held, 10u);
  EXPECT_EQ(facts.capacity, uint32_t{kLength});
  EXPECT_EQ(facts.allocated_bytes, uint64_t{2 * kBatch * kLength * kHeads * kDim * 4});
  EXPECT_EQ(facts.used_bytes, uint64_t{2 * kBatch * 10 * kHeads * kDim * 4});
  ASSERT_EQ(kvx_contiguous_reset(cache.cache), KVX_STATUS_OK);
  EXPECT_EQ(cache.facts().num_held, 0u);
}

TEST(ContiguousCache, EvictsOrRefusesAtItsEnd) {
  Contiguous refusing("f32");
  Contiguous evicting("f32", KVX_CONTIGUOUS_EVICTS);
  for (Contiguous* cache : {&refusing, &evicting}) {
    ASSERT_EQ(cache->feed(0, 14), KVX_STATUS_OK) << kvx_last_error();
  }
  EXPECT_EQ(refusing.feed(14, 5), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(refusing.gathered(14), Contiguous::rows_of(0, 14, 0.3f));
  ASSERT_EQ(evicting.feed(14, 5), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(evicting.gathered(16), Contiguous::rows_of(3, 16, 0.3f));
}

TEST(ContiguousCache, IsARingInALayerWithAWindow) {
  Contiguous ring("f32", 0, 6);
  ASSERT_EQ(ring.status, KVX_STATUS_OK) << kvx_last_error();
  for (int t = 0; t < 15; ++t) ASSERT_EQ(ring.feed(t, 1), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(ring.facts().capacity, 6u);
  EXPECT_EQ(ring.gathered(6), Contiguous::rows_of(9, 6, 0.3f));
}

// metal-marlin's words: eight codes each, the first in the lowest four bits.
TEST(ContiguousCache, ShowsPackedWordsAndScales) {
  Contiguous cache("int4_row:scale=f32");
  ASSERT_EQ(cache.status, KVX_STATUS_OK) << kvx_last_error();
  ASSERT_EQ(cache.feed(0, 5), KVX_STATUS_OK) << kvx_last_error();
  auto k = sized<kvx_side_t>();
  auto v = sized<kvx_side_t>();
  ASSERT_EQ(kvx_contiguous_layer(cache.cache, 0, &k, &v), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(k.spec->format, uint32_t{KVX_FORMAT_INT4_ROW});
  const std::vector<float> found = cache.gathered(5);
  for (int s = 0; s < kBatch; ++s) {
    for (int t = 0; t < 5; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        const auto* row = static_cast<const uint8_t*>(k.codes) + s * k.code_block_stride +
                          t * k.code_token_stride + h * k.code_head_stride;
        const auto* scale = static_cast<const uint8_t*>(k.scales) + s * k.scale_block_stride +
                            t * k.scale_token_stride + h * k.scale_head_stride;
        float step = 0;
        memcpy(&step, scale, sizeof step);
        for (int d = 0; d < kDim; ++d) {
          uint32_t word = 0;
          memcpy(&word, row + d / 8 * 4, sizeof word);
          const auto code = static_cast<int>(word >> (d % 8 * 4) & 0xF);
          const int number = code < 8 ? code : code - 16;
          EXPECT_EQ(found[((s * 5 + t) * kHeads + h) * kDim + d],
                    static_cast<float>(number) * step);
        }
      }
    }
  }
}

// Of the first sequence; the second one's output must be its own.
TEST(ContiguousCache, AttendsForwardsAndInBothDirections) {
  Contiguous cache("f32");
  ASSERT_EQ(cache.feed(0, 10), KVX_STATUS_OK) << kvx_last_error();
  constexpr int kQueries = 4;
  const std::vector<float> q = test_rows(kBatch * kQueries, kQHeads, kDim, 4.2f);
  std::vector<float> out(q.size());
  const kvx_rows_t q_rows = api::rows(q.data(), KVX_DTYPE_F32);
  const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
  auto args = sized<kvx_contiguous_attend_args_t>();
  args.num_queries = kQueries;
  args.q = &q_rows;
  args.out = &out_rows;
  const auto of_sequence = [](const std::vector<float>& rows, int s) {
    const size_t half = rows.size() / kBatch;
    const auto begin = rows.begin() + static_cast<int64_t>(half) * s;
    return std::vector<float>(begin, begin + static_cast<int64_t>(half));
  };
  for (const bool sees_all : {false, true}) {
    SCOPED_TRACE(sees_all);
    args.sees_all = sees_all ? 1 : 0;
    ASSERT_EQ(kvx_contiguous_attend(cache.cache, &args), KVX_STATUS_OK) << kvx_last_error();
    for (int s = 0; s < kBatch; ++s) {
      const std::vector<float> k = of_sequence(Contiguous::rows_of(0, 10, 0.3f), s);
      const std::vector<float> v = of_sequence(Contiguous::rows_of(0, 10, 1.9f), s);
      std::vector<float> expected;
      for (int i = 0; i < kQueries; ++i) {
        const auto query = of_sequence(q, s);
        const std::vector<float> one(query.begin() + i * kQHeads * kDim,
                                     query.begin() + (i + 1) * kQHeads * kDim);
        const int seen = sees_all ? 10 : 10 - kQueries + i + 1;
        const std::vector<float> row =
            plain_attention(one, k, v, 1, seen, kQHeads, {1, 8, kHeads, kDim});
        expected.insert(expected.end(), row.begin(), row.end());
      }
      EXPECT_LT(largest_difference(of_sequence(out, s), expected), 2e-5);
    }
  }
}

TEST(ContiguousCache, RefusesWhatItCannotBe) {
  const auto refuses = [](const char* message, auto spoil) {
    Contiguous good("f32");
    kvx_contiguous_config_t config = good.config;
    spoil(config);
    kvx_contiguous_t cache = nullptr;
    EXPECT_NE(kvx_contiguous_create(&config, &cache), KVX_STATUS_OK) << message;
    EXPECT_THAT(kvx_last_error(), HasSubstr(message));
    EXPECT_EQ(cache, nullptr);
  };
  using Config = kvx_contiguous_config_t;
  refuses("config.num_layers is 0", [](Config& c) { c.num_layers = 0; });
  refuses("config.batch_size is 0", [](Config& c) { c.batch_size = 0; });
  refuses("config.recipe is null", [](Config& c) { c.recipe = nullptr; });
  refuses("config.flags is 0x8", [](Config& c) { c.flags = 8; });
  refuses("config.reserved is 1", [](Config& c) { c.reserved = 1; });
  refuses("config.memory is 3", [](Config& c) { c.memory = KVX_MEMORY_UNIFIED; });
  refuses("config.memory is 0; expected KVX_MEMORY_DEVICE", [](Config& c) { c.device = 1; });
  refuses("num_q_heads", [](Config& c) { c.num_q_heads = 3; });

  Contiguous cache("f32");
  ASSERT_EQ(cache.feed(0, 3), KVX_STATUS_OK);
  EXPECT_EQ(kvx_contiguous_advance(cache.cache, 1), KVX_STATUS_INVALID_ARGUMENT);
  const std::vector<float> row(kBatch * kHeads * kDim);
  const kvx_rows_t rows = api::rows(row.data(), KVX_DTYPE_F32);
  EXPECT_EQ(kvx_contiguous_append(cache.cache, 1, 1, &rows, &rows), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("layer is 1; the cache has 1"));
  EXPECT_EQ(kvx_contiguous_append(cache.cache, 0, 0, &rows, &rows), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_contiguous_append(cache.cache, 0, 1, &rows, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_contiguous_gather(cache.cache, 0, nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_contiguous_reset(reinterpret_cast<kvx_contiguous_t>(99)),
            KVX_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kvx::api_test::contiguous_test
