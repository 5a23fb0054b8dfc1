// Erasure: cached blocks that must leave no bytes behind, and how an index finds them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/prefix/prefix_index.hpp"

namespace kvx::cache {

// Either all blocks of keys.tenant, or those under all of the keys that begin with `tokens` as far
// as both go, from block first_block on.
struct Erasure {
  PrefixKeys keys;
  bool is_whole_tenant = false;
  std::span<const int32_t> tokens;
  int64_t first_block = 0;
};

// Parents before children.
std::vector<int32_t> nodes_of(const PrefixIndex& index, const Erasure& erasure);

// One of the nodes' blocks that has a user; kNoBlock: none has.
int32_t block_in_use(const BlockPool& pool, const PrefixIndex& index, const SequenceShape& shape,
                     std::span<const int32_t> nodes);

// The nodes' blocks are forgotten and free; returns how many. Requires: none has a user.
int64_t forget_blocks(BlockPool& pool, PrefixIndex& index, const SequenceShape& shape,
                      std::span<const int32_t> nodes);

// Zeros to all free blocks that were ever used: also what was evicted before has left its bytes
// there.
void clear_free_blocks(BlockPool& pool);

}  // namespace kvx::cache
