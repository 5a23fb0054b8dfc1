// Saved sequences: what an index says of one, checked, and how it becomes a cache's.
#include "kv/files/saved_sequence.hpp"

#include <algorithm>

namespace kvx::kv {

const tier::StoredBlockCopy* block_copy_of(const tier::FileBlock& block, int kind) {
  for (const tier::StoredBlockCopy& block_copy : block.block_copies) {
    if (block_copy.kind == kind) return &block_copy;
  }
  return nullptr;
}

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

Result<cache::GroupPrefix> shape_of(const SavedSequence& saved, const cache::LayerGroup& facts,
                                    int64_t block_size) {
  const auto num_blocks = static_cast<int64_t>(saved.path.size());
  const auto num_tokens = static_cast<int64_t>(saved.tokens.size());
  const cache::FullPrecisionWindow& in_full = facts.full_precision_window;
  const auto has = [&](int64_t block, int kind) {
    return block_copy_of(*saved.path[block], kind) != nullptr;
  };
  cache::GroupPrefix prefix;
  prefix.first_recent_block = num_blocks;
  while (in_full.is_on() && prefix.first_recent_block > in_full.sink_blocks &&
         has(prefix.first_recent_block - 1, facts.full_precision_class)) {
    --prefix.first_recent_block;
  }
  const auto kind_of = [&](int64_t block) {
    const bool is_full_precision =
        in_full.is_on() && (block < in_full.sink_blocks || block >= prefix.first_recent_block);
    return is_full_precision ? facts.full_precision_class : facts.packed_class;
  };
  prefix.first_block = num_blocks;
  while (prefix.first_block > 0 && has(prefix.first_block - 1, kind_of(prefix.first_block - 1))) {
    --prefix.first_block;
  }
  const int64_t sinks_end = std::min(facts.window_sink_blocks, prefix.first_block);
  for (int64_t block = 0; block < sinks_end; ++block) {
    if (has(block, kind_of(block))) continue;
    return invalid_argument("block {} of its sequence, a sink, is missing", block);
  }
  // A block that is open stays in 16 bits, and the window has its size.
  const bool window_fits =
      !in_full.is_on() ||
      (num_blocks - prefix.first_recent_block <= in_full.recent_blocks &&
       (num_tokens % block_size == 0 || prefix.first_recent_block < num_blocks ||
        num_blocks <= in_full.sink_blocks));
  if (prefix.first_block <= cache::expired_blocks(num_tokens, facts.window, block_size) &&
      window_fits) {
    return prefix;
  }
  return invalid_argument("block {} of its sequence is missing", prefix.first_block - 1);
}

std::optional<int> kind_of_block(const cache::GroupPrefix& prefix, const cache::LayerGroup& facts,
                                 int64_t block) {
  if (block < prefix.first_block && block >= facts.window_sink_blocks) return std::nullopt;
  const bool is_full_precision =
      facts.full_precision_window.is_on() &&
      (block < facts.full_precision_window.sink_blocks || block >= prefix.first_recent_block);
  return is_full_precision ? facts.full_precision_class : facts.packed_class;
}

Result<int> adopt_sequence(SequenceTable& table, const SavedSequence& saved,
                           std::span<const cache::GroupPrefix> prefixes) {
  cache::BlockPool& pool = *table.storage.pool;
  KVX_ASSIGN_OR_RETURN(const int sequence, table.acquire_sequence());
  KVX_RETURN_IF_ERROR(table.prefixes->begin(sequence, saved.keys));
  cache::Sequence& blocks = table.sequences[sequence];
  Status status = blocks.adopt(pool, std::ssize(saved.tokens), prefixes);
  if (status.ok()) status = table.prefixes->record(sequence, blocks, saved.tokens);
  if (!status.ok()) {
    table.prefixes->end(sequence);
    KVX_RETURN_IF_ERROR(blocks.clear(pool));
    return status.error();
  }
  table.uses[sequence] = SequenceUse::kIdle;
  return sequence;
}

}  // namespace kvx::kv
