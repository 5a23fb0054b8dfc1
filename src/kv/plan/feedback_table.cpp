// feedback_table: transforms the moments as the keys are, factors them, inverts the factor.
#include "kv/plan/feedback_table.hpp"

#include <algorithm>
#include <cmath>

#include "format/feedback.hpp"
#include "format/format_spec.hpp"
#include "ops/transform.hpp"

namespace kvx::kv {
namespace {

// A square matrix, row by row.
struct Matrix {
  int n;
  std::vector<double> numbers;  // [n, n]

  double& at(int row, int column) { return numbers[static_cast<size_t>(row) * n + column]; }
  double at(int row, int column) const { return numbers[static_cast<size_t>(row) * n + column]; }
};

Status check_input(const FeedbackInput& input) {
  if (input.num_kv_heads < 1 || input.head_dim < 1 || input.head_dim > format::kMaxHeadDim) {
    return invalid_argument("num_kv_heads is {} and head_dim {}; expected at least 1, and 1 to {}",
                            input.num_kv_heads, input.head_dim, format::kMaxHeadDim);
  }
  const auto rows = static_cast<size_t>(input.num_kv_heads) * input.head_dim;
  if (input.moments.size() != rows * input.head_dim) {
    return invalid_argument("moments has {} numbers; expected {} ({} heads of {} x {})",
                            input.moments.size(), rows * input.head_dim, input.num_kv_heads,
                            input.head_dim, input.head_dim);
  }
  if (!input.factor.empty() && input.factor.size() != rows) {
    return invalid_argument("factor has {} numbers; expected {} or none", input.factor.size(),
                            rows);
  }
  for (size_t i = 0; i < input.factor.size(); ++i) {
    if (input.factor[i] > 0 && std::isfinite(input.factor[i])) continue;
    return invalid_argument("factor[{}] is {}; expected a positive finite number", i,
                            input.factor[i]);
  }
  if (!(input.damping > 0) || !std::isfinite(input.damping)) {
    return invalid_argument("damping is {}; expected a positive finite number", input.damping);
  }
  return {};
}

Result<Matrix> moments_of(const FeedbackInput& input, int head) {
  const int n = input.head_dim;
  const double* first = input.moments.data() + static_cast<size_t>(head) * n * n;
  Matrix moments = {n, {first, first + static_cast<size_t>(n) * n}};
  for (int i = 0; i < n * n; ++i) {
    if (std::isfinite(moments.numbers[i])) continue;
    return invalid_argument("moments[{}][{}][{}] is {}; expected a finite number", head, i / n,
                            i % n, moments.numbers[i]);
  }
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      const double a = moments.at(i, j), b = moments.at(j, i);
      const double scale = std::sqrt(std::abs(moments.at(i, i) * moments.at(j, j)));
      if (std::abs(a - b) <= 1e-6 * scale && (i != j || a >= 0)) continue;
      return invalid_argument(
          "moments[{}][{}][{}] is {} and [{}][{}] is {}; expected second moments, symmetric and "
          "with no diagonal below 0",
          head, i, j, a, j, i, b);
    }
  }
  return moments;
}

// Keys go through H diag(factor), so queries through H diag(1 / factor), for the same scores.
void rotate(double* numbers, int n, int stride) {
  const int size = ops::hadamard_block(n);
  const double norm = 1.0 / std::sqrt(size);
  for (int first = 0; first < n; first += size) {
    for (int step = 1; step < size; step *= 2) {
      for (int i = first; i < first + size; ++i) {
        if ((i - first) & step) continue;
        double& a = numbers[static_cast<size_t>(i) * stride];
        double& b = numbers[static_cast<size_t>(i + step) * stride];
        const double sum = a + b;
        b = a - b;
        a = sum;
      }
    }
    for (int i = first; i < first + size; ++i) numbers[static_cast<size_t>(i) * stride] *= norm;
  }
}

void transform(const FeedbackInput& input, int head, Matrix& moments) {
  const int n = moments.n;
  if (!input.factor.empty()) {
    const float* factor = input.factor.data() + static_cast<size_t>(head) * n;
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) moments.at(i, j) /= double{factor[i]} * factor[j];
    }
  }
  if (!input.hadamard) return;
  for (int i = 0; i < n; ++i) rotate(&moments.at(i, 0), n, 1);
  for (int i = 0; i < n; ++i) rotate(&moments.at(0, i), n, n);
}

// U and D of moments = (I + U) D (I + U)^T, from the last column to the first. Requires: positive
// definite.
Matrix upper_factor(Matrix moments) {
  const int n = moments.n;
  for (int k = n - 1; k >= 0; --k) {
    const double pivot = moments.at(k, k);
    for (int i = 0; i < k; ++i) {
      const double u = moments.at(i, k) / pivot;
      for (int j = 0; j <= i; ++j) moments.at(i, j) -= u * moments.at(j, k);
    }
    for (int i = 0; i < k; ++i) {
      for (int j = i; j < k; ++j) moments.at(i, j) = moments.at(j, i);
    }
    for (int i = 0; i < k; ++i) moments.at(i, k) /= pivot;
  }
  return moments;  // U above the diagonal, D on it
}

// (I + U)^-1 = I - W, row by row from (I - W)(I + U) = I.
void write_weights(const Matrix& upper, float* weights) {
  const int n = upper.n;
  std::vector<double> row(n);  // of I - W
  for (int i = 0; i < n; ++i) {
    row[i] = 1.0;
    for (int j = i + 1; j < n; ++j) {
      double sum = 0;
      for (int k = i; k < j; ++k) sum += row[k] * upper.at(k, j);
      row[j] = -sum;
      constexpr double kMost = format::kMaxFeedback;
      weights[static_cast<size_t>(i) * n + j] = static_cast<float>(std::clamp(sum, -kMost, kMost));
    }
  }
}

// D on the diagonal, of mean 1.
void write_error_weights(const Matrix& upper, float* weights) {
  const int n = upper.n;
  double mean = 0;
  for (int i = 0; i < n; ++i) mean += upper.at(i, i) / n;
  for (int i = 0; i < n; ++i) {
    const size_t place = static_cast<size_t>(i) * n + i;
    weights[place] = static_cast<float>(upper.at(i, i) / mean);
  }
}

}  // namespace

Result<std::vector<float>> feedback_table(const FeedbackInput& input) {
  KVX_RETURN_IF_ERROR(check_input(input));
  const int n = input.head_dim;
  const size_t per_head = static_cast<size_t>(n) * n;
  std::vector<float> table(input.num_kv_heads * per_head);
  for (int head = 0; head < input.num_kv_heads; ++head) {
    KVX_ASSIGN_OR_RETURN(Matrix moments, moments_of(input, head));
    transform(input, head, moments);
    double mean = 0;
    for (int i = 0; i < n; ++i) mean += moments.at(i, i) / n;
    if (mean == 0) continue;
    for (int i = 0; i < n; ++i) moments.at(i, i) += input.damping * mean;
    const Matrix upper = upper_factor(std::move(moments));
    write_weights(upper, table.data() + head * per_head);
    if (input.has_error_weights) write_error_weights(upper, table.data() + head * per_head);
  }
  return table;
}

}  // namespace kvx::kv
