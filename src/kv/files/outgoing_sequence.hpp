// OutgoingSequence: a sequence that leaves its cache layer by layer, while the step that completes
// it is still computing the next ones (docs/transfer.md). The step copies a layer's part of each
// block to memory of this object's own, and goes on; who hands it on to another process reads it
// there, in any thread, also when the sequence and its cache are gone.
//
//   begin()       before the step: which tokens the sequence will have
//   begin_step()  the step has its blocks: their kinds are known from then on, and so is the index
//   take()        a layer has its rows
//   end_step()    the step is over
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kv/files/layer_places.hpp"
#include "kv/plan/block_order.hpp"
#include "kv/verbs/verbs.hpp"

namespace kvx::kv {

struct SequenceTable;

// One group's blocks when the step is complete.
struct GroupBlocks {
  std::vector<int32_t> ids;
  int64_t num_sink_blocks = 0;
  int64_t first_recent_block = 0;
};

// What a reader gets: pages one after the other, and the checksum of each.
struct Pages {
  std::vector<cache::ContentHash> checksums;
  std::vector<uint8_t> bytes;
};

class OutgoingSequence {
 public:
  // KvCache::hand_on()'s. Requires: the table's lock; prefixes are on. staging_bytes: what the
  // pages will take, as far as it is known. for_peers: pages stay on the GPU where the cache lies
  // on one and the system has handles of its memory.
  static Result<std::shared_ptr<OutgoingSequence>> begin(SequenceTable& table, Verbs& verbs,
                                                         int sequence,
                                                         std::span<const int32_t> tokens,
                                                         int64_t staging_bytes, bool for_peers);
  OutgoingSequence(const OutgoingSequence&) = delete;
  OutgoingSequence& operator=(const OutgoingSequence&) = delete;
  // Waits for copies that are under way.
  ~OutgoingSequence();

  // ---- the step's; nothing here fails it: what goes wrong ends the offer alone

  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  // Requires: the table's lock; the sequence has num_tokens() when the step is over.
  void begin_step(SequenceTable& table, Verbs& verbs, const std::vector<GroupBlocks>& groups);
  void take(Verbs& verbs, int layer);
  // Requires: the table's lock; Verbs::join_copies(). why_not: what keeps the step's tokens from
  // being the sequence's; empty: nothing does.
  void end_step(SequenceTable& table, const std::string& why_not);
  // It will not be complete. Nothing where it is.
  void abandon(std::string why);

  // ---- the reader's

  int num_layers() const { return static_cast<int>(layers_.size()); }
  int num_layers_there() const;
  // Why there will be no more of it; empty: there may.
  std::string problem() const;
  // The sequence's index (tier/cache_file.hpp): fingerprint, kinds, tokens, and which blocks there
  // are in which kind. Offsets and checksums are zeros. None: the step has not begun.
  std::optional<tier::FileIndex> index() const;
  const std::vector<LayerPlaces>& places() const { return places_; }
  int64_t bytes() const;  // of all pages; 0 before the step
  // How processes of this host map the pages, which lie one after the other, layer by layer, codes
  // in the order of pool_order(). Empty: they lie in host memory.
  std::vector<uint8_t> ipc_handle() const;
  const std::string& pool_order() const { return pool_order_; }
  // Whether a layer is there for those who map it. Waits for copies that are under way. Errors as
  // read().
  Result<bool> is_there(int layer);
  // Pages [first, end) of a layer, in the order of its blocks in the index, cut to some heads.
  // None: the layer is not there yet. INVALID_ARGUMENT: no such layer, pages or heads, more than
  // most_bytes, or a sequence that will not be complete.
  Result<std::optional<Pages>> read(int layer, int64_t first, int64_t end, const HeadCut& heads,
                                    int64_t most_bytes);

 private:
  struct Page {
    int32_t block = 0;  // of the sequence
    int32_t kind = 0;   // the pool's class
    int32_t id = 0;
    int64_t offset = 0;  // in staging_
    int64_t bytes = 0;
  };
  struct Layer {
    std::vector<Page> pages;
    Verbs::Fence fence;  // null: it has not been taken
    bool is_readable = false;
    std::vector<uint8_t> on_host;  // its pages, once it is readable, where they lie on a GPU
    std::vector<cache::ContentHash> checksums;  // [pages], once it is readable
  };
  // What is known of the cache without it.
  struct LayerFacts {
    std::vector<InterleavedRows> interleaved;          // of packed pages
    std::array<std::vector<int64_t>, 2> head_offsets;  // packed, full precision
  };

  OutgoingSequence() = default;
  void plan_pages(const std::vector<GroupBlocks>& groups);
  Status acquire_copies(SequenceTable& table);
  Result<Verbs::Fence> copy_layer(Verbs& verbs, int layer);
  Result<bool> check_layer(int layer) const;
  Result<OwnBytes> allocate(Verbs& verbs, int64_t bytes) const;
  Status make_readable(int layer);
  std::span<uint8_t> bytes_of(int layer, const Page& page);
  Result<PagePlace> cut_of(int layer, const Page& page, const HeadCut& heads) const;

  int sequence_ = 0;
  std::vector<int32_t> tokens_;
  cache::PrefixKeys keys_;
  std::string fingerprint_;
  std::string pool_order_;
  bool for_peers_ = false;
  int32_t block_size_ = 0;
  std::vector<tier::StoredBlockKind> kinds_;
  std::vector<LayerPlaces> places_;
  std::vector<LayerFacts> facts_;
  // What follows is set while a step is open.
  const CacheStorage* storage_ = nullptr;
  std::vector<int32_t> copies_;  // [kinds]: for an open block's tokens alone, or kNoBlock

  std::mutex reading_;  // one reader at a time: pages are hashed when the first asks for them

  mutable std::mutex mutex_;  // guards what follows
  std::string problem_;
  bool is_complete_ = false;
  std::optional<tier::FileIndex> index_;
  int64_t bytes_ = 0;
  std::vector<Layer> layers_;
  std::optional<OwnBytes> staging_;
};

}  // namespace kvx::kv
