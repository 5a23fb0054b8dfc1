// kvx.metrics and kvx.serve_metrics: figures of all caches of the process.
#include <nanobind/stl/string.h>

#include <mutex>

#include "observe/metrics_server.hpp"
#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {

namespace nb = nanobind;

namespace {

std::mutex server_mutex;
// Never destroyed at the process's end, when its threads may be gone.
observe::MetricsServer* server = nullptr;

std::string metrics() {
  const nb::gil_scoped_release no_gil;
  return value_of(observe::metrics_text());
}

void stop_metrics() {
  const nb::gil_scoped_release no_gil;
  const std::lock_guard lock(server_mutex);
  delete server;
  server = nullptr;
}

int serve_metrics(const std::string& address, int port) {
  stop_metrics();
  const nb::gil_scoped_release no_gil;
  const std::lock_guard lock(server_mutex);
  server = value_of(observe::MetricsServer::create(address, port)).release();
  return server->port();
}

}  // namespace

void bind_metrics(nb::module_& module) {
  module.def("metrics", &metrics);
  module.def("serve_metrics", &serve_metrics, nb::arg("address"), nb::arg("port"));
  module.def("stop_metrics", &stop_metrics);
}

}  // namespace kvx::python
