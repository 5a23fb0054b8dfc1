// Dual-scale blocks: the oracle's bytes at every CPU level, what a block's numbers may be off by,
// and the verbs that take whole blocks.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "format/dual_scale.hpp"
#include "ops/append/append.hpp"
#include "ops/append/dual_scale/packed_byte.hpp"
#include "ops/copy_blocks/copy_blocks.hpp"
#include "tests/support/cpu_levels.hpp"
#include "tests/support/golden.hpp"
#include "tests/support/test_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::dual_scale_test {
namespace {

using device::CpuLevel;
using format::FormatSpec;
using namespace tests;

constexpr const char* kNames[] = {"int4_dual", "int3_dual", "int2_dual"};

FormatSpec dual_spec(const std::string& name) {
  return format::make_spec(format::format_named(name).value()).value();
}

// One head's block, with what it was made from.
struct Block {
  FormatSpec spec;
  int head_dim = 0;
  int num_tokens = 0;
  std::vector<uint8_t> codes, scales, channels;

  Block(const FormatSpec& format, int dim, int tokens)
      : spec(format), head_dim(dim), num_tokens(tokens) {
    codes.assign(size_t(tokens) * row_bytes(), 0xAA);
    scales.assign(tokens, 0xAA);
    channels.assign(format::channel_bytes_per_block(spec, dim), 0xAA);
  }
  int row_bytes() const { return format::code_bytes_per_row(spec, head_dim); }

  void encode(CpuLevel level, const std::vector<float>& rows, const float* feedback = nullptr) {
    cpu::EncodeParams params = {};
    params.spec = &spec;
    params.head_dim = head_dim;
    params.rows = rows.data();
    params.num_tokens = num_tokens;
    params.codes = codes.data();
    params.token_stride = row_bytes();
    params.scales = scales.data();
    params.scale_token_stride = 1;
    params.feedback = feedback;
    params.channels = channels.data();
    EXPECT_EQ(cpu::kernel_table(level).of(spec).encode_rows(params), 0);
  }
  std::vector<float> decode(CpuLevel level) const {
    std::vector<float> rows(size_t(num_tokens) * head_dim);
    cpu::DecodeParams params = {};
    params.spec = &spec;
    params.head_dim = head_dim;
    params.rows = rows.data();
    params.num_tokens = num_tokens;
    params.codes = codes.data();
    params.token_stride = row_bytes();
    params.scales = scales.data();
    params.scale_token_stride = 1;
    params.channels = channels.data();
    cpu::kernel_table(level).of(spec).decode_rows(params);
    return rows;
  }
};

// [head_dim, head_dim], as a golden case names them; empty: none.
std::vector<float> weights_of(const Json& golden, const Json& one) {
  const std::string name = one["weights"];
  const size_t n = one["head_dim"];
  if (name == "none") return {};
  for (const Json& shared : golden["weights"]) {
    if (shared["head_dim"] != n) continue;
    std::vector<float> weights = floats_of_hex(shared["weights"]);
    for (size_t i = 0; name == "above" && i < n; ++i) weights[i * n + i] = 0;
    return weights;
  }
  throw std::runtime_error("no weights " + name);
}

class DualScale : public testing::TestWithParam<CpuLevel> {};

TEST_P(DualScale, HasTheBytesOfTheOracle) {
  const Json golden = read_golden("dual");
  int num_cases = 0;
  for (const Json& one : golden["cases"]) {
    SCOPED_TRACE(one["format"].get<std::string>() + " " + one["block"].get<std::string>());
    const std::vector<float> weights = weights_of(golden, one);
    Block block(dual_spec(one["format"]), one["head_dim"], one["num_tokens"]);
    block.encode(GetParam(), floats_of_hex(one["input"]),
                 weights.empty() ? nullptr : weights.data());
    EXPECT_EQ(block.channels, bytes_of_hex(one["channels"]));
    EXPECT_EQ(block.scales, bytes_of_hex(one["scales"]));
    EXPECT_EQ(block.codes, bytes_of_hex(one["codes"]));
    const std::vector<float> decoded = block.decode(GetParam());
    const std::vector<float> expected = floats_of_hex(one["decoded"]);
    for (size_t i = 0; i < expected.size(); ++i) {
      const bool are_nan = std::isnan(decoded[i]) && std::isnan(expected[i]);
      ASSERT_TRUE(are_nan || decoded[i] == expected[i]) << i;
    }
    ++num_cases;
  }
  EXPECT_GE(num_cases, 26);
}

// Without feedback: half a step where the number's place is within the codes, else to the nearest
// end, times the scale that was used; then the scale changes once more.
TEST_P(DualScale, KeepsEveryNumberWithinHalfAStepOrAtTheNearestEnd) {
  for (const std::string name : kNames) {
    const FormatSpec spec = dual_spec(name);
    const float top = static_cast<float>((1 << spec.facts->element_bits) - 1);
    const std::vector<float> rows = normal_floats(64 * 64, 7);
    Block block(spec, 64, 64);
    block.encode(GetParam(), rows);
    const std::vector<float> back = block.decode(GetParam());
    double error = 0, size = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      error += double(back[i] - rows[i]) * (back[i] - rows[i]);
      size += double(rows[i]) * rows[i];
    }
    // A normal number's error on a uniform grid over +-2.3 of its deviations.
    const double expected = 2 * 2.3 / top / std::sqrt(12.0);
    EXPECT_LT(std::sqrt(error / size), 1.25 * expected + 0.02) << name;
  }
}

