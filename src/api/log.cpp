// kvx_set_log: sends the library's log lines to the caller's function.
#include "core/log.hpp"

#include "api/call.hpp"
#include "api/guard.hpp"
#include "api/kernels.hpp"

namespace kvx::boundary {
namespace {

static_assert(static_cast<int>(LogLevel::kDebug) == KVX_LOG_DEBUG);
static_assert(static_cast<int>(LogLevel::kInfo) == KVX_LOG_INFO);
static_assert(static_cast<int>(LogLevel::kWarning) == KVX_LOG_WARNING);

// The log sink's user pointer. It changes only while no sink is set.
kvx_log_t callers_hook;

void call_hook(void* hook, LogLevel level, const char* text) {
  const auto* callers = static_cast<const kvx_log_t*>(hook);
  callers->write(callers->user, static_cast<uint32_t>(level), text);
}

// The first line of every log: the version and the CPU kernels.
void introduce_library() {
  const auto kernels = chosen_kernels();
  if (!kernels.ok()) return log(LogLevel::kWarning, "{}", kernels.error().message);
  log(LogLevel::kInfo, "kvx {}.{}.{} computes with its {} kernels", KVX_ABI_VERSION_MAJOR,
      KVX_ABI_VERSION_MINOR, KVX_ABI_VERSION_PATCH, device::name_of(kernels.value()->level));
}

Status set_log(const kvx_log_t* caller) {
  if (caller == nullptr) return set_log_sink({});
  KVX_ASSIGN_OR_RETURN(const kvx_log_t args, read_struct(caller, "log"));
  if (args.write == nullptr) return invalid_argument("log.write is null");
  if (args.least > KVX_LOG_WARNING) {
    return invalid_argument("log.least is {}; expected 0 (all) to WARNING {}", args.least,
                            static_cast<int>(KVX_LOG_WARNING));
  }
  KVX_RETURN_IF_ERROR(set_log_sink({}));
  callers_hook = args;
  KVX_RETURN_IF_ERROR(
      set_log_sink({static_cast<LogLevel>(std::max<uint32_t>(args.least, KVX_LOG_DEBUG)),
                    &callers_hook, call_hook}));
  introduce_library();
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_set_log(const kvx_log_t* log) {
  return kvx::boundary::run_call([&] { return kvx::boundary::set_log(log); });
}
