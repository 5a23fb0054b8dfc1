// KvCache: sequences and prefixes to files and back. A block copy's kind is its class in the pool.
#include <algorithm>
#include <unordered_map>

#include "core/log.hpp"
#include "kv/files/fingerprint.hpp"
#include "kv/kv_cache.hpp"
#include "kv/plan/block_order.hpp"
#include "tier/cache_file.hpp"

namespace kvx::kv {
namespace {

using cache::BlockKind;
using cache::kNoBlock;
using cache::kNoNode;

// Blocks taken for a file's bytes: given back unless somebody else uses them by then.
class AcquiredBlocks {
 public:
  explicit AcquiredBlocks(cache::BlockPool& pool) : pool_(pool) {}
  AcquiredBlocks(const AcquiredBlocks&) = delete;
  AcquiredBlocks& operator=(const AcquiredBlocks&) = delete;
  ~AcquiredBlocks() {
    for (const auto& [block_class, id] : blocks_) (void)pool_.release(block_class, id);
  }
  Result<int32_t> take(int block_class) {
    int32_t id = kNoBlock;
    KVX_RETURN_IF_ERROR(pool_.allocate(block_class, std::span(&id, 1)));
    blocks_.emplace_back(block_class, id);
    return id;
  }

 private:
  cache::BlockPool& pool_;
  std::vector<std::pair<int, int32_t>> blocks_;
};

// Nodes that stay while they are in here.
class PinnedNodes {
 public:
  explicit PinnedNodes(cache::PrefixIndex& index) : index_(index) {}
  PinnedNodes(const PinnedNodes&) = delete;
  PinnedNodes& operator=(const PinnedNodes&) = delete;
  ~PinnedNodes() {
    for (int32_t node : nodes_) index_.unpin(node);
  }
  void add_pinned(int32_t node) { nodes_.push_back(node); }
  void pin(int32_t node) {
    index_.pin(node);
    nodes_.push_back(node);
  }

 private:
  cache::PrefixIndex& index_;
  std::vector<int32_t> nodes_;
};

std::vector<tier::BlockCopyKind> kinds_of(const cache::BlockPool& pool, size_t num_groups) {
  std::vector<tier::BlockCopyKind> kinds;
  const int per_group = pool.num_classes() / static_cast<int>(num_groups);
  for (int c = 0; c < pool.num_classes(); ++c) {
    kinds.push_back({c / per_group, c % per_group == 1, pool.block_bytes(c)});
  }
  return kinds;
}

// The index says block_size and kinds again beside its fingerprint, and a file may lie.
Status check_same_cache(const tier::FileIndex& index, std::string_view fingerprint, int block_size,
                        std::span<const tier::BlockCopyKind> kinds, const std::string& path) {
  const std::string difference = first_difference(index.fingerprint, fingerprint);
  if (!difference.empty()) {
    return invalid_argument("'{}' holds blocks of another cache: {}", path, difference);
  }
  if (index.block_size != block_size) {
    return invalid_argument("'{}': its blocks are of {} tokens; its fingerprint says {}", path,
                            index.block_size, block_size);
  }
  if (std::equal(index.kinds.begin(), index.kinds.end(), kinds.begin(), kinds.end())) return {};
  return invalid_argument("'{}': its kinds of blocks are not those of its fingerprint", path);
}

const tier::BlockCopy* block_copy_of(const tier::FileBlock& block, int kind) {
  for (const tier::BlockCopy& block_copy : block.block_copies) {
    if (block_copy.kind == kind) return &block_copy;
  }
  return nullptr;
}

}  // namespace

std::string_view KvCache::fingerprint() const {
  return prefixes_ ? std::string_view(prefixes_->fingerprint()) : std::string_view();
}

std::span<uint8_t> KvCache::block_bytes(int block_class, int32_t id) const {
  const int64_t bytes = pool_->block_bytes(block_class);
  return {pool_->region(block_class) + id * bytes, static_cast<size_t>(bytes)};
}

std::vector<const ops::LayerView*> KvCache::layers_interleaved(int block_class) const {
  std::vector<const ops::LayerView*> layers;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (packed_class(group_of_layer_[i]) != block_class) continue;
    const ops::LayerView& layer = layers_[i]->packed();
    const auto has_interleaved = [](const ops::HeadRun& run) {
      return run.k.is_interleaved || run.v.is_interleaved;
    };
    if (std::any_of(layer.runs.begin(), layer.runs.end(), has_interleaved))
      layers.push_back(&layer);
  }
  return layers;
}

