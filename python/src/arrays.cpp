// Checks of arrays: one rule a function, each with the message that helps to fix the call.
#include "python/src/arrays.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "device/cuda_caller.hpp"
#include "python/src/cuda_stream.hpp"
#include "python/src/errors.hpp"
#include "python/src/exchange.hpp"

namespace kvx::python {
namespace {

std::string name_of_type(nb::handle object) {
  return nb::cast<std::string>(nb::handle(object.type()).attr("__name__"));
}

// DLPack's names of the places where memory lies.
std::string place_text(int device_type, int device_id) {
  switch (device_type) {
    case nb::device::cpu::value:
      return "the CPU";
    case nb::device::cuda::value:
      return fmt::format("cuda:{}", device_id);
    case nb::device::cuda_host::value:
      return "pinned memory of the host";
    case nb::device::cuda_managed::value:
      return "managed memory of CUDA";
    default:
      return "a device that kvx does not know";
  }
}

void check_place(int device_type, int device_id, const char* name, const ArrayPlace& place) {
  if (place.cuda_device < 0) {
    if (device_type == nb::device::cpu::value) return;
    throw CoreError(
        invalid_argument("{} lies on {}; expected the CPU (copy it there, or use a {} of its "
                         "device)",
                         name, place_text(device_type, device_id),
                         std::string_view(place.owner) == "cache" ? "kvx.Cache" : place.owner));
  }
  const bool is_read_there = device_type == nb::device::cuda::value
                                 ? device_id == place.cuda_device
                                 : device_type == nb::device::cuda_host::value ||
                                       device_type == nb::device::cuda_managed::value;
  if (is_read_there) return;
  throw CoreError(invalid_argument("{} lies on {}; expected cuda:{}, the {}'s device", name,
                                   place_text(device_type, device_id), place.cuda_device,
                                   place.owner));
}

// An array with a wrong device would make a kernel fail, and that breaks the process's context.
// Arrays of libraries that allocate their own memory are not checked.
template <class Array>
void check_address(const Array& array, const char* name, const ArrayPlace& place) {
  if (array.size() == 0) return;
  const auto address = value_of(device::find_cuda_address(array.data()));
  const bool is_there = address.kind == device::CudaMemoryKind::kDevice
                            ? address.device == place.cuda_device
                            : address.kind != device::CudaMemoryKind::kHost;
  if (is_there) return;
  throw CoreError(invalid_argument("{} is declared to lie on {}; CUDA reports its memory as {}",
                                   name, place_text(array.device_type(), array.device_id()),
                                   name_of(address.kind)));
}

// The object's tensor, ordered on the stream after what its library has to do first.
nb::object capsule_of(nb::handle object, device::CudaStream stream) {
  const nb::object dlpack = object.attr("__dlpack__");
  const int64_t number = dlpack_stream(stream);
  try {
    return dlpack(nb::arg("stream") = number, nb::arg("max_version") = nb::make_tuple(1, 1));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    return dlpack(nb::arg("stream") = number);
  }
}

bool is_ready(nb::handle object, const ArrayPlace& place) {
  if (place.are_all_ready) return true;
  const auto current = current_stream(object, place.cuda_device);
  return current == place.stream || current == place.also_behind;
}

template <class Array>
bool take_array(nb::handle object, const char* name, const ArrayPlace& place, Array& array) {
  const bool is_on_cuda = place.cuda_device >= 0;
  nb::dlpack::dltensor tensor;
  if ((!is_on_cuda || is_ready(object, place)) && exchange(object, tensor)) {
    // int64_t sizes are never negative here, so they are size_t as they lie.
    array =
        Array(tensor.data, static_cast<size_t>(tensor.ndim),
              reinterpret_cast<const size_t*>(tensor.shape), object, tensor.strides, tensor.dtype,
              tensor.device.device_type, tensor.device.device_id, '\0', tensor.byte_offset);
    return true;
  }
  try {
    if (!is_on_cuda) return nb::try_cast(object, array);
    const auto [type, id] = nb::cast<std::pair<int, int>>(object.attr("__dlpack_device__")());
    check_place(type, id, name, place);
    return nb::try_cast(capsule_of(object, place.stream), array);
  } catch (nb::python_error&) {
    return false;  // the object's own __dlpack__ refused
  }
}

// The array behind a Python object, at its place.
template <class Array>
Array array_at(nb::handle object, const char* name, const ArrayPlace& place) {
  Array array;
  const bool may_be_used = Array::ReadOnly || !is_immutable(object);
  if (!may_be_used || !take_array(object, name, place, array)) {
    const std::string expected =
        place.cuda_device < 0
            ? fmt::format("a{} NumPy array or dense tensor on the CPU",
                          Array::ReadOnly ? "" : " writable")
            : fmt::format("{} on cuda:{}",
                          Array::ReadOnly ? "a dense tensor" : "a torch tensor or CuPy array",
                          place.cuda_device);
    if (object.is_none())
      throw CoreError(invalid_argument("{} is None; expected {}", name, expected));
    throw CoreError(invalid_argument("{} is a {} that cannot be {} in place; expected {}", name,
                                     name_of_type(object), Array::ReadOnly ? "read" : "written",
                                     expected));
  }
  // Only parts of complex numbers are views of that kind.
  const bool is_integer = array.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int) ||
                          array.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);
  if (!is_integer && is_negated(object)) {
    throw CoreError(
        invalid_argument("{} is a view of numbers that are negated when they are read; pass "
                         ".resolve_neg()",
                         name));
  }
  check_place(array.device_type(), array.device_id(), name, place);
  if (place.cuda_device >= 0 && !owns_its_memory(object)) check_address(array, name, place);
  return array;
}

