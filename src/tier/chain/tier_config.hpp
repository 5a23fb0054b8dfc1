// TierConfig: one tier behind a cache's pool, and the text that names a chain of them:
//
//   host(8GiB), disk(/nvme/kvx, 200GiB, policy=2q), redis(redis://10.0.0.7, ttl=1d)
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
  kHost,    // host memory
  kDisk,    // unnamed files of a folder: gone with the process
  kFolder,  // a store: named files of a folder, for every process and machine that has it
  kRedis,   // a store: Redis, Valkey
  kCaller,  // a store: the caller's own code, by the name that it is registered under
};

// Stores outlive the process and have no budget of ours.
inline bool is_store(TierKind kind) {
  return kind == TierKind::kFolder || kind == TierKind::kRedis || kind == TierKind::kCaller;
}

std::string_view name_of(TierKind kind);

struct TierConfig {
  TierKind kind = TierKind::kHost;
  int64_t budget_bytes = 0;  // of blocks
  std::string folder = {};   // of kDisk and kFolder
  cache::EvictionKind eviction = cache::EvictionKind::kLru;
  // Of stores:
  std::string store = {};         // of kCaller: its name
  std::string url = {};           // of kRedis
  std::string password_env = {};  // of kRedis: the variable of the environment with its password
  std::string ca_file = {};       // of kRedis with TLS; empty: the system's certificates
  std::string key_env = {};   // the variable with the key, 64 hexadecimal digits; empty: no cipher
  int64_t ttl_ms = 0;         // of kRedis: how long values stay; 0: for ever
  int64_t timeout_ms = 1000;  // of whoever waits for the store
};

// The tiers that the text names, none of an empty one. INVALID_ARGUMENT quotes the tier that is
// wrong and says how it is written.
Result<std::vector<TierConfig>> parse_tiers(std::string_view text);

}  // namespace kvx::tier
