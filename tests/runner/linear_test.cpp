// Matrix products against sums in double precision.
#include "runner/linear.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "core/float16.hpp"
#include "runner/model.hpp"
#include "tests/runner/linear_parts.hpp"

namespace kvx::runner {
namespace {

struct Product {
  std::vector<float> first;   // [num_tokens, 200 rows], with a bias
  std::vector<float> second;  // [num_tokens, 64 rows]
};

constexpr int kColumns = 96;

Product multiply(const std::vector<float>& x, DType type, int num_threads) {
  const auto first = random_numbers(200 * kColumns, 1);
  const auto second = random_numbers(64 * kColumns, 2);
  WeightMemory memory;
  auto linear = create_cpu_linear(
      kColumns, {part_of(first, kColumns, random_numbers(200, 9)), part_of(second, kColumns)}, type,
      memory);
  EXPECT_TRUE(linear.ok());
  const auto executor = make_thread_pool(num_threads);
  const size_t tokens = x.size() / kColumns;
  Product out{std::vector<float>(tokens * 200), std::vector<float>(tokens * 64)};
  float* const outs[] = {out.first.data(), out.second.data()};
  EXPECT_TRUE(linear.value()->multiply(x.data(), static_cast<int>(tokens), outs, *executor).ok());
  return out;
}

float rounded(float value, DType type) {
  return type == DType::kBF16 ? bf16_to_f32(f32_to_bf16(value)) : value;
}

// The largest distance from the sum in doubles, in units of the sum of magnitudes.
double worst_error(const std::vector<float>& x, const std::vector<float>& weights,
                   const std::vector<float>& bias, DType type, const std::vector<float>& actual) {
  const size_t rows = weights.size() / kColumns;
  double worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const float* token = &x[i / rows * kColumns];
    const float* row = &weights[i % rows * kColumns];
    double sum = bias.empty() ? 0 : bias[i % rows];
    double magnitude = 1;
    for (int c = 0; c < kColumns; ++c) {
      const double term = double{rounded(token[c], type)} * rounded(row[c], type);
      sum += term;
      magnitude += std::abs(term);
    }
    worst = std::max(worst, std::abs(actual[i] - sum) / magnitude);
  }
  return worst;
}

void expect_correct(DType type) {
  // One token, a few, a full strip, and strips with a rest.
  for (const size_t tokens : {1u, 7u, 128u, 300u}) {
    const auto x = random_numbers(tokens * kColumns, 3);
    const Product product = multiply(x, type, 2);
    EXPECT_LT(worst_error(x, random_numbers(200 * kColumns, 1), random_numbers(200, 9), type,
                          product.first),
              1e-6);
    EXPECT_LT(worst_error(x, random_numbers(64 * kColumns, 2), {}, type, product.second), 1e-6);
  }
}

TEST(Linear, MultipliesInF32) {
  expect_correct(DType::kF32);
}

TEST(Linear, MultipliesInBf16WhereTheCpuDoesAndElsewhereModelsRefuseIt) {
  if (cpu_multiplies_bf16()) return expect_correct(DType::kBF16);
  const auto model = Model::load("any.gguf", DType::kBF16, serial_executor());
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.error().code, ErrorCode::kUnsupported) << model.error().message;
}

TEST(Linear, GivesTheSameBitsOnAnyNumberOfThreads) {
  const auto x = random_numbers(300 * kColumns, 4);
  const Product one = multiply(x, DType::kF32, 1);
  for (const int threads : {2, 5}) {
    const Product many = multiply(x, DType::kF32, threads);
    EXPECT_EQ(one.first, many.first);
    EXPECT_EQ(one.second, many.second);
  }
}

}  // namespace
}  // namespace kvx::runner
