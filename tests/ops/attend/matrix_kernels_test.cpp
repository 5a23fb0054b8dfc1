// The products of a CPU's matrix unit against plain loops in double precision, and what they
// refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "format/list.hpp"
#include "ops/attend/cpu/prefetcher.hpp"
#include "ops/attend/cpu/tile_kernels.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "tests/support/cpu_levels.hpp"

namespace kvx::tests::matrix_kernels_test {
namespace {

using ops::cpu::kMaxTileTokens;
using ops::cpu::kTokenStep;
using ops::cpu::MatrixKernels;
using ops::cpu::MatrixParts;
using ops::cpu::MatrixTile;

using PackRows = bool (*MatrixKernels::*)(float*, int, int, MatrixTile&);

// A tile with the memory of its parts.
struct PackedRows {
  explicit PackedRows(int head_dim)
      : high(kMaxTileTokens * head_dim, 0x7FC0),  // NaN where nothing is written
        low(high),
        scratch(kTokenStep / 2 * head_dim) {
    tile = {.high = high.data(),
            .low = low.data(),
            .head_dim = head_dim,
            .is_exact = true,
            .steps = nullptr,
            .scratch = scratch.data()};
  }
  std::vector<uint16_t> high, low;
  std::vector<float> scratch;
  MatrixTile tile{};
};

// A block's rows of a format, their addresses, and what they decode to.
struct StoredTile {
  StoredTile(const format::FormatSpec& of, int dim, const ops::cpu::KernelTable& table,
             const std::vector<float>& rows)
      : spec(of),
        row_bytes(format::code_bytes_per_row(spec, dim)),
        scale_bytes(format::scale_bytes_per_row(spec, dim)),
        codes(kMaxTileTokens * row_bytes),
        scales(kMaxTileTokens * scale_bytes + 64),
        decoded(kMaxTileTokens * dim) {
    const int step_bytes = format::bytes_of(spec.scale_type);
    table.of(spec).encode_rows({.spec = &spec,
                                .head_dim = dim,
                                .tensor_scale = 1.0f,
                                .rows = rows.data(),
                                .first_token = 0,
                                .num_tokens = kMaxTileTokens,
                                .codes = codes.data(),
                                .token_stride = row_bytes,
                                .scales = scales.data(),
                                .scale_token_stride = scale_bytes,
                                .scale_group_stride = step_bytes});
    table.of(spec).decode_rows({.spec = &spec,
                                .head_dim = dim,
                                .tensor_scale = 1.0f,
                                .purpose = format::DecodeFor::kAttend,
                                .rows = decoded.data(),
                                .first_token = 0,
                                .num_tokens = kMaxTileTokens,
                                .codes = codes.data(),
                                .token_stride = row_bytes,
                                .scales = scales.data(),
                                .scale_token_stride = scale_bytes,
                                .scale_group_stride = step_bytes});
    tile.spec = &spec;
    tile.head_dim = dim;
    tile.num_tokens = kMaxTileTokens;
    tile.scale_group_stride = step_bytes;
    for (int t = 0; t < kMaxTileTokens; ++t) {
      tile.codes[t] = codes.data() + t * row_bytes;
      tile.scales[t] = scales.data() + t * scale_bytes;
    }
  }
  StoredTile(const StoredTile&) = delete;
  StoredTile& operator=(const StoredTile&) = delete;

  format::FormatSpec spec;
  int64_t row_bytes;
  int64_t scale_bytes;
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  std::vector<float> decoded;
  ops::cpu::PackedTile tile;
};

// With scales beside the rows, where a format lets callers give them.
format::FormatSpec spec_of(const format::Facts& facts) {
  format::SpecOptions options;
  if (facts.scale_sources.allows(format::ScaleSource::kComputed)) {
    options.scale_source = format::ScaleSource::kComputed;
  }
  return format::make_spec(facts, options).value();
}

class MatrixUnit : public testing::Test {
 protected:
  // Of unhidden tiles one after the other: softmax(scale * (q . k + bias)) . v, in doubles.
  struct Expected {
    std::vector<double> out;  // [num_rows, dim]
    std::vector<double> lse;  // [num_rows]
  };

