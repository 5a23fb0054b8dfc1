// Every CPU level writes and reads the same bytes as the scalar level, on random and on special
// numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string_view>

#include "format/list.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using device::CpuLevel;
using format::FormatSpec;

// Numbers that kernels treat differently: zeros, subnormals, ties, extremes, NaN and infinities.
std::vector<float> special_numbers(bool with_nonfinite) {
  std::vector<float> numbers = {0.0f,
                                -0.0f,
                                0x1p-149f,
                                -0x1p-149f,
                                0x1p-126f,
                                0x1.FFFFFCp-127f,
                                0.25f,
                                0.5f,
                                0.75f,
                                1.25f,
                                1.75f,
                                2.5f,
                                3.5f,
                                5.0f,
                                -5.0f,
                                6.0f,
                                7.0f,
                                127.0f,
                                0.5f,
                                1.5f,
                                464.0f,
                                57344.0f,
                                65504.0f,
                                65520.0f,
                                1e-8f,
                                1e30f,
                                0x1.FFFFFEp127f,
                                -0x1.FFFFFEp127f};
  if (with_nonfinite) {
    for (const uint32_t bits : {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFC12345u, 0x7F800001u}) {
      numbers.push_back(std::bit_cast<float>(bits));
    }
  }
  return numbers;
}

// Rows of several kinds: normal numbers at many scales, and special ones sprinkled in.
std::vector<float> mixed_rows(int num_rows, int head_dim, bool with_nonfinite) {
  const std::vector<float> specials = special_numbers(with_nonfinite);
  std::vector<float> rows = normal_floats(size_t(num_rows) * head_dim, 17);
  std::mt19937 generator(19);
  for (int r = 0; r < num_rows; ++r) {
    const float scale = std::ldexp(1.0f, static_cast<int>(generator() % 60) - 40);
    const bool is_special = r % 3 == 1;
    for (int d = 0; d < head_dim; ++d) {
      float& x = rows[size_t(r) * head_dim + d];
      x *= scale;
      if (is_special && generator() % 8 == 0) x = specials[generator() % specials.size()];
      if (r % 7 == 6) x = d % 2 ? -0.0f : 0.0f;
    }
  }
  return rows;
}

// All specs of a format: every source, and every choice where the encoder has one.
std::vector<FormatSpec> all_specs(const format::Facts& facts) {
  std::vector<FormatSpec> specs;
  for (int g = 0; g < facts.group_sizes.count; ++g) {
    for (int t = 0; t < facts.scale_types.count; ++t) {
      for (int r = 0; r < facts.scale_rules.count; ++r) {
        for (int s = 0; s < facts.scale_sources.count; ++s) {
          for (const auto choice : {format::ScaleChoice::kAmax, format::ScaleChoice::k4Over6,
                                    format::ScaleChoice::kSearch}) {
            const auto spec = format::make_spec(
                facts, {facts.group_sizes.values[g], facts.scale_types.values[t],
                        facts.scale_rules.values[r], facts.scale_sources.values[s], choice});
            if (spec.ok()) specs.push_back(spec.value());
          }
        }
      }
    }
  }
  return specs;
}

struct Stored {
  std::vector<uint8_t> codes, scales;
  std::vector<float> gathered, attended;
  int64_t nonfinite;
  int64_t saturated = 0;
};

// Through the kernel table alone; scales that are given are 0.5, or 2^-1 for E8M0.
Stored encode_and_decode(CpuLevel level, const FormatSpec& spec, int head_dim,
                         const std::vector<float>& rows, const float* feedback = nullptr) {
  const int n = static_cast<int>(rows.size()) / head_dim;
  TestSide side(spec, head_dim, 1, n, 1, Order::kNhd);
  side.fill_scales(spec.scale_type == format::ScaleType::kE8M0
                       ? format::StoredScale{126}
                       : format::round_scale(spec.scale_type, 0.5f));
  Stored stored;
  stored.gathered.resize(rows.size());
  stored.attended.resize(rows.size());
  const auto& kernels = cpu::kernel_table(level).of(spec);
  cpu::EncodeParams encode = {&spec,
                              head_dim,
                              0.3f,
                              rows.data(),
                              0,
                              n,
                              side.codes.data(),
                              side.view.codes.token_stride,
                              side.scales.data(),
                              side.view.scales.token_stride,
                              side.view.scales.group_stride};
  encode.saturated = &stored.saturated;
  encode.feedback = feedback;
  stored.nonfinite = kernels.encode_rows(encode);
  cpu::DecodeParams decode = {&spec,
                              head_dim,
                              0.3f,
                              format::DecodeFor::kGather,
                              stored.gathered.data(),
                              0,
                              n,
                              side.codes.data(),
                              side.view.codes.token_stride,
                              side.scales.data(),
                              side.view.scales.token_stride,
                              side.view.scales.group_stride};
  kernels.decode_rows(decode);
  decode.purpose = format::DecodeFor::kAttend;
  decode.rows = stored.attended.data();
  kernels.decode_rows(decode);
  stored.codes = side.codes;
  stored.scales = side.scales;
  return stored;
}

