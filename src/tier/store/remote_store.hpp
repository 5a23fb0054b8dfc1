// RemoteStore: what keeps blocks outside this process, by key: five calls, each for a batch. Keys
// are text of letters, digits and "/-._:", at most 255 bytes, without empty parts between slashes.
//
// A store need not be trusted: what it gives back is a record (tier/store/record.hpp) that names
// its block and carries a checksum or a cipher's tag.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/result.hpp"

namespace kvx::tier {

struct StorePut {
  std::string key;
  std::span<const uint8_t> value;
  bool is_stored = false;  // the store's answer; false: it had no room, say
};

struct StoreGet {
  std::string key;
  std::span<uint8_t> buffer;
  int64_t num_bytes = -1;  // the store's answer: of the value; -1: there is none
};

using Arrived = std::function<void(size_t)>;

// Calls come from any thread, several at once. Each returns within a time that the store chooses,
// whatever the other side does. An error means that the store could not be reached or that its
// answers make no sense: what became of the batch is then unknown.
class RemoteStore {
 public:
  virtual ~RemoteStore() = default;
  // A value under a key that has one replaces it, or is left out: they are the same.
  virtual Status put(std::span<StorePut> items) = 0;
  // A value that is larger than its buffer is as none.
  virtual Status get(std::span<StoreGet> items) = 0;
  // The same. arrived(i) is called as soon as items[i] has its answer, which may be while others
  // are on their way and by several threads at once; and once more if it has to be got anew.
  virtual Status get_each(std::span<StoreGet> items, const Arrived& arrived) {
    KVX_RETURN_IF_ERROR(get(items));
    for (size_t i = 0; i < items.size(); ++i) arrived(i);
    return {};
  }
  // has[i]: 1 when there is a value under keys[i], else 0.
  virtual Status exists(std::span<const std::string> keys, std::span<uint8_t> has) = 0;
  virtual Status remove(std::span<const std::string> keys) = 0;
  // All keys that begin with these whole parts: "a/b" removes "a/b/c", not "a/bc".
  virtual Status remove_all(std::string_view parts) = 0;
  // Zeros to memory of its own that values have passed through.
  virtual void scrub() {}
};

// Values are files of a folder, which several machines may mount (NFS). INVALID_ARGUMENT: a folder
// that may not be written.
Result<std::unique_ptr<RemoteStore>> open_folder_store(const std::string& folder);

struct RedisOptions {
  std::string url;              // redis://[user[:password]@]host[:port][/database], or rediss: TLS
  std::string password;         // instead of the URL's; empty: the URL's
  std::string ca_file;          // of TLS; empty: the system's
  int64_t ttl_seconds = 0;      // of values; 0: they stay
  int64_t timeout_ms = 1000;    // of a call's every wait for the other side
  int64_t max_value_bytes = 0;  // larger answers are refused
};

// Redis, Valkey or what speaks their protocol (RESP 2). Nothing is connected before the first call,
// and after a failed one it is tried anew. INVALID_ARGUMENT: another URL.
Result<std::unique_ptr<RemoteStore>> open_redis_store(RedisOptions options);

}  // namespace kvx::tier
