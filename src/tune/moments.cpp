// The loop over lanes has a constant length, so that the compiler turns it into vectors.
#include "tune/moments.hpp"

#include <algorithm>

#include "core/checked.hpp"

namespace kvx::tune {
namespace {

constexpr int kLanes = 16;
constexpr int kRunRows = 64;

}  // namespace

Moments::Moments(int head_dim)
    : head_dim_(head_dim),
      padded_dim_(ceil_div(head_dim, kLanes) * kLanes),
      sums_(static_cast<size_t>(head_dim) * head_dim),
      run_(static_cast<size_t>(padded_dim_) * padded_dim_),
      row_(static_cast<size_t>(padded_dim_)) {}

void Moments::add(const float* rows, int64_t num_rows, int64_t row_stride) {
  for (int64_t first = 0; first < num_rows; first += kRunRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRunRows, num_rows - first));
    add_run(rows + first * row_stride, count, row_stride);
  }
}

void Moments::add_run(const float* rows, int num_rows, int64_t row_stride) {
  std::fill(run_.begin(), run_.end(), 0.0f);
  for (int r = 0; r < num_rows; ++r) {
    std::copy_n(rows + r * row_stride, head_dim_, row_.begin());
    for (int i = 0; i < head_dim_; ++i) {
      const float x = row_[i];
      float* sum = run_.data() + static_cast<int64_t>(i) * padded_dim_;
      for (int first = 0; first <= i; first += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) sum[first + lane] += x * row_[first + lane];
      }
    }
  }
  for (int i = 0; i < head_dim_; ++i) {
    for (int j = 0; j <= i; ++j) {
      sums_[static_cast<int64_t>(i) * head_dim_ + j] +=
          run_[static_cast<int64_t>(i) * padded_dim_ + j];
    }
  }
  count_ += num_rows;
}

void Moments::merge(const Moments& other) {
  for (size_t i = 0; i < sums_.size(); ++i) sums_[i] += other.sums_[i];
  count_ += other.count_;
}

void Moments::add_sums(int64_t count, const double* sums) {
  for (int i = 0; i < head_dim_; ++i) {
    for (int j = 0; j <= i; ++j) {
      const int64_t at = static_cast<int64_t>(i) * head_dim_ + j;
      sums_[at] += sums[at];
    }
  }
  count_ += count;
}

std::vector<double> Moments::mean() const {
  std::vector<double> mean(sums_.size());
  if (count_ == 0) return mean;
  for (int i = 0; i < head_dim_; ++i) {
    for (int j = 0; j <= i; ++j) {
      const double value =
          sums_[static_cast<int64_t>(i) * head_dim_ + j] / static_cast<double>(count_);
      mean[static_cast<int64_t>(i) * head_dim_ + j] = value;
      mean[static_cast<int64_t>(j) * head_dim_ + i] = value;
    }
  }
  return mean;
}

}  // namespace kvx::tune
