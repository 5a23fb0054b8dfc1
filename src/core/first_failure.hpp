// FirstFailure: an exception of a task, kept until all tasks have ended. Tasks run in threads
// that must not see it, a pool's or a caller's, and the one who asked for them must.
#pragma once

#include <exception>
#include <mutex>
#include <utility>

namespace kvx {

class FirstFailure {
 public:
  template <class Task>
  void keep_of(const Task& task) noexcept {
    try {
      task();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }
  // Requires: no task runs. Nothing is kept afterwards.
  void rethrow() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace kvx
