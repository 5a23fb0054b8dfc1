// Stores of callers by name, as store(NAME) in a tiers text finds them. From any thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tier/store/remote_store.hpp"

namespace kvx::tier {

// INVALID_ARGUMENT: a name that is no letters, digits, "-" and "_", at most 64, or one that is
// registered already.
Status register_store(std::string_view name, std::shared_ptr<RemoteStore> store);
// Caches that have the store keep it. INVALID_ARGUMENT: nobody registered the name.
Status unregister_store(std::string_view name);
// INVALID_ARGUMENT names those that there are.
Result<std::shared_ptr<RemoteStore>> find_registered_store(std::string_view name);

// In the order of the alphabet.
std::vector<std::string> registered_stores();

}  // namespace kvx::tier
