// OutgoingSequence: the step's thread copies and marks; the reader waits for the marks, and hashes.
#include "kv/files/outgoing_sequence.hpp"

#include <algorithm>

#include "core/log.hpp"
#include "kv/sequence_table.hpp"

namespace kvx::kv {

using cache::kNoBlock;

OutgoingSequence::~OutgoingSequence() {
  for (const Layer& layer : layers_) {
    if (layer.fence) (void)layer.fence();
  }
}

Result<std::shared_ptr<OutgoingSequence>> OutgoingSequence::begin(SequenceTable& table,
                                                                  Verbs& verbs, int sequence,
                                                                  std::span<const int32_t> tokens,
                                                                  int64_t staging_bytes,
                                                                  bool for_peers) {
  KVX_RETURN_IF_ERROR(table.check_sequence(sequence));
  if (table.outgoing[sequence] && table.outgoing[sequence]->problem().empty()) {
    return invalid_argument("sequence {} is on its way already; free its offer first", sequence);
  }
  const cache::Sequence& blocks = table.sequences[sequence];
  const std::span<const int32_t> recorded = table.prefixes->tokens(sequence);
  if (std::ssize(recorded) != blocks.num_tokens()) {
    return invalid_argument("sequence {} has {} tokens of which {} are recorded; expected all",
                            sequence, blocks.num_tokens(), recorded.size());
  }
  if (std::ssize(tokens) > blocks.max_tokens()) {
    return out_of_range("num_tokens is {}; max_tokens_per_sequence is {}", tokens.size(),
                        blocks.max_tokens());
  }
  if (std::ssize(tokens) <= blocks.num_tokens()) {
    return invalid_argument(
        "num_tokens is {}; the sequence has {}, expected some that a step will add (a complete "
        "sequence is exported as a whole)",
        tokens.size(), blocks.num_tokens());
  }
  const auto differs = std::mismatch(recorded.begin(), recorded.end(), tokens.begin());
  if (differs.first != recorded.end()) {
    return invalid_argument("tokens[{}] is {}; the sequence has {} there",
                            differs.first - recorded.begin(), *differs.second, *differs.first);
  }
  const CacheStorage& storage = table.storage;
  std::shared_ptr<OutgoingSequence> made(new OutgoingSequence);
  KVX_ASSIGN_OR_RETURN(made->places_, layer_places(storage));
  made->sequence_ = sequence;
  made->tokens_.assign(tokens.begin(), tokens.end());
  made->keys_ = table.prefixes->keys(sequence);
  made->fingerprint_ = table.prefixes->fingerprint();
  made->block_size_ = storage.config.block_size;
  made->kinds_ = block_kinds(storage);
  made->layers_.resize(made->places_.size());
  for (int layer = 0; layer < made->num_layers(); ++layer) {
    LayerFacts& facts = made->facts_.emplace_back();
    const int packed = storage.packed_class(storage.group_of_layer[layer]);
    facts.interleaved =
        interleaved_rows(storage.layers[layer]->packed(), storage.pool->region(packed));
    for (InterleavedRows& rows : facts.interleaved) {  // in the page, not in the block
      rows.offset -= made->places_[static_cast<size_t>(layer)].packed.offset;
    }
    facts.head_offsets[0] = head_offsets(storage, layer, false);
    if (storage.has_full_precision_window()) {
      facts.head_offsets[1] = head_offsets(storage, layer, true);
    }
  }
  made->pool_order_ = storage.pool_fingerprint("");
  made->for_peers_ = for_peers && storage.place != nullptr;
  KVX_ASSIGN_OR_RETURN(OwnBytes staging, made->allocate(verbs, staging_bytes));
  made->staging_.emplace(std::move(staging));
  table.outgoing[sequence] = made;
  return made;
}

Result<OwnBytes> OutgoingSequence::allocate(Verbs& verbs, int64_t bytes) const {
  if (!for_peers_) return verbs.allocate_host(bytes);
  Result<OwnBytes> shared = verbs.allocate_for_peers(bytes);
  if (shared.ok() || shared.error().code != ErrorCode::kUnsupported) return shared;
  log(LogLevel::kWarning, "processes of this host get a sequence by way of its memory: {}",
      shared.error().message);
  return verbs.allocate_host(bytes);
}

// ---- the step's

void OutgoingSequence::begin_step(SequenceTable& table, Verbs& verbs,
                                  const std::vector<GroupBlocks>& groups) {
  const std::lock_guard lock(mutex_);
  if (!problem_.empty()) return;
  storage_ = &table.storage;
  plan_pages(groups);
  Status status = acquire_copies(table);
  if (status.ok() && bytes_ > staging_->region.bytes()) {
    staging_.reset();
    Result<OwnBytes> staging = allocate(verbs, bytes_);
    if (staging.ok()) staging_.emplace(std::move(staging).value());
    if (!staging.ok()) status = staging.error();
  }
  if (!status.ok()) problem_ = status.error().message;
}

// Blocks as save_sequence() writes them.
void OutgoingSequence::plan_pages(const std::vector<GroupBlocks>& groups) {
  tier::FileIndex index{fingerprint_, block_size_, {keys_}, kinds_, {}, {}};
  const auto block_size = static_cast<size_t>(block_size_);
  const auto num_blocks = static_cast<int32_t>((tokens_.size() + block_size - 1) / block_size);
  for (int32_t b = 0; b < num_blocks; ++b) {
    const auto rest = std::span(tokens_).subspan(static_cast<size_t>(b) * block_size);
    const auto held = rest.first(std::min(block_size, rest.size()));
    tier::FileBlock& saved = index.blocks.emplace_back();
    saved.parent = b - 1;  // -1 is scope 0
    saved.tokens.assign(held.begin(), held.end());
  }
  index.sequences.push_back(num_blocks - 1);
  bytes_ = 0;
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    const int64_t first =
        cache::expired_blocks(num_tokens(), storage_->groups[g].window, block_size_);
    const int64_t sinks_end = storage_->sequence_shape().groups[g].window_sink_blocks;
    for (int32_t b = 0; b < num_blocks; ++b) {
      if (b < first && b >= sinks_end) continue;
      const bool is_full_precision =
          storage_->has_full_precision_window() &&
          (b < groups[g].num_sink_blocks || b >= groups[g].first_recent_block);
      const int kind =
          is_full_precision ? storage_->full_precision_class(g) : storage_->packed_class(g);
      index.blocks[b].block_copies.push_back({kind, tier::Codec::kRaw, 0, kinds_[kind].bytes, {}});
      for (size_t layer = 0; layer < layers_.size(); ++layer) {
        if (places_[layer].group != g) continue;
        const int64_t bytes = places_[layer].of(kinds_[kind]).bytes;
        layers_[layer].pages.push_back({b, kind, groups[g].ids[b], 0, bytes});
      }
    }
  }
  for (Layer& layer : layers_) {
    for (Page& page : layer.pages) {
      page.offset = std::exchange(bytes_, bytes_ + page.bytes);
    }
  }
  index_ = std::move(index);
}

