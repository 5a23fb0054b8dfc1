// Products by cuBLAS against the CPU's.
#include "runner/gpu_products.hpp"

#include "tests/gpu/gpu.hpp"
#include "tests/runner/linear_parts.hpp"

namespace kvx::tests {
namespace {

using runner::GpuProducts;
using runner::part_of;
using runner::random_numbers;

constexpr int kColumns = 576;

class GpuProductsTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto products = GpuProducts::create();
    if (!products.ok()) GTEST_SKIP() << products.error().message;  // a machine without cuBLAS
    products_ = std::move(products).value();
  }

  // Of the sum of magnitudes, which is at least 1.
  void expect_close(int num_tokens, DType type, double tolerance) {
    const auto first = random_numbers(1500 * kColumns, 1),
               second = random_numbers(64 * kColumns, 2);
    const auto bias = random_numbers(1500, 3);
    const auto x = random_numbers(static_cast<size_t>(num_tokens) * kColumns, 4);
    auto gpu = products_->create_linear(
        kColumns, {part_of(first, kColumns, bias), part_of(second, kColumns)}, type);
    ASSERT_TRUE(gpu.ok()) << gpu.error().message;
    std::vector<float> a(num_tokens * size_t{1500}), b(num_tokens * size_t{64});
    const Status status = gpu.value()->multiply(x.data(), num_tokens,
                                                std::array{a.data(), b.data()}, serial_executor());
    ASSERT_TRUE(status.ok()) << status.error().message;
    const auto check = [&](const std::vector<float>& out, const std::vector<float>& weights,
                           const float* add) {
      const size_t rows = weights.size() / kColumns;
      for (size_t i = 0; i < out.size(); i += 37) {
        double sum = add ? add[i % rows] : 0, magnitude = 1;
        for (int c = 0; c < kColumns; ++c) {
          const double term = double{x[i / rows * kColumns + c]} * weights[i % rows * kColumns + c];
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(out[i], sum, tolerance * magnitude) << "number " << i;
      }
    };
    check(a, first, bias.data());
    check(b, second, nullptr);
  }

 private:
  std::unique_ptr<GpuProducts> products_;
};

TEST_F(GpuProductsTest, MultiplyInF32) {
  for (const int tokens : {1, 7, 512}) expect_close(tokens, DType::kF32, 1e-6);
}

TEST_F(GpuProductsTest, MultiplyInBf16) {
  for (const int tokens : {1, 3000}) expect_close(tokens, DType::kBF16, 8e-3);
}

}  // namespace
}  // namespace kvx::tests
