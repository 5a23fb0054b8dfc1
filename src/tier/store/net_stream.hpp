// NetStream: bytes to and from another process over TCP, with TLS if wanted; no call waits beyond
// its deadline, whatever the other side does.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/result.hpp"

namespace kvx::tier {

using Deadline = std::chrono::steady_clock::time_point;

struct NetAddress {
  std::string host;
  std::string port;
  bool has_tls = false;
  std::string ca_file;  // of TLS; empty: the system's certificates
};

class NetStream {
 public:
  // INTERNAL_ERROR: no such host, nobody listens, the deadline, or a certificate that is not this
  // host's.
  static Result<std::unique_ptr<NetStream>> connect(const NetAddress& address, Deadline deadline);
  virtual ~NetStream() = default;

  // All bytes. INTERNAL_ERROR: the connection is gone, or the deadline.
  virtual Status write(std::span<const uint8_t> bytes, Deadline deadline) = 0;
  // One byte at least; how many. Errors as write's.
  virtual Result<size_t> read_some(std::span<uint8_t> bytes, Deadline deadline) = 0;
};

}  // namespace kvx::tier
