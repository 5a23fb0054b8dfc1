// A stream is an address in all of them; only the attribute's name differs.
#include "python/src/cuda_stream.hpp"

#include <nanobind/stl/string.h>

#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

namespace nb = nanobind;

constexpr uintptr_t kDefaultStream = 1;  // cudaStreamLegacy

// Null where the object is no stream.
nb::object number_of(nb::handle stream) {
  if (nb::isinstance<nb::int_>(stream)) return nb::borrow(stream);
  if (nb::hasattr(stream, "cuda_stream")) return stream.attr("cuda_stream");  // torch
  if (nb::hasattr(stream, "__cuda_stream__")) return stream.attr("__cuda_stream__")()[1];
  if (nb::hasattr(stream, "ptr")) return stream.attr("ptr");  // CuPy
  return {};
}

}  // namespace

device::CudaStream stream_of(nb::handle stream) {
  const nb::object number = number_of(stream);
  uintptr_t address = 0;
  if (!number.is_valid() || !nb::try_cast(number, address)) {
    throw CoreError(
        invalid_argument("stream is a {}; expected a stream of torch or CuPy, or a cudaStream_t as "
                         "a number",
                         nb::cast<std::string>(nb::handle(stream.type()).attr("__name__"))));
  }
  return reinterpret_cast<device::CudaStream>(address == kDefaultStream ? 0 : address);
}

int64_t dlpack_stream(device::CudaStream stream) {
  return static_cast<int64_t>(stream == nullptr ? kDefaultStream
                                                : reinterpret_cast<uintptr_t>(stream));
}

}  // namespace kvx::python