bool same_or_both_nan(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return false;
  }
  return true;
}

class LevelRows : public testing::TestWithParam<CpuLevel> {};

// Weights above the diagonal, of either sign and mostly below 1.
std::vector<float> feedback_weights(int head_dim) {
  std::vector<float> weights = normal_floats(size_t(head_dim) * head_dim, 29, 0.2f);
  for (int i = 0; i < head_dim; ++i) {
    for (int j = 0; j <= i; ++j) weights[size_t(i) * head_dim + j] = 0;
  }
  return weights;
}

TEST_P(LevelRows, FeedErrorsBackAsTheScalarLevelDoes) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const FormatSpec& spec : all_specs(*facts)) {
      for (const int head_dim : {20, 64, 80, 128}) {
        if (!format::check_head_dim(spec, head_dim).ok()) continue;
        const std::vector<float> weights = feedback_weights(head_dim);
        const std::vector<float> rows = mixed_rows(21, head_dim, true);
        const float* feedback = weights.data();
        const Stored expected =
            encode_and_decode(CpuLevel::kScalar, spec, head_dim, rows, feedback);
        const Stored found = encode_and_decode(GetParam(), spec, head_dim, rows, feedback);
        SCOPED_TRACE(fmt::format("{} head_dim {} group {} {}", facts->name, head_dim,
                                 spec.group_size, name_of(spec.scale_source)));
        ASSERT_TRUE(same_bytes(expected.codes, found.codes));
        ASSERT_TRUE(same_bytes(expected.scales, found.scales));
        ASSERT_EQ(expected.nonfinite, found.nonfinite);
      }
    }
  }
}

TEST_P(LevelRows, WriteAndReadTheScalarLevelsBytes) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const FormatSpec& spec : all_specs(*facts)) {
      for (const int head_dim : {32, 64, 80, 96, 128, 192, 256, 576}) {
        if (!format::check_head_dim(spec, head_dim).ok()) continue;
        const std::vector<float> rows = mixed_rows(21, head_dim, true);
        const Stored expected = encode_and_decode(CpuLevel::kScalar, spec, head_dim, rows);
        const Stored found = encode_and_decode(GetParam(), spec, head_dim, rows);
        SCOPED_TRACE(fmt::format("{} head_dim {} group {} {} {} {}", facts->name, head_dim,
                                 spec.group_size, name_of(spec.scale_type),
                                 name_of(spec.scale_source), name_of(spec.scale_choice)));
        const auto where = [&](size_t byte) {
          const size_t row_bytes = format::code_bytes_per_row(spec, head_dim);
          const size_t dim = byte % row_bytes * 8 / facts->element_bits;
          return fmt::format("token {}, dim {}, group {}", byte / row_bytes, dim,
                             dim / format::group_length(spec, head_dim));
        };
        ASSERT_TRUE(same_bytes(expected.codes, found.codes, where));
        ASSERT_TRUE(same_bytes(expected.scales, found.scales));
        ASSERT_EQ(expected.nonfinite, found.nonfinite);
        ASSERT_EQ(expected.saturated, found.saturated);
        ASSERT_TRUE(same_or_both_nan(expected.gathered, found.gathered));
        ASSERT_TRUE(same_or_both_nan(expected.attended, found.attended));
      }
    }
  }
}

