// BoundedStore: what each call takes along, and what of its answer is believed.
#include "tier/store/bounded_store.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/caught.hpp"

namespace kvx::tier {
namespace {

// Of one store: two of a tier's threads, one that removes, and some that never return.
constexpr int kMostOpenCalls = 6;

}  // namespace

// ---- one call

Status BoundedStore::run(const char* name, std::function<Status(RemoteStore&)> make) {
  auto call = std::make_shared<Call>();
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->num_open >= kMostOpenCalls) {
      return internal_error("the store has {} calls that have not returned", shared_->num_open);
    }
    ++shared_->num_open;
  }
  auto body = [shared = shared_, store = store_, call, make = std::move(make)]() mutable {
    Status status = caught([&] { return make(*store); });
    make = nullptr;
    store.reset();  // before anybody hears of it: the store may be released here
    const std::lock_guard lock(shared->mutex);
    call->status = std::move(status);
    call->has_returned = true;
    --shared->num_open;
    shared->has_returned.notify_all();
  };
  const Status started = caught([&]() -> Status {
    std::thread(std::move(body)).detach();
    return {};
  });
  std::unique_lock lock(shared_->mutex);
  if (!started.ok()) {
    --shared_->num_open;
    return started;
  }
  if (!shared_->has_returned.wait_for(lock, timeout_, [&] { return call->has_returned; })) {
    return internal_error("the store has not returned from {} within {} ms", name,
                          timeout_.count());
  }
  return call->status;
}

BoundedStore::Memory BoundedStore::take_memory(size_t bytes) {
  Memory memory;
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->rested_memory.empty()) {
      memory = std::move(shared_->rested_memory.back());
      shared_->rested_memory.pop_back();
    }
  }
  if (memory.size() < bytes) memory.resize(bytes);
  return memory;
}

void BoundedStore::rest(Memory memory) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->rested_memory.size() < kMostOpenCalls) {
    shared_->rested_memory.push_back(std::move(memory));
  }
}

void BoundedStore::scrub() {
  const std::lock_guard lock(shared_->mutex);
  for (Memory& memory : shared_->rested_memory) std::ranges::fill(memory, uint8_t{0});
}

// ---- the five

namespace {

// A batch with its values or buffers in memory of its own, one behind the other.
template <class Item>
struct Batch {
  std::vector<uint8_t> memory;
  std::vector<Item> items;
};

template <class Item>
size_t total_bytes(std::span<const Item> items, std::span<const uint8_t> (*bytes_of)(const Item&)) {
  size_t total = 0;
  for (const Item& item : items) total += bytes_of(item).size();
  return total;
}

}  // namespace

Status BoundedStore::put(std::span<StorePut> items) {
  auto batch = std::make_shared<Batch<StorePut>>();
  batch->memory =
      take_memory(total_bytes<StorePut>(items, [](const StorePut& one) { return one.value; }));
  uint8_t* at = batch->memory.data();
  for (const StorePut& item : items) {
    std::ranges::copy(item.value, at);
    batch->items.push_back({item.key, {at, item.value.size()}});
    at += item.value.size();
  }
  KVX_RETURN_IF_ERROR(run("put", [batch](RemoteStore& store) { return store.put(batch->items); }));
  for (size_t i = 0; i < items.size(); ++i) items[i].is_stored = batch->items[i].is_stored;
  rest(std::move(batch->memory));
  return {};
}

Status BoundedStore::get(std::span<StoreGet> items) {
  auto batch = std::make_shared<Batch<StoreGet>>();
  batch->memory = take_memory(total_bytes<StoreGet>(
      items, [](const StoreGet& one) { return std::span<const uint8_t>(one.buffer); }));
  uint8_t* at = batch->memory.data();
  for (const StoreGet& item : items) {
    batch->items.push_back({item.key, {at, item.buffer.size()}});
    at += item.buffer.size();
  }
  KVX_RETURN_IF_ERROR(run("get", [batch](RemoteStore& store) { return store.get(batch->items); }));
  at = batch->memory.data();
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t bytes = batch->items[i].num_bytes;
    const bool fits = bytes >= 0 && bytes <= std::ssize(items[i].buffer);
    items[i].num_bytes = fits ? bytes : -1;
    if (fits) std::copy_n(at, bytes, items[i].buffer.data());
    at += items[i].buffer.size();
  }
  rest(std::move(batch->memory));
  return {};
}

Status BoundedStore::exists(std::span<const std::string> keys, std::span<uint8_t> has) {
  struct Question {
    std::vector<std::string> keys;
    std::vector<uint8_t> has;
  };
  auto question = std::make_shared<Question>();
  question->keys.assign(keys.begin(), keys.end());
  question->has.resize(keys.size());
  KVX_RETURN_IF_ERROR(run("exists", [question](RemoteStore& store) {
    return store.exists(question->keys, question->has);
  }));
  for (size_t i = 0; i < keys.size(); ++i) has[i] = question->has[i] == 1 ? 1 : 0;
  return {};
}

Status BoundedStore::remove(std::span<const std::string> keys) {
  return run("remove", [kept = std::vector<std::string>(keys.begin(), keys.end())](
                           RemoteStore& store) { return store.remove(kept); });
}

Status BoundedStore::remove_all(std::string_view parts) {
  return run("remove_all",
             [kept = std::string(parts)](RemoteStore& store) { return store.remove_all(kept); });
}

}  // namespace kvx::tier
