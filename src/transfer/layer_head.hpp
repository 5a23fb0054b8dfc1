// SequenceHead of a transfer: what an importer must know of a sequence before its layers come.
//
//   head   [u32 number of layers][u32 0][u64 index_bytes][u64 index_offset]
//          [index: a cache file's (tier/cache_file.hpp), whose block copies lie raw one after the
//           other, their checksums zeros]
//          each layer: [u32 group][u32 0] and where its page lies in a block,
//                      [u64 offset][u64 bytes] in packed ones and in full-precision ones
//          [16 bytes: XXH3-128 of all before]
//
// A layer's pages are its parts of the index's block copies, block by block.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/files/layer_places.hpp"
#include "tier/cache_file.hpp"

namespace kvx::transfer {

struct SequenceHead {
  tier::FileIndex index;
  std::vector<kv::LayerPlaces> layers;
};

// One of a layer's pages.
struct PageOfLayer {
  const tier::StoredBlockCopy* block_copy = nullptr;  // of the index
  kv::PagePlace place;                                // in the block copy
};

// Block copies one after the other, as in a cache file; where its index begins.
int64_t lay_out_block_copies(tier::FileIndex& index);

std::vector<uint8_t> encode_head(SequenceHead head);
// INVALID_ARGUMENT: damaged, or places that lie outside their blocks.
Result<SequenceHead> parse_head(std::span<const uint8_t> bytes);

// Requires: parse_head()'s, or one whose places lie in its blocks.
std::vector<PageOfLayer> pages_of(const SequenceHead& head, int layer);

}  // namespace kvx::transfer
