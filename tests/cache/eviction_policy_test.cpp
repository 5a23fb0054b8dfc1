// Eviction policies against plain models, over random histories; a seed replays (RC_PARAMS).
#include "cache/prefix/eviction_policy.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "cache/prefix/key_history.hpp"

namespace kvx::cache::eviction_policy_test {
namespace {

constexpr int32_t kNumBlocks = 12;

enum class State { kUnknown, kInserted, kUsed };

// What each policy promises, as plainly as it can be said. Ids are in order of their insertion.
class LruModel : public EvictionPolicy {
 public:
  void insert(int32_t id, uint32_t) override { order_.push_back(id); }
  void remove(int32_t id) override { std::erase(order_, id); }
  void touch(int32_t id) override {
    if (std::erase(order_, id) > 0) order_.push_back(id);
  }
  void forget(int32_t) override {}
  int32_t evict() override {
    const int32_t id = order_.front();
    order_.erase(order_.begin());
    return id;
  }
  void put_first(int32_t id) override { order_.insert(order_.begin(), id); }

 private:
  std::vector<int32_t> order_;
};

class LfuModel : public EvictionPolicy {
 public:
  void insert(int32_t id, uint32_t) override {
    level_[id] = age_ + uses_[id];
    order_.push_back(id);
  }
  void remove(int32_t id) override { std::erase(order_, id); }
  void touch(int32_t id) override {
    uses_[id] = std::min(uses_[id] + 1, 3);
    if (std::erase(order_, id) > 0) insert(id, 0);
  }
  void forget(int32_t id) override { uses_[id] = 0; }
  int32_t evict() override {
    const int32_t id = *std::min_element(order_.begin(), order_.end(), [this](auto a, auto b) {
      return level_[a] < level_[b];  // the first of equals
    });
    std::erase(order_, id);
    age_ = level_[id];
    return id;
  }
  void put_first(int32_t id) override {
    level_[id] = age_;
    order_.insert(order_.begin(), id);
  }

 private:
  std::vector<int32_t> order_;
  int uses_[kNumBlocks] = {};
  int level_[kNumBlocks] = {};
  int age_ = 0;  // the level of the block evicted last
};

class TwoQueuesModel : public EvictionPolicy {
 public:
  void insert(int32_t id, uint32_t key) override {
    key_[id] = key;
    if (std::count(gone_.begin(), gone_.end(), key) > 0) is_hot_[id] = true;
    (is_hot_[id] ? hot_ : queue_).push_back(id);
  }
  void remove(int32_t id) override {
    std::erase(queue_, id);
    std::erase(hot_, id);
  }
  void touch(int32_t id) override { is_used_again_[id] = true; }
  void forget(int32_t id) override { is_hot_[id] = is_used_again_[id] = false; }
  int32_t evict() override {
    while (true) {
      const bool from_queue = queue_.size() > kNumBlocks / 4 || (!queue_.empty() && hot_.empty());
      std::vector<int32_t>& from = from_queue ? queue_ : hot_;
      const int32_t id = from.front();
      from.erase(from.begin());
      if (!from_queue) return id;
      if (!is_used_again_[id]) {
        remember(key_[id]);
        return id;
      }
      is_hot_[id] = true;
      hot_.push_back(id);
    }
  }
  void put_first(int32_t id) override {
    std::vector<int32_t>& list = is_hot_[id] ? hot_ : queue_;
    list.insert(list.begin(), id);
  }

 private:
  void remember(uint32_t key) {
    if (std::count(gone_.begin(), gone_.end(), key) > 0) return;
    gone_.push_back(key);
    if (gone_.size() > kNumBlocks / 2) gone_.pop_front();
  }

