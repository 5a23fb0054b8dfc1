// Sequences against a model: several share a pool that is too small for them; after every step all
// tables, tails and counts are as the definitions say, token by token.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "cache/sequence.hpp"
#include "tests/cache/random_history.hpp"

namespace kvx::cache::sequence_model_test {
namespace {

enum class Kind { kPacked, kFullPrecision, kReleased };

// One sequence in one group, as plainly as it can be said.
struct ModelGroup {
  LayerGroup facts;
  std::vector<Kind> blocks;
};

struct ModelSequence {
  int64_t num_tokens = 0;
  std::vector<ModelGroup> groups;
};

// The kind of blocks after one more token.
void append_token(ModelGroup& group, int64_t position, int64_t block_size) {
  if (position % block_size != 0) return;
  const FullPrecisionWindow& ends = group.facts.full_precision_window;
  group.blocks.push_back(ends.is_on() ? Kind::kFullPrecision : Kind::kPacked);
  if (!ends.is_on()) return;
  const int64_t end = static_cast<int64_t>(group.blocks.size());
  for (int64_t block = ends.sink_blocks; block < end - ends.recent_blocks; ++block) {
    if (group.blocks[block] == Kind::kFullPrecision) group.blocks[block] = Kind::kPacked;
  }
}

void release_expired(ModelGroup& group, int64_t num_tokens, int64_t block_size) {
  if (group.facts.window == 0) return;
  for (size_t block = 0; block < group.blocks.size(); ++block) {
    const int64_t last_token = static_cast<int64_t>(block + 1) * block_size - 1;
    if (num_tokens - last_token >= group.facts.window) group.blocks[block] = Kind::kReleased;
  }
}

bool can_truncate(const ModelGroup& group, int64_t num_tokens, int64_t block_size) {
  // The next query, at num_tokens, reads what its window sees of the tokens that stay.
  for (int64_t token = 0; token < num_tokens; ++token) {
    const bool is_read = group.facts.window == 0 || num_tokens - token < group.facts.window;
    if (is_read && group.blocks[token / block_size] == Kind::kReleased) return false;
  }
  if (num_tokens % block_size == 0) return true;
  // The open block must be there, and full-precision where blocks are packed only whole.
  const Kind open = group.blocks[num_tokens / block_size];
  return open == Kind::kFullPrecision ||
         (open == Kind::kPacked && !group.facts.full_precision_window.is_on());
}

struct Setup {
  int64_t block_size;
  std::vector<LayerGroup> groups;
};

constexpr int kNumSequences = 3;
constexpr int64_t kMaxTokens = 100;

class SequencesHistory {
 public:
  SequencesHistory(const Setup& setup, uint64_t seed)
      : random_(seed), block_size_(setup.block_size), pool_(make_pool(setup)) {
    ModelSequence empty;
    for (const LayerGroup& group : setup.groups) empty.groups.push_back({group, {}});
    for (int i = 0; i < kNumSequences; ++i) {
      sequences_.push_back(Sequence::create({setup.block_size, kMaxTokens, setup.groups}).value());
      model_.push_back(empty);
    }
  }

  void step() {
    const auto index = static_cast<size_t>(random_.between(0, kNumSequences - 1));
    Sequence& sequence = sequences_[index];
    ModelSequence& model = model_[index];
    const int64_t dice = random_.between(0, 19);
    if (dice == 0) return clear(sequence, model);
    if (dice <= 3) return truncate(sequence, model);
    append(sequence, model);
  }

  void check() const {
    std::vector<std::set<int32_t>> used(pool_.num_classes());
    for (int i = 0; i < kNumSequences; ++i) {
      for (int group = 0; group < sequences_[i].num_groups(); ++group) {
        check_group(sequences_[i], model_[i], group, used);
      }
    }
    for (int i = 0; i < pool_.num_classes(); ++i) {
      ASSERT_EQ(pool_.num_used(i), static_cast<int64_t>(used[i].size()));
    }
  }

