// FolderServer and fetch_files: cache files of blocks, from one engine to another.
#include "transfer/folder_server.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "transfer/file_fetch.hpp"

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

std::pair<int64_t, int64_t> fetch_files(const std::string& endpoint,
                                        const std::vector<std::string>& names,
                                        const std::string& folder, int64_t timeout_ms,
                                        int64_t wait_ms) {
  const nb::gil_scoped_release no_gil;
  const transfer::FetchReport report =
      value_of(transfer::fetch_files({endpoint, folder, timeout_ms, wait_ms}, names));
  return {report.num_files, report.bytes};
}

}  // namespace

void bind_folder_server(nb::module_& module) {
  nb::class_<FolderServer>(module, "FolderServer")
      .def(nb::init<std::string, std::string>(), nb::arg("endpoint"), nb::arg("folder"))
      .def_prop_ro("endpoint", &FolderServer::endpoint)
      .def("counts", &FolderServer::counts)
      .def("close", &FolderServer::close);
  module.def("fetch_files", &fetch_files, nb::arg("endpoint"), nb::arg("names"), nb::arg("folder"),
             nb::arg("timeout_ms"), nb::arg("wait_ms"));
}

}  // namespace kvx::python
