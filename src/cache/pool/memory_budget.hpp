// MemoryBudget: how much memory a pool may take, as engines say it: bytes, blocks, or a share of
// what is there.
#pragma once

#include <cstdint>
#include <string_view>
#include <variant>

#include "core/result.hpp"

namespace kvx::cache {

struct BudgetBytes {
  int64_t bytes = 0;
};
struct BudgetBlocks {
  int64_t num_blocks = 0;
};
struct BudgetRatio {
  double ratio = 0;  // above 0, at most 1
};
using MemoryBudget = std::variant<BudgetBytes, BudgetBlocks, BudgetRatio>;

// "4GiB", "512MiB", "64KiB" or "4096B" are bytes; "1000" counts blocks; "0.8" or "1.0", with a
// point, is a ratio. INVALID_ARGUMENT names the text and what was expected.
Result<MemoryBudget> parse_memory_budget(std::string_view text);

// In bytes. available_bytes: what a ratio is a share of; block_bytes: what one block takes in all
// its regions, the full-precision window's share included. OUT_OF_RANGE: less than one block.
Result<int64_t> resolve_budget(const MemoryBudget& budget, int64_t available_bytes,
                               int64_t block_bytes);

}  // namespace kvx::cache
