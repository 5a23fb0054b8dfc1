// The names of batches of latent rows (MLA): mla64x8192, mla64x8192h16, mlamixed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/kvx/bench/bench_cache.hpp"

namespace kvx::tool {

struct LatentBatch {
  BenchShape shape;
  bool is_mixed = false;  // lengths from 128 to the shape's
};

// SEQUENCESxTOKENS or "mixed" behind "mla", and h16 for 16 query heads, 1 to 128; 128 without.
// Rows are DeepSeek's: 576 numbers, the first 512 of which are V, too. None: another name.
std::optional<LatentBatch> parse_latent_batch(const std::string& name);

// What such a batch is called, "mla64x8192h16".
std::string latent_batch_name(const BenchShape& shape);

// The batches of names with commas, each of one length. like: of the other fields.
Result<std::vector<BenchShape>> parse_latent_shapes(const std::string& names,
                                                    const BenchShape& like);

}  // namespace kvx::tool
