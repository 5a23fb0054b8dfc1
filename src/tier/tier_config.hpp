// TierConfig: one tier behind a cache's pool, and the text that names a chain of them:
//
//   host(8GiB), disk(/nvme/kvx, 200GiB, policy=2q), folder(/mnt/nfs/kvx)
//
// The order is the user's: the nearest tier first.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cache/prefix/eviction_policy.hpp"
#include "core/result.hpp"

namespace kvx::tier {

enum class TierKind : uint8_t {
  kHost,  // host memory
  kDisk,  // unnamed files of a folder: gone with the process
};

std::string_view name_of(TierKind kind);

struct TierConfig {
  TierKind kind = TierKind::kHost;
  int64_t budget_bytes = 0;  // of blocks
  std::string folder = {};   // of kDisk
  cache::EvictionKind eviction = cache::EvictionKind::kLru;
};

// The tiers that the text names, none of an empty one. INVALID_ARGUMENT quotes the tier that is
// wrong and says how it is written.
Result<std::vector<TierConfig>> parse_tiers(std::string_view text);

}  // namespace kvx::tier
