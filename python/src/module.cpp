// kvx._core: what the Python package needs of the core. Its users import kvx, not this.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <string_view>
#include <utility>

#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"
#include "python/src/interrupt.hpp"
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

// The core's names of what has another one in Python.
std::string in_pythons_words(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {" (see kvx formats --help)", "; kvx.recipe_options() lists them"},
      {"prefix.is_on (C: KVX_CACHE_PREFIXES)", "a prefix_model"},
      {"max_tokens_per_sequence", "max_tokens"},
      {"k_head_dim", "head_dim"},
  };
  for (const auto& [from, to] : kWords) {
    const size_t found = text.find(from);
    if (found != std::string::npos) text.replace(found, from.size(), to);
  }
  return text;
}

void translate(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const CoreError& error) {
    const nb::object type = nb::module_::import_("kvx.errors").attr(class_of(error.code()));
    PyErr_SetObject(type.ptr(), text_of(in_pythons_words(error.message())).ptr());
  }
}

}  // namespace

NB_MODULE(_core, module) {
  nb::register_exception_translator(translate, nullptr);
  remember_main_thread();
  nb::set_leak_warnings(false);  // engines keep caches until the process ends

  module.attr("__version__") = KVX_VERSION;
  module.def("set_num_threads", &set_num_threads, nb::arg("num_threads"));
  module.def("use_openmp", &use_openmp, nb::arg("library"));
  module.def("num_threads", &num_threads);
  bind_formats(module);
  bind_rows(module);
  bind_paged_step(module);
  bind_paged_cache(module);
  bind_paged_layer(module);
  bind_paged_window(module);
  bind_contiguous_cache(module);
  bind_cache_files(module);
  bind_block_files(module);
  bind_host_blocks(module);
  bind_block_store(module);
  bind_stores(module);
  bind_quality(module);
  bind_tune(module);
  bind_turbomind(module);
  bind_engine_layer(module);
  bind_metrics(module);
  bind_folder_server(module);
}

}  // namespace kvx::python
