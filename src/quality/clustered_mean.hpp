// ClusteredMean: the mean of many numbers that come in dependent runs, with an honest standard
// error.
#pragma once

#include <cstdint>
#include <span>

namespace kvx::quality {

// Neighbouring tokens of a text err together, so counting each as an independent draw makes the
// error bar too small. Numbers are added in clusters (kvx compare takes 64 consecutive tokens); the
// mean is over the numbers, and its error is that of a ratio of cluster sums:
//
//   mean  = sum_j S_j / N            S_j = sum of cluster j, m_j its count, N = sum_j m_j
//   error = sqrt( B / (B - 1) * sum_j (S_j - m_j * mean)^2 ) / N          B clusters
//
// (Cochran, Sampling Techniques, 3rd ed., 9A.) With clusters of one it is the usual s / sqrt(N).
class ClusteredMean {
 public:
  // Empty clusters are ignored.
  void add_cluster(std::span<const double> numbers);

  int64_t count() const { return count_; }
  // NaN without numbers.
  double mean() const;
  // NaN with fewer than two clusters.
  double standard_error() const;

 private:
  int64_t num_clusters_ = 0;
  int64_t count_ = 0;
  double sum_ = 0;
  // The squares are expanded so that nothing is kept per cluster.
  double sum_squares_ = 0;    // S_j * S_j
  double sum_products_ = 0;   // S_j * m_j
  double count_squares_ = 0;  // m_j * m_j
};

// Adds [numbers.size()] in consecutive clusters of cluster_size; the last may be shorter.
// Requires: cluster_size > 0.
void add_in_clusters(std::span<const double> numbers, int cluster_size, ClusteredMean& mean);

}  // namespace kvx::quality
