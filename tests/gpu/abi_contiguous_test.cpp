// kvx_contiguous_* in a GPU's memory: the host's bytes, rows and attention, with the fast kernels
// where the rows are metal-marlin's.
#include "tests/api/caller_layer.hpp"
#include "tests/gpu/gpu.hpp"

namespace kvx::tests::abi_contiguous_test {
namespace {

using api_test::sized;

constexpr uint32_t kBatch = 2;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 64;
constexpr uint32_t kLength = 40;  // no multiple of a tile

// [sequence, token, head, dim]: each sequence has tokens of its own.
std::vector<float> rows_of(int first, int count, float seed) {
  std::vector<float> rows;
  for (uint32_t s = 0; s < kBatch; ++s) {
    const std::vector<float> all =
        api_test::test_rows(first + count, kHeads, kDim, seed + 10.0f * static_cast<float>(s));
    rows.insert(rows.end(), all.begin() + first * static_cast<int>(kHeads * kDim), all.end());
  }
  return rows;
}

// A cache on the host, or on the GPU with rows that it brings there.
class Contiguous {
 public:
  Contiguous(const char* recipe, uint32_t flags, int32_t window, cache::Memory* memory,
             void* stream, uint32_t max_seq_len = kLength)
      : memory_(memory), stream_(stream) {
    auto config = sized<kvx_contiguous_config_t>();
    config.num_layers = 1;
    config.num_q_heads = api_test::kQHeads;
    config.num_kv_heads = kHeads;
    config.k_head_dim = kDim;
    config.batch_size = kBatch;
    config.max_seq_len = max_seq_len;
    config.max_append = window > 0 ? 4 : 0;
    config.flags = flags;
    config.recipe = recipe;
    config.layer_windows = window > 0 ? &window : nullptr;
    if (memory != nullptr) {
      config.memory = KVX_MEMORY_DEVICE;
      config.stream = stream;
    }
    EXPECT_EQ(kvx_contiguous_create(&config, &cache_), KVX_STATUS_OK) << kvx_last_error();
  }
  Contiguous(const Contiguous&) = delete;
  ~Contiguous() { kvx_contiguous_free(cache_); }

  kvx_status_t feed(int first, int count) {
    std::vector<float> k = rows_of(first, count, 0.3f), v = rows_of(first, count, 1.9f);
    const Arrays arrays(memory_, stream_);
    const kvx_rows_t k_rows = api::rows(arrays.in(k), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(arrays.in(v), KVX_DTYPE_F32);
    const auto number = static_cast<uint32_t>(count);
    const kvx_status_t appended = kvx_contiguous_append(cache_, 0, number, &k_rows, &v_rows);
    if (appended != KVX_STATUS_OK) return appended;
    return kvx_contiguous_advance(cache_, number);
  }
  std::vector<float> gathered() const {
    std::vector<float> rows(kBatch * facts().num_held * kHeads * kDim);
    const Arrays arrays(memory_, stream_);
    const kvx_rows_t v = api::rows(arrays.in(rows), KVX_DTYPE_F32);
    EXPECT_EQ(kvx_contiguous_gather(cache_, 0, nullptr, &v), KVX_STATUS_OK) << kvx_last_error();
    arrays.out(rows);
    return rows;
  }
  std::vector<float> attend(uint32_t num_queries, bool sees_all) const {
    std::vector<float> q =
        api_test::test_rows(static_cast<int>(kBatch * num_queries), api_test::kQHeads, kDim, 4.2f);
    std::vector<float> out(q.size(), 9.0f);  // what is not written is seen
    const Arrays arrays(memory_, stream_);
    const kvx_rows_t q_rows = api::rows(arrays.in(q), KVX_DTYPE_F32);
    const kvx_rows_t out_rows = api::rows(arrays.in(out), KVX_DTYPE_F32);
    auto args = sized<kvx_contiguous_attend_args_t>();
    args.num_queries = num_queries;
    args.sees_all = sees_all ? 1 : 0;
    args.q = &q_rows;
    args.out = &out_rows;
    EXPECT_EQ(kvx_contiguous_attend(cache_, &args), KVX_STATUS_OK) << kvx_last_error();
    arrays.out(out);
    return out;
  }
  kvx_contiguous_facts_t facts() const {
    auto facts = sized<kvx_contiguous_facts_t>();
    EXPECT_EQ(kvx_contiguous_facts(cache_, 0, &facts), KVX_STATUS_OK) << kvx_last_error();
    return facts;
  }
  // The codes of K's rows in use, [sequence, head, token, byte].
  std::vector<uint8_t> key_codes() const {
    auto k = sized<kvx_side_t>();
    auto v = sized<kvx_side_t>();
    EXPECT_EQ(kvx_contiguous_layer(cache_, 0, &k, &v), KVX_STATUS_OK) << kvx_last_error();
    std::vector<uint8_t> codes;
    for (uint32_t s = 0; s < kBatch; ++s) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        std::vector<uint8_t> rows(facts().num_held * static_cast<size_t>(k.code_token_stride));
        const uint8_t* from =
            static_cast<const uint8_t*>(k.codes) + s * k.code_block_stride + h * k.code_head_stride;
        if (memory_ != nullptr) {
          EXPECT_TRUE(device::cuda_copy(rows.data(), from, std::ssize(rows)).ok());
        } else {
          std::copy_n(from, rows.size(), rows.begin());
        }
        codes.insert(codes.end(), rows.begin(), rows.end());
      }
    }
    return codes;
  }

