// Text that the core passes to Python. It may hold a path, of any bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace kvx::python {

// As os.fsdecode reads a path: bytes that are no UTF-8 become surrogates, and null characters stay.
inline nanobind::object text_of(std::string_view text) {
  return nanobind::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape"));
}

}  // namespace kvx::python
