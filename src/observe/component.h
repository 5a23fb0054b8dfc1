// What libkvx and libkvx_observe.so say to each other. libkvx_observe.so links ZeroMQ and
// prometheus-cpp, so that libkvx does not; libkvx opens it when somebody asks to be seen from
// outside. It is no part of the C ABI: both come from one build, and the version says so.
#ifndef KVX_OBSERVE_COMPONENT_H
#define KVX_OBSERVE_COMPONENT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { KVX_OBSERVE_VERSION = 1 };

// Where a call writes the sentence that says why it failed.
typedef struct kvx_observe_error {
  char text[512];
} kvx_observe_error;

// ---- KV events (docs/kv-events.md)

typedef enum kvx_observe_event_kind {
  KVX_OBSERVE_STORED = 1,
  KVX_OBSERVE_REMOVED = 2,
  KVX_OBSERVE_ALL_CLEARED = 3  // concerns no block: only `kind` is read
} kvx_observe_event_kind;

typedef struct kvx_observe_event {
  int32_t kind;
  const char* medium;     // "GPU", "CPU", "STORAGE"; at most 15 characters
  const uint8_t* hash;    // [16]
  const uint8_t* parent;  // [16]; null: the block is its chain's first
  const int32_t* tokens;  // [block_size], of a stored block
  const char* adapter;    // 0-terminated, "" for none, like those that follow
  const char* image;
  const char* tenant;
} kvx_observe_event;

typedef struct kvx_observe_publisher_options {
  const char* endpoint;
  const char* replay_endpoint;  // "": no replay socket
  const char* topic;
  int32_t block_size;      // tokens
  int32_t buffer_batches;  // kept for replay
  int32_t high_water_mark;
  int32_t queue_events;
  int32_t data_parallel_rank;
  int32_t hashes_are_integers;  // their low 64 bits
} kvx_observe_publisher_options;

typedef struct kvx_observe_publisher_counts {
  int64_t num_events;
  int64_t num_batches;
  int64_t num_dropped;
  int64_t num_replays;
} kvx_observe_publisher_counts;

typedef struct kvx_observe_publisher kvx_observe_publisher;

// ---- metrics (docs/metrics.md)

typedef struct kvx_observe_label {
  const char* name;
  const char* value;
} kvx_observe_label;

typedef struct kvx_observe_sample {
  const kvx_observe_label* labels;
  int32_t num_labels;
  double value;
  // Of a histogram: counts of each bucket alone, [num_bounds + 1]. Bucket i ends at first_bound *
  // 2^i, the last one nowhere.
  const uint64_t* counts;
  int32_t num_bounds;
  double first_bound;
  double sum;
} kvx_observe_sample;

typedef struct kvx_observe_family {
  const char* name;
  const char* help;
  int32_t kind;  // 0 gauge, 1 counter, 2 histogram
  int32_t num_samples;
  const kvx_observe_sample* samples;
} kvx_observe_family;

// Calls take(to, families, num_families) once, with the figures of this moment. Any thread.
typedef void (*kvx_observe_collect)(void (*take)(void* to, const kvx_observe_family* families,
                                                 int32_t num_families),
                                    void* to);

typedef struct kvx_observe_exporter kvx_observe_exporter;

// ---- all functions, which kvx_observe_functions() returns

typedef struct kvx_observe_functions_t {
  int32_t version;
  // Binds the sockets and starts the thread that serves them. Null: `error` says why.
  kvx_observe_publisher* (*publisher_create)(const kvx_observe_publisher_options* options,
                                             kvx_observe_error* error);
  // Sends what is queued, as far as it goes without waiting, and closes the sockets.
  void (*publisher_free)(kvx_observe_publisher* publisher);
  // Queues a copy. Never waits and allocates nothing but the text of new keys: an event that finds
  // no room is dropped and counted. One thread at a time.
  void (*publisher_push)(kvx_observe_publisher* publisher, const kvx_observe_event* event);
  // The same, and waits for room.
  void (*publisher_push_all)(kvx_observe_publisher* publisher, const kvx_observe_event* event);
  void (*publisher_counts)(const kvx_observe_publisher* publisher,
                           kvx_observe_publisher_counts* counts);
  // Where the sockets are bound, with the number of a port that the system chose. They live as long
  // as the publisher; the second is "" without a replay socket.
  const char* (*publisher_endpoint)(const kvx_observe_publisher* publisher);
  const char* (*publisher_replay_endpoint)(const kvx_observe_publisher* publisher);
  // Serves what collect() gives at http://ENDPOINT/metrics ("127.0.0.1:9400"; port 0: any). Null:
  // `error` says why.
  kvx_observe_exporter* (*exporter_create)(const char* endpoint, kvx_observe_collect collect,
                                           kvx_observe_error* error);
  void (*exporter_free)(kvx_observe_exporter* exporter);
  int32_t (*exporter_port)(const kvx_observe_exporter* exporter);
  // Calls append(to, bytes, count) with the same text. Returns 0, or 1 when `error` says why not.
  int32_t (*metrics_text)(kvx_observe_collect collect,
                          void (*append)(void* to, const char* bytes, uint64_t count), void* to,
                          kvx_observe_error* error);
} kvx_observe_functions_t;

typedef const kvx_observe_functions_t* (*kvx_observe_functions_call)(void);

#ifdef __cplusplus
}
#endif

#endif
