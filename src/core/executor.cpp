// The serial executor and a small thread pool: workers take pieces from one counter, watch for the
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

thread_local bool inside_piece = false;

void run_all(int num_pieces, const std::function<void(int)>& piece) {
  for (int i = 0; i < num_pieces; ++i) piece(i);
}

class SerialExecutor final : public Executor {
 public:
  int num_threads() const override { return 1; }
  void parallel_for(int num_pieces, const std::function<void(int)>& piece) override {
    run_all(num_pieces, piece);
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

  void parallel_for(int num_pieces, const std::function<void(int)>& piece) override {
    if (num_pieces <= 1 || workers_.empty() || inside_piece) return run_all(num_pieces, piece);
    std::lock_guard one_call_at_a_time(call_mutex_);
    bool has_sleepers = false;
    {
      std::lock_guard lock(mutex_);
      piece_ = &piece;
      num_pieces_ = num_pieces;
      next_.store(0, std::memory_order_relaxed);
      ++generation_;
      has_sleepers = num_sleepers_ > 0;
    }
    if (has_sleepers) wake_.notify_all();
    take_pieces(piece, num_pieces);
    {
      std::lock_guard lock(mutex_);
      piece_ = nullptr;  // who comes now comes too late
    }
    // A worker that is still inside must not meet the next call's counter with this call's piece.
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

  void take_pieces(const std::function<void(int)>& piece, int num_pieces) noexcept {
    inside_piece = true;
    for (int i = next_.fetch_add(1); i < num_pieces; i = next_.fetch_add(1)) {
      failure_.keep_of([&] { piece(i); });
    }
    inside_piece = false;
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
      if (piece_ == nullptr) continue;
      const std::function<void(int)>& piece = *piece_;
      const int num_pieces = num_pieces_;
      ++num_busy_;
      lock.unlock();
      take_pieces(piece, num_pieces);
      lock.lock();
      if (--num_busy_ == 0) idle_.notify_all();
    }
  }

  std::mutex call_mutex_;
  std::mutex mutex_;  // guards what follows; the atomics are written under it and watched without
  std::condition_variable wake_;
  std::condition_variable idle_;
  const std::function<void(int)>* piece_ = nullptr;  // null: no call is open for joining
  int num_pieces_ = 0;
  int num_sleepers_ = 0;
  bool stopping_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> num_busy_{0};
  std::atomic<int> next_{0};
  FirstFailure failure_;  // of a call's pieces
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
