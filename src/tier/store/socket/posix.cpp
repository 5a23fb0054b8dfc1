// Sockets, as POSIX has them.
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tier/store/socket/socket.hpp"

namespace kvx::tier {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* first) const { freeaddrinfo(first); }
};

Error gone(int error) {
  return internal_error("the connection to the store is gone: {}", std::strerror(error));
}

Socket::Moved moved(ssize_t done) {
  using enum Socket::Outcome;
  if (done > 0) return {kDone, static_cast<size_t>(done)};
  if (done == 0) return {kClosed};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {kLater};
  return {kFailed};
}

int number_of(intptr_t number) {
  return static_cast<int>(number);
}

}  // namespace

Error socket_timed_out() {
  return internal_error("the store has not answered in time");
}

Socket::~Socket() {
  if (number_ != kNone) close(number_of(number_));
}

Error Socket::problem() {
  return gone(errno);
}

Socket::Moved Socket::send(std::span<const uint8_t> bytes) const {
  return moved(::send(number_of(number_), bytes.data(), bytes.size(), MSG_NOSIGNAL));
}

Socket::Moved Socket::receive(std::span<uint8_t> bytes) const {
  return moved(recv(number_of(number_), bytes.data(), bytes.size(), 0));
}

// Until the socket takes or has bytes.
Status Socket::wait(Wish wish, Deadline deadline) const {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return socket_timed_out();
    const short events = wish == Wish::kSend ? POLLOUT : POLLIN;
    pollfd one{number_of(number_), events, 0};
    const int num_ready =
        poll(&one, 1, static_cast<int>(std::min<int64_t>(left.count() + 1, 1 << 30)));
    if (num_ready > 0) return {};
    if (num_ready < 0 && errno != EINTR) return problem();
  }
}

Result<Socket> Socket::connect_to(const void* address, Deadline deadline) {
  const auto& to = *static_cast<const addrinfo*>(address);
  Socket made(::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (made.number_ == kNone) return internal_error("no socket: {}", std::strerror(errno));
  const int number = number_of(made.number_);
  if (::connect(number, to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return internal_error("no connection: {}", std::strerror(errno));
    KVX_RETURN_IF_ERROR(made.wait(Wish::kSend, deadline));
    int problem = 0;
    socklen_t bytes = sizeof problem;
    getsockopt(number, SOL_SOCKET, SO_ERROR, &problem, &bytes);
    if (problem != 0) return internal_error("no connection: {}", std::strerror(problem));
  }
  const int yes = 1;
  setsockopt(number, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return made;
}

Result<Socket> Socket::connect(const NetAddress& address, Deadline deadline) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(address.host.c_str(), address.port.c_str(), &wanted, &found);
  if (problem != 0) {
    return internal_error("no host '{}': {}", address.host, gai_strerror(problem));
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
