// A caller's store: kvx_store_register and kvx_store_unregister, and the calls between a batch and
// the arrays of the C ABI.
#include <algorithm>
#include <vector>

#include "api/call.hpp"
#include "api/guard.hpp"
#include "kvx/kvx_abi.h"
#include "tier/store/store_registry.hpp"

namespace kvx::boundary {
namespace {

using tier::StoreGet;
using tier::StorePut;

Status status_of(const char* call, kvx_status_t returned) {
  if (number_of(returned) == KVX_STATUS_OK) return {};
  return internal_error("the store's {} returned {}", call, number_of(returned));
}

// Keys as C takes them.
std::vector<const char*> c_keys(std::span<const std::string> keys) {
  std::vector<const char*> pointers;
  for (const std::string& key : keys) pointers.push_back(key.c_str());
  return pointers;
}

template <class Item>
std::vector<const char*> c_keys_of(std::span<Item> items) {
  std::vector<const char*> pointers;
  for (const Item& item : items) pointers.push_back(item.key.c_str());
  return pointers;
}

class CallersStore final : public tier::RemoteStore {
 public:
  explicit CallersStore(const kvx_store_t& hook) : hook_(hook) {}
  ~CallersStore() override {
    if (hook_.release != nullptr) hook_.release(hook_.user);
  }
  // release() is not called. Requires: nobody else has the store.
  void disown() { hook_.release = nullptr; }

  Status put(std::span<StorePut> items) override {
    const std::vector<const char*> keys = c_keys_of(items);
    std::vector<const uint8_t*> values;
    std::vector<uint64_t> bytes;
    std::vector<uint8_t> is_stored(items.size(), 0);
    for (const StorePut& item : items) {
      values.push_back(item.value.data());
      bytes.push_back(item.value.size());
    }
    KVX_RETURN_IF_ERROR(status_of("put", hook_.put(hook_.user, items.size(), keys.data(),
                                                   values.data(), bytes.data(), is_stored.data())));
    for (size_t i = 0; i < items.size(); ++i) items[i].is_stored = is_stored[i] == 1;
    return {};
  }

  Status get(std::span<StoreGet> items) override {
    const std::vector<const char*> keys = c_keys_of(items);
    std::vector<uint8_t*> buffers;
    std::vector<uint64_t> bytes;
    std::vector<int64_t> value_bytes(items.size(), -1);
    for (const StoreGet& item : items) {
      buffers.push_back(item.buffer.data());
      bytes.push_back(item.buffer.size());
    }
    KVX_RETURN_IF_ERROR(
        status_of("get", hook_.get(hook_.user, items.size(), keys.data(), buffers.data(),
                                   bytes.data(), value_bytes.data())));
    for (size_t i = 0; i < items.size(); ++i) items[i].num_bytes = value_bytes[i];
    return {};
  }

  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override {
    std::ranges::fill(has, uint8_t{0});
    return status_of("exists",
                     hook_.exists(hook_.user, keys.size(), c_keys(keys).data(), has.data()));
  }

  Status remove(std::span<const std::string> keys) override {
    return status_of("remove", hook_.remove(hook_.user, keys.size(), c_keys(keys).data()));
  }

  Status remove_all(std::string_view parts) override {
    return status_of("remove_all", hook_.remove_all(hook_.user, std::string(parts).c_str()));
  }

 private:
  kvx_store_t hook_;
};

Status check_name(const char* name) {
  return name == nullptr ? Status{invalid_argument("name is null")} : Status{};
}

Result<std::shared_ptr<CallersStore>> read_store(const kvx_store_t* store) {
  KVX_ASSIGN_OR_RETURN(const kvx_store_t args, read_struct(store, "store"));
  if (args.reserved != 0)
    return invalid_argument("store.reserved is {}; expected 0", args.reserved);
  const std::pair<const char*, bool> calls[] = {{"put", args.put != nullptr},
                                                {"get", args.get != nullptr},
                                                {"exists", args.exists != nullptr},
                                                {"remove", args.remove != nullptr},
                                                {"remove_all", args.remove_all != nullptr}};
  for (const auto& [name, is_there] : calls) {
    if (!is_there) return invalid_argument("store.{} is null; expected a function", name);
  }
  return std::make_shared<CallersStore>(args);
}

// What is refused is still the caller's: its release is not called.
Status register_callers_store(const char* name, const kvx_store_t* caller) {
  KVX_RETURN_IF_ERROR(check_name(name));
  KVX_ASSIGN_OR_RETURN(auto store, read_store(caller));
  const Status registered = tier::register_store(name, store);
  if (!registered.ok()) store->disown();
  return registered;
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_store_register(const char* name, const kvx_store_t* store) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::register_callers_store(name, store); });
}

extern "C" kvx_status_t kvx_store_unregister(const char* name) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    KVX_RETURN_IF_ERROR(kvx::boundary::check_name(name));
    return kvx::tier::unregister_store(name);
  });
}
