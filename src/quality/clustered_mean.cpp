// ClusteredMean keeps four sums, from which mean and error follow.
#include "quality/clustered_mean.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvx::quality {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

void ClusteredMean::add_cluster(std::span<const double> numbers) {
  if (numbers.empty()) return;
  double sum = 0;
  for (const double number : numbers) sum += number;
  const double count = static_cast<double>(numbers.size());
  ++num_clusters_;
  count_ += static_cast<int64_t>(numbers.size());
  sum_ += sum;
  sum_squares_ += sum * sum;
  sum_products_ += sum * count;
  count_squares_ += count * count;
}

double ClusteredMean::mean() const {
  return count_ == 0 ? kNan : sum_ / static_cast<double>(count_);
}

double ClusteredMean::standard_error() const {
  if (num_clusters_ < 2) return kNan;
  const double average = mean();
  const double squares =
      sum_squares_ - 2 * average * sum_products_ + average * average * count_squares_;
  const double clusters = static_cast<double>(num_clusters_);
  // Rounding may leave a tiny negative number where all clusters are alike; a NaN must stay one.
  const double spread = squares < 0 ? 0 : squares;
  return std::sqrt(clusters / (clusters - 1) * spread) / static_cast<double>(count_);
}

void add_in_clusters(std::span<const double> numbers, int cluster_size, ClusteredMean& mean) {
  const size_t size = static_cast<size_t>(cluster_size);
  for (size_t first = 0; first < numbers.size(); first += size) {
    mean.add_cluster(numbers.subspan(first, std::min(size, numbers.size() - first)));
  }
}

}  // namespace kvx::quality