// Finite numbers of both signs within eight powers of two, which move from row to row. Every fourth
// row has few digits, so that many products are ties.
std::vector<float> random_rows(int num_rows, int head_dim, std::mt19937_64& generator) {
  std::vector<float> rows(size_t(num_rows) * head_dim);
  for (int r = 0; r < num_rows; ++r) {
    const uint32_t exponent = 90 + static_cast<uint32_t>(generator() % 64);
    const uint32_t digits = r % 4 == 3 ? 0x780000u : 0x7FFFFFu;
    for (int d = 0; d < head_dim; ++d) {
      const uint64_t random = generator();
      const uint32_t sign = static_cast<uint32_t>(random >> 63) << 31;
      const uint32_t power = (exponent + static_cast<uint32_t>(random >> 32) % 8) << 23;
      rows[size_t(r) * head_dim + d] =
          std::bit_cast<float>(sign | power | (static_cast<uint32_t>(random) & digits));
    }
  }
  return rows;
}

// 10^5 groups of all formats together, with KVX_TEST_FULL=1 10^8.
TEST_P(LevelRows, WriteTheScalarLevelsBytesOfRandomGroups) {
  constexpr int kRows = 40;
  constexpr int kHeadDim = 128;
  const char* full = std::getenv("KVX_TEST_FULL");
  const bool is_full = full != nullptr && std::string_view(full) == "1";
  std::vector<FormatSpec> specs;
  for (const format::Facts* facts : format::kRowFacts) {
    for (const FormatSpec& spec : all_specs(*facts)) {
      const bool has_groups = spec.has_scale() || spec.is_affine();
      const bool is_computed = spec.scale_source == format::ScaleSource::kComputed;
      if (has_groups && is_computed) specs.push_back(spec);
    }
  }
  const int64_t wanted = (is_full ? 100'000'000 : 100'000) / std::ssize(specs);
  for (const FormatSpec& spec : specs) {
    std::mt19937_64 generator(31);
    const int64_t groups_a_round = int64_t{kRows} * kHeadDim / group_length(spec, kHeadDim);
    for (int64_t groups = 0; groups < wanted; groups += groups_a_round) {
      const std::vector<float> rows = random_rows(kRows, kHeadDim, generator);
      const Stored expected = encode_and_decode(CpuLevel::kScalar, spec, kHeadDim, rows);
      const Stored found = encode_and_decode(GetParam(), spec, kHeadDim, rows);
      ASSERT_TRUE(same_bytes(expected.codes, found.codes)) << spec.facts->name << groups;
      ASSERT_TRUE(same_bytes(expected.scales, found.scales)) << spec.facts->name << groups;
    }
  }
}

TEST_P(LevelRows, ConvertFloatsAsTheScalarLevelDoes) {
  const auto& scalar = cpu::kernel_table(CpuLevel::kScalar);
  const auto& level = cpu::kernel_table(GetParam());
  std::vector<uint16_t> all(0x10000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const std::vector<float> floats = mixed_rows(999, 67, true);
  const int n = static_cast<int>(floats.size());
  for (const DType type : {DType::kF16, DType::kBF16}) {
    std::vector<float> expected(all.size()), found(all.size());
    scalar.load_floats(type, all.data(), 0x10000, expected.data());
    level.load_floats(type, all.data(), 0x10000, found.data());
    EXPECT_TRUE(same_or_both_nan(expected, found));
    std::vector<uint16_t> expected_bits(n), found_bits(n);
    scalar.store_floats(type, floats.data(), n, expected_bits.data());
    level.store_floats(type, floats.data(), n, found_bits.data());
    EXPECT_EQ(expected_bits, found_bits);
  }
}

TEST_P(LevelRows, RotateAsTheScalarLevelDoes) {
  for (const int head_dim : {1, 2, 48, 64, 80, 96, 128, 256, 576}) {
    std::vector<float> expected = normal_floats(size_t(5) * head_dim, 23);
    std::vector<float> found = expected;
    cpu::kernel_table(CpuLevel::kScalar).hadamard_rows(expected.data(), 5, head_dim);
    cpu::kernel_table(GetParam()).hadamard_rows(found.data(), 5, head_dim);
    EXPECT_TRUE(same_or_both_nan(expected, found)) << head_dim;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, LevelRows, testing::ValuesIn(cpu_levels_here()),
                         level_test_name);

}  // namespace
}  // namespace kvx::ops
