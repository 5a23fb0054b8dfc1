// plan_pool: how many blocks of each class a memory budget holds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::cache {

struct ClassDemand {
  std::string name;
  int64_t block_bytes = 0;          // of all regions together, so that scales count
  int64_t blocks_per_sequence = 0;  // what one sequence of the intended length holds; 0: none
};

struct PoolPlan {
  std::vector<int64_t> num_blocks;  // of each class, in the demands' order
  int64_t bytes = 0;                // of all blocks; <= the budget
  int64_t num_sequences = 0;        // whole sequences that fit
};

// Shares the budget among the classes in the proportion of one sequence's demand. OUT_OF_RANGE when
// not even one sequence fits: the message says how many bytes one needs. INVALID_ARGUMENT names the
// class and field.
Result<PoolPlan> plan_pool(int64_t budget_bytes, std::span<const ClassDemand> demands);

}  // namespace kvx::cache
