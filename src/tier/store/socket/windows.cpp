// Sockets, as Windows has them.
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <winsock2.h>
#include <ws2tcpip.h>

#include <algorithm>
#include <string>

#include "tier/store/socket/socket.hpp"

namespace kvx::tier {
namespace {

std::string text_of(int error) {
  return fmt::format("error {} of Windows", error);
}

SOCKET number_of(intptr_t number) {
  return static_cast<SOCKET>(number);
}

// The most bytes of one call.
int at_once(size_t bytes) {
  return static_cast<int>(std::min<size_t>(bytes, size_t{1} << 30));
}

Socket::Moved moved(int done) {
  using enum Socket::Outcome;
  if (done > 0) return {kDone, static_cast<size_t>(done)};
  if (done == 0) return {kClosed};
  if (WSAGetLastError() == WSAEWOULDBLOCK || WSAGetLastError() == WSAEINTR) return {kLater};
  return {kFailed};
}

}  // namespace

// Once a process, which needs no end: the system ends it with the process.
std::string Socket::problem_of_system() {
  static const bool has = [] {
    WSADATA facts;
    return WSAStartup(MAKEWORD(2, 2), &facts) == 0;
  }();
  return has ? "" : text_of(WSAGetLastError());
}

std::string Socket::resolver_problem(int problem) {
  return text_of(problem);
}

Socket::~Socket() {
  if (number_ != kNone) closesocket(number_of(number_));
}

Error Socket::problem() {
  return internal_error("the connection to the store is gone: {}", text_of(WSAGetLastError()));
}

Socket::Moved Socket::send(std::span<const uint8_t> bytes) const {
  return moved(::send(number_of(number_), reinterpret_cast<const char*>(bytes.data()),
                      at_once(bytes.size()), 0));
}

Socket::Moved Socket::receive(std::span<uint8_t> bytes) const {
  return moved(
      recv(number_of(number_), reinterpret_cast<char*>(bytes.data()), at_once(bytes.size()), 0));
}

Status Socket::wait(Wish wish, Deadline deadline) const {
  const std::optional<int> left = milliseconds_to(deadline);
  if (!left) return socket_timed_out();
  const SHORT events = wish == Wish::kSend ? POLLWRNORM : POLLRDNORM;
  WSAPOLLFD one{number_of(number_), events, 0};
  const int num_ready = WSAPoll(&one, 1, *left);
  if (num_ready < 0) return problem();
  return num_ready > 0 ? Status{} : Status{socket_timed_out()};
}

Result<Socket> Socket::connect_to(const void* address, Deadline deadline) {
  const auto& to = *static_cast<const addrinfo*>(address);
  const SOCKET number = ::socket(to.ai_family, SOCK_STREAM, IPPROTO_TCP);
  if (number == INVALID_SOCKET) return internal_error("no socket: {}", text_of(WSAGetLastError()));
  Socket made(static_cast<intptr_t>(number));
  u_long yes = 1;
  ioctlsocket(number, FIONBIO, &yes);
  if (::connect(number, to.ai_addr, static_cast<int>(to.ai_addrlen)) != 0) {
    if (WSAGetLastError() != WSAEWOULDBLOCK) {
      return internal_error("no connection: {}", text_of(WSAGetLastError()));
    }
    KVX_RETURN_IF_ERROR(made.wait(Wish::kSend, deadline));
    int problem = 0;
    int bytes = sizeof problem;
    getsockopt(number, SOL_SOCKET, SO_ERROR, reinterpret_cast<char*>(&problem), &bytes);
    if (problem != 0) return internal_error("no connection: {}", text_of(problem));
  }
  const BOOL at_once = TRUE;
  setsockopt(number, IPPROTO_TCP, TCP_NODELAY, reinterpret_cast<const char*>(&at_once),
             sizeof at_once);
  return made;
}

}  // namespace kvx::tier
