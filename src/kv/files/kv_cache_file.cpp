// Sequences and prefixes to files and back. A block copy's kind is its class in the pool.
#include "kv/files/kv_cache_file.hpp"

#include <algorithm>
#include <unordered_map>

#include "core/log.hpp"
#include "kv/files/fingerprint.hpp"
#include "kv/files/layer_places.hpp"
#include "kv/files/saved_sequence.hpp"
#include "kv/plan/block_order.hpp"
#include "kv/sequence_table.hpp"
#include "tier/cache_file.hpp"

namespace kvx::kv {
namespace {

using cache::BlockKind;
using cache::kNoBlock;
using cache::kNoNode;

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

// The index repeats block_size and kinds beside its fingerprint, and a file may be forged.
Status check_same_cache(const tier::FileIndex& index, std::string_view fingerprint, int block_size,
                        std::span<const tier::StoredBlockKind> kinds, const std::string& path) {
  const std::string reason = reason_not_to_load(index.fingerprint, fingerprint);
  if (!reason.empty()) {
    return invalid_argument("'{}' holds blocks of another cache: {}", path, reason);
  }
  if (index.block_size != block_size) {
    return invalid_argument("'{}': its blocks are of {} tokens; its fingerprint has {}", path,
                            index.block_size, block_size);
  }
  if (std::equal(index.kinds.begin(), index.kinds.end(), kinds.begin(), kinds.end())) return {};
  return invalid_argument("'{}': its kinds of blocks are not those of its fingerprint", path);
}

// ---- the order of codes in the pool and in files

// Rows of a class's blocks whose codes have interleaved order.
std::vector<InterleavedRows> interleaved_rows_of(const CacheStorage& storage, int block_class) {
  std::vector<InterleavedRows> all;
  for (size_t i = 0; i < storage.layers.size(); ++i) {
    if (storage.packed_class(storage.group_of_layer[i]) != block_class) continue;
    const auto rows =
        interleaved_rows(storage.layers[i]->packed(), storage.pool->region(block_class));
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

// Writes a block to the file, codes as files have them.
Result<tier::StoredBlockCopy> write_block(tier::CacheFileWriter& file, const CacheStorage& storage,
                                          Verbs& verbs, int block_class, int32_t id) {
  KVX_ASSIGN_OR_RETURN(const auto bytes, verbs.readable(storage.block_bytes(block_class, id)));
  const std::vector<InterleavedRows> rows = interleaved_rows_of(storage, block_class);
  if (rows.empty()) return file.add_block_copy(block_class, bytes);
  std::vector<uint8_t> reordered(bytes.begin(), bytes.end());
  deinterleave_nibbles(rows, reordered);
  return file.add_block_copy(block_class, reordered);
}

// Reads a file's block into the pool's, codes as the pool has them. `damage`: why the file's block
// cannot be had; the pool's block is then not written.
Status read_block(tier::CacheFileReader& file, const tier::StoredBlockCopy& block_copy,
                  const CacheStorage& storage, Verbs& verbs, int32_t id, Status& damage) {
  const int block_class = block_copy.kind;
  KVX_ASSIGN_OR_RETURN(const auto bytes, verbs.writable(storage.block_bytes(block_class, id)));
  damage = file.read_block_copy(block_copy, bytes);
  if (!damage.ok()) return {};
  interleave_nibbles(interleaved_rows_of(storage, block_class), bytes);
  return verbs.written(storage.block_bytes(block_class, id));
}

// ---- saving

tier::FileIndex empty_index(const SequenceTable& table) {
  const CacheStorage& storage = table.storage;
  return {
      table.prefixes->fingerprint(), storage.config.block_size, {}, block_kinds(storage), {}, {}};
}

// One block of a sequence in one group, its first num_tokens.
struct SequenceBlock {
  int group = 0;
  int block_class = 0;
  int32_t id = kNoBlock;
  int num_tokens = 0;
};

// What lies after an open block's tokens does not leave the pool.
Result<tier::StoredBlockCopy> write_sequence_block(tier::CacheFileWriter& file,
                                                   SequenceTable& table, Verbs& verbs,
                                                   const SequenceBlock& block) {
  const CacheStorage& storage = table.storage;
  if (block.num_tokens == storage.config.block_size) {
    return write_block(file, storage, verbs, block.block_class, block.id);
  }
  AcquiredBlocks copies(*storage.pool);
  KVX_ASSIGN_OR_RETURN(const int32_t copy, copies.acquire(block.block_class));
  storage.pool->clear(block.block_class, copy);
  const bool is_packed = block.block_class == storage.packed_class(block.group);
  const ops::BlockCopy tokens_alone{block.id, copy, block.num_tokens};
  KVX_RETURN_IF_ERROR(verbs.copy_blocks(
      storage.layer_copies(block.group, is_packed ? CopyKind::kPacked : CopyKind::kFullPrecision),
      {&tokens_alone, 1}));
  return write_block(file, storage, verbs, block.block_class, copy);
}

int class_of_block(const CacheStorage& storage, const cache::Sequence& blocks, int group,
                   int64_t block) {
  const bool is_full_precision =
      storage.has_full_precision_window() &&
      (block < blocks.num_sink_blocks(group) || block >= blocks.first_recent_block(group));
  return is_full_precision ? storage.full_precision_class(group) : storage.packed_class(group);
}

Result<tier::FileIndex> write_nodes(tier::CacheFileWriter& file, const SequenceTable& table,
                                    Verbs& verbs, const SaveOptions& options) {
  const cache::PrefixIndex& nodes = table.prefixes->index();
  tier::FileIndex index = empty_index(table);
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
      const auto written = write_block(file, table.storage, verbs, kind, id);
      if (!written.ok()) {
        status = written.error();
        return;
      }
      index.blocks.back().block_copies.push_back(written.value());
    }
    if (options.on_block) options.on_block(std::ssize(index.blocks), num_nodes);
  });
  KVX_RETURN_IF_ERROR(status);
  return index;
}

}  // namespace

