// Scratch<T>: a T that keeps its memory from call to call, so that a warm call allocates nothing.
#pragma once

#include <memory>
#include <utility>
#include <vector>

namespace kvx {

// As its last user of this thread left it. A thread_local T would not do where a caller's executor
// runs: while it waits for its tasks, it may call into the library again, in the same thread.
template <class T>
class Scratch {
 public:
  Scratch() {
    std::vector<std::unique_ptr<T>>& free = free_of_thread();
    if (free.empty()) {
      value_ = std::make_unique<T>();
    } else {
      value_ = std::move(free.back());
      free.pop_back();
    }
  }
  ~Scratch() {
    try {
      free_of_thread().push_back(std::move(value_));
    } catch (const std::bad_alloc&) {
      // The next call makes another.
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T& operator*() { return *value_; }
  T* operator->() { return value_.get(); }

 private:
  static std::vector<std::unique_ptr<T>>& free_of_thread() {
    thread_local std::vector<std::unique_ptr<T>> free;
    return free;
  }

  std::unique_ptr<T> value_;
};

}  // namespace kvx
