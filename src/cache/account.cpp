// The memory account: sums over blocks, layers and groups.
#include "cache/account.hpp"

#include <algorithm>

#include "core/checked.hpp"

namespace kvx::cache {
namespace {

// Blocks full of tokens.
ByteCount block_bytes(const BlockLayout& layout, int64_t num_blocks) {
  return {num_blocks * layout.code_bytes(), num_blocks * layout.scale_bytes(),
          num_blocks * layout.padding_bytes()};
}

// Blocks with num_tokens in them.
ByteCount token_bytes(const BlockLayout& layout, int64_t num_blocks, int64_t num_tokens) {
  ByteCount bytes;
  bytes.codes = num_tokens * layout.token_code_bytes;
  bytes.scales = num_tokens * layout.token_scale_bytes + num_blocks * layout.page_scale_bytes;
  bytes.padding = num_blocks * layout.block_bytes - bytes.codes - bytes.scales;
  return bytes;
}

// Tokens [first_token, num_tokens) of a sequence, in the blocks that hold them.
ByteCount group_bytes(const GroupSizes& group, int64_t first_token, int64_t num_tokens) {
  const int64_t block_size = group.packed->block_size;
  const int64_t first_block = first_token / block_size;
  const BlockCounts blocks =
      count_blocks(group.full_precision_window, num_tokens, block_size, first_block);
  const int64_t tokens = num_tokens - first_token;
  if (!group.full_precision_window.is_on())
    return token_bytes(*group.packed, blocks.packed, tokens);
  // The open block is full-precision, hence packed ones are full; the first may be seen in part.
  const bool starts_packed =
      first_block >= group.full_precision_window.sink_blocks && blocks.packed > 0;
  const int64_t unseen = starts_packed ? first_token % block_size : 0;
  const int64_t packed_tokens = blocks.packed * block_size - unseen;
  ByteCount bytes = token_bytes(*group.packed, blocks.packed, packed_tokens);
  bytes += token_bytes(*group.full_precision, blocks.full_precision, tokens - packed_tokens);
  return bytes;
}

// Sinks are stored as a sequence's first block is.
const BlockLayout& layout_of_sinks(const GroupSizes& group) {
  return group.full_precision_window.is_on() ? *group.full_precision : *group.packed;
}

}  // namespace

ByteCount& ByteCount::operator+=(const ByteCount& other) {
  codes += other.codes;
  scales += other.scales;
  padding += other.padding;
  return *this;
}

PoolAccount account_pool(const BlockPool& pool, std::span<const BlockLayout> layouts) {
  PoolAccount account;
  for (int i = 0; i < pool.num_classes(); ++i) {
    ClassAccount one{pool.name(i), block_bytes(layouts[i], pool.num_blocks(i)),
                     block_bytes(layouts[i], pool.num_used(i))};
    account.allocated += one.allocated;
    account.used += one.used;
    account.classes.push_back(std::move(one));
  }
  return account;
}

double bytes_per_token(std::span<const GroupSizes> groups) {
  double bytes = 0;
  for (const GroupSizes& group : groups) {
    bytes += static_cast<double>(group.packed->block_bytes) /
             static_cast<double>(group.packed->block_size);
  }
  return bytes;
}

ByteCount sequence_bytes(std::span<const GroupSizes> groups, int64_t num_tokens) {
  ByteCount bytes;
  for (const GroupSizes& group : groups) {
    const int64_t block_size = group.packed->block_size;
    const int64_t first_block = expired_blocks(num_tokens, group.window, block_size);
    bytes += group_bytes(group, first_block * block_size, num_tokens);
    const int64_t sink_blocks = std::min(blocks_for(group.sinks, block_size), first_block);
    bytes += token_bytes(layout_of_sinks(group), sink_blocks, sink_blocks * block_size);
  }
  return bytes;
}

int64_t tokens_that_fit(std::span<const GroupSizes> groups, int64_t num_bytes,
                        int64_t context_tokens) {
  if (context_tokens < 1) return 0;
  return mul_div(num_bytes, context_tokens, sequence_bytes(groups, context_tokens).total());
}

int64_t bytes_read_per_step(std::span<const GroupSizes> groups, int64_t num_tokens) {
  int64_t bytes = 0;
  for (const GroupSizes& group : groups) {
    const int64_t seen = group.window > 0 ? std::min(num_tokens, group.window) : num_tokens;
    const ByteCount read = group_bytes(group, num_tokens - seen, num_tokens);
    bytes += read.codes + read.scales;
    const int64_t sinks = std::min(group.sinks, num_tokens - seen);
    const int64_t sink_blocks = blocks_for(sinks, group.packed->block_size);
    const ByteCount sink_bytes = token_bytes(layout_of_sinks(group), sink_blocks, sinks);
    bytes += sink_bytes.codes + sink_bytes.scales;
  }
  return bytes;
}

}  // namespace kvx::cache
