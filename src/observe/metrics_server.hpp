// The process's metrics: caches that are shown, their text, and an HTTP server for Prometheus.
#pragma once

#include <memory>
#include <string>

#include "observe/component.h"
#include "observe/metrics.hpp"

namespace kvx::observe {

// The cache is in metrics_text() as long as this lives; the cache outlives it. Of two caches with
// one name, the later gets a number behind it.
class ShownCache {
 public:
  // name: the label cache="name"; empty: a number.
  ShownCache(const kv::KvCache& cache, std::string name);
  ShownCache(const ShownCache&) = delete;
  ShownCache& operator=(const ShownCache&) = delete;
  // Waits for a collection that is under way.
  ~ShownCache();

 private:
  const kv::KvCache* cache_;
};

// The figures of all shown caches, in Prometheus' text format. UNSUPPORTED: open_component's.
Result<std::string> metrics_text();

// Serves metrics_text() at http://address:port/metrics from threads of its own.
class MetricsServer {
 public:
  // port 0: any free one. INVALID_ARGUMENT: the address cannot be bound; UNSUPPORTED:
  // open_component's.
  static Result<std::unique_ptr<MetricsServer>> create(const std::string& address, int port);
  ~MetricsServer();
  int port() const { return functions_->exporter_port(exporter_); }

 private:
  MetricsServer(const kvx_observe_functions_t* functions, kvx_observe_exporter* exporter)
      : functions_(functions), exporter_(exporter) {}

  const kvx_observe_functions_t* functions_;
  kvx_observe_exporter* exporter_;
};

}  // namespace kvx::observe