  void SetUp() override {
    if (!device::supports(device::CpuLevel::kAvx512Amx)) GTEST_SKIP() << "this CPU has no AMX";
    kernels_ = ops::cpu::tile_kernels(device::CpuLevel::kAvx512Amx).matrix;
    ASSERT_NE(kernels_, nullptr);
    prefetcher_.start(no_tile_, no_tile_);
  }

  std::vector<float> random_floats(int n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float& x : values) x = normal(rng_);
    return values;
  }

  // The same every time.
  static std::vector<float> random_probabilities(int n) {
    std::mt19937 rng(7);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    std::vector<float> values(n);
    for (float& x : values) x = uniform(rng);
    return values;
  }

  // rows: [num_tokens, head_dim]
  bool pack(PackRows pack_rows, const std::vector<float>& rows, PackedRows& packed) const {
    const int dim = packed.tile.head_dim;
    const int num_tokens = static_cast<int>(rows.size()) / dim;
    std::vector<float> step(kTokenStep * dim, std::nanf(""));
    for (int first = 0; first < kMaxTileTokens; first += kTokenStep) {
      const int count = std::clamp(num_tokens - first, 0, kTokenStep);
      std::copy_n(rows.begin() + std::min(first, num_tokens) * dim, count * dim, step.begin());
      if (!(kernels_->*pack_rows)(step.data(), first, count, packed.tile)) return false;
    }
    return true;
  }

  // keys, values: [tiles * kMaxTileTokens, dim]; with steps, the numbers times their token's.
  static Expected attend(const std::vector<float>& queries, const std::vector<float>& keys,
                         const std::vector<float>& values, int dim, float scale, float bias) {
    const size_t num_rows = queries.size() / dim;
    const size_t num_tokens = keys.size() / dim;
    Expected expected = {std::vector<double>(queries.size()), std::vector<double>(num_rows)};
    std::vector<double> scores(num_tokens);
    for (size_t r = 0; r < num_rows; ++r) {
      for (size_t t = 0; t < num_tokens; ++t) {
        double product = bias;
        for (int d = 0; d < dim; ++d) product += double{queries[r * dim + d]} * keys[t * dim + d];
        scores[t] = product * scale;
      }
      const double max = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (const double score : scores) sum += std::exp(score - max);
      for (size_t t = 0; t < num_tokens; ++t) {
        const double p = std::exp(scores[t] - max) / sum;
        for (int d = 0; d < dim; ++d) expected.out[r * dim + d] += p * values[t * dim + d];
      }
      expected.lse[r] = max + std::log(sum);
    }
    return expected;
  }

