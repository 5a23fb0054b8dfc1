// Arrays that Python passes (NumPy, PyTorch, CuPy, JAX: buffer protocol or DLPack), checked and
// seen as the core's rows. Nothing is copied; an array that would need a copy is an error that
// names the reason.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "core/rows.hpp"
#include "device/cuda.hpp"

namespace kvx::python {

namespace nb = nanobind;

// Where a verb's arrays must lie. On a CUDA device they are ready on one of two streams, which the
// verb is put behind: the caller's, and one that another library is at.
struct ArrayPlace {
  int cuda_device = -1;  // -1: the CPU
  device::CudaStream stream = nullptr;
  device::CudaStream also_behind = nullptr;
  bool are_all_ready = false;   // the current streams of all arrays' libraries are of these two
  const char* owner = "cache";  // whose device it is, for messages
};

// What [num_tokens, num_heads, head_dim] rows must look like; a negative size may be anything.
struct RowsShape {
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
};

// The array lives as long as this does.
struct InputRows {
  nb::ndarray<nb::ro> array;
  FloatRows rows;
  int64_t num_tokens = 0;
  int num_heads = 0;
};
struct OutputRows {
  nb::ndarray<> array;
  MutableFloatRows rows;
};

// Throws CoreError naming `name`, what is wrong with it and the fix: no array, in another place,
// not f32, f16 or bf16, another shape, head_dim not contiguous. An output must also be writable,
// its rows apart.
InputRows input_rows(nb::handle object, const char* name, const RowsShape& expected,
                     const ArrayPlace& place = {});
OutputRows output_rows(nb::handle object, const char* name, const RowsShape& expected,
                       const ArrayPlace& place = {});

// A contiguous array of n floats (f32).
nb::ndarray<nb::ro> input_floats(nb::handle object, const char* name, int64_t n,
                                 const ArrayPlace& place = {});
// A contiguous float32 array to write to, [rows, heads] or more rows.
nb::ndarray<> output_floats(nb::handle object, const char* name, int64_t rows, int64_t heads,
                            const ArrayPlace& place = {});
// Contiguous uint8 [rows, bytes]; negative bytes: any number.
nb::ndarray<nb::ro> input_bytes(nb::handle object, const char* name, int64_t rows, int64_t bytes,
                                const ArrayPlace& place = {});
nb::ndarray<> output_bytes(nb::handle object, const char* name, int64_t rows, int64_t bytes,
                           const ArrayPlace& place = {});
// Contiguous uint8 of any size in one dimension.
nb::ndarray<> scratch_bytes(nb::handle object, const char* name, const ArrayPlace& place);

// Contiguous int32 or int64 numbers; of two dimensions the rows may be apart.
template <class Int>
nb::ndarray<nb::ro> input_ints(nb::handle object, const char* name, size_t num_dimensions,
                               const ArrayPlace& place = {});

// A contiguous array of n int32 or int64 numbers or more to write to, of any shape.
template <class Int>
nb::ndarray<> output_ints(nb::handle object, const char* name, int64_t n,
                          const ArrayPlace& place = {});

// An engine's pages, uint8 [pages, ...], writable, each page contiguous and of page_bytes or more.
struct PageMemory {
  nb::ndarray<> array;
  int64_t page_stride = 0;  // bytes
};
PageMemory page_memory(nb::handle object, const char* name, int64_t page_bytes,
                       const ArrayPlace& place = {});

// The device that an array's library reports: -1 is the CPU, and what is no array. Throws CoreError
// naming `name`: another kind of device.
int cuda_device_of(nb::handle object, const char* name);

// The numbers of an array that was checked to have this type.
template <class T>
const T* numbers(const nb::ndarray<nb::ro>& array) {
  return static_cast<const T*>(array.data());
}
template <class T>
T* numbers(const nb::ndarray<>& array) {
  return static_cast<T*>(array.data());
}

// Throws CoreError when an output's memory and an input's meet. An input may be none.
void check_apart(const nb::ndarray<>& out, const nb::ndarray<nb::ro>& in, const char* in_name);

}  // namespace kvx::python