Result<std::span<const uint8_t>> KvCache::bytes_for_file(int block_class, int32_t id,
                                                         std::vector<uint8_t>& room) const {
  KVX_ASSIGN_OR_RETURN(const auto bytes, verbs_->readable(block_bytes(block_class, id)));
  const std::vector<const ops::LayerView*> layers = layers_interleaved(block_class);
  if (layers.empty()) return bytes;
  room.assign(bytes.begin(), bytes.end());
  for (const ops::LayerView* layer : layers) {
    deinterleave_nibbles(*layer, pool_->region(block_class), room);
  }
  return std::span<const uint8_t>(room);
}

void KvCache::take_pools_order(int block_class, std::span<uint8_t> block) const {
  for (const ops::LayerView* layer : layers_interleaved(block_class)) {
    interleave_nibbles(*layer, pool_->region(block_class), block);
  }
}

// ---- saving

Status KvCache::save_sequence(int sequence, const std::string& path, const SaveOptions& options) {
  if (!prefixes_) return prefixes_are_off();
  const auto lock = lock_drained();
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  const cache::Sequence& blocks = sequences_[sequence];
  const std::span<const int32_t> tokens = prefixes_->tokens(sequence);
  if (static_cast<int64_t>(tokens.size()) != blocks.num_tokens() || tokens.empty()) {
    return invalid_argument("sequence {} has {} tokens of which {} are recorded; expected all",
                            sequence, blocks.num_tokens(), tokens.size());
  }
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileWriter::create(path, options.zstd_level));
  tier::FileIndex index{std::string(fingerprint()),
                        config_.block_size,
                        {prefixes_->keys(sequence)},
                        kinds_of(*pool_, groups_.size()),
                        {},
                        {}};
  const auto block_size = static_cast<size_t>(config_.block_size);
  const auto num_blocks = static_cast<int32_t>((tokens.size() + block_size - 1) / block_size);
  for (int32_t b = 0; b < num_blocks; ++b) {
    const auto held =
        tokens.subspan(b * block_size).first(std::min(block_size, tokens.size() - b * block_size));
    tier::FileBlock& saved = index.blocks.emplace_back();
    saved.parent = b - 1;  // -1 is scope 0
    saved.tokens.assign(held.begin(), held.end());
    for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
      int32_t id = blocks.table(g)[b];
      if (id == kNoBlock) continue;  // a window has passed it
      const bool is_full_precision =
          has_full_precision_window() &&
          (b < blocks.num_sink_blocks(g) || b >= blocks.first_recent_block(g));
      const int block_class = is_full_precision ? full_precision_class(g) : packed_class(g);
      AcquiredBlocks copy(*pool_);
      if (held.size() < block_size) {  // what lies after the tokens does not leave the pool
        const int32_t open = id;
        KVX_ASSIGN_OR_RETURN(id, copy.take(block_class));
        pool_->clear(block_class, id);
        const ops::BlockCopy tokens_alone{open, id, static_cast<int>(held.size())};
        KVX_RETURN_IF_ERROR(verbs_->copy_blocks(
            layer_copies(g, is_full_precision ? CopyKind::kFullPrecision : CopyKind::kPacked),
            {&tokens_alone, 1}));
      }
      std::vector<uint8_t> room;
      KVX_ASSIGN_OR_RETURN(const auto bytes, bytes_for_file(block_class, id, room));
      KVX_ASSIGN_OR_RETURN(const tier::BlockCopy block_copy,
                           file.add_block_copy(block_class, bytes));
      saved.block_copies.push_back(block_copy);
    }
    if (options.on_block) options.on_block(b + 1, num_blocks);
  }
  index.sequences.push_back(num_blocks - 1);
  return file.finish(index);
}

