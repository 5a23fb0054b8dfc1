// Log: what the library reports about itself (levels chosen, memory taken, blocks evicted), to one
// sink of the process. Off until somebody listens; an error is no log line but a call's result.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "core/result.hpp"

namespace kvx {

// The numbers of the C ABI (KVX_LOG_*).
enum class LogLevel : uint32_t { kDebug = 1, kInfo = 2, kWarning = 3 };

struct LogSink {
  LogLevel least = LogLevel::kDebug;  // what is below it is not formatted
  void* user = nullptr;
  void (*write)(void* user, LogLevel level, const char* text) = nullptr;  // null: nobody listens
};

// When it returns, the sink before is not called any more. INVALID_ARGUMENT: called by a sink.
Status set_log_sink(const LogSink& sink);

bool is_logged(LogLevel level);

// Calls the sink, one call at a time. What a sink's own calls of the library say is dropped.
void write_log(LogLevel level, const std::string& text);

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> text, Args&&... args) {
  if (is_logged(level)) write_log(level, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace kvx
