// Sockets, as POSIX has them.
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tier/store/socket/socket.hpp"

namespace kvx::tier {
namespace {

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

// One that does not block and that other programs do not inherit; negative: there is none.
int open_socket(int family) {
#ifdef SOCK_NONBLOCK
  return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
#else  // macOS, whose older versions take SIGPIPE off a socket, not off a call
  const int made = ::socket(family, SOCK_STREAM, 0);
  if (made < 0) return made;
  const int yes = 1;
  setsockopt(made, SOL_SOCKET, SO_NOSIGPIPE, &yes, sizeof yes);
  fcntl(made, F_SETFD, FD_CLOEXEC);
  fcntl(made, F_SETFL, O_NONBLOCK);
  return made;
#endif
}

}  // namespace

std::string Socket::problem_of_system() {
  return "";
}

std::string Socket::resolver_problem(int problem) {
  return gai_strerror(problem);
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

Status Socket::wait(Wish wish, Deadline deadline) const {
  while (true) {
    const std::optional<int> left = milliseconds_to(deadline);
    if (!left) return socket_timed_out();
    const short events = wish == Wish::kSend ? POLLOUT : POLLIN;
    pollfd one{number_of(number_), events, 0};
    const int num_ready = poll(&one, 1, *left);
    if (num_ready > 0) return {};
    if (num_ready < 0 && errno != EINTR) return problem();
  }
}

Result<Socket> Socket::connect_to(const void* address, Deadline deadline) {
  const auto& to = *static_cast<const addrinfo*>(address);
  Socket made(open_socket(to.ai_family));
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

}  // namespace kvx::tier