  int64_t num_appends() const { return num_appends_; }
  int64_t num_refused_appends() const { return num_refused_appends_; }
  int64_t num_moves() const { return num_moves_; }
  int64_t num_truncations() const { return num_truncations_; }
  int64_t num_refused_truncations() const { return num_refused_truncations_; }

 private:
  // Enough for about two of the three sequences.
  static BlockPool make_pool(const Setup& setup) {
    const int64_t num_blocks = 2 * blocks_for(kMaxTokens, setup.block_size);
    std::vector<BlockClassSpec> classes;
    for (size_t group = 0; group < setup.groups.size(); ++group) {
      classes.push_back({fmt::format("packed {}", group), num_blocks, {64}});
      classes.push_back({fmt::format("full_precision {}", group), 10, {64}});
    }
    return BlockPool::create(host_memory(), classes).value();
  }

  void append(Sequence& sequence, ModelSequence& model) {
    ASSERT_TRUE(sequence.release_expired(pool_).ok());
    for (ModelGroup& group : model.groups) {
      release_expired(group, model.num_tokens, block_size_);
    }
    const int64_t most = std::min(sequence.max_tokens() - sequence.num_tokens(), 5 * block_size_);
    if (most == 0) return;
    const int64_t num_tokens = random_.between(1, most);

    ModelSequence after = model;
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (ModelGroup& group : after.groups) append_token(group, model.num_tokens + t, block_size_);
    }
    after.num_tokens += num_tokens;

    SequenceGrowth growth;
    const bool is_free = has_room(model, after);
    ASSERT_EQ(sequence.acquire(pool_, num_tokens, growth).ok(), is_free);
    if (!is_free) {
      ++num_refused_appends_;
      return;
    }
    for (const BlockMove& move : growth.moves) {
      ASSERT_EQ(model.groups[move.group].blocks[move.block], Kind::kFullPrecision);
      ASSERT_EQ(after.groups[move.group].blocks[move.block], Kind::kPacked);
      ASSERT_EQ(sequence.table(move.group)[move.block], move.full_precision_id);
    }
    ASSERT_TRUE(sequence.commit_moves(pool_, growth).ok());
    num_moves_ += static_cast<int64_t>(growth.moves.size());
    if (random_.between(0, 9) == 0) return cancel(sequence, model, growth);
    ASSERT_TRUE(sequence.commit(pool_, growth).ok());
    model = std::move(after);
    ++num_appends_;
  }

  // Blocks that have moved stay packed.
  void cancel(Sequence& sequence, ModelSequence& model, const SequenceGrowth& growth) {
    ASSERT_TRUE(sequence.cancel(pool_, growth).ok());
    for (const BlockMove& move : growth.moves) {
      model.groups[move.group].blocks[move.block] = Kind::kPacked;
    }
  }

  static int64_t count(const ModelGroup& group, Kind kind) {
    return std::count(group.blocks.begin(), group.blocks.end(), kind);
  }

  bool has_room(const ModelSequence& before, const ModelSequence& after) const {
    for (size_t i = 0; i < before.groups.size(); ++i) {
      for (Kind kind : {Kind::kPacked, Kind::kFullPrecision}) {
        const int64_t needed = count(after.groups[i], kind) - count(before.groups[i], kind);
        if (needed > pool_.num_free(class_of(before.groups[i], kind))) return false;
      }
    }
    return true;
  }

  static int class_of(const ModelGroup& group, Kind kind) {
    return kind == Kind::kFullPrecision ? group.facts.full_precision_class
                                        : group.facts.packed_class;
  }

  void truncate(Sequence& sequence, ModelSequence& model) {
    const int64_t num_tokens =
        random_.between(std::max<int64_t>(model.num_tokens - 20, 0), model.num_tokens);
    bool expected = true;
    for (const ModelGroup& group : model.groups) {
      expected = expected && can_truncate(group, num_tokens, block_size_);
    }
    ASSERT_EQ(sequence.truncate(pool_, num_tokens).ok(), expected)
        << num_tokens << " of " << model.num_tokens;
    ++(expected ? num_truncations_ : num_refused_truncations_);
    if (!expected) return;
    model.num_tokens = num_tokens;
    for (ModelGroup& group : model.groups) {
      group.blocks.resize(blocks_for(num_tokens, block_size_));
    }
  }

