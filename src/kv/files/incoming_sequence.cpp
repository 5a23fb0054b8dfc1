// IncomingSequence: blocks are acquired and adopted under the table's lock, and written without it.
#include "kv/files/incoming_sequence.hpp"

#include <algorithm>
#include <cstring>

namespace kvx::kv {

using cache::kNoBlock;

Result<std::unique_ptr<IncomingSequence>> IncomingSequence::begin(KvCache& cache,
                                                                  tier::FileIndex index) {
  SequenceTable& table = cache.table();
  const CacheStorage& storage = table.storage;
  if (index.block_size != storage.config.block_size) {
    return invalid_argument("its blocks are of {} tokens; its fingerprint has {}", index.block_size,
                            storage.config.block_size);
  }
  if (index.kinds != block_kinds(storage)) {
    return invalid_argument("its kinds of blocks are not those of its fingerprint");
  }
  std::unique_ptr<IncomingSequence> made(new IncomingSequence(table, std::move(index)));
  KVX_ASSIGN_OR_RETURN(made->places_, layer_places(storage));
  KVX_ASSIGN_OR_RETURN(made->saved_, saved_sequence(made->index_));
  const int64_t num_tokens = std::ssize(made->saved_.tokens);
  if (num_tokens > storage.config.max_tokens_per_sequence) {
    return out_of_range("it has {} tokens; max_tokens_per_sequence is {}", num_tokens,
                        storage.config.max_tokens_per_sequence);
  }
  KVX_ASSIGN_OR_RETURN(made->verbs_, table.create_verbs());
  {
    const auto lock = table.lock_drained();
    const Result<int> unused = table.acquire_sequence();  // said before anything travels
    if (!unused.ok()) return unused.error();
    KVX_RETURN_IF_ERROR(made->acquire());
  }
  made->plan_layers(made->places_);
  return made;
}

IncomingSequence::~IncomingSequence() {
  if (verbs_) (void)verbs_->synchronize();  // blocks that are written to are nobody else's
  const std::lock_guard lock(table_.mutex);
  acquired_.reset();
}

// Requires: the table's lock.
Status IncomingSequence::acquire() {
  const CacheStorage& storage = table_.storage;
  const cache::SequenceShape shape = storage.sequence_shape();
  AcquiredBlocks& acquired = acquired_.emplace(*storage.pool);
  ids_.resize(shape.groups.size());
  for (size_t g = 0; g < shape.groups.size(); ++g) {
    KVX_ASSIGN_OR_RETURN(cache::GroupPrefix prefix,
                         shape_of(saved_, shape.groups[g], shape.block_size));
    ids_[g].assign(saved_.path.size(), kNoBlock);
    for (int64_t b = 0; b < std::ssize(saved_.path); ++b) {
      const std::optional<int> kind = kind_of_block(prefix, shape.groups[g], b);
      if (!kind) continue;
      KVX_ASSIGN_OR_RETURN(ids_[g][static_cast<size_t>(b)], acquired.acquire(*kind));
    }
    prefix.ids = ids_[g];
    prefixes_.push_back(prefix);
  }
  return {};
}

// The index may have blocks and block copies that the sequence does not need: their pages come too.
void IncomingSequence::plan_layers(const std::vector<LayerPlaces>& places) {
  const CacheStorage& storage = table_.storage;
  const cache::SequenceShape shape = storage.sequence_shape();
  std::vector<int64_t> place_in_path(index_.blocks.size(), -1);
  for (size_t b = 0; b < saved_.path.size(); ++b) {
    place_in_path[static_cast<size_t>(saved_.path[b] - index_.blocks.data())] =
        static_cast<int64_t>(b);
  }
  for (size_t layer = 0; layer < places.size(); ++layer) {
    Layer& own = layers_.emplace_back();
    const auto g = static_cast<size_t>(places[layer].group);
    const int packed = storage.packed_class(places[layer].group);
    own.interleaved =
        interleaved_rows(storage.layers[layer]->packed(), storage.pool->region(packed));
    for (InterleavedRows& rows : own.interleaved) rows.offset -= places[layer].packed.offset;
    for (size_t i = 0; i < index_.blocks.size(); ++i) {
      const int64_t b = place_in_path[i];
      const std::optional<int> needed =
          b < 0 ? std::nullopt : kind_of_block(prefixes_[g], shape.groups[g], b);
      for (const tier::StoredBlockCopy& copy : index_.blocks[i].block_copies) {
        const tier::StoredBlockKind& kind = index_.kinds[copy.kind];
        if (kind.group != places[layer].group) continue;
        const bool is_needed = needed && *needed == copy.kind;
        own.pages.push_back({copy.kind, is_needed ? ids_[g][static_cast<size_t>(b)] : kNoBlock});
        own.page_bytes.push_back(places[layer].of(kind).bytes);
      }
    }
  }
}

uint8_t* IncomingSequence::address_of(int layer, const Page& page) const {
  const PagePlace& place = places_[static_cast<size_t>(layer)].of(index_.kinds[page.kind]);
  return table_.storage.block_bytes(page.kind, page.id).data() + place.offset;
}

Status IncomingSequence::write(int layer, int64_t first, int64_t num_pages,
                               std::span<const uint8_t> bytes) {
  const Layer& own = layers_[static_cast<size_t>(layer)];
  const uint8_t* from = bytes.data();
  // On a GPU by way of pinned memory, where codes get the order that they have there.
  const bool is_staged = table_.storage.place != nullptr;
  if (is_staged) {
    if (!staging_ || staging_->region.bytes() < std::ssize(bytes)) {
      staging_.reset();
      KVX_ASSIGN_OR_RETURN(OwnBytes grown, verbs_->allocate_host(std::ssize(bytes)));
      staging_.emplace(std::move(grown));
    }
    std::memcpy(staging_->region.data(), bytes.data(), bytes.size());
    from = staging_->region.data();
  }
  std::vector<BytesCopy> copies;
  int64_t at = 0;
  for (int64_t i = first; i < first + num_pages; ++i) {
    const Page& page = own.pages[static_cast<size_t>(i)];
    const int64_t count = own.page_bytes[static_cast<size_t>(i)];
    if (is_staged && !index_.kinds[page.kind].is_full_precision) {
      interleave_nibbles(own.interleaved,
                         {staging_->region.data() + at, static_cast<size_t>(count)});
    }
    if (page.id != kNoBlock) copies.push_back({address_of(layer, page), from + at, count});
    at += count;
  }
  KVX_RETURN_IF_ERROR(verbs_->copy_runs(copies));
  return is_staged ? verbs_->synchronize() : Status();
}

Status IncomingSequence::copy(int layer, const uint8_t* pages) {
  const Layer& own = layers_[static_cast<size_t>(layer)];
  std::vector<BytesCopy> copies;
  int64_t at = 0;
  for (size_t i = 0; i < own.pages.size(); ++i) {
    const Page& page = own.pages[i];
    if (page.id != kNoBlock)
      copies.push_back({address_of(layer, page), pages + at, own.page_bytes[i]});
    at += own.page_bytes[i];
  }
  return verbs_->copy_runs(copies);
}

Result<int> IncomingSequence::commit() {
  const auto lock = table_.lock_drained();
  return adopt_sequence(table_, saved_, prefixes_);
}

}  // namespace kvx::kv
