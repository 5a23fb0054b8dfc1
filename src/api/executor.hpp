// CallersExecutor: the caller's threads as an Executor.
#pragma once

#include <algorithm>
#include <optional>

#include "api/guard.hpp"
#include "core/executor.hpp"
#include "core/first_failure.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

class CallersExecutor final : public Executor {
 public:
  explicit CallersExecutor(const kvx_executor_t& hook) : hook_(hook) {}

  int num_threads() const override {
    return static_cast<int>(std::clamp<uint32_t>(hook_.num_threads, 1, 65536));
  }

  void parallel_for(int num_tasks, const std::function<void(int)>& task) override {
    if (num_tasks <= 0) return;
    Call call{&task, {}};
    const auto run = [](void* context, uint32_t i) {
      auto& of = *static_cast<Call*>(context);
      of.failure.keep_of([&] { (*of.task)(static_cast<int>(i)); });
    };
    hook_.parallel_for(hook_.user, static_cast<uint32_t>(num_tasks), run, &call);
    call.failure.rethrow();
  }

 private:
  // Keeps the first exception of a task, so that none passes through the caller's code.
  struct Call {
    const std::function<void(int)>* task;
    FirstFailure failure;
  };

  kvx_executor_t hook_;
};

// Reads a caller's executor. Null gives an empty result: the calling thread.
inline Result<std::optional<CallersExecutor>> read_executor(const kvx_executor_t* executor) {
  if (executor == nullptr) return std::optional<CallersExecutor>();
  KVX_ASSIGN_OR_RETURN(const kvx_executor_t args, read_struct(executor, "executor"));
  if (args.parallel_for == nullptr) return invalid_argument("executor.parallel_for is null");
  return std::optional<CallersExecutor>(args);
}

inline Executor& chosen_executor(std::optional<CallersExecutor>& executor) {
  return executor ? *executor : serial_executor();
}

}  // namespace kvx::boundary
