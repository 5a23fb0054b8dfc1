// The caller's threads as an Executor.
#pragma once

#include <algorithm>
#include <optional>

#include "abi/guard.hpp"
#include "core/executor.hpp"
#include "core/first_failure.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::abi {

class CallersExecutor final : public Executor {
 public:
  explicit CallersExecutor(const kvx_executor_t& hook) : hook_(hook) {}

  int num_threads() const override {
    return static_cast<int>(std::clamp<uint32_t>(hook_.num_threads, 1, 65536));
  }

  void parallel_for(int num_pieces, const std::function<void(int)>& piece) override {
    if (num_pieces <= 0) return;
    Call call{&piece, {}};
    const auto run = [](void* context, uint32_t i) {
      auto& of = *static_cast<Call*>(context);
      of.failure.keep_of([&] { (*of.piece)(static_cast<int>(i)); });
    };
    hook_.parallel_for(hook_.user, static_cast<uint32_t>(num_pieces), run, &call);
    call.failure.rethrow();
  }

 private:
  // No exception leaves for the caller's code.
  struct Call {
    const std::function<void(int)>* piece;
    FirstFailure failure;
  };

  kvx_executor_t hook_;
};

// Null: empty, which stands for the calling thread.
inline Result<std::optional<CallersExecutor>> read_executor(const kvx_executor_t* executor) {
  if (executor == nullptr) return std::optional<CallersExecutor>();
  KVX_ASSIGN_OR_RETURN(const kvx_executor_t known, read_struct(executor, "executor"));
  if (known.parallel_for == nullptr) return invalid_argument("executor.parallel_for is null");
  return std::optional<CallersExecutor>(known);
}

inline Executor& chosen_executor(std::optional<CallersExecutor>& executor) {
  return executor ? *executor : serial_executor();
}

}  // namespace kvx::abi
