// EventEncoder: events as msgpack, in the schema of vLLM's KVEventBatch (vllm/distributed/
// kv_events.py of vLLM 0.32):
//
//   [ts: seconds, [event, ...], data_parallel_rank]
//   event: a map with "type": "BlockStored", "BlockRemoved" or "AllBlocksCleared"
//
// Blocks of one chain that were stored one after the other become one BlockStored, and blocks of
// one medium that were removed one after the other one BlockRemoved.
#pragma once

#include <string_view>

#include <msgpack.hpp>

#include "components/observe/event_ring.hpp"

namespace kvx::observe {

class EventEncoder {
 public:
  EventEncoder(int32_t block_size, int32_t data_parallel_rank, bool hashes_are_integers)
      : block_size_(block_size),
        data_parallel_rank_(data_parallel_rank),
        hashes_are_integers_(hashes_are_integers) {}

  // The first num_events of the ring as a batch of that time; valid until the next call.
  std::string_view encode(const EventRing& ring, int64_t num_events, double seconds);

 private:
  using Packer = msgpack::packer<msgpack::sbuffer>;
  // Events [first, first + count) of the ring become one.
  struct Run {
    int64_t first;
    int64_t count;
  };
  void find_runs(const EventRing& ring, int64_t num_events);
  void pack_stored(Packer& packer, const EventRing& ring, const Run& run) const;
  void pack_removed(Packer& packer, const EventRing& ring, const Run& run) const;
  void pack_hash(Packer& packer, const Hash& hash) const;
  void pack_hashes(Packer& packer, const EventRing& ring, const Run& run) const;

  int32_t block_size_;
  int32_t data_parallel_rank_;
  bool hashes_are_integers_;
  std::vector<Run> runs_;
  msgpack::sbuffer buffer_;
};

}  // namespace kvx::observe
