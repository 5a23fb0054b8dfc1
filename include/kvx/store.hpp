// store.hpp: a store of the caller's own, as a tier of any cache (kvx_store_t), in C++.
//
//   class MyStore : public kvx::api::Store { ... };
//   kvx::api::register_store("mine", std::make_shared<MyStore>());
//   config.tiers = "host(8GiB), store(mine)";
#pragma once

#include "kvx/kvx.hpp"

namespace kvx::api {

// Calls come from threads of the library's own, several at once. What is thrown counts as a failed
// call, and so does one that has not returned within the tier's timeout: the store is then left
// alone for a while, and what a call that is late does with its arguments is of no use to anybody.
class Store {
 public:
  struct Put {
    const char* key;
    Span<const uint8_t> value;
    bool is_stored = false;  // the answer; false: there was no room
  };
  struct Get {
    const char* key;
    Span<uint8_t> buffer;
    int64_t value_bytes = -1;  // the answer; -1: there is none, or none that fits
  };

  virtual ~Store() = default;
  // A value under a key that has one replaces it, or is left out.
  virtual void put(Span<Put> items) = 0;
  virtual void get(Span<Get> items) = 0;
  // has[i]: 1 when there is a value under keys[i]; 0 as it comes.
  virtual void exists(Span<const char* const> keys, Span<uint8_t> has) = 0;
  virtual void remove(Span<const char* const> keys) = 0;
  // All keys that begin with these whole parts: "a/b" removes "a/b/c", not "a/bc".
  virtual void remove_all(const char* parts) = 0;
};

// The store lives until its name is unregistered and no cache and no call uses it any more. Errors
// as kvx_store_register's.
inline Status register_store(const std::string& name, std::shared_ptr<Store> store) {
  if (!store) return to_status(kvx_store_register(name.c_str(), nullptr));
  using Kept = std::shared_ptr<Store>;
  const auto hook_of = [](Kept* kept) {
    auto hook = sized<kvx_store_t>();
    hook.user = kept;
    hook.put = [](void* user, uint64_t num_items, const char* const* keys,
                  const uint8_t* const* values, const uint64_t* value_bytes, uint8_t* is_stored) {
      std::vector<Store::Put> items;
      for (uint64_t i = 0; i < num_items; ++i)
        items.push_back({keys[i], {values[i], static_cast<size_t>(value_bytes[i])}});
      (*static_cast<Kept*>(user))->put(Span<Store::Put>(items.data(), items.size()));
      for (uint64_t i = 0; i < num_items; ++i) is_stored[i] = items[i].is_stored ? 1 : 0;
      return KVX_STATUS_OK;
    };
    hook.get = [](void* user, uint64_t num_items, const char* const* keys, uint8_t* const* buffers,
                  const uint64_t* buffer_bytes, int64_t* value_bytes) {
      std::vector<Store::Get> items;
      for (uint64_t i = 0; i < num_items; ++i)
        items.push_back({keys[i], {buffers[i], static_cast<size_t>(buffer_bytes[i])}});
      (*static_cast<Kept*>(user))->get(Span<Store::Get>(items.data(), items.size()));
      for (uint64_t i = 0; i < num_items; ++i) value_bytes[i] = items[i].value_bytes;
      return KVX_STATUS_OK;
    };
    hook.exists = [](void* user, uint64_t num_items, const char* const* keys, uint8_t* has) {
      const auto count = static_cast<size_t>(num_items);
      (*static_cast<Kept*>(user))->exists({keys, count}, {has, count});
      return KVX_STATUS_OK;
    };
    hook.remove = [](void* user, uint64_t num_items, const char* const* keys) {
      (*static_cast<Kept*>(user))->remove({keys, static_cast<size_t>(num_items)});
      return KVX_STATUS_OK;
    };
    hook.remove_all = [](void* user, const char* parts) {
      (*static_cast<Kept*>(user))->remove_all(parts);
      return KVX_STATUS_OK;
    };
    hook.release = [](void* user) { delete static_cast<Kept*>(user); };
    return hook;
  };
  auto kept = std::make_unique<Kept>(std::move(store));
  const kvx_store_t hook = hook_of(kept.get());
  const Status registered = to_status(kvx_store_register(name.c_str(), &hook));
  if (registered.ok()) static_cast<void>(kept.release());
  return registered;
}

inline Status unregister_store(const std::string& name) {
  return to_status(kvx_store_unregister(name.c_str()));
}

}  // namespace kvx::api
