// DLPack's C exchange API: a tensor's address and shape by one call, without the capsule that
// __dlpack__() makes for every tensor. PyTorch has it; arrays without it take the usual way.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "device/cuda.hpp"

namespace kvx::python {

// Fills `tensor`, whose pointers live as long as the object, and returns true; false, no Python
// error set: the object's type has no exchange API, or the API refuses this object (a sparse
// one, say), and the usual way returns the reason. Called with the GIL held.
bool exchange(nanobind::handle object, nanobind::dlpack::dltensor& tensor);

// Whether the numbers in memory are the negatives of the object's (torch: a view such as the
// imaginary part of a conjugate); no exchange reports it.
bool is_negated(nanobind::handle object);

// Whether the object's library reports correctly where its own memory lies (torch, CuPy, JAX).
bool owns_its_memory(nanobind::handle object);

// The stream that the object's library would put work on now; none: it names none (NumPy, JAX).
// Called with the GIL held.
std::optional<device::CudaStream> current_stream(nanobind::handle object, int cuda_device);

// Whether the object's library relies on its numbers never changing (JAX).
bool is_immutable(nanobind::handle object);

}  // namespace kvx::python