  void clear(Sequence& sequence, ModelSequence& model) {
    ASSERT_TRUE(sequence.clear(pool_).ok());
    model.num_tokens = 0;
    for (ModelGroup& group : model.groups) group.blocks.clear();
  }

  void check_group(const Sequence& sequence, const ModelSequence& model, int group,
                   std::vector<std::set<int32_t>>& used) const {
    const ModelGroup& expected = model.groups[group];
    const BlockTable& table = sequence.table(group);
    ASSERT_EQ(sequence.num_tokens(), model.num_tokens);
    ASSERT_EQ(table.size(), static_cast<int64_t>(expected.blocks.size()));
    for (int64_t block = 0; block < table.size(); ++block) {
      const Kind kind = expected.blocks[block];
      ASSERT_EQ(table[block] == kNoBlock, kind == Kind::kReleased) << "block " << block;
      if (kind == Kind::kReleased) continue;
      const bool is_full_precision =
          block < sequence.num_sink_blocks(group) || block >= sequence.first_recent_block(group);
      ASSERT_EQ(is_full_precision, kind == Kind::kFullPrecision) << "block " << block;
      const int block_class = class_of(expected, kind);
      ASSERT_EQ(pool_.use_count(block_class, table[block]), 1);
      ASSERT_TRUE(used[block_class].insert(table[block]).second) << "a block in two places";
    }
  }

  RandomHistory random_;
  int64_t block_size_;
  BlockPool pool_;
  std::vector<Sequence> sequences_;
  std::vector<ModelSequence> model_;
  int64_t num_appends_ = 0;
  int64_t num_refused_appends_ = 0;
  int64_t num_moves_ = 0;
  int64_t num_truncations_ = 0;
  int64_t num_refused_truncations_ = 0;
};

void run_history(const Setup& setup) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    SequencesHistory history(setup, seed);
    const int64_t num_steps = num_operations(5'000, 200'000);
    for (int64_t i = 0; i < num_steps; ++i) {
      history.step();
      history.check();
      if (testing::Test::HasFatalFailure()) FAIL() << "operation " << i;
    }
    // The history went where it should.
    EXPECT_GT(history.num_appends(), num_steps / 4);
    EXPECT_GT(history.num_truncations(), 0);
    const bool is_full_precision = setup.groups[0].full_precision_window.is_on();
    EXPECT_EQ(history.num_moves() > 0, is_full_precision);
    if (is_full_precision) {
      EXPECT_GT(history.num_refused_appends(), 0);
      // Blocks of one token cannot be cut.
      EXPECT_EQ(history.num_refused_truncations() > 0, setup.block_size > 1);
    }
  }
}

TEST(Sequence, FollowsItsModelWithImmediateAppend) {
  run_history({4, {{0, 1, {}, 0}}});
}

TEST(Sequence, FollowsItsModelWithAWindowBesideFullLayers) {
  run_history({4, {{0, 1, {}, 0}, {2, 3, {}, 10}}});
}

TEST(Sequence, FollowsItsModelWithAWindowOfOneToken) {
  run_history({4, {{0, 1, {}, 1}}});
}

TEST(Sequence, FollowsItsModelWithFullPrecisionWindow) {
  run_history({4, {{0, 1, {1, 3}, 0}}});
}

TEST(Sequence, FollowsItsModelWithOneTokenABlock) {
  run_history({1, {{0, 1, {2, 3}, 0}}});
}

TEST(Sequence, FollowsItsModelWithFullPrecisionWindowInAWindow) {
  run_history({4, {{0, 1, {1, 3}, 0}, {2, 3, {1, 2}, 30}}});
}

TEST(Sequence, FollowsItsModelWhenBlocksExpireBeforeTheyWouldBePacked) {
  run_history({4, {{0, 1, {1, 3}, 0}, {2, 3, {1, 3}, 5}}});
}

}  // namespace
}  // namespace kvx::cache::sequence_model_test
