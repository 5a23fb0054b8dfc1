// What sockets of POSIX and of Windows share: names of hosts, deadlines.
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <winsock2.h>
#include <ws2tcpip.h>
#else
#include <netdb.h>
#endif

#include <algorithm>
#include <memory>

#include "tier/store/socket/socket.hpp"

namespace kvx::tier {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* first) const { freeaddrinfo(first); }
};

}  // namespace

Error socket_timed_out() {
  return internal_error("the store has not answered in time");
}

std::optional<int> Socket::milliseconds_to(Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  if (left.count() <= 0) return std::nullopt;
  return static_cast<int>(std::min<int64_t>(left.count() + 1, 1 << 30));
}

Result<Socket> Socket::connect(const NetAddress& address, Deadline deadline) {
  const std::string missing = problem_of_system();
  if (!missing.empty()) return internal_error("no sockets: {}", missing);
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(address.host.c_str(), address.port.c_str(), &wanted, &found);
  if (problem != 0) {
    return internal_error("no host '{}': {}", address.host, resolver_problem(problem));
  }
  const std::unique_ptr<addrinfo, FreeAddresses> all(found);
  Error last = internal_error("no address");
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Result<Socket> socket = connect_to(one, deadline);
    if (socket.ok()) return socket;
    last = socket.error();
  }
  return last;
}

}  // namespace kvx::tier