  const MatrixKernels* kernels_ = nullptr;
  ops::cpu::PackedTile no_tile_;
  ops::cpu::Prefetcher prefetcher_;  // of nothing
  std::mt19937 rng_{5};
};

int padded_rows(int num_rows) {
  return (num_rows + ops::cpu::kMatrixRows - 1) / ops::cpu::kMatrixRows * ops::cpu::kMatrixRows;
}

// Of the sum of n products of normal numbers, relative to their root mean square.
constexpr double kTwoPartTolerance = 4e-5;
constexpr double kHighPartTolerance = 4e-2;

TEST_F(MatrixUnit, ScoresAreProductsOfQueriesAndKeys) {
  for (const int dim : {32, 96, 128}) {
    for (const int num_rows : {1, 16, 17, 33, 64}) {
      for (const int num_tokens : {1, 16, 37, 64}) {
        const std::vector<float> queries = random_floats(num_rows * dim);
        const std::vector<float> keys = random_floats(num_tokens * dim);
        std::vector<float> parts(padded_rows(num_rows) * dim);
        PackedRows packed(dim);
        ASSERT_TRUE(kernels_->split_rows(queries.data(), num_rows, dim, parts.data()));
        ASSERT_TRUE(pack(&MatrixKernels::pack_keys, keys, packed));
        EXPECT_FALSE(packed.tile.is_exact);
        for (const MatrixParts parts_taken :
             {MatrixParts::kHigh, MatrixParts::kNotBothLow, MatrixParts::kAll}) {
          std::vector<float> scores(padded_rows(num_rows) * kMaxTileTokens, 99.0f);
          kernels_->score({.rows = parts.data(),
                           .stride = dim,
                           .num_rows = num_rows,
                           .tile = &packed.tile,
                           .target = scores.data(),
                           .target_stride = kMaxTileTokens,
                           .parts = parts_taken});
          const double tolerance =
              std::sqrt(dim) *
              (parts_taken == MatrixParts::kHigh ? kHighPartTolerance : kTwoPartTolerance);
          for (int r = 0; r < num_rows; ++r) {
            for (int t = 0; t < kMaxTileTokens; ++t) {
              double expected = 0;
              for (int d = 0; d < dim && t < num_tokens; ++d) {
                expected += double{queries[r * dim + d]} * keys[t * dim + d];
              }
              ASSERT_NEAR(scores[r * kMaxTileTokens + t], expected, tolerance)
                  << dim << ", " << num_rows << " rows, row " << r << ", token " << t;
            }
          }
        }
      }
    }
  }
}

TEST_F(MatrixUnit, ValuesAreAddedByTheirProbabilities) {
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  for (const int dim : {32, 96, 128}) {
    for (const int num_rows : {1, 16, 17, 64}) {
      for (const int num_tokens : {1, 31, 48, 64}) {
        std::vector<float> p(padded_rows(num_rows) * kMaxTileTokens, std::nanf(""));
        for (int r = 0; r < num_rows; ++r) {
          for (int t = 0; t < num_tokens; ++t) p[r * kMaxTileTokens + t] = uniform(rng_);
        }
        const std::vector<float> values = random_floats(num_tokens * dim);
        const std::vector<float> before = random_floats(padded_rows(num_rows) * dim);
        std::vector<float> sums = before;
        std::vector<float> parts = p;
        PackedRows packed(dim);
        ASSERT_TRUE(pack(&MatrixKernels::pack_values, values, packed));
        kernels_->split_probabilities(parts.data(), num_rows, num_tokens);
        kernels_->add_values({.rows = parts.data(),
                              .stride = kMaxTileTokens,
                              .num_rows = num_rows,
                              .tile = &packed.tile,
                              .target = sums.data(),
                              .target_stride = dim,
                              .parts = MatrixParts::kNotBothLow});
        for (int r = 0; r < num_rows; ++r) {
          for (int d = 0; d < dim; ++d) {
            double expected = before[r * dim + d];
            for (int t = 0; t < num_tokens; ++t) {
              expected += double{p[r * kMaxTileTokens + t]} * values[t * dim + d];
            }
            ASSERT_NEAR(sums[r * dim + d], expected, 8 * kTwoPartTolerance)
                << dim << ", " << num_rows << " rows, row " << r << ", number " << d;
          }
        }
      }
    }
  }
}

TEST_F(MatrixUnit, NumbersOfSixteenBitsAreExact) {
  constexpr int kDim = 64;
  std::vector<float> rows(kMaxTileTokens * kDim);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = std::ldexp(static_cast<float>(i % 256) - 128.0f, static_cast<int>(i % 40) - 20);
  }
  for (const PackRows pack_rows : {&MatrixKernels::pack_keys, &MatrixKernels::pack_values}) {
    PackedRows packed(kDim);
    ASSERT_TRUE(pack(pack_rows, rows, packed));
    EXPECT_TRUE(packed.tile.is_exact);
  }
}

TEST_F(MatrixUnit, NumbersWithoutTwoPartsAreRefused) {
  constexpr int kDim = 32;
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY, 3e38f, -2e38f}) {
    for (const int place : {0, 17, 5 * kDim + 31, 63 * kDim + 16}) {
      std::vector<float> rows = random_floats(kMaxTileTokens * kDim);
      rows[place] = bad;
      std::vector<float> parts(rows.size());
      EXPECT_FALSE(kernels_->split_rows(rows.data(), kMaxTileTokens, kDim, parts.data())) << bad;
      for (const PackRows pack_rows : {&MatrixKernels::pack_keys, &MatrixKernels::pack_values}) {
        PackedRows packed(kDim);
        EXPECT_FALSE(pack(pack_rows, rows, packed)) << bad << " at " << place;
      }
    }
  }
}

