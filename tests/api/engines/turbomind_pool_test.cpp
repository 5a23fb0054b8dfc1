// kvx_turbomind_pool_*: data and scale blocks under one id, one budget, pointer tables, and the
// verbs on its memory; kvx_turbomind_process_kv: biases, RoPE and the write.
#include <gmock/gmock.h>

#include <cmath>
#include <set>

#include "core/float16.hpp"
#include "tests/api/engines/turbomind_pools.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

class OwnedPool {
 public:
  explicit OwnedPool(uint32_t mode, int64_t num_blocks = 6, uint64_t budget_bytes = 0) {
    pools = pools_of({.mode = mode});
    pools.num_blocks = num_blocks;
    config.pools = &pools;
    config.budget_bytes = budget_bytes;
    status = kvx_turbomind_pool_create(&config, &pool);
    if (status == KVX_STATUS_OK) status = kvx_turbomind_pool_describe(pool, &pools);
  }
  OwnedPool(const OwnedPool&) = delete;
  ~OwnedPool() { kvx_turbomind_pool_free(pool); }

  kvx_turbomind_pool_facts_t facts() const {
    auto result = sized<kvx_turbomind_pool_facts_t>();
    EXPECT_EQ(kvx_turbomind_pool_facts(pool, &result), KVX_STATUS_OK) << kvx_last_error();
    return result;
  }

  kvx_turbomind_pools_t pools;
  kvx_turbomind_pool_config_t config = sized<kvx_turbomind_pool_config_t>();
  kvx_turbomind_pool_t pool = nullptr;
  kvx_status_t status;
};

constexpr uint32_t kModes[] = {KVX_TURBOMIND_MODE_NONE, KVX_TURBOMIND_MODE_INT4,
                               KVX_TURBOMIND_MODE_INT8, KVX_TURBOMIND_MODE_FP4_MX,
                               KVX_TURBOMIND_MODE_FP4_NV};

