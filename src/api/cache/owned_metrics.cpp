// kvx_metrics_* and kvx_cache_set_name: figures of all caches of the process.
#include <mutex>

#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {
namespace {

struct ProcessServer {
  std::mutex mutex;
  std::unique_ptr<observe::MetricsServer> server;
};

// Never destroyed: when the process ends, its threads may end before static objects do.
ProcessServer& process_server() {
  static auto* const one = new ProcessServer;
  return *one;
}

Status serve(const char* address, uint32_t port, uint32_t* bound_port) {
  if (port > 65535) return invalid_argument("port is {}; expected 0 to 65535", port);
  ProcessServer& all = process_server();
  const std::lock_guard lock(all.mutex);
  all.server.reset();  // it may have bound the same port
  KVX_ASSIGN_OR_RETURN(all.server,
                       observe::MetricsServer::create(address == nullptr ? "127.0.0.1" : address,
                                                      static_cast<int>(port)));
  if (bound_port != nullptr) *bound_port = static_cast<uint32_t>(all.server->port());
  return {};
}

Status stop() {
  ProcessServer& all = process_server();
  const std::lock_guard lock(all.mutex);
  all.server.reset();
  return {};
}

Status write_text(char* text, uint64_t capacity, uint64_t* bytes) {
  KVX_ASSIGN_OR_RETURN(const std::string whole, observe::metrics_text());
  return copy_text(whole, text, capacity, bytes);
}

Status set_name(kvx_cache_t handle, const char* name) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  owned->shown.reset();
  owned->shown.emplace(*owned->cache, name == nullptr ? "" : name);
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_metrics_serve(const char* address, uint32_t port,
                                          uint32_t* bound_port) {
  return kvx::boundary::run_call([&] { return kvx::boundary::serve(address, port, bound_port); });
}

extern "C" kvx_status_t kvx_metrics_stop(void) {
  return kvx::boundary::run_call([] { return kvx::boundary::stop(); });
}

extern "C" kvx_status_t kvx_metrics_text(char* text, uint64_t capacity, uint64_t* bytes) {
  return kvx::boundary::run_call([&] { return kvx::boundary::write_text(text, capacity, bytes); });
}

extern "C" kvx_status_t kvx_cache_set_name(kvx_cache_t cache, const char* name) {
  return kvx::boundary::run_call([&] { return kvx::boundary::set_name(cache, name); });
}
