// The registered stores: a map behind a lock.
#include "tier/store/store_registry.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

namespace kvx::tier {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<RemoteStore>, std::less<>> stores;
};

// Never destroyed: a store may be released by a thread that outlives static objects.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

Status check_name(std::string_view name) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
  constexpr size_t kMostLetters = 64;
  if (!name.empty() && name.size() <= kMostLetters &&
      name.find_first_not_of(kLetters) == std::string_view::npos) {
    return {};
  }
  return invalid_argument("name is '{}'; expected 1 to {} letters, digits, '-' or '_'", name,
                          kMostLetters);
}

}  // namespace

Status register_store(std::string_view name, std::shared_ptr<RemoteStore> store) {
  KVX_RETURN_IF_ERROR(check_name(name));
  const std::lock_guard lock(registry().mutex);
  if (registry().stores.emplace(name, std::move(store)).second) return {};
  return invalid_argument("name is '{}', which is registered; unregister it first", name);
}

Status unregister_store(std::string_view name) {
  std::shared_ptr<RemoteStore> store;  // it goes after the lock: its end may be the caller's code
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().stores.find(name);
  if (found == registry().stores.end()) {
    return invalid_argument("name is '{}', under which no store is registered", name);
  }
  store = std::move(found->second);
  registry().stores.erase(found);
  return {};
}

Result<std::shared_ptr<RemoteStore>> find_registered_store(std::string_view name) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().stores.find(name);
  if (found != registry().stores.end()) return found->second;
  std::vector<std::string_view> known;
  for (const auto& [one, store] : registry().stores) known.push_back(one);
  if (known.empty()) {
    return invalid_argument("tiers has store({}); expected a registered store, and there is none",
                            name);
  }
  return invalid_argument("tiers has store({}); expected a registered store: {}", name,
                          fmt::join(known, ", "));
}

std::vector<std::string> registered_stores() {
  const std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, store] : registry().stores) names.push_back(name);
  return names;
}

}  // namespace kvx::tier
