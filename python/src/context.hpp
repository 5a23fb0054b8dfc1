// The threads and kernels that the module's verbs run with, shared by all caches of a process.
#pragma once

#include <memory>
#include <string>

#include "ops/cpu/kernel_table.hpp"

namespace kvx::python {

// The process that something was made in. A forked child has its memory and none of its threads:
// nobody there must wait for one, or for a lock that one may hold.
class HomeProcess {
 public:
  HomeProcess();
  bool is_this() const;
  // Throws CoreError in a forked child.
  void check() const;

 private:
  int id_;
};

class Context {
 public:
  // Throws CoreError: KVX_CPU forces a level that this machine lacks.
  explicit Context(std::unique_ptr<Executor> threads);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Throws CoreError in a forked child.
  const ops::CpuContext& cpu() const;
  const HomeProcess& home() const { return home_; }

 private:
  std::unique_ptr<Executor> threads_;
  ops::CpuContext cpu_;
  const HomeProcess home_;
};

// Made at the first call, with a thread a core unless set_num_threads came before. Called with the
// GIL held.
std::shared_ptr<const Context> current_context();

// For caches that are made from now on; 0 means a thread a core. INVALID_ARGUMENT: negative or
// beyond 1024.
void set_num_threads(int num_threads);
// The same with the OpenMP threads of a library that the process has loaded; errors as
// make_openmp_executor.
void use_openmp(const std::string& library);
int num_threads();

}  // namespace kvx::python
