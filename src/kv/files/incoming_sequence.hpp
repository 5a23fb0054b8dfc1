// IncomingSequence: a sequence that comes layer by layer, written into blocks of the pool as it
// comes. Nobody sees it before commit(); until then other threads may use the cache.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kv/files/layer_places.hpp"
#include "kv/files/saved_sequence.hpp"
#include "kv/kv_cache.hpp"
#include "kv/plan/block_order.hpp"

namespace kvx::kv {

class IncomingSequence {
 public:
  // index: of blocks with the cache's own fingerprint, or one that reason_not_to_load() allows.
  // INVALID_ARGUMENT: its kinds or sizes are not the cache's, or blocks of it are missing;
  // OUT_OF_RANGE: too few blocks, or too long. Requires: prefixes are on.
  static Result<std::unique_ptr<IncomingSequence>> begin(KvCache& cache, tier::FileIndex index);
  IncomingSequence(const IncomingSequence&) = delete;
  IncomingSequence& operator=(const IncomingSequence&) = delete;
  // Without commit() its blocks are free again.
  ~IncomingSequence();

  // Bytes of a layer's pages, in the order of the index.
  std::span<const int64_t> page_bytes(int layer) const {
    return layers_[static_cast<size_t>(layer)].page_bytes;
  }
  // A layer's pages from `first` on, one after the other. Requires: as many bytes as these have.
  Status write(int layer, int64_t first, int64_t num_pages, std::span<const uint8_t> bytes);
  // All pages of a layer, one after the other in memory of a GPU, codes as this pool has them; on
  // its way when this returns.
  Status copy(int layer, const uint8_t* pages);
  // What copies from a GPU's memory of another process. UNSUPPORTED: Verbs::open_peer's.
  Result<std::unique_ptr<PeerBytes>> open_peer(std::span<const uint8_t> ipc_handle) {
    return verbs_->open_peer(ipc_handle);
  }
  // Waits until all that was written is there. INTERNAL_ERROR: a device failed.
  Status synchronize() { return verbs_->synchronize(); }
  // The sequence is the cache's. Requires: all pages were written, and synchronize().
  Result<int> commit();

 private:
  struct Page {
    int32_t kind = 0;
    int32_t id = 0;  // kNoBlock: the sequence does not need it
  };
  struct Layer {
    std::vector<Page> pages;
    std::vector<int64_t> page_bytes;
    std::vector<InterleavedRows> interleaved;  // of packed pages
  };

  IncomingSequence(SequenceTable& table, tier::FileIndex index)
      : table_(table), index_(std::move(index)) {}
  Status acquire();
  void plan_layers(const std::vector<LayerPlaces>& places);
  uint8_t* address_of(int layer, const Page& page) const;

  SequenceTable& table_;
  tier::FileIndex index_;
  SavedSequence saved_;
  std::vector<LayerPlaces> places_;
  std::unique_ptr<Verbs> verbs_;
  std::optional<OwnBytes> staging_;
  std::optional<AcquiredBlocks> acquired_;    // the table's lock guards it
  std::vector<std::vector<int32_t>> ids_;     // [groups][blocks of the sequence]
  std::vector<cache::GroupPrefix> prefixes_;  // [groups]
  std::vector<Layer> layers_;
};

}  // namespace kvx::kv
