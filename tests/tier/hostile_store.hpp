// Stores that a tier must survive: one that keeps values in a map and can be told to misbehave.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tier/store/remote_store.hpp"

namespace kvx::tier {

class MapStore : public RemoteStore {
 public:
  Status put(std::span<StorePut> items) override {
    const std::lock_guard lock(mutex_);
    for (StorePut& item : items) {
      values_[item.key].assign(item.value.begin(), item.value.end());
      item.is_stored = true;
    }
    return {};
  }
  Status get(std::span<StoreGet> items) override {
    const std::lock_guard lock(mutex_);
    for (StoreGet& item : items) {
      const auto found = values_.find(item.key);
      item.num_bytes = -1;
      if (found == values_.end() || found->second.size() > item.buffer.size()) continue;
      std::ranges::copy(found->second, item.buffer.begin());
      item.num_bytes = std::ssize(found->second);
    }
    return {};
  }
  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) has[i] = values_.contains(keys[i]) ? 1 : 0;
    return {};
  }
  Status remove(std::span<const std::string> keys) override {
    const std::lock_guard lock(mutex_);
    for (const std::string& key : keys) values_.erase(key);
    return {};
  }
  Status remove_all(std::string_view parts) override {
    const std::lock_guard lock(mutex_);
    const std::string begin = std::string(parts) + "/";
    std::erase_if(values_, [&](const auto& one) { return one.first.starts_with(begin); });
    return {};
  }
  size_t num_values() const {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 protected:
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_;
};

// Every call fails in one way or another, or answers nonsense, or works; chance decides.
class RandomlyHostileStore final : public MapStore {
 public:
  explicit RandomlyHostileStore(uint32_t seed) : random_(seed) {}

  Status put(std::span<StorePut> items) override {
    KVX_RETURN_IF_ERROR(misbehave());
    KVX_RETURN_IF_ERROR(MapStore::put(items));
    if (chance(4)) items[draw() % items.size()].is_stored = false;
    if (chance(4)) damage(items[draw() % items.size()].key);
    return {};
  }
  Status get(std::span<StoreGet> items) override {
    KVX_RETURN_IF_ERROR(misbehave());
    KVX_RETURN_IF_ERROR(MapStore::get(items));
    StoreGet& one = items[draw() % items.size()];
    switch (draw() % 6) {
      case 0:
        one.num_bytes = static_cast<int64_t>(draw()) << 20;
        break;
      case 1:
        one.num_bytes = -static_cast<int64_t>(draw());
        break;
      case 2:
        for (uint8_t& byte : one.buffer) byte = static_cast<uint8_t>(draw());
        one.num_bytes = std::ssize(one.buffer);
        break;
      case 3:  // another's value
        std::ranges::copy(
            items[0].buffer.first(std::min(items[0].buffer.size(), one.buffer.size())),
            one.buffer.begin());
        break;
      default:
        break;
    }
    return {};
  }
  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override {
    KVX_RETURN_IF_ERROR(misbehave());
    KVX_RETURN_IF_ERROR(MapStore::exists(keys, has));
    if (chance(3)) has[draw() % has.size()] = static_cast<uint8_t>(draw());
    return {};
  }

 private:
  uint32_t draw() {
    const std::lock_guard lock(mutex_);
    return static_cast<uint32_t>(random_());
  }
  bool chance(uint32_t one_in) { return draw() % one_in == 0; }
  void damage(const std::string& key) {
    const size_t at = draw();
    const std::lock_guard lock(mutex_);
    std::vector<uint8_t>& value = values_[key];
    value[at % value.size()] ^= 0x10;
    if (at % 7 == 0) value.resize(at % value.size());
  }
  Status misbehave() {
    switch (draw() % 20) {
      case 0:
        throw std::bad_alloc();
      case 1:
        throw std::runtime_error("a store that throws");
      case 2:
        throw 7;
      case 3:
        return internal_error("a store that fails");
      case 4:
        std::this_thread::sleep_for(std::chrono::milliseconds(draw() % 30));
        return {};
      default:
        return {};
    }
  }

  std::mt19937 random_;
};

// Its calls, or its gets alone, return when it is told so.
class HangingStore final : public MapStore {
 public:
  Status put(std::span<StorePut> items) override {
    if (!only_gets_hang_) wait();
    return MapStore::put(items);
  }
  Status get(std::span<StoreGet> items) override {
    wait();
    return MapStore::get(items);
  }
  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override {
    if (!only_gets_hang_) wait();
    return MapStore::exists(keys, has);
  }
  void let_only_gets_hang() { only_gets_hang_ = true; }
  void let_go() {
    const std::lock_guard lock(gate_);
    is_open_ = true;
    opened_.notify_all();
  }

 private:
  void wait() {
    std::unique_lock lock(gate_);
    opened_.wait(lock, [this] { return is_open_; });
  }
  std::mutex gate_;
  std::condition_variable opened_;
  bool is_open_ = false;
  std::atomic<bool> only_gets_hang_ = false;
};

}  // namespace kvx::tier
