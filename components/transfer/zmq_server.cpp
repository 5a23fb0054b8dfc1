// ZmqServer: an answer that its client does not take is lost, and asked for again.
#include "components/transfer/zmq_server.hpp"

#include <array>
#include <chrono>
#include <vector>

#include <zmq_addon.hpp>

#include "components/bound_socket.hpp"

namespace kvx::transfer {
namespace {

constexpr auto kLookAgainAfter = std::chrono::milliseconds(20);  // whether it should stop
constexpr int64_t kMostRequestBytes = 2 << 20;

// The client of a request; it gets one answer.
struct Client {
  zmq::socket_t& router;
  zmq::message_t& identity;
};

void reply(void* to, const void* head, uint64_t head_bytes, const void* body, uint64_t body_bytes) {
  auto& client = *static_cast<Client*>(to);
  zmq::message_t whole(static_cast<size_t>(head_bytes + body_bytes));
  auto* const bytes = static_cast<uint8_t*>(whole.data());
  std::copy_n(static_cast<const uint8_t*>(head), head_bytes, bytes);
  if (body_bytes > 0) {
    std::copy_n(static_cast<const uint8_t*>(body), body_bytes, bytes + head_bytes);
  }
  std::array<zmq::message_t, 2> frames = {std::move(client.identity), std::move(whole)};
  zmq::send_multipart(client.router, frames, zmq::send_flags::dontwait);
}

}  // namespace

ZmqServer::ZmqServer(const std::string& endpoint, kvx_transfer_answer answer, void* user)
    : answer_(answer), user_(user), context_(1) {
  router_ = zmq::socket_t(context_, zmq::socket_type::router);
  router_.set(zmq::sockopt::maxmsgsize, kMostRequestBytes);
  endpoint_ = bind_socket(router_, endpoint, "tcp://127.0.0.1:5560");
  thread_ = std::thread([this] { run(); });
}

ZmqServer::~ZmqServer() {
  is_stopping_ = true;
  thread_.join();
}

void ZmqServer::run() {
  while (!is_stopping_) {
    try {
      zmq::pollitem_t item = {router_, 0, ZMQ_POLLIN, 0};
      zmq::poll(&item, 1, kLookAgainAfter);
      answer_waiting();
    } catch (const std::exception&) {
      // A signal, or no memory: the client asks again.
    }
  }
}

void ZmqServer::answer_waiting() {
  std::vector<zmq::message_t> frames;
  while (!is_stopping_) {
    frames.clear();
    if (!zmq::recv_multipart(router_, std::back_inserter(frames), zmq::recv_flags::dontwait))
      return;
    if (frames.size() != 2) continue;  // no request of ours
    Client client{router_, frames[0]};
    answer_(user_, frames[1].data(), frames[1].size(), reply, &client);
  }
}

}  // namespace kvx::transfer
