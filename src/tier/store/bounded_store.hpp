// BoundedStore: a store that is somebody else's code: its calls may throw, hang, or answer
// anything. Each call is made by a thread of its own, on memory of its own, and whoever waits for
// it waits no longer than the timeout. A call that returns later is of no use to anybody; its
// thread, its memory and its share of the store end with it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tier/store/remote_store.hpp"

namespace kvx::tier {

class BoundedStore final : public RemoteStore {
 public:
  BoundedStore(std::shared_ptr<RemoteStore> store, std::chrono::milliseconds timeout)
      : store_(std::move(store)), timeout_(timeout), shared_(std::make_shared<Shared>()) {}

  // INTERNAL_ERROR: the store's own error, its exception's text, no return within the timeout, or
  // too many earlier calls that have not returned.
  Status put(std::span<StorePut> items) override;
  Status get(std::span<StoreGet> items) override;
  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override;
  Status remove(std::span<const std::string> keys) override;
  Status remove_all(std::string_view parts) override;
  void scrub() override;

 private:
  using Memory = std::vector<uint8_t>;
  // What the calls' threads may still use when the store is gone.
  struct Shared {
    std::mutex mutex;
    std::condition_variable has_returned;
    int num_open = 0;                   // calls that have not returned
    std::vector<Memory> rested_memory;  // of calls that have, for the next ones
  };
  struct Call {
    Status status;
    bool has_returned = false;
  };

  // make() may outlive this call and all that its caller owns.
  Status run(const char* name, std::function<Status(RemoteStore&)> make);
  // At least so many bytes; its content is any.
  Memory take_memory(size_t bytes);
  void rest(Memory memory);

  const std::shared_ptr<RemoteStore> store_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace kvx::tier
