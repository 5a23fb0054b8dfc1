// Pages as an engine keeps them: codes in its own order of tokens and heads, scales in regions of
// their own, so that the verbs are measured on callers' memory too.
#pragma once

#include <string_view>

#include "cache/pool/memory.hpp"
#include "ops/cache_view.hpp"

namespace kvx::tool {

enum class PageOrder { kPool, kNhd, kHnd };

struct PageLayout {
  PageOrder order = PageOrder::kPool;
  int block_size = 0;  // 0: the call's
};

// "pool", or "nhd16", "hnd64", ...: the order and the tokens of a block.
Result<PageLayout> parse_page_layout(std::string_view name);

// Points a run's codes and computed scales to new memory in that order. Given scales stay.
//   [K codes][V codes][K scales][V scales], each [block][token][head][row] or
//   [block][head][token][row]
Result<cache::Region> lay_out_pages(cache::Memory& memory, PageOrder order, int64_t num_blocks,
                                    int block_size, ops::HeadRun& run);

// The same for one head's rows that are keys and values: K's, and V is as many of their first
// numbers as it has. Codes, then scales, a row after another.
Result<cache::Region> lay_out_latent_pages(cache::Memory& memory, int64_t num_blocks,
                                           int block_size, ops::HeadRun& run);

}  // namespace kvx::tool