// What lies after an open block's tokens does not leave the pool: these go to a block without
// anything else.
Status OutgoingSequence::acquire_copies(SequenceTable& table) {
  cache::BlockPool& pool = *table.storage.pool;
  copies_.assign(kinds_.size(), kNoBlock);
  const tier::FileBlock& last = index_->blocks.back();
  if (std::ssize(last.tokens) == block_size_) return {};
  for (const tier::StoredBlockCopy& copy : last.block_copies) {
    int32_t id = kNoBlock;
    KVX_RETURN_IF_ERROR(pool.allocate(copy.kind, std::span(&id, 1)));
    copies_[copy.kind] = id;
    pool.clear(copy.kind, id);
  }
  return {};
}

void OutgoingSequence::take(Verbs& verbs, int layer) {
  if (!problem().empty()) return;
  if (layers_[layer].fence) {
    abandon(
        fmt::format("layer {} has rows twice in the step that completes the sequence; its "
                    "first ones may have left",
                    layer));
    return;
  }
  Result<Verbs::Fence> fence = copy_layer(verbs, layer);
  if (!fence.ok()) {
    abandon(fmt::format("layer {}: {}", layer, fence.error().message));
    return;
  }
  const std::lock_guard lock(mutex_);
  layers_[layer].fence = std::move(fence).value();
}

