// The serial executor and a small thread pool: workers take tasks from one counter, watch for the
// next call for a moment, then sleep.
#include "core/executor.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/first_failure.hpp"

namespace kvx {
namespace {

thread_local bool inside_task = false;

void run_all(int num_tasks, const std::function<void(int)>& task) {
  for (int i = 0; i < num_tasks; ++i) task(i);
}

class SerialExecutor final : public Executor {
 public:
  int num_threads() const override { return 1; }
  void parallel_for(int num_tasks, const std::function<void(int)>& task) override {
    run_all(num_tasks, task);
  }
};

// Waking a sleeper costs tens of microseconds, about what a decode step's matrix product takes;
// spinning for ever starves the other threads of a busy machine. So both sides watch for this long
// first.
constexpr std::chrono::microseconds kWatchTime(50);

template <class Condition>
bool watch_for(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kWatchTime;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  return true;
}

class ThreadPool final : public Executor {
 public:
  // Throws std::system_error where the system starts no more threads.
  explicit ThreadPool(int num_threads) {
    try {
      for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ThreadPool() override { stop(); }

  int num_threads() const override { return static_cast<int>(workers_.size()) + 1; }

  void parallel_for(int num_tasks, const std::function<void(int)>& task) override {
    if (num_tasks <= 1 || workers_.empty() || inside_task) return run_all(num_tasks, task);
    std::lock_guard one_call_at_a_time(call_mutex_);
    bool has_sleepers = false;
    {
      std::lock_guard lock(mutex_);
      task_ = &task;
      num_tasks_ = num_tasks;
      next_.store(0, std::memory_order_relaxed);
      ++generation_;
      has_sleepers = num_sleepers_ > 0;
    }
    if (has_sleepers) wake_.notify_all();
    take_tasks(task, num_tasks);
    {
      std::lock_guard lock(mutex_);
      task_ = nullptr;  // who comes now comes too late
    }
    // A worker that is still inside must not meet the next call's counter with this call's task.
    if (!watch_for([this] { return num_busy_ == 0; })) {
      std::unique_lock lock(mutex_);
      idle_.wait(lock, [this] { return num_busy_ == 0; });
    }
    failure_.rethrow();
  }

 private:
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void take_tasks(const std::function<void(int)>& task, int num_tasks) noexcept {
    inside_task = true;
    for (int i = next_.fetch_add(1); i < num_tasks; i = next_.fetch_add(1)) {
      failure_.keep_of([&] { task(i); });
    }
    inside_task = false;
  }

  void work() {
    uint64_t seen = 0;
    while (true) {
      watch_for([&] { return generation_ != seen; });
      std::unique_lock lock(mutex_);
      ++num_sleepers_;
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      --num_sleepers_;
      if (stopping_) return;
      seen = generation_;
      if (task_ == nullptr) continue;
      const std::function<void(int)>& task = *task_;
      const int num_tasks = num_tasks_;
      ++num_busy_;
      lock.unlock();
      take_tasks(task, num_tasks);
      lock.lock();
      if (--num_busy_ == 0) idle_.notify_all();
    }
  }

  std::mutex call_mutex_;
  std::mutex mutex_;  // guards what follows; the atomics are written under it and watched without
  std::condition_variable wake_;
  std::condition_variable idle_;
  const std::function<void(int)>* task_ = nullptr;  // null: no call is open for joining
  int num_tasks_ = 0;
  int num_sleepers_ = 0;
  bool stopping_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> num_busy_{0};
  std::atomic<int> next_{0};
  FirstFailure failure_;  // of a call's tasks
  std::vector<std::thread> workers_;
};

}  // namespace

Executor& serial_executor() {
  static SerialExecutor executor;
  return executor;
}

std::unique_ptr<Executor> make_thread_pool(int num_threads) {
  if (num_threads <= 0) num_threads = std::max(1u, std::thread::hardware_concurrency());
  return std::make_unique<ThreadPool>(num_threads);
}

}  // namespace kvx
