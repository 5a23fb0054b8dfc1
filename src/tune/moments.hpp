// Moments: the sum of x x^T over many rows, in double, without the cost of double.
#pragma once

#include <cstdint>
#include <vector>

namespace kvx::tune {

// Second moments of rows of one head. Parts add up: add() both, then merge().
class Moments {
 public:
  explicit Moments(int head_dim);

  // rows: num_rows of head_dim numbers, row_stride apart. Runs of 64 rows are summed in binary32
  // first.
  void add(const float* rows, int64_t num_rows, int64_t row_stride);
  void merge(const Moments& other);
  // What was summed up elsewhere over `count` rows: [head_dim, head_dim], of which the lower
  // triangle counts.
  void add_sums(int64_t count, const double* sums);

  int64_t count() const { return count_; }
  int head_dim() const { return head_dim_; }
  // [head_dim, head_dim], E[x x^T]; zeros without rows.
  std::vector<double> mean() const;

 private:
  void add_run(const float* rows, int num_rows, int64_t row_stride);

  int head_dim_;
  int padded_dim_;  // whole lanes
  int64_t count_ = 0;
  std::vector<double> sums_;  // [head_dim, head_dim], lower triangle
  std::vector<float> run_;    // [padded_dim, padded_dim]
  std::vector<float> row_;    // [padded_dim]
};

}  // namespace kvx::tune
