// kvx_observe_functions: the component behind C functions, out of which no exception comes.
#include <cstdio>
#include <exception>
#include <memory>

#include "components/observe/exporter.hpp"
#include "components/observe/zmq_publisher.hpp"

struct kvx_observe_publisher {
  explicit kvx_observe_publisher(const kvx_observe_publisher_options& options) : zmq(options) {}
  kvx::observe::ZmqPublisher zmq;
};

struct kvx_observe_exporter {
  kvx_observe_exporter(const char* endpoint, kvx_observe_collect collect)
      : http(endpoint, collect) {}
  kvx::observe::Exporter http;
};

namespace kvx::observe {
namespace {

void say(kvx_observe_error* error, const char* text) {
  std::snprintf(error->text, sizeof error->text, "%s", text);
}

kvx_observe_publisher* publisher_create(const kvx_observe_publisher_options* options,
                                        kvx_observe_error* error) {
  try {
    return new kvx_observe_publisher(*options);
  } catch (const std::exception& caught) {
    say(error, caught.what());
    return nullptr;
  }
}

void publisher_free(kvx_observe_publisher* publisher) {
  delete publisher;
}
void publisher_push(kvx_observe_publisher* publisher, const kvx_observe_event* event) {
  publisher->zmq.push(*event);
}
void publisher_push_all(kvx_observe_publisher* publisher, const kvx_observe_event* event) {
  publisher->zmq.push_all(*event);
}
void publisher_counts(const kvx_observe_publisher* publisher,
                      kvx_observe_publisher_counts* counts) {
  *counts = publisher->zmq.counts();
}
const char* publisher_endpoint(const kvx_observe_publisher* publisher) {
  return publisher->zmq.endpoint().c_str();
}
const char* publisher_replay_endpoint(const kvx_observe_publisher* publisher) {
  return publisher->zmq.replay_endpoint().c_str();
}

kvx_observe_exporter* exporter_create(const char* endpoint, kvx_observe_collect collect,
                                      kvx_observe_error* error) {
  try {
    return new kvx_observe_exporter(endpoint, collect);
  } catch (const std::exception& caught) {
    say(error, caught.what());
    return nullptr;
  }
}
void exporter_free(kvx_observe_exporter* exporter) {
  delete exporter;
}
int32_t exporter_port(const kvx_observe_exporter* exporter) {
  return exporter->http.port();
}

int32_t write_metrics(kvx_observe_collect collect,
                      void (*append)(void* to, const char* bytes, uint64_t count), void* to,
                      kvx_observe_error* error) {
  try {
    const std::string text = metrics_text(collect);
    append(to, text.data(), text.size());
    return 0;
  } catch (const std::exception& caught) {
    say(error, caught.what());
    return 1;
  }
}

constexpr kvx_observe_functions_t kFunctions = {
    KVX_OBSERVE_VERSION, publisher_create, publisher_free,     publisher_push,
    publisher_push_all,  publisher_counts, publisher_endpoint, publisher_replay_endpoint,
    exporter_create,     exporter_free,    exporter_port,      write_metrics};

}  // namespace
}  // namespace kvx::observe

// Of the type that core/component_library.cpp calls.
extern "C" __attribute__((visibility("default"))) const void* kvx_observe_functions() {
  return &kvx::observe::kFunctions;
}
