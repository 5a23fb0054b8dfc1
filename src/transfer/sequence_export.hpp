// SequenceExport: a sequence on offer to other processes (docs/transfer.md). Its bytes are copied
// to shared memory when the offer is made, or layer by layer to memory of the offer's while a step
// computes them; a thread of libkvx_transfer.so answers who asks for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "kv/files/outgoing_sequence.hpp"
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
  int64_t bytes = 0;         // of the offer; 0 before the step that computes its layers
  int64_t packed_bytes = 0;  // of them, blocks
  int64_t bytes_sent = 0;    // to all importers
  int64_t num_taken = 0;     // importers that have a sequence of it
  int64_t num_refused = 0;   // importers whose cache cannot have it
  std::string last_refusal;  // empty: none
  int num_layers = 0;  // of a sequence that leaves layer by layer; 0: it is offered as a whole
  int num_layers_there = 0;
  std::string problem;  // why the other layers will not come; empty: they may
};

class SequenceExport {
 public:
  // Saves the sequence, which may end from then on. KvCache::save_sequence's errors; UNSUPPORTED:
  // no libkvx_transfer.so; INVALID_ARGUMENT: an endpoint that cannot be bound.
  static Result<std::unique_ptr<SequenceExport>> create(kv::KvCache& cache, int sequence,
                                                        const ExportOptions& options);
  // The sequence with all of `tokens`, layer by layer, in the step that brings it to them.
  // KvCache::hand_on's errors, and as create().
  static Result<std::unique_ptr<SequenceExport>> create_by_layer(kv::KvCache& cache, int sequence,
                                                                 std::span<const int32_t> tokens,
                                                                 const ExportOptions& options);
  // Importers that are not done find nobody any more.
  ~SequenceExport();

  // Where it is bound, with the port that it got.
  const char* endpoint() const { return functions_->server_endpoint(server_); }
  ExportState state() const;
  // Waits until an importer has taken it, at most so long; whether one has.
  bool wait(int64_t timeout_ms) const;

 private:
  explicit SequenceExport(const kvx_transfer_functions_t* functions) : functions_(functions) {}
  static Result<const kvx_transfer_functions_t*> open(const ExportOptions& options);
  Status serve(const kv::KvCache& cache, const ExportOptions& options);
  // A kvx_transfer_answer: of the server's thread.
  static void answer(void* user, const void* request, uint64_t bytes, kvx_transfer_reply reply,
                     void* to);
  Answer answer_to(const Request& request);
  Answer refused(std::string text) const;
  Answer read(const Request& request);
  Answer read_head(const Request& request);
  Answer read_pages(const Request& request);
  Answer count_mapped(const Request& request);
  void count_sent(int64_t bytes);

  const kvx_transfer_functions_t* functions_;
  std::optional<SharedFile> file_;                  // of a whole sequence
  std::shared_ptr<kv::OutgoingSequence> outgoing_;  // of one that leaves layer by layer
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
