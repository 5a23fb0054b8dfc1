// plan_pool: the budget is shared in the proportion of one sequence's demand.
#include "cache/pool/pool_plan.hpp"

#include <algorithm>
#include <limits>

#include "core/checked.hpp"

namespace kvx::cache {
namespace {

Status check_demand(const ClassDemand& demand) {
  if (demand.block_bytes < 1) {
    return invalid_argument("block_bytes of class '{}' is {}; expected 1 or more", demand.name,
                            demand.block_bytes);
  }
  if (demand.blocks_per_sequence < 0) {
    return invalid_argument("blocks_per_sequence of class '{}' is {}; expected 0 or more",
                            demand.name, demand.blocks_per_sequence);
  }
  return {};
}

Result<int64_t> bytes_of_one_sequence(std::span<const ClassDemand> demands) {
  CheckedSize bytes = 0;
  for (const ClassDemand& demand : demands) {
    KVX_RETURN_IF_ERROR(check_demand(demand));
    bytes = bytes + CheckedSize(demand.block_bytes) * demand.blocks_per_sequence;
  }
  const auto total = bytes.get();
  if (!total) {
    return invalid_argument(
        "blocks_per_sequence of {} classes: the bytes of one sequence do not fit in 63 bits",
        demands.size());
  }
  if (*total == 0) {
    return invalid_argument("blocks_per_sequence is 0 in all {} classes; expected one above 0",
                            demands.size());
  }
  return *total;
}

}  // namespace

Result<PoolPlan> plan_pool(int64_t budget_bytes, std::span<const ClassDemand> demands) {
  KVX_ASSIGN_OR_RETURN(const int64_t sequence_bytes, bytes_of_one_sequence(demands));
  if (budget_bytes < sequence_bytes) {
    return out_of_range("budget_bytes is {}; one sequence needs {}", budget_bytes, sequence_bytes);
  }
  PoolPlan plan;
  plan.num_sequences = budget_bytes / sequence_bytes;
  for (const ClassDemand& demand : demands) {
    constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
    const int64_t num_blocks =
        std::min(mul_div(budget_bytes, demand.blocks_per_sequence, sequence_bytes), kMostBlocks);
    plan.num_blocks.push_back(num_blocks);
    plan.bytes += num_blocks * demand.block_bytes;
    if (demand.blocks_per_sequence > 0) {
      plan.num_sequences = std::min(plan.num_sequences, num_blocks / demand.blocks_per_sequence);
    }
  }
  return plan;
}

}  // namespace kvx::cache