template <class Array>
std::string shape_text(const Array& array) {
  std::string text;
  for (size_t i = 0; i < array.ndim(); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", array.shape(i));
  }
  return text;
}

std::string size_text(int64_t size, const char* word) {
  return size < 0 ? word : std::to_string(size);
}

// As NumPy and torch name it: float64, uint8, bool.
std::string dtype_text(nb::dlpack::dtype type) {
  // DLPack's numbers, in its order. Those of torch that have fixed widths end there.
  constexpr const char* kNames[] = {"int",
                                    "uint",
                                    "float",
                                    "opaque",
                                    "bfloat",
                                    "complex",
                                    "bool",
                                    "float8_e3m4",
                                    "float8_e4m3",
                                    "float8_e4m3b11fnuz",
                                    "float8_e4m3fn",
                                    "float8_e4m3fnuz",
                                    "float8_e5m2",
                                    "float8_e5m2fnuz",
                                    "float8_e8m0fnu",
                                    "float6_e2m3fn",
                                    "float6_e3m2fn",
                                    "float4_e2m1fn"};
  if (type.code >= std::size(kNames)) return fmt::format("of {}-bit elements", type.bits);
  const std::string name = kNames[type.code];
  return type.code >= static_cast<uint8_t>(nb::dlpack::dtype_code::Bool)
             ? name
             : name + std::to_string(type.bits);
}

template <class Array>
DType float_type(const Array& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&type](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::Float, 32)) return DType::kF32;
  if (is(nb::dlpack::dtype_code::Float, 16)) return DType::kF16;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return DType::kBF16;
  throw CoreError(
      invalid_argument("{} is {}; expected float32, float16 or bfloat16", name, dtype_text(type)));
}

// ``float64 [3, 4]``
template <class Array>
std::string array_text(const Array& array) {
  return fmt::format("{} [{}]", dtype_text(array.dtype()), shape_text(array));
}

template <class Byte, class Array>
BasicFloatRows<Byte> rows_of(const Array& array, const char* name, const RowsShape& expected) {
  const DType dtype = float_type(array, name);
  const int64_t sizes[] = {expected.num_tokens, expected.num_heads, expected.head_dim};
  bool fits = array.ndim() == 3;
  for (size_t i = 0; fits && i < 3; ++i) {
    fits = sizes[i] < 0 || static_cast<int64_t>(array.shape(i)) == sizes[i];
  }
  if (!fits) {
    throw CoreError(invalid_argument("{} has the shape [{}]; expected [{}, {}, {}]", name,
                                     shape_text(array), size_text(sizes[0], "tokens"),
                                     size_text(sizes[1], "heads"),
                                     size_text(sizes[2], "head_dim")));
  }
  if (array.size() > 0 && array.shape(2) > 1 && array.stride(2) != 1) {
    throw CoreError(
        invalid_argument("{} has a stride of {} elements along head_dim; expected 1 (pass a "
                         "contiguous copy)",
                         name, array.stride(2)));
  }
  return {static_cast<Byte*>(array.data()), dtype, array.stride(0), array.stride(1)};
}