// Three tiles, of which the second one's scores are far larger, with and without steps a token.
TEST_F(MatrixUnit, ATileThatEveryRowSeesIsAttendedInOneGo) {
  constexpr float kBias = 0.3f;
  for (const int dim : {32, 128}) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (const int num_rows : {1, 16, 33, 63, 128}) {
      for (const bool has_steps : {false, true}) {
        const std::vector<float> queries = random_floats(num_rows * dim);
        std::vector<float> parts(padded_rows(num_rows) * dim);
        ASSERT_TRUE(kernels_->split_rows(queries.data(), num_rows, dim, parts.data()));
        std::vector<float> sums(padded_rows(num_rows) * dim);
        std::vector<ops::QueryRow> rows(num_rows);
        for (ops::QueryRow& row : rows) row.bias = kBias;
        std::vector<float> keys, values;
        for (const float size : {1.0f, 30.0f, 0.5f}) {
          std::vector<float> k = random_floats(kMaxTileTokens * dim);
          std::vector<float> v = random_floats(kMaxTileTokens * dim);
          for (float& x : k) x *= size;
          PackedRows packed_k(dim), packed_v(dim);
          ASSERT_TRUE(pack(&MatrixKernels::pack_keys, k, packed_k));
          ASSERT_TRUE(pack(&MatrixKernels::pack_values, v, packed_v));
          std::vector<float> steps(kMaxTileTokens, 1.0f);
          if (has_steps) {
            for (int t = 0; t < kMaxTileTokens; ++t) {
              steps[t] = 0.25f + static_cast<float>(t % 7);
              for (int d = 0; d < dim; ++d) v[t * dim + d] *= steps[t];
            }
            packed_v.tile.steps = steps.data();
          }
          keys.insert(keys.end(), k.begin(), k.end());
          values.insert(values.end(), v.begin(), v.end());
          std::vector<float> scores(padded_rows(num_rows) * kMaxTileTokens);
          kernels_->attend_tile({.queries = parts.data(),
                                 .num_rows = num_rows,
                                 .keys = packed_k.tile,
                                 .values = packed_v.tile,
                                 .key_parts = MatrixParts::kAll,
                                 .value_parts = MatrixParts::kAll,
                                 .rows = rows.data(),
                                 .softmax_scale = scale,
                                 .scores = scores.data(),
                                 .sums = sums.data(),
                                 .prefetcher = prefetcher_});
        }
        const Expected expected = attend(queries, keys, values, dim, scale, kBias);
        for (int r = 0; r < num_rows; ++r) {
          ASSERT_NEAR(rows[r].softmax.log_sum_exp(), expected.lse[r], 2e-3)
              << num_rows << ", " << r;
          for (int d = 0; d < dim; ++d) {
            ASSERT_NEAR(sums[r * dim + d] / rows[r].softmax.sum, expected.out[r * dim + d], 4e-3)
                << dim << ", " << num_rows << " rows, row " << r << ", number " << d;
          }
        }
      }
    }
  }
}

// Stored rows of every format that has packers, packed straight and from decoded floats.
class Packers : public MatrixUnit, public testing::WithParamInterface<const format::Facts*> {};

