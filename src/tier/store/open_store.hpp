// From a tier's text to its store.
#pragma once

#include <memory>
#include <optional>

#include "tier/chain/tier_config.hpp"
#include "tier/store/record.hpp"
#include "tier/store/remote_store.hpp"

namespace kvx::tier {

// INVALID_ARGUMENT: a URL or folder that the store refuses, a variable of the environment that is
// not set. Requires: is_store(config.kind).
Result<std::shared_ptr<RemoteStore>> open_store(const TierConfig& config, int64_t max_value_bytes);

// The key that records are enciphered with; none: they are not. INVALID_ARGUMENT: the variable is
// not set, or holds no key.
Result<std::optional<RecordKey>> record_key_of(const TierConfig& config);

}  // namespace kvx::tier
