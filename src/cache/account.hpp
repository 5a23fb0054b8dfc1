// The memory account: what a cache has allocated, what it uses, and what a decode step reads. Pure
// numbers; printing happens elsewhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache/block_layout.hpp"
#include "cache/full_precision_window.hpp"
#include "cache/pool/block_pool.hpp"

namespace kvx::cache {

struct ByteCount {
  int64_t codes = 0;
  int64_t scales = 0;
  int64_t padding = 0;  // alignment, and a block's places without a token

  int64_t total() const { return codes + scales + padding; }
  ByteCount& operator+=(const ByteCount& other);
};

struct ClassAccount {
  std::string name;
  ByteCount allocated;  // all blocks
  ByteCount used;       // blocks in use
};

struct PoolAccount {
  std::vector<ClassAccount> classes;
  ByteCount allocated;
  ByteCount used;
};

// layouts: of each class of the pool. Requires: layouts.size() == pool.num_classes(), every class
// has one region of its layout's block_bytes.
PoolAccount account_pool(const BlockPool& pool, std::span<const BlockLayout> layouts);

// A layer group as the account sees it. full-precision is null without full-precision window.
struct GroupSizes {
  const BlockLayout* packed = nullptr;
  const BlockLayout* full_precision = nullptr;
  FullPrecisionWindow full_precision_window;
  int64_t window = 0;  // tokens; 0: every token is read
  int64_t sinks =
      0;  // tokens that a window does not leave behind; with full-precision window in their head
};

// Bytes of one token, packed (padding and page scales' share included), all groups together.
double bytes_per_token(std::span<const GroupSizes> groups);

// Whole blocks of one sequence of num_tokens; sliding windows hold what a next token reads.
// padding counts the open block's empty places.
ByteCount sequence_bytes(std::span<const GroupSizes> groups, int64_t num_tokens);

// Tokens that fit in num_bytes when every sequence is context_tokens long, its full-precision
// window and open blocks included. Parts of a sequence count. 0 when context_tokens < 1.
int64_t tokens_that_fit(std::span<const GroupSizes> groups, int64_t num_bytes,
                        int64_t context_tokens);

// K and V bytes that attention of one new token reads when num_tokens are in the cache, itself
// included: codes and scales of the tokens that it sees, no padding.
int64_t bytes_read_per_step(std::span<const GroupSizes> groups, int64_t num_tokens);

}  // namespace kvx::cache
