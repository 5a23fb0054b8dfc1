// Calls the runtime's GOMP_parallel, the entry that compilers use and that both GCC's and LLVM's
// (Intel's) libraries have; nothing is linked.
#include "python/src/openmp_executor.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

using Parallel = void (*)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);
using MaxThreads = int (*)();

thread_local bool inside_task = false;

class OpenMpExecutor final : public Executor {
 public:
  OpenMpExecutor(Parallel parallel, int num_threads)
      : parallel_(parallel), num_threads_(num_threads) {}

  int num_threads() const override { return num_threads_; }

  void parallel_for(int num_tasks, const std::function<void(int)>& task) override {
    if (num_tasks <= 1 || num_threads_ == 1 || inside_task) {
      for (int i = 0; i < num_tasks; ++i) task(i);
      return;
    }
    Job job{&task, num_tasks, {0}};
    const int threads = std::min(num_threads_, num_tasks);
    parallel_(&OpenMpExecutor::run_tasks, &job, static_cast<unsigned>(threads), 0);
  }

 private:
  struct Job {
    const std::function<void(int)>* task;
    int num_tasks;
    std::atomic<int> next;
  };

  static void run_tasks(void* data) {
    auto& job = *static_cast<Job*>(data);
    inside_task = true;
    for (int i = job.next.fetch_add(1); i < job.num_tasks; i = job.next.fetch_add(1)) {
      (*job.task)(i);
    }
    inside_task = false;
  }

  Parallel parallel_;
  int num_threads_;
};

}  // namespace

std::unique_ptr<Executor> make_openmp_executor(const std::string& library) {
  // The library stays loaded, because this handle is never closed.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) {
    throw CoreError(invalid_argument("library is '{}'; it is not loaded in this process", library));
  }
  const auto parallel = reinterpret_cast<Parallel>(dlsym(handle, "GOMP_parallel"));
  const auto max_threads = reinterpret_cast<MaxThreads>(dlsym(handle, "omp_get_max_threads"));
  if (parallel == nullptr || max_threads == nullptr) {
    throw CoreError(
        invalid_argument("library is '{}'; it is no OpenMP library with GOMP_parallel", library));
  }
  return std::make_unique<OpenMpExecutor>(parallel, std::max(1, max_threads()));
}

}  // namespace kvx::python
