// ZmqServer: requests from any number of DEALER sockets, answered one after the other by a thread.
#pragma once

#include <atomic>
#include <string>
#include <thread>

#include <zmq.hpp>

#include "transfer/component.h"

namespace kvx::transfer {

class ZmqServer {
 public:
  // Throws std::exception: the endpoint cannot be bound.
  ZmqServer(const std::string& endpoint, kvx_transfer_answer answer, void* user);
  ~ZmqServer();
  const std::string& endpoint() const { return endpoint_; }

 private:
  void run();
  void answer_waiting();

  kvx_transfer_answer answer_;
  void* user_;
  zmq::context_t context_;
  zmq::socket_t router_;
  std::string endpoint_;
  std::atomic<bool> is_stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace kvx::transfer