  std::vector<int32_t> queue_, hot_;
  std::deque<uint32_t> gone_;
  uint32_t key_[kNumBlocks] = {};
  bool is_hot_[kNumBlocks] = {}, is_used_again_[kNumBlocks] = {};
};

// A history as a pool makes them: blocks are inserted, used again, touched, evicted and discarded.
void follow(EvictionKind kind, EvictionPolicy& model) {
  IdLists lists(kNumBlocks, kPolicyLists);
  const auto policy = make_eviction_policy(kind, lists, kNumBlocks);
  std::vector<State> states(kNumBlocks, State::kUsed);
  const auto operations = *rc::gen::container<std::vector<std::tuple<int, int32_t, uint32_t>>>(
      rc::gen::tuple(rc::gen::inRange(0, 6), rc::gen::inRange(0, kNumBlocks),
                     rc::gen::inRange<uint32_t>(0, 20)));
  for (const auto& [operation, id, key] : operations) {
    State& state = states[id];
    const bool any_inserted = std::count(states.begin(), states.end(), State::kInserted) > 0;
    if (operation <= 1 && state != State::kInserted) {
      policy->insert(id, key);
      model.insert(id, key);
      state = State::kInserted;
    } else if (operation == 2 && state == State::kInserted) {
      policy->remove(id);
      model.remove(id);
      state = State::kUsed;
    } else if (operation == 3) {
      policy->touch(id);
      model.touch(id);
    } else if (operation == 4 && any_inserted) {
      const int32_t evicted = policy->evict();
      RC_ASSERT(evicted == model.evict());
      if (key % 4 == 0) {  // it stays
        policy->put_first(evicted);
        model.put_first(evicted);
        continue;
      }
      policy->forget(evicted);
      model.forget(evicted);
      states[evicted] = State::kUnknown;
    } else if (operation == 5 && state == State::kUsed) {
      policy->forget(id);
      model.forget(id);
    }
  }
}

RC_GTEST_PROP(EvictionPolicy, LruEvictsTheBlockThatWasLetGoOfFirst, ()) {
  LruModel model;
  follow(EvictionKind::kLru, model);
}

RC_GTEST_PROP(EvictionPolicy, LfuEvictsTheBlockOfFewestUsesAndAges, ()) {
  LfuModel model;
  follow(EvictionKind::kLfu, model);
}

RC_GTEST_PROP(EvictionPolicy, TwoQueuesFollowTheirModel, ()) {
  TwoQueuesModel model;
  follow(EvictionKind::k2Q, model);
}

TEST(EvictionPolicy, AScanOfNewBlocksEvictsNoHotOneUnder2Q) {
  IdLists lists(8, kPolicyLists);
  const auto policy = make_eviction_policy(EvictionKind::k2Q, lists, 8);
  for (int32_t id = 0; id < 8; ++id) policy->insert(id, static_cast<uint32_t>(id));
  policy->touch(0);
  // Block 0 was used again, so it becomes hot; the scan's blocks go before it.
  for (uint32_t key = 100; key < 200; ++key) {
    const int32_t id = policy->evict();
    EXPECT_NE(id, 0);
    policy->forget(id);
    policy->insert(id, key);
  }
}

TEST(EvictionPolicy, EveryNameNamesItsKind) {
  for (EvictionKind kind : {EvictionKind::kLru, EvictionKind::kLfu, EvictionKind::k2Q}) {
    EXPECT_EQ(eviction_named(name_of(kind)), kind);
  }
  EXPECT_EQ(eviction_named("random"), std::nullopt);
}

RC_GTEST_PROP(KeyHistory, HoldsTheLastKeysThatWereAdded, ()) {
  const auto most_keys = *rc::gen::inRange<int32_t>(1, 9);
  const auto keys = *rc::gen::container<std::vector<uint32_t>>(rc::gen::inRange<uint32_t>(0, 40));
  KeyHistory history(most_keys);
  std::deque<uint32_t> model;
  for (const uint32_t key : keys) {
    history.add(key);
    if (std::count(model.begin(), model.end(), key) == 0) model.push_back(key);
    if (model.size() > static_cast<size_t>(most_keys)) model.pop_front();
    for (uint32_t any = 0; any < 40; ++any) {
      RC_ASSERT(history.contains(any) == (std::count(model.begin(), model.end(), any) > 0));
    }
  }
}

}  // namespace
}  // namespace kvx::cache::eviction_policy_test