Status KvCache::save_prefixes(const std::string& path, const SaveOptions& options) const {
  if (!prefixes_) return prefixes_are_off();
  const auto lock = lock_drained();
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileWriter::create(path, options.zstd_level));
  const cache::PrefixIndex& nodes = prefixes_->index();
  tier::FileIndex index{
      std::string(fingerprint()), config_.block_size, {}, kinds_of(*pool_, groups_.size()), {}, {}};
  std::unordered_map<int32_t, int32_t> places;  // of nodes in the file; of scopes: -1 - scope
  Status status;
  int64_t num_nodes = 0;
  if (options.on_block) nodes.for_each_node([&](int32_t) { ++num_nodes; });
  nodes.for_each_node([&](int32_t node) {
    if (!status.ok()) return;
    const int32_t parent = nodes.parent(node);
    if (nodes.is_scope(parent) && !places.contains(parent)) {
      places[parent] = -1 - static_cast<int32_t>(index.scopes.size());
      index.scopes.push_back(nodes.keys(parent));
    }
    places[node] = static_cast<int32_t>(index.blocks.size());
    const std::span<const int32_t> tokens = nodes.tokens(node);
    index.blocks.push_back({places.at(parent), {tokens.begin(), tokens.end()}, {}});
    for (int kind = 0; kind < static_cast<int>(index.kinds.size()); ++kind) {
      const int32_t id = nodes.block_of(
          node, index.kinds[kind].group,
          index.kinds[kind].is_full_precision ? BlockKind::kFullPrecision : BlockKind::kPacked);
      if (id == kNoBlock) continue;
      std::vector<uint8_t> room;
      const auto bytes = bytes_for_file(kind, id, room);
      auto block_copy = bytes.ok() ? file.add_block_copy(kind, bytes.value()) : bytes.error();
      if (!block_copy.ok()) {
        status = block_copy.error();
        return;
      }
      index.blocks.back().block_copies.push_back(block_copy.value());
    }
    if (options.on_block) options.on_block(std::ssize(index.blocks), num_nodes);
  });
  KVX_RETURN_IF_ERROR(status);
  return file.finish(index);
}

// ---- loading

namespace {

// A saved sequence's way through the file, and what each group holds of it.
struct SavedSequence {
  std::vector<const tier::FileBlock*> path;
  std::vector<int32_t> tokens;
  cache::PrefixKeys keys;
};

Result<SavedSequence> saved_sequence(const tier::FileIndex& index) {
  if (index.sequences.empty()) return invalid_argument("the file holds no sequence");
  SavedSequence saved;
  int32_t block = index.sequences.front();
  for (; block >= 0; block = index.blocks[block].parent) saved.path.push_back(&index.blocks[block]);
  std::reverse(saved.path.begin(), saved.path.end());
  saved.keys = index.scopes[-1 - block];
  for (const tier::FileBlock* one : saved.path) {
    saved.tokens.insert(saved.tokens.end(), one->tokens.begin(), one->tokens.end());
  }
  return saved;
}

// Which blocks of a group are there and which are full-precision; the file may be missing any of
// them.
Result<cache::GroupPrefix> shape_of(const SavedSequence& saved, const cache::LayerGroup& facts,
                                    int64_t block_size) {
  const auto num_blocks = static_cast<int64_t>(saved.path.size());
  const auto num_tokens = static_cast<int64_t>(saved.tokens.size());
  const cache::FullPrecisionWindow& ends = facts.full_precision_window;
  const auto has = [&](int64_t block, int kind) {
    return block_copy_of(*saved.path[block], kind) != nullptr;
  };
  cache::GroupPrefix prefix;
  prefix.first_recent_block = num_blocks;
  while (ends.is_on() && prefix.first_recent_block > ends.head_blocks &&
         has(prefix.first_recent_block - 1, facts.full_precision_class)) {
    --prefix.first_recent_block;
  }
  const auto kind_of = [&](int64_t block) {
    const bool is_full_precision =
        ends.is_on() && (block < ends.head_blocks || block >= prefix.first_recent_block);
    return is_full_precision ? facts.full_precision_class : facts.packed_class;
  };
  prefix.first_block = num_blocks;
  while (prefix.first_block > 0 && has(prefix.first_block - 1, kind_of(prefix.first_block - 1))) {
    --prefix.first_block;
  }
  const int64_t sinks_end = std::min(facts.sink_blocks, prefix.first_block);
  for (int64_t block = 0; block < sinks_end; ++block) {
    if (has(block, kind_of(block))) continue;
    return invalid_argument("block {} of its sequence, a sink, is missing", block);
  }
  // A block that is open stays in 16 bits, and the window has its size.
  const bool window_fits =
      !ends.is_on() || (num_blocks - prefix.first_recent_block <= ends.recent_blocks &&
                        (num_tokens % block_size == 0 || prefix.first_recent_block < num_blocks ||
                         num_blocks <= ends.head_blocks));
  if (prefix.first_block <= cache::expired_blocks(num_tokens, facts.window, block_size) &&
      window_fits) {
    return prefix;
  }
  return invalid_argument("block {} of its sequence is missing", prefix.first_block - 1);
}

}  // namespace

