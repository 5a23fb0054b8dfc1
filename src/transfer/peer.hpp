// Peer: the other side of a transfer, as a client asks it, and how long it has not answered.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transfer/component.h"
#include "transfer/messages.hpp"

namespace kvx::transfer {

// How long a client waits before it asks again.
inline constexpr auto kAskAgainAfter = std::chrono::milliseconds(1000);
// A client asks for at most so many bytes at once, and an exporter gives at most four times as
// many.
inline constexpr uint64_t kPartBytes = 4 << 20;

class Peer {
 public:
  // timeout_ms: without any answer. INVALID_ARGUMENT: no endpoint, or a timeout that is not 1 to a
  // day; UNSUPPORTED: no libkvx_transfer.so.
  static Result<std::unique_ptr<Peer>> create(std::string endpoint, int64_t timeout_ms);
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() { functions_->client_free(client_); }

  Status send(const Request& request);
  // An answer, whose data is valid until the next call; none: it is time to ask again. UNSUPPORTED:
  // nobody has answered for too long; INVALID_ARGUMENT: the peer refuses, or sends no answer.
  Result<std::optional<Answer>> receive();
  // What the peer offers to a cache of this fingerprint. num_asked_again: counts on.
  Result<Answer> greet(std::string_view fingerprint, int64_t& num_asked_again);

 private:
  using Clock = std::chrono::steady_clock;
  Peer(const kvx_transfer_functions_t* functions, kvx_transfer_client* client, std::string endpoint,
       int64_t timeout_ms)
      : functions_(functions),
        client_(client),
        endpoint_(std::move(endpoint)),
        timeout_ms_(timeout_ms),
        last_answer_(Clock::now()) {}

  const kvx_transfer_functions_t* functions_;
  kvx_transfer_client* client_;
  std::string endpoint_;
  int64_t timeout_ms_;
  Clock::time_point last_answer_;
  std::vector<uint8_t> bytes_;  // of the last answer
};

}  // namespace kvx::transfer