 private:
  // Arrays of one call, where the cache takes them.
  class Arrays {
   public:
    Arrays(cache::Memory* memory, void* stream) : stream_(stream) {
      if (memory != nullptr) mirror_.emplace(*memory);
    }
    // Waits for what reads them.
    ~Arrays() {
      if (!mirror_) return;
      EXPECT_TRUE(device::cuda_synchronize(stream_).ok());
    }
    Arrays(const Arrays&) = delete;
    float* in(std::vector<float>& host) const { return mirror_ ? mirror_->add(host) : host.data(); }
    void out(std::vector<float>& host) const {
      if (!mirror_) return;
      EXPECT_TRUE(device::cuda_synchronize(stream_).ok());
      mirror_->fetch(host);
    }

   private:
    void* stream_;
    mutable std::optional<Mirror> mirror_;
  };

  cache::Memory* memory_;
  void* stream_;
  kvx_contiguous_t cache_ = nullptr;
};

class GpuAbiContiguous : public GpuTest {};

TEST_F(GpuAbiContiguous, IsTheHosts) {
  const struct {
    const char* recipe;
    uint32_t flags;
    int32_t window;
  } kCases[] = {
      {"f32", 0, 0},
      {"f16", 0, 0},
      {"fp4_row", 0, 0},
      {"int4_row", 0, 0},
      {"int8", 0, 0},
      {"int8/int4", 0, 0},
      {"fp4_row", 0, 12},
      {"int4_row", 0, 12},
      {"fp4_row:scale=f32", 0, 0},
      {"fp4_row", KVX_CONTIGUOUS_EVICTS, 0},
      {"f16", KVX_CONTIGUOUS_EVICTS, 0},
  };
  for (const auto& [recipe, flags, window] : kCases) {
    SCOPED_TRACE(fmt::format("{} flags {} window {}", recipe, flags, window));
    Contiguous host(recipe, flags, window, nullptr, nullptr);
    Contiguous device(recipe, flags, window, &memory(), context().stream);
    int first = 0;
    for (const int count : {31, 4, 1, 1, 3, 2}) {  // past kLength where rows leave
      if (first + count > int{kLength} && flags == 0) break;
      for (Contiguous* cache : {&host, &device}) {
        ASSERT_EQ(cache->feed(first, count), KVX_STATUS_OK) << kvx_last_error();
      }
      first += count;
      const auto num_queries = static_cast<uint32_t>(std::min(count, 4));
      for (const bool sees_all : {false, true}) {
        EXPECT_LT(api_test::largest_difference(device.attend(num_queries, sees_all),
                                               host.attend(num_queries, sees_all)),
                  2e-3);
      }
    }
    EXPECT_EQ(device.gathered(), host.gathered());
    EXPECT_EQ(device.facts().num_held, host.facts().num_held);
    if (window > 0) continue;  // a ring of the GPU's has more room, and other slots
    EXPECT_EQ(device.key_codes(), host.key_codes());
    EXPECT_EQ(device.facts().capacity, host.facts().capacity);
  }
}

// A GPU's ring has whole tiles, whose passes follow each other without gaps.
TEST_F(GpuAbiContiguous, RingsGoRoundAsTheHostsDo) {
  constexpr uint32_t kLong = 400;
  for (const char* recipe : {"fp4_row", "int4_row", "int8", "fp4_row:scale=f32"}) {
    for (const int32_t window : {12, 61, 70}) {
      SCOPED_TRACE(fmt::format("{} window {}", recipe, window));
      Contiguous host(recipe, 0, window, nullptr, nullptr, kLong);
      Contiguous device(recipe, 0, window, &memory(), context().stream, kLong);
      EXPECT_EQ(host.facts().capacity, static_cast<uint32_t>(window + 3));
      EXPECT_EQ(device.facts().capacity, window + 3 <= 64 ? 64u : 128u);
      int first = 0;
      for (const int count : {60, 3, 1, 1, 1, 62, 4, 1, 130, 2, 1}) {
        for (Contiguous* cache : {&host, &device}) {
          ASSERT_EQ(cache->feed(first, count), KVX_STATUS_OK) << kvx_last_error();
        }
        first += count;
        const auto num_queries = static_cast<uint32_t>(std::min(count, 4));
        EXPECT_LT(api_test::largest_difference(device.attend(num_queries, false),
                                               host.attend(num_queries, false)),
                  2e-3);
        EXPECT_EQ(device.gathered(), host.gathered());
        EXPECT_EQ(device.facts().num_held, host.facts().num_held);
      }
    }
  }
}

// More queries than decode_mma takes at once, in both directions, where every row sees all rows.
TEST_F(GpuAbiContiguous, PromptsSeeInBothDirections) {
  for (const char* recipe : {"f16", "fp4_row", "fp4_row:scale=f32", "int4_row:scale=f32", "int8"}) {
    SCOPED_TRACE(recipe);
    Contiguous host(recipe, 0, 0, nullptr, nullptr);
    Contiguous device(recipe, 0, 0, &memory(), context().stream);
    for (Contiguous* cache : {&host, &device}) {
      ASSERT_EQ(cache->feed(0, kLength), KVX_STATUS_OK) << kvx_last_error();
    }
    std::vector<float> outputs[2];
    for (const bool sees_all : {false, true}) {
      outputs[sees_all ? 1 : 0] = device.attend(kLength, sees_all);
      EXPECT_LT(
          api_test::largest_difference(outputs[sees_all ? 1 : 0], host.attend(kLength, sees_all)),
          2e-3);
    }
    EXPECT_NE(outputs[0], outputs[1]);
  }
}

TEST_F(GpuAbiContiguous, RefusesRowsOfTheHostAndStepsThatAreTooLong) {
  Contiguous device("fp4_row", 0, 0, &memory(), context().stream);
  EXPECT_EQ(device.feed(0, kLength + 1), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(device.facts().num_held, 0u);
  auto config = sized<kvx_contiguous_config_t>();
  config.num_layers = 1;
  config.num_q_heads = config.num_kv_heads = kHeads;
  config.k_head_dim = kDim;
  config.batch_size = kBatch;
  config.max_seq_len = kLength;
  config.recipe = "fp4_row";
  config.memory = KVX_MEMORY_DEVICE;
  config.stream = context().stream;
  kvx_contiguous_t cache = nullptr;
  ASSERT_EQ(kvx_contiguous_create(&config, &cache), KVX_STATUS_OK) << kvx_last_error();
  const std::vector<float> row(kBatch * kHeads * kDim);
  const kvx_rows_t rows = api::rows(row.data(), KVX_DTYPE_F32);
  EXPECT_EQ(kvx_contiguous_append(cache, 0, 1, &rows, &rows), KVX_STATUS_INVALID_ARGUMENT);
  kvx_contiguous_free(cache);
}

}  // namespace
}  // namespace kvx::tests::abi_contiguous_test
