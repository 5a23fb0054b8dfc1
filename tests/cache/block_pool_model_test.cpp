// BlockPool against a model: random histories, every number compared after every step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "cache/pool/block_pool.hpp"
#include "tests/cache/random_history.hpp"

namespace kvx::cache::block_pool_model_test {
namespace {

constexpr std::array<int64_t, 3> kNumBlocks = {7, 1, 40};

// The pool as plainly as it can be said.
struct ModelClass {
  std::vector<int32_t> use_counts;
  std::vector<uint32_t> generations;
  std::vector<bool> is_kept;
  std::vector<int32_t> free_ids;    // the next to be taken last
  std::vector<int32_t> cached_ids;  // the next to be evicted first
  int64_t num_evicted = 0;
};

class PoolHistory {
 public:
  explicit PoolHistory(uint64_t seed) : random_(seed), pool_(make_pool()) {
    for (int64_t num_blocks : kNumBlocks) {
      ModelClass& one = model_.emplace_back();
      one.use_counts.resize(num_blocks);
      one.generations.resize(num_blocks);
      one.is_kept.resize(num_blocks);
      for (int64_t id = num_blocks - 1; id >= 0; --id) {
        one.free_ids.push_back(static_cast<int32_t>(id));
      }
    }
  }

  void step() {
    const int block_class = static_cast<int>(random_.between(0, kNumBlocks.size() - 1));
    // One id too low and one too high are among them.
    const auto id = static_cast<int32_t>(random_.between(-1, kNumBlocks[block_class]));
    switch (random_.between(0, 15)) {
      case 0:
      case 1:
      case 2:
        return allocate(block_class, random_.between(0, 6));
      case 3:
      case 4:
      case 5:
        return retain(block_class, id);
      case 6:
      case 7:
        return keep(block_class, id);
      case 8:
        return discard(block_class, id);
      case 9:
        return evict(block_class, random_.between(0, 2));
      case 10:
        return touch(block_class, id);
      default:  // oftener, or the pool would always be full
        return release(block_class, id);
    }
  }

  void check() const {
    for (int i = 0; i < pool_.num_classes(); ++i) check_class(i);
  }

 private:
  static BlockPool make_pool() {
    std::vector<BlockClassSpec> classes;
    for (int64_t num_blocks : kNumBlocks) {
      classes.push_back({fmt::format("class {}", classes.size()), num_blocks, {64}});
    }
    return BlockPool::create(host_memory(), classes).value();
  }

  void allocate(int block_class, int64_t count) {
    ModelClass& model = model_[block_class];
    std::vector<int32_t> ids(count, -7);
    const bool expected =
        count <= static_cast<int64_t>(model.free_ids.size() + model.cached_ids.size());
    ASSERT_EQ(pool_.allocate(block_class, ids).ok(), expected);
    if (!expected) {
      ASSERT_EQ(ids, std::vector<int32_t>(count, -7));
      return;
    }
    while (static_cast<int64_t>(model.free_ids.size()) < count) evict_oldest(model);
    for (int32_t id : ids) {
      ASSERT_EQ(id, model.free_ids.back());
      model.free_ids.pop_back();
      model.use_counts[id] = 1;
    }
  }

  bool exists(int block_class, int32_t id) const { return id >= 0 && id < kNumBlocks[block_class]; }
  bool is_used(int block_class, int32_t id) const {
    return exists(block_class, id) && model_[block_class].use_counts[id] > 0;
  }
  bool has_content(int block_class, int32_t id) const {
    return is_used(block_class, id) || (exists(block_class, id) && model_[block_class].is_kept[id]);
  }

  static void free_block(ModelClass& model, int32_t id) {
    model.is_kept[id] = false;
    ++model.generations[id];
    model.free_ids.push_back(id);
  }
  static void evict_oldest(ModelClass& model) {
    const int32_t id = model.cached_ids.front();
    model.cached_ids.erase(model.cached_ids.begin());
    ++model.num_evicted;
    free_block(model, id);
  }

