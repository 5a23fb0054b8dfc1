// kvx._core: what the Python package needs of the core. Its users import kvx, not this.
#include <nanobind/nanobind.h>

#include <string>

#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {

namespace nb = nanobind;

namespace {

struct ExceptionTypes {
  PyObject* error = nullptr;
  PyObject* out_of_range = nullptr;
  PyObject* unsupported = nullptr;
  PyObject* internal = nullptr;

  PyObject* of(ErrorCode code) const {
    switch (code) {
      case ErrorCode::kOutOfRange:
        return out_of_range;
      case ErrorCode::kUnsupported:
        return unsupported;
      case ErrorCode::kInternal:
        return internal;
      case ErrorCode::kInvalidArgument:
      case ErrorCode::kIncompatible:
        return error;
    }
    return error;
  }
};
ExceptionTypes exception_types;

PyObject* new_exception(nb::module_& module, const char* name, const char* doc, PyObject* base) {
  const std::string full_name = std::string("kvx.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, base, nullptr);
  if (type == nullptr) throw nb::python_error();
  module.attr(name) = nb::handle(type);
  return type;
}

void translate(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const CoreError& error) {
    PyErr_SetString(exception_types.of(error.code()), error.what());
  }
}

}  // namespace

NB_MODULE(_core, module) {
  exception_types.error =
      new_exception(module, "Error",
                    "A call that kvx refuses; it says which argument, its value and what was "
                    "expected. Nothing has changed.",
                    PyExc_ValueError);
  exception_types.out_of_range =
      new_exception(module, "OutOfRangeError",
                    "Too many tokens, too few free blocks, or memory that the machine has not.",
                    exception_types.error);
  exception_types.unsupported = new_exception(
      module, "UnsupportedError", "Something that kvx cannot do.", exception_types.error);
  exception_types.internal =
      new_exception(module, "InternalError", "A fault of kvx itself.", PyExc_RuntimeError);
  nb::register_exception_translator(translate, nullptr);

  module.attr("__version__") = KVX_VERSION;
  module.def("set_num_threads", &set_num_threads, nb::arg("num_threads"),
             "Threads for caches and rows from now on; 0 means one a core. Results never depend on "
             "it.");
  module.def("num_threads", &num_threads, "Threads that new caches run on.");
  bind_formats(module);
  bind_rows(module);
  bind_paged_cache(module);
  bind_contiguous_cache(module);
  bind_turbomind(module);
}

}  // namespace kvx::python
