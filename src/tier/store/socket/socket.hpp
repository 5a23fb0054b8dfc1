// Socket: a TCP connection that does not block. POSIX's calls are in posix.cpp, Windows' in
// windows.cpp, what needs neither in socket.cpp.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tier/store/net_stream.hpp"

namespace kvx::tier {

class Socket {
 public:
  // What the other side, or this one, is ready for.
  enum class Wish : uint8_t { kSend, kReceive };
  // What a call came to. kLater: wait(), and call again.
  enum class Outcome : uint8_t { kDone, kLater, kClosed, kFailed };
  struct Moved {
    Outcome outcome;
    size_t bytes = 0;
  };

  // Errors as NetStream::connect's.
  static Result<Socket> connect(const NetAddress& address, Deadline deadline);
  Socket(Socket&& other) noexcept : number_(std::exchange(other.number_, kNone)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Socket();

  // A signal is not raised when the other side has gone.
  Moved send(std::span<const uint8_t> bytes) const;
  Moved receive(std::span<uint8_t> bytes) const;
  // Until the socket takes or has bytes.
  Status wait(Wish wish, Deadline deadline) const;
  // Why the last call of this thread has failed.
  static Error problem();

 private:
  static constexpr intptr_t kNone = -1;
  explicit Socket(intptr_t number) : number_(number) {}
  // Empty: the system's sockets can be used. Windows has to be asked for them.
  static std::string problem_of_system();
  static std::string resolver_problem(int problem);
  static Result<Socket> connect_to(const void* address, Deadline deadline);  // addrinfo*
  // Up to a deadline, rounded up, as poll() takes it; none: it is over.
  static std::optional<int> milliseconds_to(Deadline deadline);

  intptr_t number_;
};

Error socket_timed_out();

}  // namespace kvx::tier