Status save_sequence(SequenceTable& table, Verbs& verbs, int sequence, const std::string& path,
                     const SaveOptions& options) {
  const auto lock = table.lock_drained();
  KVX_RETURN_IF_ERROR(table.check_sequence(sequence));
  const cache::Sequence& blocks = table.sequences[sequence];
  const std::span<const int32_t> tokens = table.prefixes->tokens(sequence);
  if (std::ssize(tokens) != blocks.num_tokens() || tokens.empty()) {
    return invalid_argument("sequence {} has {} tokens of which {} are recorded; expected all",
                            sequence, blocks.num_tokens(), tokens.size());
  }
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileWriter::create(path, options.zstd_level));
  tier::FileIndex index = empty_index(table);
  index.scopes.push_back(table.prefixes->keys(sequence));
  const auto block_size = static_cast<size_t>(blocks.block_size());
  const auto num_blocks =
      static_cast<int32_t>(cache::blocks_for(blocks.num_tokens(), blocks.block_size()));
  for (int32_t b = 0; b < num_blocks; ++b) {
    const auto rest = tokens.subspan(b * block_size);
    const auto held = rest.first(std::min(block_size, rest.size()));
    tier::FileBlock& saved = index.blocks.emplace_back();
    saved.parent = b - 1;  // -1 is scope 0
    saved.tokens.assign(held.begin(), held.end());
    for (int g = 0; g < table.storage.num_groups(); ++g) {
      const int32_t id = blocks.table(g)[b];
      if (id == kNoBlock) continue;  // a window has passed it
      const SequenceBlock block{g, class_of_block(table.storage, blocks, g, b), id,
                                static_cast<int>(held.size())};
      KVX_ASSIGN_OR_RETURN(const tier::StoredBlockCopy block_copy,
                           write_sequence_block(file, table, verbs, block));
      saved.block_copies.push_back(block_copy);
    }
    if (options.on_block) options.on_block(b + 1, num_blocks);
  }
  index.sequences.push_back(num_blocks - 1);
  return file.finish(index);
}

