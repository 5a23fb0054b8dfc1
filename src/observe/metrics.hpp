// What a cache's figures are called outside (docs/metrics.md): families of samples, as Prometheus
// has them. Names are vLLM's after the prefix where the meaning is vLLM's.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/latency_histogram.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::observe {

struct Histogram {
  std::vector<uint64_t> counts;  // bucket i ends at first_bound * 2^i; the last one nowhere
  double first_bound = 0;        // seconds
  double sum = 0;
};

struct Sample {
  std::vector<std::pair<std::string, std::string>> labels;  // name, value
  double value = 0;
  std::optional<Histogram> histogram = {};
};

enum class MetricKind : uint8_t { kGauge, kCounter, kHistogram };

struct MetricFamily {
  std::string name;  // counters end in _total
  std::string help;
  MetricKind kind;
  std::vector<Sample> samples;
};

// The figures of one cache are added to the families, with the label cache="name".
class Metrics {
 public:
  void add(const kv::KvCache& cache, const std::string& name);
  const std::vector<MetricFamily>& families() const { return families_; }

 private:
  using Labels = std::vector<std::pair<std::string, std::string>>;
  void add_pool(const kv::KvCache& cache, const Labels& labels, const std::string& tier, int level,
                cache::EvictionKind policy, const std::vector<cache::BlockClassSnapshot>& classes);
  void add_prefixes(const Labels& labels, const std::string& prefix, const std::string& of,
                    const cache::PrefixCounters& counters, int block_size);
  void add_tier(const Labels& labels, const tier::HostTierSnapshot& seen);
  void add_inputs(const kv::KvCache& cache, const Labels& labels);
  void add_latencies(const kv::KvCache& cache, const Labels& labels);
  MetricFamily& family(const std::string& name, MetricKind kind, const char* help);
  void put(const std::string& name, MetricKind kind, const char* help, Labels labels, double value);

  std::vector<MetricFamily> families_;
};

}  // namespace kvx::observe
