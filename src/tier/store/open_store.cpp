// Stores from their tiers' text.
#include "tier/store/open_store.hpp"

#include <algorithm>
#include <cstdlib>

#include "tier/store/bounded_store.hpp"
#include "tier/store/store_registry.hpp"

namespace kvx::tier {
namespace {

Result<std::string> read_variable(std::string_view option, const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  if (value != nullptr && *value != '\0') return std::string(value);
  return invalid_argument("tiers has {}={}, a variable that is not set; expected one that is",
                          option, name);
}

}  // namespace

Result<std::shared_ptr<RemoteStore>> open_store(const TierConfig& config, int64_t max_value_bytes) {
  if (config.kind == TierKind::kFolder) {
    KVX_ASSIGN_OR_RETURN(auto store, open_folder_store(config.folder));
    return std::shared_ptr<RemoteStore>(std::move(store));
  }
  if (config.kind == TierKind::kCaller) {
    KVX_ASSIGN_OR_RETURN(auto store, find_registered_store(config.store));
    return std::shared_ptr<RemoteStore>(std::make_shared<BoundedStore>(
        std::move(store), std::chrono::milliseconds(config.timeout_ms)));
  }
  RedisOptions options;
  options.url = config.url;
  options.ca_file = config.ca_file;
  options.ttl_seconds = std::max<int64_t>(config.ttl_ms / 1000, config.ttl_ms > 0 ? 1 : 0);
  options.timeout_ms = config.timeout_ms;
  options.max_value_bytes = max_value_bytes;
  if (!config.password_env.empty()) {
    KVX_ASSIGN_OR_RETURN(options.password, read_variable("password_env", config.password_env));
  }
  KVX_ASSIGN_OR_RETURN(auto store, open_redis_store(std::move(options)));
  return std::shared_ptr<RemoteStore>(std::move(store));
}

Result<std::optional<RecordKey>> record_key_of(const TierConfig& config) {
  if (config.key_env.empty()) return std::optional<RecordKey>();
  KVX_ASSIGN_OR_RETURN(const std::string digits, read_variable("key_env", config.key_env));
  KVX_ASSIGN_OR_RETURN(RecordKey key, parse_record_key(digits));
  return std::optional<RecordKey>(key);
}

}  // namespace kvx::tier