TEST_P(Packers, MakeOfStoredRowsWhatIsMadeOfDecodedOnes) {
  constexpr int kRows = 32;
  const format::FormatSpec spec = spec_of(*GetParam());
  const ops::cpu::KernelTable& table = ops::cpu::kernel_table(device::CpuLevel::kAvx512Amx);
  int compared = 0;
  for (const int dim : {32, 64, 96, 128}) {
    if (!format::check_head_dim(spec, dim).ok()) continue;
    for (const bool wants_low : {true, false}) {
      const ops::cpu::MatrixPackers* packers = kernels_->find_packers(spec, dim, wants_low);
      if (packers == nullptr) continue;
      const StoredTile stored(spec, dim, table, random_floats(kMaxTileTokens * dim));
      const std::vector<float> queries = random_floats(kRows * dim);
      std::vector<float> parts(kRows * dim);
      ASSERT_TRUE(kernels_->split_rows(queries.data(), kRows, dim, parts.data()));
      PackedRows straight(dim), decoded(dim), straight_v(dim), decoded_v(dim);
      ASSERT_TRUE(packers->pack_keys(stored.tile, prefetcher_, straight.tile));
      ASSERT_TRUE(packers->pack_values(stored.tile, prefetcher_, straight_v.tile));
      ASSERT_TRUE(pack(&MatrixKernels::pack_keys, stored.decoded, decoded));
      ASSERT_TRUE(pack(&MatrixKernels::pack_values, stored.decoded, decoded_v));
      const MatrixParts taken = wants_low ? MatrixParts::kAll : MatrixParts::kHigh;
      // Rows whose step comes behind the product are exact in their high parts; the others' low
      // parts were made in another order of roundings.
      const double tolerance = std::sqrt(dim) * (wants_low ? 1e-4 : 5e-2);
      const auto products = [&](bool of_values, const MatrixTile& tile) {
        const int inner = of_values ? kMaxTileTokens : dim;
        const int columns = of_values ? dim : kMaxTileTokens;
        std::vector<float> left = random_probabilities(kRows * kMaxTileTokens);
        if (of_values && tile.steps != nullptr) {
          for (int i = 0; i < kRows * kMaxTileTokens; ++i) {
            left[i] *= tile.steps[i % kMaxTileTokens];
          }
        }
        if (of_values) kernels_->split_probabilities(left.data(), kRows, kMaxTileTokens);
        std::vector<float> target(kRows * columns);
        const ops::cpu::MatrixProduct product = {.rows = of_values ? left.data() : parts.data(),
                                                 .stride = inner,
                                                 .num_rows = kRows,
                                                 .tile = &tile,
                                                 .target = target.data(),
                                                 .target_stride = columns,
                                                 .parts = taken};
        of_values ? kernels_->add_values(product) : kernels_->score(product);
        if (!of_values && tile.steps != nullptr) {
          for (int i = 0; i < kRows * columns; ++i) target[i] *= tile.steps[i % columns];
        }
        return target;
      };
      for (const bool of_values : {false, true}) {
        const auto got = products(of_values, of_values ? straight_v.tile : straight.tile);
        const auto wanted = products(of_values, of_values ? decoded_v.tile : decoded.tile);
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(got[i], wanted[i], tolerance) << dim << (of_values ? ", V " : ", K ") << i;
        }
      }
      ++compared;
    }
  }
  const bool is_packed = spec.facts->element_bits <= 16 && !spec.is_dual() &&
                         spec.facts->kernels == format::Kernels::kAll;
  EXPECT_EQ(compared > 0, is_packed);
}

INSTANTIATE_TEST_SUITE_P(Formats, Packers, testing::ValuesIn(format::kRowFacts),
                         [](const auto& of) { return std::string(of.param->name); });

TEST_F(MatrixUnit, PackersRefuseCodesAndStepsThatAreOutOfReach) {
  constexpr int kDim = 64;
  const ops::cpu::KernelTable& table = ops::cpu::kernel_table(device::CpuLevel::kAvx512Amx);
  const auto refuses = [&](const format::FormatSpec& spec, const StoredTile& stored) {
    const ops::cpu::MatrixPackers* packers = kernels_->find_packers(spec, kDim, true);
    PackedRows k(kDim), v(kDim);
    return !packers->pack_keys(stored.tile, prefetcher_, k.tile) &&
           !packers->pack_values(stored.tile, prefetcher_, v.tile);
  };
  const auto named = [](std::string_view name) {
    return spec_of(*format::make_spec(*format::format_named(name)).value().facts);
  };
  for (const std::string_view name : {"bf16", "f16", "fp8_e4m3", "fp8_e5m2"}) {
    const format::FormatSpec spec = named(name);
    StoredTile stored(spec, kDim, table, random_floats(kMaxTileTokens * kDim));
    EXPECT_FALSE(refuses(spec, stored)) << name;
    // All ones mean NaN in each of them.
    const int bytes = spec.facts->element_bits / 8;
    std::fill_n(stored.codes.begin() + 40 * stored.row_bytes + 17 * bytes, bytes, uint8_t{0xFF});
    EXPECT_TRUE(refuses(spec, stored)) << name;
  }
  const format::FormatSpec fp8 = named("fp8_e4m3");
  for (const float step : {1e-30f, 1e30f, std::nanf(""), -1.0f}) {
    StoredTile stored(fp8, kDim, table, random_floats(kMaxTileTokens * kDim));
    std::memcpy(stored.scales.data() + 4 * 63, &step, 4);
    EXPECT_TRUE(refuses(fp8, stored)) << step;
  }
  const format::FormatSpec int8 = named("int8");
  StoredTile stored(int8, kDim, table, random_floats(kMaxTileTokens * kDim));
  std::fill_n(stored.scales.begin() + 2, 2, uint8_t{0xFF});  // NaN in F16
  EXPECT_TRUE(refuses(int8, stored));
}

}  // namespace
}  // namespace kvx::tests::matrix_kernels_test
