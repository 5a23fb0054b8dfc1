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

struct FreeAddresses {
  void operator()(addrinfo* first) const { freeaddrinfo(first); }
};

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

// Once a process, which needs no end: the system ends it with the process.
bool has_sockets() {
  static const bool has = [] {
    WSADATA facts;
    return WSAStartup(MAKEWORD(2, 2), &facts) == 0;
  }();
  return has;
}

}  // namespace

Error socket_timed_out() {
  return internal_error("the store has not answered in time");
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
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  if (left.count() <= 0) return socket_timed_out();
  const SHORT events = wish == Wish::kSend ? POLLWRNORM : POLLRDNORM;
  WSAPOLLFD one{number_of(number_), events, 0};
  const int num_ready =
      WSAPoll(&one, 1, static_cast<int>(std::min<int64_t>(left.count() + 1, 1 << 30)));
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

Result<Socket> Socket::connect(const NetAddress& address, Deadline deadline) {
  if (!has_sockets()) return internal_error("no sockets: {}", text_of(WSAGetLastError()));
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(address.host.c_str(), address.port.c_str(), &wanted, &found);
  if (problem != 0) return internal_error("no host '{}': {}", address.host, text_of(problem));
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
