// Erasure: one walk over an index's nodes, then over the blocks of those that are meant.
#include "cache/prefix/erasure.hpp"

#include <algorithm>

namespace kvx::cache {
namespace {

// A node's way from its scope: which block it is, and whether it is a session's so far.
struct Way {
  int64_t block = -1;
  bool agrees = false;
};

// Whether the block's tokens are those of the session, as far as it has any there.
bool agree(std::span<const int32_t> block, std::span<const int32_t> tokens, int64_t first) {
  if (first >= std::ssize(tokens)) return true;
  const size_t count = std::min(block.size(), tokens.size() - static_cast<size_t>(first));
  return std::ranges::equal(block.first(count), tokens.subspan(static_cast<size_t>(first), count));
}

// Calls visit(class, id) for each block of the node.
template <class Visit>
void for_each_block(const PrefixIndex& index, const SequenceShape& shape, int32_t node,
                    const Visit& visit) {
  for (int group = 0; group < static_cast<int>(shape.groups.size()); ++group) {
    for (const BlockKind kind : {BlockKind::kPacked, BlockKind::kFullPrecision}) {
      const LayerGroup& facts = shape.groups[group];
      const int32_t id = index.block_of(node, group, kind);
      if (id == kNoBlock) continue;
      visit(kind == BlockKind::kPacked ? facts.packed_class : facts.full_precision_class, id);
    }
  }
}

}  // namespace

std::vector<int32_t> nodes_of(const PrefixIndex& index, const Erasure& erasure) {
  std::vector<int32_t> meant;
  std::vector<Way> ways(static_cast<size_t>(index.max_nodes()));
  index.for_each_node([&](int32_t node) {
    const int32_t parent = index.parent(node);
    if (index.is_scope(parent)) {
      const PrefixKeys& keys = index.keys(parent);
      ways[parent].agrees =
          erasure.is_whole_tenant ? keys.tenant == erasure.keys.tenant : keys == erasure.keys;
    }
    Way& way = ways[node];
    way.block = ways[parent].block + 1;
    const std::span<const int32_t> tokens = index.tokens(node);
    way.agrees =
        ways[parent].agrees &&
        (erasure.is_whole_tenant || agree(tokens, erasure.tokens, way.block * std::ssize(tokens)));
    if (way.agrees && way.block >= erasure.first_block) meant.push_back(node);
  });
  return meant;
}

int32_t block_in_use(const BlockPool& pool, const PrefixIndex& index, const SequenceShape& shape,
                     std::span<const int32_t> nodes) {
  int32_t found = kNoBlock;
  for (const int32_t node : nodes) {
    for_each_block(index, shape, node, [&](int block_class, int32_t id) {
      if (pool.use_count(block_class, id) > 0) found = id;
    });
  }
  return found;
}

int64_t forget_blocks(BlockPool& pool, PrefixIndex& index, const SequenceShape& shape,
                      std::span<const int32_t> nodes) {
  std::vector<std::pair<int, int32_t>> blocks;
  // Children first: a node goes when it has neither blocks nor children.
  for (size_t i = nodes.size(); i-- > 0;) {
    for_each_block(index, shape, nodes[i],
                   [&](int block_class, int32_t id) { blocks.emplace_back(block_class, id); });
  }
  for (const auto& [block_class, id] : blocks) {
    index.on_evict(block_class, id);
    (void)pool.discard(block_class, id);
  }
  return std::ssize(blocks);
}

void clear_free_blocks(BlockPool& pool) {
  if (pool.zeroes_on_free()) return;
  for (int c = 0; c < pool.num_classes(); ++c) {
    for (int32_t id = 0; id < pool.num_blocks(c); ++id) {
      const bool is_free = pool.use_count(c, id) == 0 && !pool.is_kept(c, id);
      if (is_free && pool.generation(c, id) > 0) pool.clear(c, id);
    }
  }
}

}  // namespace kvx::cache
