// Ctrl-C in a long verb. Python's handlers run in its main thread alone, and a verb of that thread
// runs without the GIL: it asks for signals itself, some times a second.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <type_traits>

#include "core/executor.hpp"
#include "core/stop.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {

// While it lives, the verb of this thread hears of signals whose handlers raise. Made without the
// GIL or with it.
class Interruptible final : public StopWish {
 public:
  Interruptible();
  ~Interruptible() override;
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  bool is_there() override;
  // Throws what a handler raised, such as KeyboardInterrupt.
  void check();

 private:
  const std::thread::id thread_;
  const bool hears_signals_;  // Python's main thread
  std::atomic<bool> is_interrupted_ = false;
  std::chrono::steady_clock::time_point last_asked_;
  PyObject* raised_ = nullptr;
};

// Python's thread that hears signals; set when the module is imported.
void remember_main_thread();

// Runs a verb that may be left early, and throws what a signal's handler raised meanwhile.
template <class F>
std::invoke_result_t<F> interruptibly(F verb) {
  Interruptible interrupt;
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      verb();
      interrupt.check();
    } else {
      auto result = verb();
      interrupt.check();
      return result;
    }
  } catch (const CoreError&) {
    interrupt.check();
    throw;
  }
}

// Leaves out tasks once its verb is interrupted: for verbs whose outputs are dropped then.
class InterruptibleExecutor final : public Executor {
 public:
  InterruptibleExecutor(Executor& executor, Interruptible& interrupt)
      : executor_(executor), interrupt_(interrupt) {}

  int num_threads() const override { return executor_.num_threads(); }
  void parallel_for(int num_tasks, const std::function<void(int)>& task) override {
    executor_.parallel_for(num_tasks, [this, &task](int i) {
      if (!interrupt_.is_there()) task(i);
    });
  }

 private:
  Executor& executor_;
  Interruptible& interrupt_;
};

}  // namespace kvx::python