  void retain(int block_class, int32_t id) {
    const bool expected = has_content(block_class, id);
    ASSERT_EQ(pool_.retain(block_class, id).ok(), expected);
    if (!expected) return;
    ModelClass& model = model_[block_class];
    std::erase(model.cached_ids, id);
    ++model.use_counts[id];
  }

  void release(int block_class, int32_t id) {
    const bool expected = is_used(block_class, id);
    ASSERT_EQ(pool_.release(block_class, id).ok(), expected);
    if (!expected) return;
    ModelClass& model = model_[block_class];
    if (--model.use_counts[id] > 0) return;
    if (model.is_kept[id]) {
      model.cached_ids.push_back(id);
    } else {
      free_block(model, id);
    }
  }

  void keep(int block_class, int32_t id) {
    const bool expected = is_used(block_class, id);
    ASSERT_EQ(pool_.keep(block_class, id, 0).ok(), expected);
    if (expected) model_[block_class].is_kept[id] = true;
  }

  void discard(int block_class, int32_t id) {
    const bool expected = has_content(block_class, id);
    ASSERT_EQ(pool_.discard(block_class, id).ok(), expected);
    if (!expected) return;
    ModelClass& model = model_[block_class];
    model.is_kept[id] = false;
    if (std::erase(model.cached_ids, id) > 0) free_block(model, id);
  }

  void touch(int block_class, int32_t id) {
    const bool expected = has_content(block_class, id);
    ASSERT_EQ(pool_.touch(block_class, id).ok(), expected);
    if (!expected) return;
    std::vector<int32_t>& cached = model_[block_class].cached_ids;
    if (std::erase(cached, id) > 0) cached.push_back(id);
  }

  void evict(int block_class, int64_t count) {
    ModelClass& model = model_[block_class];
    const auto expected = std::min<int64_t>(count, static_cast<int64_t>(model.cached_ids.size()));
    ASSERT_EQ(pool_.evict(block_class, count), expected);
    for (int64_t i = 0; i < expected; ++i) evict_oldest(model);
  }

  void check_class(int block_class) const {
    const ModelClass& model = model_[block_class];
    int64_t num_used = 0;
    for (int32_t id = 0; id < pool_.num_blocks(block_class); ++id) {
      ASSERT_EQ(pool_.use_count(block_class, id), model.use_counts[id]);
      ASSERT_EQ(pool_.generation(block_class, id), model.generations[id]);
      ASSERT_EQ(pool_.verify(block_class, id, model.generations[id]), has_content(block_class, id));
      ASSERT_FALSE(pool_.verify(block_class, id, model.generations[id] - 1));
      num_used += model.use_counts[id] > 0;
    }
    const BlockClassSnapshot seen = pool_.snapshot(block_class);
    ASSERT_EQ(seen.num_active, num_used);
    ASSERT_EQ(seen.num_cached, static_cast<int64_t>(model.cached_ids.size()));
    ASSERT_EQ(seen.num_free, static_cast<int64_t>(model.free_ids.size()));
    ASSERT_EQ(seen.num_active + seen.num_cached + seen.num_free, pool_.num_blocks(block_class));
    ASSERT_EQ(seen.num_evicted, model.num_evicted);
  }

  RandomHistory random_;
  BlockPool pool_;
  std::vector<ModelClass> model_;
};

TEST(BlockPool, BehavesAsItsModelAfterAnyHistory) {
  constexpr int kNumSeeds = 4;
  for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    PoolHistory history(seed);
    const int64_t num_steps = num_operations(50'000, 2'500'000);
    for (int64_t i = 0; i < num_steps; ++i) {
      history.step();
      history.check();
      if (testing::Test::HasFatalFailure()) FAIL() << "operation " << i;
    }
  }
}

}  // namespace
}  // namespace kvx::cache::block_pool_model_test
