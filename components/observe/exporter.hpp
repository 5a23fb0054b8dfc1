// Exporter: metrics in Prometheus' text format, as a string or over HTTP, by prometheus-cpp.
#pragma once

#include <memory>
#include <string>

#include <prometheus/exposer.h>

#include "observe/component.h"

namespace kvx::observe {

std::string metrics_text(kvx_observe_collect collect);

class Exporter {
 public:
  // endpoint: "127.0.0.1:9400". Throws std::exception: it cannot be bound.
  Exporter(const std::string& endpoint, kvx_observe_collect collect);
  int port() const { return server_.GetListeningPorts().front(); }

 private:
  std::shared_ptr<prometheus::Collectable> families_;
  prometheus::Exposer server_;
};

}  // namespace kvx::observe
