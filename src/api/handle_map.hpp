// HandleMap: the objects behind a kind of the C ABI's handles.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace kvx::boundary {

// Maps handles to objects. A handle is a number that is used once, so a stale handle is detected
// and never dereferenced.
template <class Handle, class Object>
class HandleMap {
 public:
  Handle add(std::unique_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    objects_.emplace(++last_, std::move(object));
    return reinterpret_cast<Handle>(last_);
  }
  // Returns null when there is no such handle.
  Object* find(Handle handle) const {
    const std::shared_lock lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    return found == objects_.end() ? nullptr : found->second.get();
  }
  // Returns null when there is no such handle, or when may_remove(object) is false.
  template <class MayRemove>
  std::unique_ptr<Object> remove(Handle handle, const MayRemove& may_remove) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == objects_.end() || !may_remove(*found->second)) return nullptr;
    std::unique_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<uintptr_t, std::unique_ptr<Object>> objects_;
  uintptr_t last_ = 0;
};

}  // namespace kvx::boundary
