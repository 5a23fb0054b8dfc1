// Executor runs independent tasks of work, on the caller's threads or on a small pool of our own.
#pragma once

#include <functional>
#include <memory>

namespace kvx {

// TaskGrid must not depend on each other; results never depend on how many threads run them.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int num_threads() const = 0;

  // Calls task(i) for every i in [0, num_tasks), each once, and returns when all are done. What a
  // task throws (memory is short) is thrown from here. Calls from several threads are allowed; a
  // nested call runs in the calling thread.
  virtual void parallel_for(int num_tasks, const std::function<void(int)>& task) = 0;
};

// Runs everything in the calling thread.
Executor& serial_executor();

// A pool of num_threads - 1 workers beside the calling thread; 0 means one thread a core.
std::unique_ptr<Executor> make_thread_pool(int num_threads);

}  // namespace kvx
