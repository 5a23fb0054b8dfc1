// Peer: messages over a client of libkvx_transfer.so.
#include "transfer/peer.hpp"

#include <algorithm>

#include "transfer/open_component.hpp"

namespace kvx::transfer {

Result<std::unique_ptr<Peer>> Peer::create(std::string endpoint, int64_t timeout_ms) {
  constexpr int64_t kDay = int64_t{1000} * 3600 * 24;
  if (timeout_ms < 1 || timeout_ms > kDay) {
    return invalid_argument("timeout_ms is {}; expected 1 to {}", timeout_ms, kDay);
  }
  if (endpoint.empty()) {
    return invalid_argument("endpoint is ''; expected the exporter's, as tcp://ADDRESS:PORT");
  }
  KVX_ASSIGN_OR_RETURN(const kvx_transfer_functions_t* functions, open_component());
  kvx_transfer_error error{};
  kvx_transfer_client* const client = functions->client_create(endpoint.c_str(), &error);
  if (client == nullptr) return invalid_argument("{}", error.text);
  return std::unique_ptr<Peer>(new Peer(functions, client, std::move(endpoint), timeout_ms));
}

Status Peer::send(const Request& request) {
  const std::vector<uint8_t> bytes = encode(request);
  kvx_transfer_error error{};
  if (functions_->client_send(client_, bytes.data(), bytes.size(), &error) == 0) return {};
  return internal_error("a request cannot be sent: {}", error.text);
}

Result<std::optional<Answer>> Peer::receive() {
  bytes_.clear();
  const auto take = [](void* to, const void* bytes, uint64_t count) {
    const auto* const first = static_cast<const uint8_t*>(bytes);
    static_cast<std::vector<uint8_t>*>(to)->assign(first, first + count);
  };
  kvx_transfer_error error{};
  const auto wait_ms = static_cast<int32_t>(std::min<int64_t>(kAskAgainAfter.count(), timeout_ms_));
  const int32_t got = functions_->client_receive(client_, wait_ms, take, &bytes_, &error);
  if (got < 0) return internal_error("no answer can be received: {}", error.text);
  if (got == 0) {
    const auto waited =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - last_answer_);
    if (waited.count() < timeout_ms_) return std::optional<Answer>();
    return unsupported("nobody at {} has answered for {} ms; expected an exporter there", endpoint_,
                       waited.count());
  }
  last_answer_ = Clock::now();
  KVX_ASSIGN_OR_RETURN(Answer answer, parse_answer(bytes_));
  if (answer.kind == Kind::kRefused) {
    return invalid_argument("the exporter at {} refuses: {}", endpoint_, answer.text);
  }
  return std::optional<Answer>(std::move(answer));
}

Result<Answer> Peer::greet(std::string_view fingerprint, int64_t& num_asked_again) {
  Request hello;
  hello.text = fingerprint;
  KVX_RETURN_IF_ERROR(send(hello));
  while (true) {
    KVX_ASSIGN_OR_RETURN(std::optional<Answer> answer, receive());
    if (answer && answer->kind == Kind::kHello) return std::move(*answer);
    if (answer) continue;  // of an earlier request
    ++num_asked_again;
    KVX_RETURN_IF_ERROR(send(hello));
  }
}

}  // namespace kvx::transfer
