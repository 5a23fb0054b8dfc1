// Log: one sink behind a lock; whether anybody listens is a single load.
#include "core/log.hpp"

#include <atomic>
#include <mutex>

namespace kvx {
namespace {

constexpr uint32_t kNobodyListens = UINT32_MAX;

std::atomic<uint32_t> least_level = kNobodyListens;
std::mutex sink_lock;
LogSink current_sink;                  // under sink_lock
thread_local bool is_in_sink = false;  // this thread holds sink_lock

}  // namespace

Status set_log_sink(const LogSink& sink) {
  if (is_in_sink) return invalid_argument("the log's sink is set by a sink; it is in use");
  const std::lock_guard lock(sink_lock);
  current_sink = sink;
  least_level = sink.write == nullptr ? kNobodyListens : static_cast<uint32_t>(sink.least);
  return {};
}

bool is_logged(LogLevel level) {
  return static_cast<uint32_t>(level) >= least_level.load(std::memory_order_relaxed);
}

void write_log(LogLevel level, const std::string& text) {
  if (is_in_sink) return;
  const std::lock_guard lock(sink_lock);
  // Another thread may have taken the sink away since is_logged().
  if (current_sink.write == nullptr || level < current_sink.least) return;
  is_in_sink = true;
  current_sink.write(current_sink.user, level, text.c_str());
  is_in_sink = false;
}

}  // namespace kvx
