// What libkvx and libkvx_transfer.so say to each other: messages between two processes, over
// ZeroMQ. As observe/component.h, it is no part of the C ABI.
#ifndef KVX_TRANSFER_COMPONENT_H
#define KVX_TRANSFER_COMPONENT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { KVX_TRANSFER_VERSION = 1 };

typedef struct kvx_transfer_error {
  char text[512];
} kvx_transfer_error;

typedef struct kvx_transfer_server kvx_transfer_server;
typedef struct kvx_transfer_client kvx_transfer_client;

// Sends the answer to the request that is being answered, its parts one after the other; once.
typedef void (*kvx_transfer_reply)(void* to, const void* head, uint64_t head_bytes,
                                   const void* body, uint64_t body_bytes);
// Answers a request, in the server's thread. It calls reply(to, ...) once, or never: then nobody
// gets an answer.
typedef void (*kvx_transfer_answer)(void* user, const void* request, uint64_t bytes,
                                    kvx_transfer_reply reply, void* to);

typedef struct kvx_transfer_functions_t {
  int32_t version;
  // Binds the endpoint ("tcp://127.0.0.1:*", "ipc:///run/kvx") and starts a thread. Null: `error`
  // says why.
  kvx_transfer_server* (*server_create)(const char* endpoint, kvx_transfer_answer answer,
                                        void* user, kvx_transfer_error* error);
  // Returns when no answer is being given any more.
  void (*server_free)(kvx_transfer_server* server);
  const char* (*server_endpoint)(const kvx_transfer_server* server);

  kvx_transfer_client* (*client_create)(const char* endpoint, kvx_transfer_error* error);
  void (*client_free)(kvx_transfer_client* client);
  // Never waits: what a peer that is not there does not take is lost. 0, or 1 when `error` says
  // why.
  int32_t (*client_send)(kvx_transfer_client* client, const void* request, uint64_t bytes,
                         kvx_transfer_error* error);
  // Waits for an answer, at most so long. 1: take(to, ...) was called; 0: none came; -1: `error`
  // says why.
  int32_t (*client_receive)(kvx_transfer_client* client, int32_t timeout_ms,
                            void (*take)(void* to, const void* bytes, uint64_t count), void* to,
                            kvx_transfer_error* error);
} kvx_transfer_functions_t;

typedef const kvx_transfer_functions_t* (*kvx_transfer_functions_call)(void);

#ifdef __cplusplus
}
#endif

#endif