Status save_prefixes(const SequenceTable& table, Verbs& verbs, const std::string& path,
                     const SaveOptions& options) {
  const auto lock = table.lock_drained();
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileWriter::create(path, options.zstd_level));
  KVX_ASSIGN_OR_RETURN(const tier::FileIndex index, write_nodes(file, table, verbs, options));
  return file.finish(index);
}

// ---- loading

namespace {

Status check_file(const SequenceTable& table, const tier::FileIndex& index,
                  const std::string& path) {
  const CacheStorage& storage = table.storage;
  return check_same_cache(index, table.prefixes->fingerprint(), storage.config.block_size,
                          block_kinds(storage), path);
}

// Reads a group's blocks of the sequence; ids: where they are, [blocks of the path].
Result<cache::GroupPrefix> read_group(tier::CacheFileReader& file, const SavedSequence& saved,
                                      const CacheStorage& storage, const cache::LayerGroup& facts,
                                      Verbs& verbs, AcquiredBlocks& acquired,
                                      std::vector<int32_t>& ids) {
  KVX_ASSIGN_OR_RETURN(cache::GroupPrefix prefix,
                       shape_of(saved, facts, storage.config.block_size));
  ids.assign(saved.path.size(), kNoBlock);
  for (int64_t b = 0; b < std::ssize(saved.path); ++b) {
    const std::optional<int> kind = kind_of_block(prefix, facts, b);
    if (!kind) continue;
    KVX_ASSIGN_OR_RETURN(ids[b], acquired.acquire(*kind));
    Status damage;
    KVX_RETURN_IF_ERROR(
        read_block(file, *block_copy_of(*saved.path[b], *kind), storage, verbs, ids[b], damage));
    KVX_RETURN_IF_ERROR(damage);
  }
  prefix.ids = ids;
  return prefix;
}

}  // namespace

Result<int> load_sequence(SequenceTable& table, Verbs& verbs, const std::string& path) {
  const auto lock = table.lock_drained();
  const CacheStorage& storage = table.storage;
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  KVX_RETURN_IF_ERROR(check_file(table, file.index(), path));
  const auto with_path = [&path](const Error& error) {
    return Error{error.code, fmt::format("'{}': {}", path, error.message)};
  };
  const Result<SavedSequence> saved = saved_sequence(file.index());
  if (!saved.ok()) return with_path(saved.error());
  const int64_t num_tokens = std::ssize(saved.value().tokens);
  if (num_tokens > storage.config.max_tokens_per_sequence) {
    return out_of_range("'{}' holds {} tokens; max_tokens_per_sequence is {}", path, num_tokens,
                        storage.config.max_tokens_per_sequence);
  }
  AcquiredBlocks acquired(*storage.pool);
  const cache::SequenceShape shape = storage.sequence_shape();
  std::vector<std::vector<int32_t>> ids(shape.groups.size());
  std::vector<cache::GroupPrefix> prefixes;
  for (size_t g = 0; g < shape.groups.size(); ++g) {
    const auto prefix =
        read_group(file, saved.value(), storage, shape.groups[g], verbs, acquired, ids[g]);
    if (!prefix.ok()) return with_path(prefix.error());
    prefixes.push_back(prefix.value());
  }
  return adopt_sequence(table, saved.value(), prefixes);
}

namespace {

// Where a file's blocks go that can be found by their tokens, and what becomes of them.
class PrefixLoader {
 public:
  PrefixLoader(SequenceTable& table, Verbs& verbs, tier::CacheFileReader& file)
      : table_(table),
        verbs_(verbs),
        file_(file),
        nodes_(table.prefixes->index()),
        pinned_(nodes_),
        node_of_(file.index().blocks.size(), kNoNode) {
    report_.num_blocks = std::ssize(file.index().blocks);
  }

