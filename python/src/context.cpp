// The process's current context; a cache keeps the one that it was made with.
#include "python/src/context.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "python/src/errors.hpp"
#include "python/src/openmp_executor.hpp"

namespace kvx::python {
namespace {

constexpr int kMaxThreads = 1024;

std::shared_ptr<const Context>& current() {
  static std::shared_ptr<const Context> context;
  return context;
}

// This process's id. Each call asks for it, and the system's own answer takes longer than reading
// an array does: a forked child writes its own here.
std::atomic<int>& process_id() {
  static std::atomic<int> id = [] {
    pthread_atfork(nullptr, nullptr, [] { process_id() = getpid(); });
    return getpid();
  }();
  return id;
}

}  // namespace

HomeProcess::HomeProcess() : id_(process_id()) {}

bool HomeProcess::is_this() const {
  return process_id() == id_;
}

void HomeProcess::check() const {
  if (is_this()) return;
  throw CoreError(
      unsupported("this process was forked from process {}, whose threads did not come along; use "
                  "the 'spawn' start method, or call kvx.set_num_threads() and make the cache anew",
                  id_));
}

Context::Context(std::unique_ptr<Executor> threads)
    : threads_(std::move(threads)),
      cpu_{&ops::cpu::kernel_table(value_of(device::choose_cpu_level())), threads_.get()} {}

Context::~Context() {
  if (!home_.is_this()) static_cast<void>(threads_.release());
}

const ops::CpuContext& Context::cpu() const {
  home_.check();
  return cpu_;
}

std::shared_ptr<const Context> current_context() {
  if (!current()) current() = std::make_shared<const Context>(make_thread_pool(0));
  return current();
}

void set_num_threads(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw CoreError(
        invalid_argument("num_threads is {}; expected 0 to {}", num_threads, kMaxThreads));
  }
  current() = std::make_shared<const Context>(make_thread_pool(num_threads));
}

void use_openmp(const std::string& library) {
  current() = std::make_shared<const Context>(make_openmp_executor(library));
}

int num_threads() {
  return current_context()->cpu().executor->num_threads();
}

}  // namespace kvx::python