Result<int> KvCache::load_sequence(const std::string& path) {
  if (!prefixes_) return prefixes_are_off();
  const auto lock = lock_drained();
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  const auto kinds = kinds_of(*pool_, groups_.size());
  KVX_RETURN_IF_ERROR(
      check_same_cache(file.index(), fingerprint(), config_.block_size, kinds, path));
  const auto with_path = [&path](const Error& error) {
    return Error{error.code, fmt::format("'{}': {}", path, error.message)};
  };
  const Result<SavedSequence> found = saved_sequence(file.index());
  if (!found.ok()) return with_path(found.error());
  const SavedSequence& saved = found.value();
  const auto num_tokens = static_cast<int64_t>(saved.tokens.size());
  if (num_tokens > config_.max_tokens_per_sequence) {
    return out_of_range("'{}' holds {} tokens; max_tokens_per_sequence is {}", path, num_tokens,
                        config_.max_tokens_per_sequence);
  }
  AcquiredBlocks taken(*pool_);
  const cache::SequenceShape shape = sequence_shape();
  std::vector<std::vector<int32_t>> ids(groups_.size());
  std::vector<cache::GroupPrefix> prefixes;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const cache::LayerGroup& facts = shape.groups[g];
    const auto group_shape = shape_of(saved, facts, config_.block_size);
    if (!group_shape.ok()) return with_path(group_shape.error());
    cache::GroupPrefix prefix = group_shape.value();
    ids[g].assign(saved.path.size(), kNoBlock);
    for (int64_t b = 0; b < static_cast<int64_t>(saved.path.size()); ++b) {
      if (b < prefix.first_block && b >= facts.sink_blocks) continue;
      const bool is_full_precision =
          facts.full_precision_window.is_on() &&
          (b < facts.full_precision_window.head_blocks || b >= prefix.first_recent_block);
      const int kind = is_full_precision ? facts.full_precision_class : facts.packed_class;
      KVX_ASSIGN_OR_RETURN(ids[g][b], taken.take(kind));
      KVX_ASSIGN_OR_RETURN(const auto bytes, verbs_->writable(block_bytes(kind, ids[g][b])));
      const Status read = file.read_block_copy(*block_copy_of(*saved.path[b], kind), bytes);
      if (!read.ok()) return with_path(read.error());
      take_pools_order(kind, bytes);
      KVX_RETURN_IF_ERROR(verbs_->written(block_bytes(kind, ids[g][b])));
    }
    prefix.ids = ids[g];
    prefixes.push_back(prefix);
  }
  KVX_ASSIGN_OR_RETURN(const int sequence, acquire_sequence());
  KVX_RETURN_IF_ERROR(prefixes_->begin(sequence, saved.keys));
  Status status = sequences_[sequence].adopt(*pool_, num_tokens, prefixes);
  if (status.ok()) status = prefixes_->record(sequence, sequences_[sequence], saved.tokens);
  if (!status.ok()) {
    prefixes_->end(sequence);
    KVX_RETURN_IF_ERROR(sequences_[sequence].clear(*pool_));
    return status.error();
  }
  uses_[sequence] = Use::kIdle;
  return sequence;
}

