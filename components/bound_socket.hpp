// bind_socket: what every component's socket that others connect to has in common.
#pragma once

#include <stdexcept>
#include <string>

#include <zmq.hpp>

namespace kvx {

// Binds a socket that keeps nobody waiting when it is closed. Returns the endpoint that it got,
// with its port. std::runtime_error: it cannot be bound. example: an endpoint, for the message.
inline std::string bind_socket(zmq::socket_t& socket, const std::string& endpoint,
                               const std::string& example) {
  socket.set(zmq::sockopt::linger, 0);
  try {
    socket.bind(endpoint);
  } catch (const zmq::error_t& error) {
    throw std::runtime_error("the endpoint '" + endpoint + "' cannot be bound (" + error.what() +
                             "); expected one that is free, as " + example);
  }
  return socket.get(zmq::sockopt::last_endpoint);
}

}  // namespace kvx
