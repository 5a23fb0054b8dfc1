// The OpenMP threads that a process already has as an Executor.
#pragma once

#include <memory>
#include <string>

#include "core/executor.hpp"

namespace kvx::python {

// Threads of our own and an engine's OpenMP threads take the cores from each other: the latter spin
// between their regions, and some engines bind every thread to a core. On the engine's own threads
// the verbs wait for nobody.
//
// library: the loaded OpenMP library (libgomp or libiomp5), by its path or file name. Throws
// CoreError: it is not loaded in this process, or is no OpenMP library.
std::unique_ptr<Executor> make_openmp_executor(const std::string& library);

}  // namespace kvx::python
