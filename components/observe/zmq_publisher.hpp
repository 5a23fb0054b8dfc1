// ZmqPublisher: sends batches of events from a thread of its own, over a PUB socket, and answers
// who asks for batches again, over a ROUTER socket. Both bind. As vLLM's ZmqEventPublisher:
//
//   PUB      [topic][sequence number: 8 bytes, big-endian][batch]
//   request  [""][first sequence number: 8 bytes, big-endian], from a REQ or DEALER socket
//   answer   [""][topic][sequence number][batch] for every kept batch from there on, and then
//            [""][""][-1][""]
//
// A sequence number that no batch has stands for events that were dropped.
#pragma once

#include <atomic>
#include <deque>
#include <string>
#include <thread>

#include <zmq.hpp>

#include "components/observe/event_encoder.hpp"

namespace kvx::observe {

class ZmqPublisher {
 public:
  // Throws zmq::error_t or std::runtime_error: an endpoint that cannot be bound.
  explicit ZmqPublisher(const kvx_observe_publisher_options& options);
  ~ZmqPublisher();

  void push(const kvx_observe_event& event);
  void push_all(const kvx_observe_event& event);
  kvx_observe_publisher_counts counts() const;
  const std::string& endpoint() const { return endpoint_; }
  const std::string& replay_endpoint() const { return replay_endpoint_; }

 private:
  struct Batch {
    int64_t sequence;
    std::string payload;
  };
  void run();
  bool send_some();
  void answer_replays();
  void answer_replay(zmq::message_t& client, int64_t first);

  std::string topic_;
  size_t buffer_batches_;
  EventRing ring_;
  EventEncoder encoder_;
  std::atomic<int64_t> num_events_ = 0;
  std::atomic<int64_t> num_batches_ = 0;
  std::atomic<int64_t> num_dropped_ = 0;
  std::atomic<int64_t> num_replays_ = 0;
  int64_t num_dropped_known_ = 0;  // of these, a gap in the numbers tells already
  int64_t next_sequence_ = 0;
  std::deque<Batch> kept_;
  zmq::context_t context_;
  zmq::socket_t pub_;
  zmq::socket_t router_;  // null without replay
  std::string endpoint_;
  std::string replay_endpoint_;
  std::atomic<bool> is_stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace kvx::observe
