// BlockPool against a model: random histories, every number compared after every step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "cache/block_pool.hpp"
#include "tests/cache/random_history.hpp"

namespace kvx::cache {
namespace {

constexpr std::array<int64_t, 3> kNumBlocks = {7, 1, 40};

// The pool as plainly as it can be said.
struct ModelClass {
  std::vector<int32_t> use_counts;
  std::vector<uint32_t> generations;
  std::vector<int32_t> free_ids;  // the next to be taken last
};

class PoolHistory {
 public:
  explicit PoolHistory(uint64_t seed) : random_(seed), pool_(make_pool()) {
    for (int64_t num_blocks : kNumBlocks) {
      ModelClass& one = model_.emplace_back();
      one.use_counts.resize(num_blocks);
      one.generations.resize(num_blocks);
      for (int64_t id = num_blocks - 1; id >= 0; --id) {
        one.free_ids.push_back(static_cast<int32_t>(id));
      }
    }
  }

  void step() {
    const int block_class = static_cast<int>(random_.between(0, kNumBlocks.size() - 1));
    // One id too low and one too high are among them.
    const auto id = static_cast<int32_t>(random_.between(-1, kNumBlocks[block_class]));
    switch (random_.between(0, 3)) {
      case 0:
        return allocate(block_class, random_.between(0, 6));
      case 1:
        return retain(block_class, id);
      default:  // twice as often, or the pool would always be full
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
    const bool expected = count <= static_cast<int64_t>(model.free_ids.size());
    ASSERT_EQ(pool_.allocate(block_class, ids).ok(), expected);
    if (!expected) {
      ASSERT_EQ(ids, std::vector<int32_t>(count, -7));
      return;
    }
    for (int32_t id : ids) {
      ASSERT_EQ(id, model.free_ids.back());
      model.free_ids.pop_back();
      model.use_counts[id] = 1;
    }
  }

  bool is_used(int block_class, int32_t id) const {
    return id >= 0 && id < kNumBlocks[block_class] && model_[block_class].use_counts[id] > 0;
  }

  void retain(int block_class, int32_t id) {
    const bool expected = is_used(block_class, id);
    ASSERT_EQ(pool_.retain(block_class, id).ok(), expected);
    if (expected) ++model_[block_class].use_counts[id];
  }

  void release(int block_class, int32_t id) {
    const bool expected = is_used(block_class, id);
    ASSERT_EQ(pool_.release(block_class, id).ok(), expected);
    if (!expected) return;
    ModelClass& model = model_[block_class];
    if (--model.use_counts[id] > 0) return;
    ++model.generations[id];
    model.free_ids.push_back(id);
  }

  void check_class(int block_class) const {
    const ModelClass& model = model_[block_class];
    int64_t num_used = 0;
    for (int32_t id = 0; id < pool_.num_blocks(block_class); ++id) {
      ASSERT_EQ(pool_.use_count(block_class, id), model.use_counts[id]);
      ASSERT_EQ(pool_.generation(block_class, id), model.generations[id]);
      num_used += model.use_counts[id] > 0;
    }
    ASSERT_EQ(pool_.num_used(block_class), num_used);
    ASSERT_EQ(pool_.num_used(block_class) + pool_.num_free(block_class),
              pool_.num_blocks(block_class));
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
}  // namespace kvx::cache
