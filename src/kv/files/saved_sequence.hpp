// SavedSequence: a sequence as an index describes it (tier/cache_file.hpp), on its way from a file
// or another process into a cache.
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv/sequence_table.hpp"
#include "tier/cache_file.hpp"

namespace kvx::kv {

// Blocks acquired for a file's bytes: released unless somebody else uses them by then.
class AcquiredBlocks {
 public:
  explicit AcquiredBlocks(cache::BlockPool& pool) : pool_(pool) {}
  AcquiredBlocks(const AcquiredBlocks&) = delete;
  AcquiredBlocks& operator=(const AcquiredBlocks&) = delete;
  ~AcquiredBlocks() {
    for (const auto& [block_class, id] : blocks_) (void)pool_.release(block_class, id);
  }
  Result<int32_t> acquire(int block_class) {
    int32_t id = cache::kNoBlock;
    KVX_RETURN_IF_ERROR(pool_.allocate(block_class, std::span(&id, 1)));
    blocks_.emplace_back(block_class, id);
    return id;
  }

 private:
  cache::BlockPool& pool_;
  std::vector<std::pair<int, int32_t>> blocks_;
};

// A saved sequence's way through the file, and what each group holds of it.
struct SavedSequence {
  std::vector<const tier::FileBlock*> path;
  std::vector<int32_t> tokens;
  cache::PrefixKeys keys;
};

// INVALID_ARGUMENT: the index names no sequence.
Result<SavedSequence> saved_sequence(const tier::FileIndex& index);
// Which blocks of a group are there and which are full-precision; the file may be missing any of
// them.
// INVALID_ARGUMENT: blocks are missing.
Result<cache::GroupPrefix> shape_of(const SavedSequence& saved, const cache::LayerGroup& facts,
                                    int64_t block_size);
// In which kind the sequence has a block of the group; none: a window has passed it.
std::optional<int> kind_of_block(const cache::GroupPrefix& prefix, const cache::LayerGroup& facts,
                                 int64_t block);
// The block's copy of this kind; null: it has none.
const tier::StoredBlockCopy* block_copy_of(const tier::FileBlock& block, int kind);
// A new sequence of these blocks, each with one more user. Requires: the table's lock.
Result<int> adopt_sequence(SequenceTable& table, const SavedSequence& saved,
                           std::span<const cache::GroupPrefix> prefixes);

}  // namespace kvx::kv