// Rows of an output must not lie over each other: threads write them at once.
void check_rows_apart(const nb::ndarray<>& array, const char* name) {
  if (array.size() == 0) return;
  struct Axis {
    int64_t stride;
    int64_t size;
  };
  Axis inner{std::abs(array.stride(1)), static_cast<int64_t>(array.shape(1))};
  Axis outer{std::abs(array.stride(0)), static_cast<int64_t>(array.shape(0))};
  if (outer.stride < inner.stride) std::swap(inner, outer);
  const auto head_dim = static_cast<int64_t>(array.shape(2));
  const bool heads_apart = inner.size <= 1 || inner.stride >= head_dim;
  const int64_t inner_extent =
      inner.size <= 1 ? head_dim : (inner.size - 1) * inner.stride + head_dim;
  if (heads_apart && (outer.size <= 1 || outer.stride >= inner_extent)) return;
  throw CoreError(
      invalid_argument("{} has rows that lie over each other (strides {}, {}); expected "
                       "memory of its own for every row",
                       name, array.stride(0), array.stride(1)));
}

template <class Array>
void check_contiguous(const Array& array, const char* name) {
  if (array.size() == 0) return;
  int64_t expected = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != expected) {
      throw CoreError(invalid_argument("{} is not contiguous; pass a contiguous copy", name));
    }
    expected *= static_cast<int64_t>(array.shape(i));
  }
}

template <class Array>
Array bytes_array(nb::handle object, const char* name, int64_t rows, int64_t bytes,
                  const ArrayPlace& place) {
  Array array = array_at<Array>(object, name, place);
  const nb::dlpack::dtype type = array.dtype();
  const bool is_uint8 =
      type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && type.bits == 8;
  const bool fits = is_uint8 && array.ndim() == 2 && static_cast<int64_t>(array.shape(0)) == rows &&
                    (bytes < 0 || static_cast<int64_t>(array.shape(1)) == bytes);
  if (!fits) {
    throw CoreError(invalid_argument("{} is {}; expected uint8 [{}, {}]", name, array_text(array),
                                     rows, bytes < 0 ? "n" : std::to_string(bytes)));
  }
  check_contiguous(array, name);
  return array;
}

// First and one past the last byte of an array.
struct Extent {
  const char* first;
  const char* end;
};
template <class Array>
Extent extent_of(const Array& array) {
  int64_t low = 0;
  int64_t high = 0;
  for (size_t i = 0; i < array.ndim(); ++i) {
    if (array.shape(i) == 0) return {nullptr, nullptr};
    const int64_t reach = (static_cast<int64_t>(array.shape(i)) - 1) * array.stride(i);
    (reach < 0 ? low : high) += reach;
  }
  const auto* data = static_cast<const char*>(array.data());
  const auto item = static_cast<int64_t>(array.itemsize());
  return {data + low * item, data + (high + 1) * item};
}

}  // namespace

InputRows input_rows(nb::handle object, const char* name, const RowsShape& expected,
                     const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<nb::ro>>(object, name, place);
  const FloatRows rows = rows_of<const uint8_t>(array, name, expected);
  if (array.shape(1) > std::numeric_limits<int>::max()) {  // a broadcast array's may be
    throw CoreError(invalid_argument("{} has {} heads; expected at most {}", name, array.shape(1),
                                     std::numeric_limits<int>::max()));
  }
  const auto tokens = static_cast<int64_t>(array.shape(0));
  const auto heads = static_cast<int>(array.shape(1));
  return {std::move(array), rows, tokens, heads};
}

OutputRows output_rows(nb::handle object, const char* name, const RowsShape& expected,
                       const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<>>(object, name, place);
  const MutableFloatRows rows = rows_of<uint8_t>(array, name, expected);
  check_rows_apart(array, name);
  return {std::move(array), rows};
}

nb::ndarray<nb::ro> input_floats(nb::handle object, const char* name, int64_t n,
                                 const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<nb::ro>>(object, name, place);
  if (array.dtype() != nb::dtype<float>() || static_cast<int64_t>(array.size()) != n) {
    throw CoreError(
        invalid_argument("{} is {}; expected float32 [{}]", name, array_text(array), n));
  }
  check_contiguous(array, name);
  return array;
}

nb::ndarray<> output_floats(nb::handle object, const char* name, int64_t rows, int64_t heads,
                            const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<>>(object, name, place);
  const bool fits = array.dtype() == nb::dtype<float>() && array.ndim() == 2 &&
                    static_cast<int64_t>(array.shape(0)) >= rows &&
                    static_cast<int64_t>(array.shape(1)) == heads;
  if (!fits) {
    throw CoreError(invalid_argument("{} is {}; expected float32 [{} or more, {}]", name,
                                     array_text(array), rows, heads));
  }
  check_contiguous(array, name);
  return array;
}

