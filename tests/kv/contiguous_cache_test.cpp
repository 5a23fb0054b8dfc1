// The contiguous cache: its bytes, its position counter, and attention against the textbook.
#include "kv/contiguous/contiguous_cache.hpp"

#include <gmock/gmock.h>

#include <cstring>

#include "tests/kv/contiguous_support.hpp"

namespace kvx::kv {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// The seed's layout: codes [batch, kv_heads, max_seq_len, head_dim / 8] uint32, scales [batch,
// kv_heads, max_seq_len, 1] f16.
TEST(ContiguousCache, KeepsPackedRowsAsUint32WordsWithOneF16ScaleARow) {
  ContiguousCache cache = cache_of(small_config("fp4_row", 4));
  // Sequence 1, head 1, token 2 alone differs from zero: every magnitude with both signs.
  const int heads = 2, head_dim = 32;
  std::vector<float> k(2 * 3 * heads * head_dim), v(k.size());
  float* row = k.data() + ((1 * 3 + 2) * heads + 1) * head_dim;
  const float codes_0_to_7[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int d = 0; d < head_dim; ++d) row[d] = codes_0_to_7[d % 8] * (d / 8 % 2 == 0 ? 1.0f : -1.0f);
  ASSERT_TRUE(cache.append(0, 3, input(k, heads, head_dim), input(v, heads, head_dim)).ok());

  const ops::SideView& side = cache.view(0).runs[0].k;
  constexpr int kRows = 2 * 2 * 4;  // batch, heads, max_seq_len
  constexpr int kTouched = (1 * 2 + 1) * 4 + 2;
  uint32_t words[kRows][4];
  uint16_t scales[kRows];
  std::memcpy(words, side.codes.base, sizeof words);
  std::memcpy(scales, side.scales.base, sizeof scales);
  for (int r = 0; r < kRows; ++r) {
    if (r == kTouched) {
      // -0 keeps its sign: element 8 is code 8.
      EXPECT_THAT(words[r],
                  ::testing::ElementsAre(0x76543210u, 0xFEDCBA98u, 0x76543210u, 0xFEDCBA98u));
      EXPECT_EQ(scales[r], 0x3C00);  // amax 6 / 6 = 1
    } else {
      EXPECT_THAT(words[r], Each(0u)) << r;
      EXPECT_EQ(scales[r], 0) << r;
    }
  }
}

TEST(ContiguousCache, LaysOutInt4RowsLikewiseInTwosComplement) {
  ContiguousCache cache = cache_of(small_config("int4_row", 4));
  const int heads = 2, head_dim = 32;
  std::vector<float> k(2 * heads * head_dim), v(k.size());
  for (int d = 0; d < head_dim; ++d) v[d] = static_cast<float>(d % 8) * (d < 8 ? 1.0f : -1.0f);
  ASSERT_TRUE(cache.append(1, 1, input(k, heads, head_dim), input(v, heads, head_dim)).ok());
  const ops::SideView& side = cache.view(1).runs[0].v;
  uint32_t words[4];
  uint16_t scale;
  std::memcpy(words, side.codes.base, sizeof words);
  std::memcpy(&scale, side.scales.base, sizeof scale);
  EXPECT_THAT(words, ::testing::ElementsAre(0x76543210u, 0x9ABCDEF0u, 0x9ABCDEF0u, 0x9ABCDEF0u));
  EXPECT_EQ(scale, 0x3C00);
}

TEST(ContiguousCache, IsZeroEverywhereBeforeTheFirstAppend) {
  const ContiguousCache cache = cache_of(small_config("fp4_row", 16));
  const ops::SideView& side = cache.view(1).runs[0].v;
  EXPECT_THAT(std::vector<uint8_t>(side.codes.base, side.codes.base + 2 * 2 * 16 * 16), Each(0));
  EXPECT_THAT(std::vector<uint8_t>(side.scales.base, side.scales.base + 2 * 2 * 16 * 2), Each(0));
}

TEST(ContiguousCache, MovesItsPositionOnceAllLayersHaveAppended) {
  ContiguousCache cache = cache_of(small_config("bf16", 16));
  ASSERT_TRUE(append_layer(cache, 0, 0, 3).ok());
  EXPECT_EQ(cache.seq_len(), 0);
  EXPECT_EQ(cache.num_held(0), 3);
  EXPECT_EQ(cache.num_held(1), 0);
  EXPECT_THAT(message_of(cache.advance(3)), HasSubstr("layer 1 has appended 0"));
  EXPECT_THAT(message_of(append_layer(cache, 0, 3, 1)),
              HasSubstr("layer 0 has appended 3 tokens since the last advance"));
  ASSERT_TRUE(append_layer(cache, 1, 0, 3).ok());
  EXPECT_THAT(message_of(cache.advance(2)), HasSubstr("num_tokens is 2; layer 0 has appended 3"));
  ASSERT_TRUE(cache.advance(3).ok());
  EXPECT_EQ(cache.seq_len(), 3);
}

TEST(ContiguousCache, ShowsALayerItsNewTokensBeforeTheyAreCounted) {
  ContiguousCache cache = cache_of(small_config("f32", 16));
  ASSERT_TRUE(append_all(cache, 0, 5).ok());
  ASSERT_TRUE(append_layer(cache, 0, 5, 2).ok());
  EXPECT_LE(relative_rms(attend(cache, 0, 7, 2, {.softmax_scale = 0.2f}),
                         reference_attention(cache, 0, 7, 2, 0.2f, 0)),
            1e-5);
  EXPECT_EQ(cache.num_held(0), 7);
}

TEST(ContiguousCache, WritesTheSameBytesInOneCallAndTokenByToken) {
  ContiguousCache whole = cache_of(small_config("nvfp4", 8));
  ContiguousCache by_token = cache_of(small_config("nvfp4", 8));
  ASSERT_TRUE(append_all(whole, 0, 8).ok());
  for (int t = 0; t < 8; ++t) ASSERT_TRUE(append_all(by_token, t, 1).ok());
  for (int layer = 0; layer < 2; ++layer) {
    const ops::SideView& a = whole.view(layer).runs[0].k;
    const ops::SideView& b = by_token.view(layer).runs[0].k;
    EXPECT_EQ(std::memcmp(a.codes.base, b.codes.base, 2 * 2 * 8 * 16), 0);
    EXPECT_EQ(std::memcmp(a.scales.base, b.scales.base, 2 * 2 * 8 * 2), 0);
  }
}

TEST(ContiguousCache, ForgetsEverythingOnReset) {
  ContiguousCache cache = cache_of(small_config("int8", 8));
  ASSERT_TRUE(append_all(cache, 0, 8).ok());
  cache.reset();
  EXPECT_EQ(cache.seq_len(), 0);
  EXPECT_EQ(cache.used_bytes(), 0);
  ASSERT_TRUE(append_all(cache, 40, 2).ok());
  ContiguousCache fresh = cache_of(small_config("int8", 8));
  ASSERT_TRUE(append_all(fresh, 40, 2).ok());
  EXPECT_EQ(attend(cache, 0, 42, 2), attend(fresh, 0, 42, 2));
}

class ContiguousFormats : public ::testing::TestWithParam<const char*> {};

TEST_P(ContiguousFormats, AttendAsTheTextbookDoesOverWhatIsStored) {
  for (const int head_dim : {64, 96}) {
    ContiguousCache cache = cache_of(small_config(GetParam(), 70, head_dim));
    ASSERT_TRUE(append_all(cache, 0, 65).ok());
    // gather rounds affine rows to f16, attention reads them in binary32.
    const double bound = std::string_view(GetParam()).ends_with("affine") ? 2e-3 : 1e-5;
    for (const int q_len : {1, 9, 65}) {
      EXPECT_LE(relative_rms(attend(cache, 1, 65, q_len, {.softmax_scale = 0.1f}),
                             reference_attention(cache, 1, 65, q_len, 0.1f, 0)),
                bound)
          << GetParam() << " head_dim " << head_dim << " q_len " << q_len;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ContiguousFormats,
                         ::testing::Values("f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8",
                                           "int4", "int8_affine", "int4_affine", "mxfp4_g16",
                                           "mxfp4", "nvfp4", "fp4_row", "int4_row", "int8/int4",
                                           "nvfp4:hadamard"));

// The public kernels derive head and batch strides from the current length, which is wrong as soon
// as there is a second head or sequence in a preallocated cache.
TEST(ContiguousCache, ReadsTheSameWhateverMaxSeqLenIs) {
  ContiguousCache tight = cache_of(small_config("int4", 20));
  ContiguousCache roomy = cache_of(small_config("int4", 333));
  ASSERT_TRUE(append_all(tight, 0, 20).ok());
  ASSERT_TRUE(append_all(roomy, 0, 20).ok());
  EXPECT_EQ(attend(tight, 0, 20, 7), attend(roomy, 0, 20, 7));
}

TEST(ContiguousCache, StoresHeadsAndLayersInFormatsOfTheirOwn) {
  ContiguousConfig config = small_config("int4", 12);
  config.overrides = {parse_layer_override("0=bf16").value(),
                      parse_head_override("1:1=int8/fp4_row").value()};
  ContiguousCache cache = cache_of(config);
  ASSERT_EQ(cache.view(0).runs.size(), 1u);
  ASSERT_EQ(cache.view(1).runs.size(), 2u);
  ASSERT_TRUE(append_all(cache, 0, 12).ok());
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_LE(relative_rms(attend(cache, layer, 12, 3, {.softmax_scale = 0.2f}),
                           reference_attention(cache, layer, 12, 3, 0.2f, 0)),
              1e-5);
  }
}

TEST(ContiguousCache, ReadsGivenScalesAndCountsWhatTheyCannotSay) {
  ContiguousConfig config = small_config("int8:source=given,g32", 4);
  EXPECT_FALSE(ContiguousCache::create(config, scalar_context()).ok());  // which scales?
  config.calibration.resize(2);
  for (LayerCalibration& layer : config.calibration) {
    layer.k.group_scales = {0.5f, 0.25f};  // a group a head
    layer.v.group_scales = {1.0f, 2.0f};
  }
  ContiguousCache cache = cache_of(config);
  std::vector<float> k(2 * 2 * 32, 3.0f);
  k[5] = std::nanf("");
  ASSERT_TRUE(cache.append(0, 1, input(k, 2, 32), input(k, 2, 32)).ok());
  EXPECT_EQ(cache.nonfinite_inputs().value(), 2);  // one in K, one in V
  const ops::SideView& side = cache.view(0).runs[0].k;
  EXPECT_EQ(*side.codes.at(0, 0, 0), 6);   // 3 / 0.5
  EXPECT_EQ(*side.codes.at(1, 0, 1), 12);  // 3 / 0.25
}

TEST(ContiguousCache, RefusesToPassItsEndAndWritesNothing) {
  ContiguousCache cache = cache_of(small_config("int8", 8));
  ASSERT_TRUE(append_all(cache, 0, 6).ok());
  const Held before = gather(cache, 0);
  const Status status = append_layer(cache, 0, 6, 3);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_THAT(status.error().message,
              HasSubstr("seq_len is 6 and 3 tokens come; max_seq_len is 8"));
  EXPECT_EQ(gather(cache, 0).k, before.k);
  EXPECT_TRUE(append_all(cache, 6, 2).ok());
}

class ContiguousEviction : public ::testing::TestWithParam<const char*> {};

// Evicting by explicit mode keeps the newest max_seq_len tokens, scales with them.
TEST_P(ContiguousEviction, KeepsTheNewestTokensWithTheirScales) {
  ContiguousConfig config = small_config(GetParam(), 8);
  ContiguousConfig large = config;
  config.overflow = Overflow::kEvict;
  large.max_seq_len = 64;
  ContiguousCache cache = cache_of(config);
  ContiguousCache all = cache_of(large);
  int position = 0;
  for (const int num_tokens : {5, 2, 3, 1, 8, 4, 11, 1}) {
    ASSERT_TRUE(append_all(cache, position, num_tokens).ok());
    ASSERT_TRUE(append_all(all, position, num_tokens).ok());
    position += num_tokens;
    const int num_held = std::min(position, 8);
    EXPECT_EQ(cache.seq_len(), num_held);
    const Held newest = gather(cache, 1);
    const Held every = gather(all, 1);
    for (int b = 0; b < 2; ++b) {
      const int row = 2 * 32;
      const auto expected = every.v.begin() + (b * position + position - num_held) * row;
      EXPECT_TRUE(
          std::equal(expected, expected + num_held * row, newest.v.begin() + b * num_held * row))
          << "at position " << position << ", sequence " << b;
    }
  }
  EXPECT_EQ(attend(cache, 0, position, 1), attend(all, 0, position, 1, {.window = 8}));
}

INSTANTIATE_TEST_SUITE_P(Formats, ContiguousEviction,
                         ::testing::Values("f32", "int4", "nvfp4", "fp4_row", "fp8_e4m3"));

TEST(ContiguousCache, TellsUsedFromAllocatedBytes) {
  ContiguousCache cache = cache_of(small_config("fp4_row", 100));
  const int64_t token = 2 * 2 * 2 * 2 * (16 + 2);  // layers, K and V, batch, heads
  EXPECT_EQ(cache.allocated_bytes(), 100 * token);
  EXPECT_EQ(cache.used_bytes(), 0);
  ASSERT_TRUE(append_all(cache, 0, 7).ok());
  EXPECT_EQ(cache.used_bytes(), 7 * token);
  EXPECT_EQ(cache.read_bytes_per_step(), 7 * token);
  EXPECT_EQ(cache.allocated_bytes(), contiguous_bytes(cache.config()).value());
}

TEST(ContiguousCache, RefusesCallsThatNameNothing) {
  ContiguousCache cache = cache_of(small_config("f16", 8));
  EXPECT_THAT(message_of(append_layer(cache, 0, 0, 0)), HasSubstr("num_tokens is 0"));
  EXPECT_THAT(message_of(cache.append(2, 1, {}, {})), HasSubstr("layer is 2; expected 0 to 1"));
  EXPECT_THAT(message_of(cache.attend(0, 1, {}, {}, {})), HasSubstr("q_len is 1"));
  EXPECT_THAT(message_of(cache.gather(-1, {}, {})), HasSubstr("layer is -1"));
}

}  // namespace
}  // namespace kvx::kv