TEST_P(DualScale, PermutesWithItsTokens) {
  for (const std::string name : kNames) {
    const FormatSpec spec = dual_spec(name);
    // Sums over tokens are added in their order: numbers of few bits make them exact.
    std::vector<float> rows = normal_floats(64 * 64, 9);
    for (float& x : rows) x = std::round(x * 4) / 4;
    std::vector<float> turned;
    for (int t = 0; t < 64; ++t) {
      const int from = (t + 17) % 64;
      turned.insert(turned.end(), rows.begin() + from * 64, rows.begin() + (from + 1) * 64);
    }
    Block block(spec, 64, 64), other(spec, 64, 64);
    block.encode(GetParam(), rows);
    other.encode(GetParam(), turned);
    const std::vector<float> a = block.decode(GetParam()), b = other.decode(GetParam());
    int num_different = 0;
    for (int t = 0; t < 64; ++t) {
      const int from = (t + 17) % 64;
      for (int c = 0; c < 64; ++c) num_different += a[from * 64 + c] != b[t * 64 + c];
    }
    EXPECT_LT(num_different, 64) << name << ": spreads of the second round may differ by a bit";
  }
}

TEST_P(DualScale, OfHalvedNumbersIsTheHalf) {
  for (const std::string name : kNames) {
    std::vector<float> rows = normal_floats(64 * 128, 3);
    Block block(dual_spec(name), 128, 64), half(dual_spec(name), 128, 64);
    block.encode(GetParam(), rows);
    for (float& x : rows) x *= 0.5f;
    half.encode(GetParam(), rows);
    EXPECT_EQ(half.codes, block.codes);
    EXPECT_EQ(half.scales, block.scales);
    const std::vector<float> whole = block.decode(GetParam()), halves = half.decode(GetParam());
    for (size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(halves[i], whole[i] * 0.5f);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, DualScale, testing::ValuesIn(cpu_levels_here()),
                         level_test_name);

// ---- verbs

constexpr LayerShape kShape = {.num_blocks = 3, .block_size = 64, .num_heads = 2};

CpuContext context() {
  return {&cpu::kernel_table(device::choose_cpu_level().value()), &serial_executor()};
}

void fill_floats(TestLayer& layer, uint32_t seed) {
  for (TestSide* side : {&layer.k, &layer.v}) {
    const std::vector<float> numbers = normal_floats(side->codes.size() / sizeof(float), seed++);
    memcpy(side->codes.data(), numbers.data(), side->codes.size());
  }
}

TEST(DualScaleVerbs, CopyBlocksQuantisesWholeBlocksAndCopiesThemAsTheyAre) {
  const FormatSpec f32 = format::make_spec(format::FormatId::kF32).value();
  for (const std::string name : kNames) {
    const FormatSpec spec = dual_spec(name);
    TestLayer floats(f32, f32, kShape);
    TestLayer packed(spec, spec, kShape);
    fill_floats(floats, 1);
    const BlockCopy pack = {.from_block = 2, .to_block = 1, .num_tokens = 64};
    ASSERT_EQ(copy_blocks(context(), floats.view(), packed.view(), {&pack, 1}).value(), 0);
    for (int head = 0; head < 2; ++head) {
      Block expected(spec, 64, 64);
      std::vector<float> rows;
      for (int t = 0; t < 64; ++t) {
        const std::vector<uint8_t> row = floats.k.codes_at(2, t, head);
        const auto* x = reinterpret_cast<const float*>(row.data());
        rows.insert(rows.end(), x, x + 64);
      }
      expected.encode(context().kernels->level, rows);
      EXPECT_EQ(memcmp(packed.k.view.channels.at(1, head), expected.channels.data(), 128), 0);
      for (int t = 0; t < 64; ++t) {
        EXPECT_EQ(packed.k.scales_at(1, t, head)[0], expected.scales[t]);
        EXPECT_EQ(memcmp(packed.k.codes_at(1, t, head).data(),
                         expected.codes.data() + t * expected.row_bytes(), expected.row_bytes()),
                  0);
      }
    }
    const BlockCopy copy = {.from_block = 1, .to_block = 0, .num_tokens = 64};
    ASSERT_EQ(copy_blocks(context(), packed.view(), packed.view(), {&copy, 1}).value(), 0);
    for (int head = 0; head < 2; ++head) {
      EXPECT_EQ(memcmp(packed.v.view.channels.at(0, head), packed.v.view.channels.at(1, head), 128),
                0);
      EXPECT_EQ(packed.v.codes_at(0, 63, head), packed.v.codes_at(1, 63, head));
      EXPECT_EQ(packed.v.scales_at(0, 63, head), packed.v.scales_at(1, 63, head));
    }
  }
}

template <format::Packing P>
void expect_same_packing(int bits) {
  std::vector<uint8_t> codes(192), packed(192 * size_t(bits) / 8);
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<uint8_t>((i * 7 + i / 5) % (size_t{1} << bits));
  }
  format::pack<P>(codes.data(), 0, 192, packed.data());
  for (size_t i = 0; i < packed.size(); ++i) {
    EXPECT_EQ(packed_byte<P>(codes.data(), static_cast<int>(i)), packed[i]) << bits << ", " << i;
  }
}

TEST(PackedByte, IsOneOfThoseThatPackWrites) {
  expect_same_packing<format::Packing::kNibbles>(4);
  expect_same_packing<format::Packing::kQuarters>(2);
  expect_same_packing<format::Packing::kThreeBits>(3);
}

// Rows that append rounds to 16 bits, beside those that pass through a window of 16 bits.
TEST(DualScaleVerbs, AppendWritesTheBytesThatAWindowsBlockIsQuantisedTo) {
  for (const char* name : kNames) {
    const FormatSpec spec = dual_spec(name);
    for (const auto& [window, window_name] :
         {std::pair{DType::kBF16, "bf16"}, {DType::kF16, "f16"}, {DType::kF32, "f32"}}) {
      SCOPED_TRACE(fmt::format("{} behind {}", name, window_name));
      const KvRows rows = normal_rows(kShape, 3 * kShape.block_size, 3);
      TestLayer at_once(spec, spec, kShape), copied(spec, spec, kShape);
      const FormatSpec of_window =
          format::make_spec(format::format_named(window_name).value()).value();
      TestLayer window_layer(of_window, of_window, kShape);
      AppendArgs args;
      args.transform.k.hadamard = true;
      args.k = dense_rows(rows.k.data(), DType::kF32, 2, 64);
      args.v = dense_rows(rows.v.data(), DType::kF32, 2, 64);
      std::vector<int64_t> slots;  // blocks 2, 0 and 1, with tokens between them that are skipped
      for (const int64_t block : {2, 0, 1}) {
        for (int64_t t = 0; t < kShape.block_size; ++t) {
          slots.push_back(block * kShape.block_size + t);
        }
      }
      args.slot_mapping = slots;
      args.window_dtype = window;
      args.cache = at_once.view();
      ASSERT_TRUE(append(context(), args).ok());
      args.cache = window_layer.view();
      ASSERT_TRUE(append(context(), args).ok());
      std::vector<BlockCopy> copies;
      for (const int64_t block : {0, 1, 2}) copies.push_back({block, block, kShape.block_size});
      ASSERT_TRUE(copy_blocks(context(), window_layer.view(), copied.view(), copies).ok());
      EXPECT_EQ(at_once.k.codes, copied.k.codes);
      EXPECT_EQ(at_once.k.scales, copied.k.scales);
      EXPECT_EQ(at_once.k.channels, copied.k.channels);
      EXPECT_EQ(at_once.v.codes, copied.v.codes);
      EXPECT_EQ(at_once.v.channels, copied.v.channels);
    }
  }
}

TEST(DualScaleVerbs, AppendRefusesAPartOfABlock) {
  const FormatSpec spec = dual_spec("int2_dual");
  TestLayer packed(spec, spec, kShape);
  const std::vector<float> rows(size_t{2} * kShape.block_size * 2 * 64, 1.0f);
  AppendArgs args;
  args.cache = packed.view();
  args.k = args.v = dense_rows(rows.data(), DType::kF32, 2, 64);
  std::vector<int64_t> slots(kShape.block_size);
  std::iota(slots.begin(), slots.end(), kShape.block_size);
  slots.push_back(0);
  args.slot_mapping = slots;
  const auto report = append(context(), args);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(report.error().message,
            fmt::format("slot_mapping[{0}] begins 1 tokens of block 0; int2_dual quantises whole "
                        "blocks: pass the {0} tokens of a block in one call, or append them to a "
                        "window and copy the block when it is full",
                        kShape.block_size));
  EXPECT_EQ(packed.k.codes[0], 0xCC);
  EXPECT_EQ(packed.k.codes[packed.k.codes.size() / 2], 0xCC);
}

}  // namespace
}  // namespace kvx::ops::dual_scale_test
