// ZmqPublisher: the thread looks every few milliseconds, so that the cache need not wake it.
#include "components/observe/zmq_publisher.hpp"

#include <chrono>

#include <zmq_addon.hpp>

#include "components/bound_socket.hpp"

namespace kvx::observe {
namespace {

constexpr auto kExample = "tcp://127.0.0.1:5557";  // an endpoint
constexpr auto kPause = std::chrono::milliseconds(2);
constexpr int64_t kMostEventsOfBatch = 1024;
constexpr int kSequenceBytes = 8;

std::array<uint8_t, kSequenceBytes> big_endian(int64_t number) {
  std::array<uint8_t, kSequenceBytes> bytes{};
  for (int i = 0; i < kSequenceBytes; ++i) {
    bytes[i] = static_cast<uint8_t>(static_cast<uint64_t>(number) >> (8 * (7 - i)));
  }
  return bytes;
}

double seconds_since_1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace

ZmqPublisher::ZmqPublisher(const kvx_observe_publisher_options& options)
    : topic_(options.topic),
      buffer_batches_(static_cast<size_t>(options.buffer_batches)),
      ring_(options.queue_events, options.block_size),
      encoder_(options.block_size, options.data_parallel_rank, options.hashes_are_integers != 0),
      context_(1) {
  pub_ = zmq::socket_t(context_, zmq::socket_type::pub);
  pub_.set(zmq::sockopt::sndhwm, options.high_water_mark);
  endpoint_ = bind_socket(pub_, options.endpoint, kExample);
  if (options.replay_endpoint[0] != '\0') {
    router_ = zmq::socket_t(context_, zmq::socket_type::router);
    // Room for all that an answer may have: what does not fit would be lost without a word.
    router_.set(zmq::sockopt::sndhwm, options.buffer_batches + 1);
    replay_endpoint_ = bind_socket(router_, options.replay_endpoint, kExample);
  }
  thread_ = std::thread([this] { run(); });
}

ZmqPublisher::~ZmqPublisher() {
  is_stopping_ = true;
  thread_.join();
}

void ZmqPublisher::push(const kvx_observe_event& event) {
  if (!ring_.push(event)) num_dropped_.fetch_add(1, std::memory_order_release);
}

void ZmqPublisher::push_all(const kvx_observe_event& event) {
  while (!ring_.push(event)) std::this_thread::sleep_for(kPause);
}

kvx_observe_publisher_counts ZmqPublisher::counts() const {
  return {num_events_, num_batches_, num_dropped_, num_replays_};
}

// ---- the thread

void ZmqPublisher::run() {
  while (true) {
    const bool is_last = is_stopping_;
    try {
      while (send_some()) answer_replays();
      answer_replays();
    } catch (const std::exception&) {
      // A signal, or no memory: a number that nobody got shows what is lost.
    }
    if (is_last) return;
    std::this_thread::sleep_for(kPause);
  }
}

// False: there was nothing.
bool ZmqPublisher::send_some() {
  const int64_t num_dropped = num_dropped_.load(std::memory_order_acquire);
  if (num_dropped != num_dropped_known_) {
    num_dropped_known_ = num_dropped;
    ++next_sequence_;
  }
  const int64_t count = ring_.num_waiting(kMostEventsOfBatch);
  if (count == 0) return false;
  const int64_t sequence = next_sequence_++;
  kept_.push_back({sequence, std::string(encoder_.encode(ring_, count, seconds_since_1970()))});
  ring_.pop(count);
  if (kept_.size() > buffer_batches_) kept_.pop_front();
  const auto number = big_endian(sequence);
  const std::array<zmq::const_buffer, 3> frames = {zmq::buffer(topic_), zmq::buffer(number),
                                                   zmq::buffer(kept_.back().payload)};
  zmq::send_multipart(pub_, frames, zmq::send_flags::dontwait);  // PUB drops, it never waits
  num_events_ += count;
  ++num_batches_;
  return true;
}

void ZmqPublisher::answer_replays() {
  if (!router_) return;
  std::vector<zmq::message_t> frames;
  while (true) {
    frames.clear();
    if (!zmq::recv_multipart(router_, std::back_inserter(frames), zmq::recv_flags::dontwait))
      return;
    if (frames.size() != 3 || frames[2].size() != kSequenceBytes) continue;  // no request of ours
    int64_t first = 0;
    for (const uint8_t byte : std::span(frames[2].data<const uint8_t>(), kSequenceBytes)) {
      first = static_cast<int64_t>(static_cast<uint64_t>(first) << 8 | byte);
    }
    answer_replay(frames[0], first);
  }
}

void ZmqPublisher::answer_replay(zmq::message_t& client, int64_t first) {
  const auto send = [&](const std::string& topic, int64_t sequence, const std::string& payload) {
    const auto number = big_endian(sequence);
    const std::array<zmq::const_buffer, 5> frames = {
        zmq::const_buffer(client.data(), client.size()), zmq::const_buffer(), zmq::buffer(topic),
        zmq::buffer(number), zmq::buffer(payload)};
    zmq::send_multipart(router_, frames, zmq::send_flags::dontwait);
  };
  for (const Batch& batch : kept_) {
    if (batch.sequence >= first) send(topic_, batch.sequence, batch.payload);
  }
  ++num_replays_;  // before its client can know that it is over
  send({}, -1, {});
}

}  // namespace kvx::observe
