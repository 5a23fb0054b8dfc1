// kvx_transfer_functions: the component behind C functions, out of which no exception comes.
#include <chrono>
#include <cstdio>
#include <exception>

#include "components/transfer/zmq_server.hpp"

struct kvx_transfer_server {
  kvx_transfer_server(const char* endpoint, kvx_transfer_answer answer, void* user)
      : zmq(endpoint, answer, user) {}
  kvx::transfer::ZmqServer zmq;
};

struct kvx_transfer_client {
  explicit kvx_transfer_client(const char* endpoint)
      : context(1), dealer(context, zmq::socket_type::dealer) {
    dealer.set(zmq::sockopt::linger, 0);
    dealer.set(zmq::sockopt::reconnect_ivl_max, 1000);
    dealer.connect(endpoint);
  }
  zmq::context_t context;
  zmq::socket_t dealer;
};

namespace kvx::transfer {
namespace {

void say(kvx_transfer_error* error, const char* text) {
  std::snprintf(error->text, sizeof error->text, "%s", text);
}

// Runs what may throw; `failed` when it does.
template <class Body, class Value>
Value guarded(kvx_transfer_error* error, Value failed, const Body& body) {
  try {
    return body();
  } catch (const std::exception& caught) {
    say(error, caught.what());
    return failed;
  }
}

kvx_transfer_server* server_create(const char* endpoint, kvx_transfer_answer answer, void* user,
                                   kvx_transfer_error* error) {
  return guarded(error, static_cast<kvx_transfer_server*>(nullptr),
                 [&] { return new kvx_transfer_server(endpoint, answer, user); });
}
void server_free(kvx_transfer_server* server) {
  delete server;
}
const char* server_endpoint(const kvx_transfer_server* server) {
  return server->zmq.endpoint().c_str();
}

kvx_transfer_client* client_create(const char* endpoint, kvx_transfer_error* error) {
  kvx_transfer_client* const made = guarded(error, static_cast<kvx_transfer_client*>(nullptr),
                                            [&] { return new kvx_transfer_client(endpoint); });
  if (made == nullptr) {
    std::snprintf(
        error->text, sizeof error->text,
        "the endpoint '%s' is none of ZeroMQ's; expected tcp://ADDRESS:PORT or ipc://PATH",
        endpoint);
  }
  return made;
}
void client_free(kvx_transfer_client* client) {
  delete client;
}
int32_t client_send(kvx_transfer_client* client, const void* request, uint64_t bytes,
                    kvx_transfer_error* error) {
  return guarded(error, 1, [&] {
    client->dealer.send(zmq::const_buffer(request, static_cast<size_t>(bytes)),
                        zmq::send_flags::dontwait);
    return 0;
  });
}
int32_t client_receive(kvx_transfer_client* client, int32_t timeout_ms,
                       void (*take)(void* to, const void* bytes, uint64_t count), void* to,
                       kvx_transfer_error* error) {
  return guarded(error, -1, [&] {
    zmq::pollitem_t item = {client->dealer, 0, ZMQ_POLLIN, 0};
    if (zmq::poll(&item, 1, std::chrono::milliseconds(timeout_ms)) == 0) return 0;
    zmq::message_t message;
    if (!client->dealer.recv(message, zmq::recv_flags::dontwait)) return 0;
    while (client->dealer.get(zmq::sockopt::rcvmore)) {  // parts that no server of ours sends
      zmq::message_t more;
      (void)client->dealer.recv(more);
    }
    take(to, message.data(), message.size());
    return 1;
  });
}

constexpr kvx_transfer_functions_t kFunctions = {KVX_TRANSFER_VERSION, server_create, server_free,
                                                 server_endpoint,      client_create, client_free,
                                                 client_send,          client_receive};

}  // namespace
}  // namespace kvx::transfer

// Of the type that core/component_library.cpp calls.
extern "C" __attribute__((visibility("default"))) const void* kvx_transfer_functions() {
  return &kvx::transfer::kFunctions;
}
