// The probe, and every scale byte of two fp4 blocks against a recomputation that shares no code
// with the library (two bytes of one token prove neither the di / 16 mapping nor
// that other tokens' scales were written).
#include "engines/turbomind/probe.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "ops/append/append.hpp"
#include "tests/engines/turbomind_pool.hpp"

namespace kvx::engines::turbomind {
namespace {

using ::testing::HasSubstr;

constexpr int kLayers = 2, kHeads = 2, kHeadDim = 64, kBlockLen = 4;
constexpr int kTokens = 2 * kBlockLen;
constexpr int kGroups = kHeadDim / 16;

struct Place {
  int layer, head;
  KvSide side;
  int token;
};

// Every group has a magnitude of its own, far from its neighbours' along all five axes.
float number_at(const Place& at, int d) {
  const int group = d / 16;
  const int exponent = (at.layer * 5 + at.head * 7 + at.token * 3 + group * 4 +
                        (at.side == KvSide::kValue ? 11 : 0)) %
                           13 -
                       6;
  const float mantissa = 1.0f + 0.11f * static_cast<float>((at.token * 5 + group * 3) % 9);
  const float shape = d % 16 == 5 ? 1.0f : 0.06f * static_cast<float>(d % 16);
  return std::ldexp(mantissa * shape, exponent) * (d % 3 == 0 ? -1.0f : 1.0f);
}

double group_amax(const Place& at, int group) {
  double amax = 0;
  for (int d = group * 16; d < group * 16 + 16; ++d) {
    amax = std::max(amax, std::fabs(double{number_at(at, d)}));
  }
  return amax;
}

// The smallest power of two that clips nothing.
uint8_t expected_mx_scale(double amax) {
  int exponent = -127;
  while (amax > std::ldexp(6.0, exponent)) ++exponent;
  return static_cast<uint8_t>(exponent + 127);
}

double e4m3_value(int code) {
  const int exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

// The E4M3 number nearest to amax / 6, ties to the even code.
uint8_t expected_nv_scale(double amax) {
  const double exact = static_cast<float>(amax) / 6.0f;
  int best = 1;
  for (int code = 2; code <= 0x7E; ++code) {
    const double error = std::fabs(e4m3_value(code) - exact);
    const double best_error = std::fabs(e4m3_value(best) - exact);
    if (error < best_error || (error == best_error && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

double nv_step(uint8_t scale) {
  return e4m3_value(scale);
}
double mx_step(uint8_t scale) {
  return std::ldexp(1.0, scale - 127);
}

// The E2M1 code nearest to x / step, ties to the even code.
int expected_code(float x, double step) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const double target = std::fabs(static_cast<double>(x)) / step;
  int best = 0;
  for (int code = 1; code < 8; ++code) {
    const double error = std::fabs(kMagnitudes[code] - target);
    const double best_error = std::fabs(kMagnitudes[best] - target);
    if (error < best_error || (error == best_error && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 8 : 0);
}

struct Mode {
  KvCacheMode mode;
  uint8_t (*scale)(double amax);
  double (*step)(uint8_t scale);
};

class Fp4Blocks : public ::testing::TestWithParam<Mode> {
 protected:
  Fp4Blocks()
      : pool_(
            make_pool_layout({GetParam().mode, DType::kBF16, kLayers, kHeads, kHeadDim, kBlockLen})
                .value(),
            4) {
    for (const int block : kBlocks) {
      data_blocks_.push_back(get_block_ptr(pool_.pools, block));
      scale_blocks_.push_back(get_scale_block_ptr(pool_.pools, block));
    }
    for (int layer = 0; layer < kLayers; ++layer) prefill(layer);
  }

  void prefill(int layer) {
    std::vector<float> k, v;
    std::vector<int64_t> slots;
    for (int token = 0; token < kTokens; ++token) {
      slots.push_back(int64_t{kBlocks[token / kBlockLen]} * kBlockLen + token % kBlockLen);
      for (int head = 0; head < kHeads; ++head) {
        for (int d = 0; d < kHeadDim; ++d) {
          k.push_back(number_at({layer, head, KvSide::kKey, token}, d));
          v.push_back(number_at({layer, head, KvSide::kValue, token}, d));
        }
      }
    }
    const auto blocks = layer_blocks(pool_.layout, pool_.pools, layer);
    ASSERT_TRUE(blocks.ok());
    const auto report = ops::append(scalar_context(), {.cache = blocks.value().view(),
                                                       .transform = {},
                                                       .k = input_rows(k.data(), kHeads, kHeadDim),
                                                       .v = input_rows(v.data(), kHeads, kHeadDim),
                                                       .slot_mapping = slots,
                                                       .positions = {}});
    ASSERT_TRUE(report.ok()) << report.error().message;
  }

  uint8_t expected_scale(const Place& at, int group) const {
    return GetParam().scale(group_amax(at, group));
  }
  Result<Fp4KvProbeResult> probe(int layer, int head, int64_t token) {
    return fp4_kv_probe_host(pool_.layout, {data_blocks_, scale_blocks_}, layer, head, token);
  }

  static constexpr int kBlocks[] = {3, 1};  // the sequence's, in a pool of four
  TestPool pool_;
  std::vector<uint8_t*> data_blocks_;
  std::vector<uint8_t*> scale_blocks_;
};

TEST_P(Fp4Blocks, HoldEveryTokensOwnScalesAtTheirPlace) {
  int checked = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int head = 0; head < kHeads; ++head) {
      for (int token = 0; token < kTokens; ++token) {
        for (const KvSide side : {KvSide::kKey, KvSide::kValue}) {
          const Place at = {layer, head, side, token};
          // [layer][head][token][K: 4 bytes][V: 4 bytes]
          const int64_t row = (layer * kHeads + head) * kBlockLen + token % kBlockLen;
          const uint8_t* scales = scale_blocks_[token / kBlockLen] + row * 2 * kGroups +
                                  (side == KvSide::kValue ? kGroups : 0);
          for (int group = 0; group < kGroups; ++group, ++checked) {
            ASSERT_EQ(int{scales[group]}, int{expected_scale(at, group)})
                << "layer " << layer << " head " << head << " token " << token << " group " << group
                << (side == KvSide::kKey ? " K" : " V");
          }
        }
      }
    }
  }
  EXPECT_EQ(checked, 2 * pool_.layout.scale_block_bytes);  // all bytes of both blocks
}

TEST_P(Fp4Blocks, CodeElementDiUnderScaleDiOver16) {
  for (int token = 0; token < kTokens; ++token) {
    for (const KvSide side : {KvSide::kKey, KvSide::kValue}) {
      const Place at = {1, 1, side, token};
      const uint8_t* row =
          data_blocks_[token / kBlockLen] + pool_.layout.data_offset(1, 1, side, token % kBlockLen);
      for (int d = 0; d < kHeadDim; ++d) {
        const double step = GetParam().step(expected_scale(at, d / 16));
        const int code = d % 2 == 0 ? row[d / 2] & 0xF : row[d / 2] >> 4;
        ASSERT_EQ(code, expected_code(number_at(at, d), step)) << "token " << token << " d " << d;
      }
    }
  }
}

TEST_P(Fp4Blocks, ShowTheProbeTheirScalesAndFirstByte) {
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int head = 0; head < kHeads; ++head) {
      for (int token = 0; token < kTokens; ++token) {  // block_len and block_len + 1 among them
        const Place k = {layer, head, KvSide::kKey, token};
        const Place v = {layer, head, KvSide::kValue, token};
        const double step = GetParam().step(expected_scale(k, 0));
        const int byte0 =
            expected_code(number_at(k, 0), step) | expected_code(number_at(k, 1), step) << 4;
        const Fp4KvProbeResult expected = {expected_scale(k, 0), expected_scale(v, 0),
                                           expected_scale(k, 1), expected_scale(v, 1),
                                           static_cast<uint8_t>(byte0)};
        const auto result = probe(layer, head, token);
        ASSERT_TRUE(result.ok()) << result.error().message;
        EXPECT_EQ(result.value(), expected) << layer << " " << head << " " << token;
      }
    }
  }
}

TEST_P(Fp4Blocks, LeaveOtherBlocksOfBothPoolsAlone) {
  for (const int other : {0, 2}) {
    EXPECT_THAT(pool_.data_block(other), ::testing::Each(kUntouched));
    EXPECT_THAT(pool_.scale_block(other), ::testing::Each(kUntouched));
  }
}

TEST_P(Fp4Blocks, RefuseAProbeOfWhatIsNotThere) {
  EXPECT_THAT(probe(2, 0, 0).error().message, HasSubstr("layer is 2; expected 0 to 1"));
  EXPECT_THAT(probe(0, -1, 0).error().message, HasSubstr("head is -1; expected 0 to 1"));
  EXPECT_THAT(probe(0, 0, 8).error().message, HasSubstr("token is 8; expected 0 to 7"));
  scale_blocks_.pop_back();
  EXPECT_THAT(probe(0, 0, 0).error().message, HasSubstr("2 data blocks and 1 scale blocks"));
}

INSTANTIATE_TEST_SUITE_P(Both, Fp4Blocks,
                         ::testing::Values(Mode{KvCacheMode::kFp4Mx, expected_mx_scale, mx_step},
                                           Mode{KvCacheMode::kFp4Nv, expected_nv_scale, nv_step}),
                         [](const auto& mode) {
                           return mode.param.mode == KvCacheMode::kFp4Mx ? "Mx" : "Nv";
                         });

TEST(Fp4Probe, RefusesModesAndHeadsWithoutTwoScales) {
  const PoolLayout int8 = make_pool_layout({KvCacheMode::kInt8, DType::kF16, 1, 1, 64, 4}).value();
  EXPECT_THAT(fp4_kv_probe_host(int8, {}, 0, 0, 0).error().message, HasSubstr("the mode is int8"));
  const PoolLayout small =
      make_pool_layout({KvCacheMode::kFp4Mx, DType::kF16, 1, 1, 16, 4}).value();
  EXPECT_THAT(fp4_kv_probe_host(small, {}, 0, 0, 0).error().message, HasSubstr("head_dim is 16"));
}

}  // namespace
}  // namespace kvx::engines::turbomind
