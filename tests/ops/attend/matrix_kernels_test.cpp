// The products of a CPU's matrix unit against plain loops in double precision, and what they
// refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "ops/attend/cpu/tile_kernels.hpp"
#include "tests/support/cpu_levels.hpp"

namespace kvx::tests {
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
      : high(kMaxTileTokens * head_dim, 0x7FC0), low(high) {  // NaN where nothing is written
    tile = {.high = high.data(), .low = low.data(), .head_dim = head_dim, .is_exact = true};
  }
  std::vector<uint16_t> high, low;
  MatrixTile tile{};
};

class MatrixUnit : public testing::Test {
 protected:
  void SetUp() override {
    if (!device::supports(device::CpuLevel::kAvx512Amx)) GTEST_SKIP() << "this CPU has no AMX";
    kernels_ = ops::cpu::tile_kernels(device::CpuLevel::kAvx512Amx).matrix;
    ASSERT_NE(kernels_, nullptr);
  }

  std::vector<float> random_floats(int n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float& x : values) x = normal(rng_);
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

  const MatrixKernels* kernels_ = nullptr;
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

}  // namespace
}  // namespace kvx::tests