Result<Verbs::Fence> OutgoingSequence::copy_layer(Verbs& verbs, int layer) {
  const Layer& own = layers_[layer];
  const auto last_block = static_cast<int32_t>(index_->blocks.size() - 1);
  const auto last_tokens = static_cast<int>(index_->blocks.back().tokens.size());
  const LayerStore& store = *storage_->layers[layer];
  std::vector<BytesCopy> copies;
  for (const Page& page : own.pages) {
    const tier::StoredBlockKind& kind = kinds_[page.kind];
    int32_t id = page.id;
    if (page.block == last_block && last_tokens < block_size_) {
      id = copies_[page.kind];
      const ops::LayerView& view = kind.is_full_precision ? store.full_precision() : store.packed();
      const LayerCopy in_layer{&view, &view};
      const ops::BlockCopy tokens_alone{page.id, id, last_tokens};
      KVX_RETURN_IF_ERROR(verbs.copy_blocks({&in_layer, 1}, {&tokens_alone, 1}));
    }
    const uint8_t* const block = storage_->block_bytes(page.kind, id).data();
    copies.push_back({staging_->region.data() + page.offset, block + places_[layer].of(kind).offset,
                      page.bytes});
  }
  return verbs.copy_beside(copies);
}

void OutgoingSequence::end_step(SequenceTable& table, const std::string& why_not) {
  for (size_t kind = 0; kind < copies_.size(); ++kind) {
    if (copies_[kind] != kNoBlock) {
      (void)table.storage.pool->release(static_cast<int>(kind), copies_[kind]);
    }
  }
  copies_.clear();
  storage_ = nullptr;
  table.outgoing[sequence_].reset();
  if (!why_not.empty()) {
    abandon(why_not);
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto missing =
      std::ranges::find_if(layers_, [](const Layer& layer) { return !layer.fence; });
  is_complete_ = problem_.empty() && missing == layers_.end();
  if (is_complete_ || !problem_.empty()) return;
  problem_ = fmt::format("layer {} had no rows in the step that completes the sequence",
                         missing - layers_.begin());
}

void OutgoingSequence::abandon(std::string why) {
  const std::lock_guard lock(mutex_);
  if (!is_complete_ && problem_.empty()) problem_ = std::move(why);
}

// ---- the reader's

int OutgoingSequence::num_layers_there() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(
      std::ranges::count_if(layers_, [](const Layer& layer) { return bool(layer.fence); }));
}

std::string OutgoingSequence::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

std::optional<tier::FileIndex> OutgoingSequence::index() const {
  const std::lock_guard lock(mutex_);
  return index_;
}

int64_t OutgoingSequence::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

// The lock is open while this waits for a GPU, so that the step goes on.
Status OutgoingSequence::make_readable(int layer) {
  Layer& own = layers_[layer];
  if (own.is_readable) return {};
  const Status passed = own.fence();
  if (!passed.ok()) {
    abandon(fmt::format("layer {}: {}", layer, passed.error().message));
    return passed;
  }
  if (!staging_->is_on_host() && !own.pages.empty()) {
    const Page& last = own.pages.back();
    own.on_host.resize(static_cast<size_t>(last.offset + last.bytes - own.pages.front().offset));
    const Status read = staging_->read(own.pages.front().offset, own.on_host);
    if (!read.ok()) {
      abandon(fmt::format("layer {}: {}", layer, read.error().message));
      return read;
    }
  }
  for (const Page& page : own.pages) {
    const std::span<uint8_t> bytes = bytes_of(layer, page);
    if (!kinds_[page.kind].is_full_precision) {
      deinterleave_nibbles(facts_[layer].interleaved, bytes);
    }
    own.checksums.push_back(cache::checksum(bytes));
  }
  own.is_readable = true;
  return {};
}

