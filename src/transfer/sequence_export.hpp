// SequenceExport: a sequence on offer to other processes (docs/transfer.md). Its bytes are copied
// to shared memory when the offer is made; a thread of libkvx_transfer.so answers who asks for
// them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "kv/kv_cache.hpp"
#include "transfer/component.h"
#include "transfer/messages.hpp"
#include "transfer/shared_file.hpp"

namespace kvx::transfer {

struct ExportOptions {
  // Bound: tcp://ADDRESS:PORT (port *: any), or ipc://PATH. Importers on this host that come by
  // ipc:// read the shared memory itself.
  std::string endpoint = "tcp://127.0.0.1:*";
};

struct ExportState {
  int64_t bytes = 0;         // of the offer
  int64_t packed_bytes = 0;  // of them, blocks
  int64_t bytes_sent = 0;    // to all importers
  int64_t num_taken = 0;     // importers that have a sequence of it
  int64_t num_refused = 0;   // importers whose cache cannot have it
  std::string last_refusal;  // empty: none
};

class SequenceExport {
 public:
  // Saves the sequence, which may end from then on. KvCache::save_sequence's errors; UNSUPPORTED:
  // no libkvx_transfer.so; INVALID_ARGUMENT: an endpoint that cannot be bound.
  static Result<std::unique_ptr<SequenceExport>> create(kv::KvCache& cache, int sequence,
                                                        const ExportOptions& options);
  // Importers that are not done find nobody any more.
  ~SequenceExport();

  // Where it is bound, with the port that it got.
  const char* endpoint() const { return functions_->server_endpoint(server_); }
  ExportState state() const;
  // Waits until an importer has taken it, at most so long; whether one has.
  bool wait(int64_t timeout_ms) const;

 private:
  SequenceExport(const kvx_transfer_functions_t* functions, SharedFile file)
      : functions_(functions), file_(std::move(file)) {}
  // A kvx_transfer_answer: of the server's thread.
  static void answer(void* user, const void* request, uint64_t bytes, kvx_transfer_reply reply,
                     void* to);
  Answer answer_to(const Request& request);
  Answer refused(std::string text) const;
  Answer read(const Request& request);

  const kvx_transfer_functions_t* functions_;
  SharedFile file_;
  uint64_t id_ = 0;
  bool shares_memory_ = false;
  std::string fingerprint_;
  std::vector<uint8_t> buffer_;  // of the server's thread
  mutable std::mutex mutex_;     // guards state_
  mutable std::condition_variable taken_;
  ExportState state_;
  kvx_transfer_server* server_ = nullptr;  // last: its thread uses all of the above
};

}  // namespace kvx::transfer
