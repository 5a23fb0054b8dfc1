// FolderServer and fetch_layers: layer files of blocks, from one engine to another.
#include "transfer/folder_server.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "transfer/layer_fetch.hpp"

namespace kvx::python {

namespace nb = nanobind;

namespace {

class FolderServer {
 public:
  FolderServer(const std::string& endpoint, std::string folder)
      : server_(value_of(transfer::FolderServer::create(endpoint, std::move(folder)))) {}
  ~FolderServer() { close(); }
  FolderServer(FolderServer&&) = default;

  std::string endpoint() const { return open().endpoint(); }
  std::pair<int64_t, int64_t> counts() const {
    const transfer::ServedCounts counts = open().counts();
    return {counts.num_files, counts.bytes};
  }
  void close() {
    const nb::gil_scoped_release no_gil;
    server_.reset();
  }

 private:
  const transfer::FolderServer& open() const {
    if (server_ == nullptr) {
      throw CoreError(invalid_argument("the server is closed; expected one that is open"));
    }
    return *server_;
  }
  std::unique_ptr<transfer::FolderServer> server_;
};

// heads: (first, end, of how many), and the fingerprint of files that have no others; empty: all.
// Returns (files, bytes, what is wrong with the file after these).
nb::tuple fetch_layers(const std::string& endpoint, const std::vector<std::string>& names,
                       const std::string& folder, const std::string& fingerprint,
                       int64_t timeout_ms, int64_t wait_ms, const std::vector<uint32_t>& heads,
                       const std::string& fingerprint_of_heads) {
  transfer::FetchOptions options;
  options.endpoint = endpoint;
  options.folder = folder;
  options.timeout_ms = timeout_ms;
  options.wait_ms = wait_ms;
  options.fingerprint = fingerprint;
  if (!heads.empty()) {
    if (heads.size() != 3) {
      throw CoreError(invalid_argument("heads has {} numbers; expected 3", heads.size()));
    }
    options.heads = {heads[0], heads[1], heads[2]};
    options.fingerprint_of_heads = fingerprint_of_heads;
  }
  transfer::FetchReport report;
  {
    const nb::gil_scoped_release no_gil;
    report = value_of(transfer::fetch_layers(options, names));
  }
  return nb::make_tuple(report.num_files, report.bytes, report.problem);
}

}  // namespace

void bind_folder_server(nb::module_& module) {
  nb::class_<FolderServer>(module, "FolderServer")
      .def(nb::init<std::string, std::string>(), nb::arg("endpoint"), nb::arg("folder"))
      .def_prop_ro("endpoint", &FolderServer::endpoint)
      .def("counts", &FolderServer::counts)
      .def("close", &FolderServer::close);
  module.def("fetch_layers", &fetch_layers, nb::arg("endpoint"), nb::arg("names"),
             nb::arg("folder"), nb::arg("fingerprint"), nb::arg("timeout_ms"), nb::arg("wait_ms"),
             nb::arg("heads") = std::vector<uint32_t>(), nb::arg("fingerprint_of_heads") = "");
}

}  // namespace kvx::python