// Requires: the layer is readable, or is becoming so.
std::span<uint8_t> OutgoingSequence::bytes_of(int layer, const Page& page) {
  Layer& own = layers_[layer];
  uint8_t* const first = staging_->is_on_host()
                             ? staging_->region.data() + page.offset
                             : own.on_host.data() + (page.offset - own.pages.front().offset);
  return {first, static_cast<size_t>(page.bytes)};
}

Result<PagePlace> OutgoingSequence::cut_of(int layer, const Page& page,
                                           const HeadCut& heads) const {
  if (heads.is_whole()) return PagePlace{0, page.bytes};
  const auto& offsets = facts_[layer].head_offsets[kinds_[page.kind].is_full_precision ? 1 : 0];
  const auto num_heads = static_cast<int>(offsets.size() - 1);
  if (heads.num_heads != num_heads || heads.first < 0 || heads.first >= heads.end ||
      heads.end > num_heads) {
    return invalid_argument("heads {} to {} of {} are asked for; expected some of {}", heads.first,
                            heads.end, heads.num_heads, num_heads);
  }
  const int64_t begin = offsets[static_cast<size_t>(heads.first)];
  return PagePlace{begin, offsets[static_cast<size_t>(heads.end)] - begin};
}

std::vector<uint8_t> OutgoingSequence::ipc_handle() const {
  const std::lock_guard lock(mutex_);
  return staging_ ? staging_->ipc_handle : std::vector<uint8_t>();
}

// Whether the step has given the layer's copies on their way.
Result<bool> OutgoingSequence::check_layer(int layer) const {
  const std::lock_guard lock(mutex_);
  if (!problem_.empty()) return invalid_argument("the sequence is incomplete: {}", problem_);
  if (layer < 0 || layer >= num_layers()) {
    return invalid_argument("layer {} is asked for; expected 0 to {}", layer, num_layers() - 1);
  }
  return bool(layers_[layer].fence);
}

Result<bool> OutgoingSequence::is_there(int layer) {
  const std::lock_guard reading(reading_);
  KVX_ASSIGN_OR_RETURN(const bool was_taken, check_layer(layer));
  if (!was_taken) return false;
  const Status passed = layers_[layer].fence();
  if (passed.ok()) return true;
  abandon(fmt::format("layer {}: {}", layer, passed.error().message));
  return passed.error();
}

Result<std::optional<Pages>> OutgoingSequence::read(int layer, int64_t first, int64_t end,
                                                    const HeadCut& heads, int64_t most_bytes) {
  const std::lock_guard reading(reading_);
  KVX_ASSIGN_OR_RETURN(const bool was_taken, check_layer(layer));
  if (!was_taken) return std::optional<Pages>();
  KVX_RETURN_IF_ERROR(make_readable(layer));
  const Layer& own = layers_[layer];
  if (first < 0 || first >= end || end > std::ssize(own.pages)) {
    return invalid_argument("pages {} to {} of layer {} are asked for; it has {}", first, end,
                            layer, own.pages.size());
  }
  Pages pages;
  for (int64_t i = first; i < end; ++i) {
    const Page& page = own.pages[static_cast<size_t>(i)];
    KVX_ASSIGN_OR_RETURN(const PagePlace cut, cut_of(layer, page, heads));
    const auto bytes =
        bytes_of(layer, page)
            .subspan(static_cast<size_t>(cut.offset), static_cast<size_t>(cut.bytes));
    if (!pages.bytes.empty() && std::ssize(pages.bytes) + cut.bytes > most_bytes) {
      return invalid_argument("pages {} to {} of layer {} have more than {} bytes", first, end,
                              layer, most_bytes);
    }
    pages.bytes.insert(pages.bytes.end(), bytes.begin(), bytes.end());
    pages.checksums.push_back(heads.is_whole() ? own.checksums[static_cast<size_t>(i)]
                                               : cache::checksum(bytes));
  }
  return std::optional<Pages>(std::move(pages));
}

}  // namespace kvx::kv
