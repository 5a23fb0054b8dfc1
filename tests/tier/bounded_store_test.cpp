// Stores of callers: their names, and calls that throw, hang or answer nonsense.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/waits_until.hpp"
#include "tests/tier/hostile_store.hpp"
#include "tier/store/bounded_store.hpp"
#include "tier/store/store_registry.hpp"

namespace kvx::tier {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

template <class Store>
struct Bounded {
  explicit Bounded(milliseconds timeout = milliseconds(60'000))
      : inner(std::make_shared<Store>()), store(inner, timeout) {}
  std::shared_ptr<Store> inner;
  BoundedStore store;
};

std::vector<uint8_t> value_of(uint8_t first, size_t bytes) {
  std::vector<uint8_t> value(bytes);
  for (size_t i = 0; i < bytes; ++i) value[i] = static_cast<uint8_t>(first + i);
  return value;
}

TEST(BoundedStore, PassesWhatAStoreAnswers) {
  Bounded<MapStore> bounded;
  const auto first = value_of(1, 100);
  const auto second = value_of(2, 300);
  std::vector<StorePut> puts = {{"a/1", first}, {"a/2", second}};
  ASSERT_TRUE(bounded.store.put(puts).ok());
  EXPECT_TRUE(puts[0].is_stored && puts[1].is_stored);
  std::vector<uint8_t> one(100), two(400), none(10);
  std::vector<StoreGet> gets = {{"a/1", one}, {"a/2", two}, {"a/3", none}};
  ASSERT_TRUE(bounded.store.get(gets).ok());
  EXPECT_EQ(gets[0].num_bytes, 100);
  EXPECT_EQ(gets[1].num_bytes, 300);
  EXPECT_EQ(gets[2].num_bytes, -1);
  EXPECT_EQ(one, first);
  two.resize(300);
  EXPECT_EQ(two, second);
  const std::vector<std::string> keys = {"a/1", "a/3"};
  std::vector<uint8_t> has(2);
  ASSERT_TRUE(bounded.store.exists(keys, has).ok());
  EXPECT_EQ(has, (std::vector<uint8_t>{1, 0}));
  ASSERT_TRUE(bounded.store.remove(std::span(keys).first(1)).ok());
  EXPECT_EQ(bounded.inner->num_values(), 1u);
  ASSERT_TRUE(bounded.store.remove_all("a").ok());
  EXPECT_EQ(bounded.inner->num_values(), 0u);
}

class ThrowingStore final : public MapStore {
 public:
  Status put(std::span<StorePut>) override { throw std::bad_alloc(); }
  Status get(std::span<StoreGet>) override { throw std::runtime_error("no wires"); }
  Status remove_all(std::string_view) override { throw 7; }
};

TEST(BoundedStore, AnExceptionIsAFailedCall) {
  Bounded<ThrowingStore> bounded;
  StorePut put{"a", {}};
  StoreGet get{"a", {}};
  EXPECT_THAT(bounded.store.put(std::span(&put, 1)).error().message, HasSubstr("out of memory"));
  EXPECT_THAT(bounded.store.get(std::span(&get, 1)).error().message, HasSubstr("no wires"));
  EXPECT_THAT(bounded.store.remove_all("a").error().message, HasSubstr("unknown type"));
}

class LyingStore final : public MapStore {
 public:
  Status get(std::span<StoreGet> items) override {
    for (StoreGet& item : items) item.num_bytes = lie;
    return {};
  }
  Status exists(std::span<const std::string>, std::span<uint8_t> has) override {
    std::ranges::fill(has, uint8_t{255});
    return {};
  }
  int64_t lie = 0;
};

TEST(BoundedStore, ALengthThatCannotBeIsNone) {
  Bounded<LyingStore> bounded;
  std::vector<uint8_t> buffer(10, 3);
  for (const int64_t lie : {int64_t{11}, int64_t{-2}, INT64_MIN, INT64_MAX}) {
    bounded.inner->lie = lie;
    StoreGet get{"a", buffer};
    ASSERT_TRUE(bounded.store.get(std::span(&get, 1)).ok());
    EXPECT_EQ(get.num_bytes, -1) << lie;
  }
  EXPECT_EQ(buffer, std::vector<uint8_t>(10, 3)) << "nothing was written";
  const std::vector<std::string> keys = {"a"};
  std::vector<uint8_t> has(1);
  ASSERT_TRUE(bounded.store.exists(keys, has).ok());
  EXPECT_EQ(has[0], 0) << "neither 0 nor 1 is no yes";
}

TEST(BoundedStore, ACallThatNeverReturnsIsLeftBehind) {
  Bounded<HangingStore> bounded(milliseconds(20));
  const std::vector<std::string> keys = {"a"};
  std::vector<uint8_t> has(1);
  const Status late = bounded.store.exists(keys, has);
  EXPECT_THAT(late.error().message, HasSubstr("has not returned from exists within 20 ms"));
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(bounded.store.exists(keys, has).ok());
  EXPECT_THAT(bounded.store.exists(keys, has).error().message,
              HasSubstr("calls that have not returned"))
      << "no thread is started for ever more calls";
  bounded.inner->let_go();
  EXPECT_TRUE(tests::waits_until([&] { return bounded.store.exists(keys, has).ok(); }))
      << "it is called again when its calls have returned";
}

TEST(BoundedStore, ALateCallOutlivesItsStoreWithMemoryOfItsOwn) {
  auto inner = std::make_shared<HangingStore>();
  {
    BoundedStore store(inner, milliseconds(5));
    const auto value = value_of(1, 1000);
    StorePut put{"a", value};
    EXPECT_FALSE(store.put(std::span(&put, 1)).ok());
  }
  inner->let_go();
  ASSERT_TRUE(tests::waits_until([&] { return inner->num_values() > 0; }));
  std::vector<uint8_t> kept(1000);
  StoreGet get{"a", kept};
  ASSERT_TRUE(inner->get(std::span(&get, 1)).ok());
  EXPECT_EQ(kept, value_of(1, 1000));
}

TEST(StoreRegistry, FindsAStoreByItsName) {
  const auto store = std::make_shared<MapStore>();
  EXPECT_THAT(find_registered_store("mine").error().message,
              HasSubstr("tiers has store(mine); expected a registered store"));
  ASSERT_TRUE(register_store("mine", store).ok());
  EXPECT_EQ(find_registered_store("mine").value(), store);
  EXPECT_THAT(register_store("mine", store).error().message, HasSubstr("which is registered"));
  EXPECT_THAT(find_registered_store("yours").error().message, HasSubstr("store: mine"));
  ASSERT_TRUE(unregister_store("mine").ok());
  EXPECT_THAT(unregister_store("mine").error().message, HasSubstr("no store is registered"));
  EXPECT_EQ(store.use_count(), 1);
}

TEST(StoreRegistry, RefusesNamesThatATextCouldNotHold) {
  for (const char* name : {"", "a,b", "a b", "a)", "\"", "ä"}) {
    EXPECT_THAT(register_store(name, std::make_shared<MapStore>()).error().message,
                HasSubstr("expected 1 to 64 letters"))
        << name;
  }
}

}  // namespace
}  // namespace kvx::tier