TEST(TurboMindPool, CountsBothPoolsAgainstItsBudget) {
  for (const uint32_t mode : kModes) {
    SCOPED_TRACE(mode);
    const kvx_turbomind_pools_t geometry = pools_of({.mode = mode});
    auto sizes = sized<kvx_turbomind_sizes_t>();
    ASSERT_EQ(kvx_turbomind_block_sizes(&geometry, &sizes), KVX_STATUS_OK);
    const uint64_t of_block = sizes.block_bytes + sizes.scale_block_bytes;
    const OwnedPool owned(mode, 0, 5 * of_block + of_block - 1);
    ASSERT_EQ(owned.status, KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(owned.facts().num_blocks, 5);
    EXPECT_EQ(owned.facts().num_free, 5);
    EXPECT_EQ(owned.facts().data_bytes, 5 * sizes.block_bytes);
    EXPECT_EQ(owned.facts().scale_bytes, 5 * sizes.scale_block_bytes);
    const OwnedPool none(mode, 0, of_block - 1);
    EXPECT_EQ(none.status, KVX_STATUS_OUT_OF_RANGE);
  }
}

TEST(TurboMindPool, AllocatesBlocksOnceAndTakesThemBack) {
  const OwnedPool owned(KVX_TURBOMIND_MODE_FP4_MX);
  std::vector<int32_t> ids(4, -1);
  ASSERT_EQ(kvx_turbomind_pool_allocate(owned.pool, 4, ids.data()), KVX_STATUS_OK);
  EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), 4u);
  EXPECT_EQ(owned.facts().num_free, 2);
  std::vector<int32_t> more(3, -1);
  EXPECT_EQ(kvx_turbomind_pool_allocate(owned.pool, 3, more.data()), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(owned.facts().num_free, 2);
  const std::vector<int32_t> twice = {ids[0], ids[1], ids[0]};
  EXPECT_EQ(kvx_turbomind_pool_release(owned.pool, 3, twice.data()), KVX_STATUS_INVALID_ARGUMENT);
  const std::vector<int32_t> beyond = {ids[0], 6};
  EXPECT_EQ(kvx_turbomind_pool_release(owned.pool, 2, beyond.data()), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(owned.facts().num_free, 2);
  EXPECT_EQ(kvx_turbomind_pool_release(owned.pool, 4, ids.data()), KVX_STATUS_OK);
  EXPECT_EQ(owned.facts().num_free, 6);
}

TEST(TurboMindPool, WritesReadsAndNamesItsBlocksInEveryMode) {
  for (const uint32_t mode : kModes) {
    SCOPED_TRACE(mode);
    const OwnedPool owned(mode);
    ASSERT_EQ(owned.status, KVX_STATUS_OK) << kvx_last_error();
    const bool has_scales = owned.pools.scales != nullptr;
    std::vector<int32_t> ids(3);
    ASSERT_EQ(kvx_turbomind_pool_allocate(owned.pool, 3, ids.data()), KVX_STATUS_OK);
    const OneSequence sequence(ids, kTokens);
    const TurbomindLayer layer(owned.pools, 1);
    const std::vector<float> k = test_rows(kTokens, 2, 32, 0.3f);
    const std::vector<float> v = test_rows(kTokens, 2, 32, 1.9f);
    ASSERT_EQ(append_rows(layer.layer, k, v, slots_of(sequence, 8)), KVX_STATUS_OK)
        << kvx_last_error();
    std::vector<float> k_found(k.size());
    std::vector<float> v_found(v.size());
    ASSERT_EQ(gather_rows(layer.layer, sequence, k_found, v_found), KVX_STATUS_OK);
    EXPECT_LT(largest_difference(k_found, k), 0.35);
    Attention attention(layer.layer, sequence, 1);
    ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_LT(largest_difference(attention.out, plain_attention(attention.q, k_found, v_found, 1,
                                                                kTokens, kQHeads, Geometry{})),
              1e-3);  // the largest; the root mean square of codes is 3e-4 (kvx_precision_t)
    // The engine's own tables name the same blocks.
    std::vector<const void*> blocks(3);
    std::vector<const void*> scales(3);
    ASSERT_EQ(kvx_turbomind_pool_pointers(owned.pool, 3, ids.data(), blocks.data(),
                                          has_scales ? scales.data() : nullptr),
              KVX_STATUS_OK)
        << kvx_last_error();
    std::vector<int32_t> found(3);
    ASSERT_EQ(kvx_turbomind_block_ids(&owned.pools, blocks.data(),
                                      has_scales ? scales.data() : nullptr, 3, found.data()),
              KVX_STATUS_OK)
        << kvx_last_error();
    EXPECT_EQ(found, ids);
  }
}

TEST(TurboMindPool, RefusesWhatItCannotBe) {
  const auto refuses = [](const char* message, auto spoil) {
    kvx_turbomind_pools_t pools = pools_of({});
    pools.num_blocks = 6;
    auto config = sized<kvx_turbomind_pool_config_t>();
    config.pools = &pools;
    spoil(config, pools);
    kvx_turbomind_pool_t pool = nullptr;
    EXPECT_EQ(kvx_turbomind_pool_create(&config, &pool), KVX_STATUS_INVALID_ARGUMENT) << message;
    EXPECT_THAT(kvx_last_error(), HasSubstr(message));
    EXPECT_EQ(pool, nullptr);
  };
  using Config = kvx_turbomind_pool_config_t;
  using Pools = kvx_turbomind_pools_t;
  refuses("budget_bytes 100; expected one of the two",
          [](Config& c, Pools&) { c.budget_bytes = 100; });
  refuses("num_blocks is 0 and budget_bytes 0", [](Config&, Pools& p) { p.num_blocks = 0; });
  refuses("num_blocks is -1", [](Config&, Pools& p) { p.num_blocks = -1; });
  refuses("config.memory is 3", [](Config& c, Pools&) { c.memory = KVX_MEMORY_UNIFIED; });
  refuses("config.device is 1", [](Config& c, Pools&) { c.device = 1; });
  refuses("pools.head_dim is 0", [](Config&, Pools& p) { p.head_dim = 0; });
  refuses("config.pools has data", [](Config& c, Pools& p) { p.data = &c; });
  EXPECT_EQ(kvx_turbomind_pool_facts(reinterpret_cast<kvx_turbomind_pool_t>(77), nullptr),
            KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("pool is not a handle"));
}

// --- kvx_turbomind_process_kv ---

constexpr int kPairs = 12;  // 8 numbers of a row stay
constexpr int kPositions = 40;

// The call's rows as halves, with its tables, and the rows that it should leave, by the definition.
struct Step {
  explicit Step(bool is_interleaved) {
    for (int p = 0; p < kPositions; ++p) {
      for (int i = 0; i < kPairs; ++i) {
        const double angle = p * std::pow(10000.0, -i / double{kPairs});
        cos_sin[(p * 2 + 0) * kPairs + i] = static_cast<float>(std::cos(angle));
        cos_sin[(p * 2 + 1) * kPairs + i] = static_cast<float>(std::sin(angle));
      }
    }
    for (int t = 0; t < kTokens; ++t) positions.push_back(t + 13);
    args.rope_pairs = is_interleaved ? KVX_ROPE_PAIRS_INTERLEAVED : KVX_ROPE_PAIRS_HALVES;
    args.append = &append;
    args.k_bias = k_bias.data();
    args.v_bias = v_bias.data();
    args.cos_sin = cos_sin.data();
    args.num_positions = kPositions;
    args.num_pairs = kPairs;
    k_rows = api::rows(k.data(), KVX_DTYPE_F16);
    v_rows = api::rows(v.data(), KVX_DTYPE_F16);
    append.k = &k_rows;
    append.v = &v_rows;
    append.slot_dtype = KVX_DTYPE_S64;
    append.num_tokens = kTokens;
    append.positions = positions.data();
  }
  Step(const Step&) = delete;

  static std::vector<uint16_t> halves(const std::vector<float>& numbers) {
    std::vector<uint16_t> result;
    for (const float x : numbers) result.push_back(f32_to_f16(x));
    return result;
  }
  static float round(float x) { return f16_to_f32(f32_to_f16(x)); }

  std::vector<uint16_t> with_bias(const std::vector<uint16_t>& rows,
                                  const std::vector<uint16_t>& bias) const {
    std::vector<uint16_t> result = rows;
    for (size_t i = 0; i < rows.size(); ++i) {
      result[i] = f32_to_f16(f16_to_f32(rows[i]) + f16_to_f32(bias[i % 64]));
    }
    return result;
  }
  std::vector<uint16_t> turned(const std::vector<uint16_t>& rows) const {
    std::vector<uint16_t> result = rows;
    for (size_t row = 0; row < rows.size() / 32; ++row) {
      const auto position = static_cast<size_t>(positions[row / 2]);
      for (size_t i = 0; i < kPairs; ++i) {
        const bool is_interleaved = args.rope_pairs == KVX_ROPE_PAIRS_INTERLEAVED;
        const size_t first = row * 32 + (is_interleaved ? 2 * i : i);
        const size_t second = row * 32 + (is_interleaved ? 2 * i + 1 : i + kPairs);
        const float cosine = cos_sin[(position * 2) * kPairs + i];
        const float sine = cos_sin[(position * 2 + 1) * kPairs + i];
        const float a = f16_to_f32(rows[first]), b = f16_to_f32(rows[second]);
        result[first] = f32_to_f16(a * cosine - b * sine);
        result[second] = f32_to_f16(b * cosine + a * sine);
      }
    }
    return result;
  }

  std::vector<uint16_t> k = halves(test_rows(kTokens, 2, 32, 0.3f));
  std::vector<uint16_t> v = halves(test_rows(kTokens, 2, 32, 1.9f));
  std::vector<uint16_t> k_bias = halves(test_rows(1, 2, 32, 2.2f));
  std::vector<uint16_t> v_bias = halves(test_rows(1, 2, 32, 5.1f));
  std::vector<float> cos_sin = std::vector<float>(kPositions * 2 * kPairs);
  std::vector<int64_t> positions;
  kvx_rows_t k_rows;
  kvx_rows_t v_rows;
  kvx_append_args_t append = sized<kvx_append_args_t>();
  kvx_turbomind_process_args_t args = sized<kvx_turbomind_process_args_t>();
};

TEST(TurboMindProcessKv, AddsBiasesTurnsKAndStores) {
  for (const bool is_interleaved : {true, false}) {
    SCOPED_TRACE(is_interleaved);
    TurbomindPools found({});
    TurbomindPools expected({});
    const OneSequence sequence({4, 1, 5}, kTokens);
    std::vector<int64_t> slots = slots_of(sequence, 8);
    slots[2] = -1;
    const TurbomindLayer layer(found.args, 1);
    Step step(is_interleaved);
    const std::vector<uint16_t> k_given = step.k;
    std::vector<uint16_t> k = step.turned(step.with_bias(step.k, step.k_bias));
    std::vector<uint16_t> v = step.with_bias(step.v, step.v_bias);
    std::copy_n(k_given.begin() + 2 * 64, 64, k.begin() + 2 * 64);  // its slot is negative
    std::copy_n(step.v.begin() + 2 * 64, 64, v.begin() + 2 * 64);
    step.append.layer = &layer.layer;
    step.append.slots = slots.data();
    ASSERT_EQ(kvx_turbomind_process_kv(&step.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(step.k, k);
    EXPECT_EQ(step.v, v);

    const TurbomindLayer other(expected.args, 1);
    const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F16);
    const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F16);
    kvx_append_args_t append = append_args(other.layer, k_rows, slots);
    append.v = &v_rows;
    ASSERT_EQ(kvx_append(&append, nullptr), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(found.data, expected.data);
    EXPECT_EQ(found.scales, expected.scales);
  }
}

TEST(TurboMindProcessKv, RefusesBadArgumentsAndChangesNothing) {
  TurbomindPools pools({});
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<int64_t> slots = slots_of(sequence, 8);
  std::vector<int64_t> beyond = slots;
  beyond[7] = 48;
  const TurbomindLayer layer(pools.args, 0);
  const auto refuses = [&](const char* message, kvx_status_t status, auto spoil) {
    SCOPED_TRACE(message);
    Step step(true);
    step.append.layer = &layer.layer;
    step.append.slots = slots.data();
    spoil(step);
    const std::vector<uint16_t> before = step.k;
    EXPECT_EQ(kvx_turbomind_process_kv(&step.args, nullptr), status);
    EXPECT_THAT(kvx_last_error(), HasSubstr(message));
    EXPECT_EQ(step.k, before);
  };
  constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
  refuses("args.append is null", kInvalid, [](Step& s) { s.args.append = nullptr; });
  refuses("args.rope_pairs is 2", kInvalid, [](Step& s) { s.args.rope_pairs = 2; });
  refuses("17 pairs; expected all three or none, and at most 16", kInvalid,
          [](Step& s) { s.args.num_pairs = 17; });
  refuses("with 0 positions", kInvalid, [](Step& s) { s.args.num_positions = 0; });
  refuses("args.append.positions is null", kInvalid, [](Step& s) { s.append.positions = nullptr; });
  refuses("positions[20] is 33; cos_sin has 0 to 32", kInvalid,
          [](Step& s) { s.args.num_positions = 33; });
  refuses("one array for k and v", kInvalid, [](Step& s) { s.append.v = &s.k_rows; });
  refuses("slot_mapping[7] is 48", KVX_STATUS_OUT_OF_RANGE,
          [&beyond](Step& s) { s.append.slots = beyond.data(); });
}

}  // namespace
}  // namespace kvx::api_test
