// kvx_thread_pool_create: the library's own thread pool as an executor that a caller hands to
// verbs.
#include <cstring>

#include "api/call.hpp"
#include "api/guard.hpp"
#include "core/executor.hpp"

namespace kvx::boundary {
namespace {

void run_in_pool(void* user, uint32_t num_tasks, void (*task)(void*, uint32_t), void* context) {
  // Two captured pointers fit into the std::function: nothing is allocated.
  static_cast<Executor*>(user)->parallel_for(static_cast<int>(num_tasks), [task, context](int i) {
    task(context, static_cast<uint32_t>(i));
  });
}

Status create_pool(uint32_t num_threads, kvx_executor_t* executor) {
  constexpr uint32_t kMostThreads = 4096;
  if (executor == nullptr) return invalid_argument("executor is null");
  if (executor->size < sizeof *executor) {
    return invalid_argument("executor.size is {}; expected at least {}", executor->size,
                            sizeof *executor);
  }
  if (num_threads > kMostThreads) {
    return invalid_argument("num_threads is {}; expected at most {}", num_threads, kMostThreads);
  }
  std::unique_ptr<Executor> pool = make_thread_pool(static_cast<int>(num_threads));
  executor->size = sizeof *executor;
  executor->num_threads = static_cast<uint32_t>(pool->num_threads());
  executor->parallel_for = run_in_pool;
  executor->user = pool.release();
  return {};
}

Status free_pool(kvx_executor_t* executor) {
  if (executor == nullptr || executor->user == nullptr) return {};
  if (executor->parallel_for != run_in_pool) {
    return invalid_argument("executor is none that kvx_thread_pool_create has filled");
  }
  delete static_cast<Executor*>(executor->user);
  executor->user = nullptr;
  executor->parallel_for = nullptr;
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_thread_pool_create(uint32_t num_threads, kvx_executor_t* executor) {
  return kvx::boundary::run_call([&] { return kvx::boundary::create_pool(num_threads, executor); });
}

extern "C" kvx_status_t kvx_thread_pool_free(kvx_executor_t* executor) {
  return kvx::boundary::run_call([&] { return kvx::boundary::free_pool(executor); });
}
