// Engine: the threads and the CPU kernels that a command runs with.
#pragma once

#include <memory>

#include "core/executor.hpp"
#include "core/result.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::tool {

inline constexpr int kMaxThreads = 1024;

struct Engine {
  std::unique_ptr<Executor> executor;
  ops::CpuContext context;

  std::string_view level_name() const { return name_of(context.kernels->level); }
};

// num_threads 0: one a core. INVALID_ARGUMENT or UNSUPPORTED when KVX_CPU names no level that runs
// here.
Result<Engine> make_engine(int num_threads);

}  // namespace kvx::tool