nb::ndarray<nb::ro> input_bytes(nb::handle object, const char* name, int64_t rows, int64_t bytes,
                                const ArrayPlace& place) {
  return bytes_array<nb::ndarray<nb::ro>>(object, name, rows, bytes, place);
}
nb::ndarray<> output_bytes(nb::handle object, const char* name, int64_t rows, int64_t bytes,
                           const ArrayPlace& place) {
  return bytes_array<nb::ndarray<>>(object, name, rows, bytes, place);
}

nb::ndarray<> scratch_bytes(nb::handle object, const char* name, const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<>>(object, name, place);
  if (array.dtype() != nb::dtype<uint8_t>() || array.ndim() != 1) {
    throw CoreError(invalid_argument("{} is {}; expected uint8 [bytes]", name, array_text(array)));
  }
  check_contiguous(array, name);
  return array;
}

template <class Int>
nb::ndarray<nb::ro> input_ints(nb::handle object, const char* name, size_t num_dimensions,
                               const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<nb::ro>>(object, name, place);
  const size_t last = num_dimensions - 1;
  const bool fits = array.dtype() == nb::dtype<Int>() && array.ndim() == num_dimensions &&
                    (array.size() == 0 || array.shape(last) == 1 || array.stride(last) == 1);
  if (fits) return array;
  throw CoreError(invalid_argument("{} is {}; expected int{} in {} dimension{}, contiguous", name,
                                   array_text(array), 8 * sizeof(Int), num_dimensions,
                                   num_dimensions == 1 ? "" : "s"));
}
template nb::ndarray<nb::ro> input_ints<int32_t>(nb::handle, const char*, size_t,
                                                 const ArrayPlace&);
template nb::ndarray<nb::ro> input_ints<int64_t>(nb::handle, const char*, size_t,
                                                 const ArrayPlace&);

template <class Int>
nb::ndarray<> output_ints(nb::handle object, const char* name, int64_t n, const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<>>(object, name, place);
  if (array.dtype() != nb::dtype<Int>() || static_cast<int64_t>(array.size()) < n) {
    throw CoreError(invalid_argument("{} is {}; expected {} numbers of int{} or more", name,
                                     array_text(array), n, 8 * sizeof(Int)));
  }
  check_contiguous(array, name);
  return array;
}
template nb::ndarray<> output_ints<int32_t>(nb::handle, const char*, int64_t, const ArrayPlace&);
template nb::ndarray<> output_ints<int64_t>(nb::handle, const char*, int64_t, const ArrayPlace&);

PageMemory page_memory(nb::handle object, const char* name, int64_t page_bytes,
                       const ArrayPlace& place) {
  auto array = array_at<nb::ndarray<>>(object, name, place);
  int64_t inner_bytes = 1;
  bool fits = array.dtype() == nb::dtype<uint8_t>() && array.ndim() >= 2;
  for (size_t i = array.ndim(); fits && i-- > 1;) {
    fits = array.shape(i) <= 1 || array.stride(i) == inner_bytes;
    inner_bytes *= static_cast<int64_t>(array.shape(i));
  }
  const int64_t stride = array.ndim() == 0 ? 0 : array.stride(0);
  if (fits && inner_bytes >= page_bytes && stride >= page_bytes) {
    return {std::move(array), stride};
  }
  throw CoreError(
      invalid_argument("{} is {}; expected uint8 [pages, ...], each page contiguous and of at "
                       "least {} bytes",
                       name, array_text(array), page_bytes));
}

int cuda_device_of(nb::handle object, const char* name) {
  std::pair<int, int> device;
  nb::dlpack::dltensor tensor;
  if (exchange(object, tensor)) {
    device = {tensor.device.device_type, tensor.device.device_id};
  } else if (!nb::hasattr(object, "__dlpack_device__")) {
    return -1;
  } else {
    try {
      device = nb::cast<std::pair<int, int>>(object.attr("__dlpack_device__")());
    } catch (nb::python_error&) {
      return -1;  // array_at returns the reason
    }
  }
  if (device.first == nb::device::cpu::value) return -1;
  if (device.first == nb::device::cuda::value) return device.second;
  throw CoreError(invalid_argument("{} lies on {}; expected the CPU or a CUDA device", name,
                                   place_text(device.first, device.second)));
}

void check_apart(const nb::ndarray<>& out, const nb::ndarray<nb::ro>& in, const char* in_name) {
  if (!in.is_valid()) return;
  const Extent a = extent_of(out);
  const Extent b = extent_of(in);
  if (a.first < b.end && b.first < a.end) {
    throw CoreError(invalid_argument("out lies over {}; expected memory of its own", in_name));
  }
}

}  // namespace kvx::python