Result<LoadReport> KvCache::load_prefixes(const std::string& path) {
  if (!prefixes_) return prefixes_are_off();
  const auto lock = lock_drained();
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  const tier::FileIndex& index = file.index();
  KVX_RETURN_IF_ERROR(check_same_cache(index, fingerprint(), config_.block_size,
                                       kinds_of(*pool_, groups_.size()), path));
  cache::PrefixIndex& nodes = prefixes_->index();
  // Until all are read, so that a parent whose own blocks are bad still leads to its children.
  PinnedNodes pinned(nodes);
  std::vector<int32_t> scopes;
  for (const cache::PrefixKeys& keys : index.scopes) {
    KVX_ASSIGN_OR_RETURN(const int32_t scope, nodes.pin_scope(keys));
    pinned.add_pinned(scope);
    scopes.push_back(scope);
  }
  LoadReport report;
  report.num_blocks = static_cast<int64_t>(index.blocks.size());
  const auto note = [&report](int64_t& count, std::string_view problem) {
    ++count;
    if (report.first_problem.empty()) report.first_problem = problem;
  };
  std::vector<int32_t> node_of(index.blocks.size(), kNoNode);
  for (size_t i = 0; i < index.blocks.size(); ++i) {
    const tier::FileBlock& block = index.blocks[i];
    if (static_cast<int>(block.tokens.size()) < config_.block_size) continue;  // a sequence's end
    const int32_t parent = block.parent < 0 ? scopes[-1 - block.parent] : node_of[block.parent];
    const int32_t node = parent == kNoNode ? kNoNode : nodes.insert(parent, block.tokens);
    if (node == kNoNode) {
      note(report.num_no_room, "the prefix index is full");
      continue;
    }
    pinned.pin(node);
    node_of[i] = node;
    for (const tier::BlockCopy& block_copy : block.block_copies) {
      const tier::BlockCopyKind& facts = index.kinds[block_copy.kind];
      const BlockKind kind =
          facts.is_full_precision ? BlockKind::kFullPrecision : BlockKind::kPacked;
      if (nodes.block_of(node, facts.group, kind) != kNoBlock) {
        ++report.num_known;
        continue;
      }
      if (pool_->num_free(block_copy.kind) == 0) {
        note(report.num_no_room, fmt::format("no free block of {}", pool_->name(block_copy.kind)));
        continue;
      }
      AcquiredBlocks taken(*pool_);
      const Result<int32_t> found = taken.take(block_copy.kind);
      if (!found.ok()) {  // what is free is promised to another thread's step
        note(report.num_no_room, found.error().message);
        continue;
      }
      const int32_t id = found.value();
      KVX_ASSIGN_OR_RETURN(const auto bytes, verbs_->writable(block_bytes(block_copy.kind, id)));
      const Status read = file.read_block_copy(block_copy, bytes);
      if (!read.ok()) {
        note(report.num_bad, read.error().message);
        continue;
      }
      take_pools_order(block_copy.kind, bytes);
      KVX_RETURN_IF_ERROR(verbs_->written(block_bytes(block_copy.kind, id)));
      KVX_RETURN_IF_ERROR(nodes.attach(node, facts.group, kind, id));
      ++report.num_loaded;
    }
  }
  if (report.num_bad != 0) {
    log(LogLevel::kWarning, "{} of {} blocks in {} are damaged and were not loaded; the first: {}",
        report.num_bad, report.num_blocks, path, report.first_problem);
  }
  return report;
}

}  // namespace kvx::kv
