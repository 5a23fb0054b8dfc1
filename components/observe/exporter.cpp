// Exporter: every request collects anew.
#include "components/observe/exporter.hpp"

#include <prometheus/text_serializer.h>

#include <stdexcept>

namespace kvx::observe {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr int kNumThreads = 2;

ClientMetric::Histogram histogram_of(const kvx_observe_sample& sample) {
  ClientMetric::Histogram histogram;
  double bound = sample.first_bound;
  for (int32_t i = 0; i <= sample.num_bounds; ++i) {
    histogram.sample_count += sample.counts[i];
    ClientMetric::Bucket bucket;
    bucket.cumulative_count = histogram.sample_count;
    bucket.upper_bound = i < sample.num_bounds ? bound : std::numeric_limits<double>::infinity();
    histogram.bucket.push_back(bucket);
    bound *= 2;
  }
  histogram.sample_sum = sample.sum;
  return histogram;
}

MetricFamily family_of(const kvx_observe_family& family) {
  constexpr MetricType kTypes[] = {MetricType::Gauge, MetricType::Counter, MetricType::Histogram};
  MetricFamily made;
  made.name = family.name;
  made.help = family.help;
  made.type = kTypes[family.kind];
  for (int32_t i = 0; i < family.num_samples; ++i) {
    const kvx_observe_sample& sample = family.samples[i];
    ClientMetric& metric = made.metric.emplace_back();
    for (int32_t l = 0; l < sample.num_labels; ++l) {
      metric.label.push_back({sample.labels[l].name, sample.labels[l].value});
    }
    switch (made.type) {
      case MetricType::Gauge:
        metric.gauge.value = sample.value;
        break;
      case MetricType::Counter:
        metric.counter.value = sample.value;
        break;
      default:
        metric.histogram = histogram_of(sample);
    }
  }
  return made;
}

class Families final : public prometheus::Collectable {
 public:
  explicit Families(kvx_observe_collect collect) : collect_(collect) {}

  std::vector<MetricFamily> Collect() const override {
    std::vector<MetricFamily> families;
    collect_(
        [](void* to, const kvx_observe_family* seen, int32_t num_families) {
          for (int32_t i = 0; i < num_families; ++i) {
            static_cast<std::vector<MetricFamily>*>(to)->push_back(family_of(seen[i]));
          }
        },
        &families);
    return families;
  }

 private:
  kvx_observe_collect collect_;
};

}  // namespace

std::string metrics_text(kvx_observe_collect collect) {
  return prometheus::TextSerializer().Serialize(Families(collect).Collect());
}

Exporter::Exporter(const std::string& endpoint, kvx_observe_collect collect)
    : families_(std::make_shared<Families>(collect)), server_(endpoint, kNumThreads) {
  if (server_.GetListeningPorts().empty()) throw std::runtime_error("nothing listens there");
  server_.RegisterCollectable(families_);
}

}  // namespace kvx::observe