  Result<LoadReport> load() {
    for (const cache::PrefixKeys& keys : file_.index().scopes) {
      KVX_ASSIGN_OR_RETURN(const int32_t scope, nodes_.pin_scope(keys));
      pinned_.add_pinned(scope);
      scopes_.push_back(scope);
    }
    for (size_t i = 0; i < file_.index().blocks.size(); ++i) {
      const tier::FileBlock& block = file_.index().blocks[i];
      // The end of a sequence that is no whole block is not found by its tokens.
      if (std::ssize(block.tokens) < table_.storage.config.block_size) continue;
      const int32_t node = insert(block);
      node_of_[i] = node;
      if (node == kNoNode) continue;
      for (const tier::StoredBlockCopy& block_copy : block.block_copies) {
        KVX_RETURN_IF_ERROR(load_block_copy(node, block_copy));
      }
    }
    return report_;
  }

 private:
  void note(int64_t& count, std::string_view problem) {
    ++count;
    if (report_.first_problem.empty()) report_.first_problem = problem;
  }

  int32_t insert(const tier::FileBlock& block) {
    const int32_t parent = block.parent < 0 ? scopes_[-1 - block.parent] : node_of_[block.parent];
    const int32_t node = parent == kNoNode ? kNoNode : nodes_.insert(parent, block.tokens);
    if (node == kNoNode) {
      note(report_.num_no_room, "the prefix index is full");
    } else {
      pinned_.pin(node);
    }
    return node;
  }

  Status load_block_copy(int32_t node, const tier::StoredBlockCopy& block_copy) {
    const tier::StoredBlockKind& facts = file_.index().kinds[block_copy.kind];
    const BlockKind kind = facts.is_full_precision ? BlockKind::kFullPrecision : BlockKind::kPacked;
    cache::BlockPool& pool = *table_.storage.pool;
    if (nodes_.block_of(node, facts.group, kind) != kNoBlock) {
      ++report_.num_known;
      return {};
    }
    if (pool.num_free(block_copy.kind) == 0) {
      note(report_.num_no_room, fmt::format("no free block of {}", pool.name(block_copy.kind)));
      return {};
    }
    AcquiredBlocks acquired(pool);
    KVX_ASSIGN_OR_RETURN(const int32_t id, acquired.acquire(block_copy.kind));
    Status damage;
    KVX_RETURN_IF_ERROR(read_block(file_, block_copy, table_.storage, verbs_, id, damage));
    if (!damage.ok()) {
      note(report_.num_bad, damage.error().message);
      return {};
    }
    KVX_RETURN_IF_ERROR(nodes_.attach(node, facts.group, kind, id));
    ++report_.num_loaded;
    return {};
  }

  SequenceTable& table_;
  Verbs& verbs_;
  tier::CacheFileReader& file_;
  cache::PrefixIndex& nodes_;
  // Until all are read, so that a parent whose own blocks are bad still leads to its children.
  PinnedNodes pinned_;
  std::vector<int32_t> scopes_;
  std::vector<int32_t> node_of_;  // [blocks of the file]
  LoadReport report_;
};

}  // namespace

Result<LoadReport> load_prefixes(SequenceTable& table, Verbs& verbs, const std::string& path) {
  const auto lock = table.lock_drained();
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  KVX_RETURN_IF_ERROR(check_file(table, file.index(), path));
  KVX_ASSIGN_OR_RETURN(const LoadReport report, PrefixLoader(table, verbs, file).load());
  if (report.num_bad != 0) {
    log(LogLevel::kWarning, "{} of {} blocks in {} are damaged and were not loaded; the first: {}",
        report.num_bad, report.num_blocks, path, report.first_problem);
  }
  return report;
}

}  // namespace kvx::kv
