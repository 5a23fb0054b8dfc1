// kvx._core: what the Python package needs of the core. Its users import kvx, not this.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"
#include "python/src/text.hpp"

namespace kvx::python {

namespace nb = nanobind;

namespace {

// The class of kvx.errors for this error.
const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOutOfRange:
      return "OutOfRangeError";
    case ErrorCode::kUnsupported:
      return "UnsupportedError";
    case ErrorCode::kInternal:
      return "InternalError";
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kIncompatible:
      return "Error";
  }
  return "InternalError";
}

void translate(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const CoreError& error) {
    const nb::object type = nb::module_::import_("kvx.errors").attr(class_of(error.code()));
    PyErr_SetObject(type.ptr(), text_of(error.message()).ptr());
  }
}

}  // namespace

NB_MODULE(_core, module) {
  nb::register_exception_translator(translate, nullptr);
  nb::set_leak_warnings(false);  // engines keep caches until the process ends

  module.attr("__version__") = KVX_VERSION;
  module.def("set_num_threads", &set_num_threads, nb::arg("num_threads"),
             "Threads for caches and rows from now on; 0 means one a core. Results never depend on "
             "it.");
  module.def("use_openmp", &use_openmp, nb::arg("library"),
             "Runs caches and rows from now on upon the threads of an OpenMP library that the "
             "process has loaded (its path), which a program that computes with them wants. Raises "
             "kvx.Error: it is not loaded, or no OpenMP library.");
  module.def("num_threads", &num_threads, "Threads that new caches run on.");
  bind_formats(module);
  bind_rows(module);
  bind_paged_cache(module);
  bind_paged_layer(module);
  bind_contiguous_cache(module);
  bind_cache_files(module);
  bind_block_files(module);
  bind_host_blocks(module);
  bind_quality(module);
  bind_turbomind(module);
}

}  // namespace kvx::python
