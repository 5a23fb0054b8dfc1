// The manager against a model: sequences that grow, fork, roll back, die and begin with cached
// prefixes, in a pool that is too small for them. Each token's place holds a stamp of all tokens
// before it; after every operation every stamp is read, counts add up, and a match is the longest.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cache/prefix/prefix_index.hpp"
#include "tests/cache/random_history.hpp"

namespace kvx::cache::manager_model_test {
namespace {

struct Setup {
  int64_t block_size;
  std::vector<LayerGroup> groups;
  EvictionKind eviction = EvictionKind::kLru;
};

constexpr int kNumSequences = 4;
constexpr int kNumScopes = 2;
constexpr int64_t kMaxTokens = 60;

using Tokens = std::vector<int32_t>;
// A prefix in full: the scope's number, then the tokens.
using Prefix = std::vector<int32_t>;

// What a token's place must hold: depends on the scope and on every token up to it.
std::vector<uint32_t> stamps_of(int scope, const Tokens& tokens) {
  std::vector<uint32_t> stamps;
  uint32_t stamp = 2166136261u + static_cast<uint32_t>(scope);
  for (int32_t token : tokens) {
    stamp = (stamp ^ static_cast<uint32_t>(token)) * 16777619u;
    stamps.push_back(stamp);
  }
  return stamps;
}

struct ModelSequence {
  std::unique_ptr<Sequence> sequence;  // null: not in use
  int scope = 0;
  Tokens tokens;
  std::vector<int32_t> nodes;  // of the full blocks, as far as there was room
};

class ManagerHistory : public EvictionListener {
 public:
  ManagerHistory(const Setup& setup, uint64_t seed)
      : random_(seed),
        shape_{setup.block_size, kMaxTokens, setup.groups},
        pool_(make_pool(setup)),
        index_(PrefixIndex::create(pool_, shape_, "test", HashAlgorithm::kSha256).value()),
        sequences_(kNumSequences) {
    pool_.set_eviction_listener(this);
    for (int c = 0; c < pool_.num_classes(); ++c) cached_.emplace_back(pool_.num_blocks(c));
    for (int scope = 0; scope < kNumScopes; ++scope) {
      scopes_.push_back(index_.pin_scope({"", "", fmt::format("tenant {}", scope)}).value());
    }
  }

  void on_evict(int block_class, int32_t id) override {
    cached_[block_class][id].clear();
    index_.on_evict(block_class, id);
    ++num_evicted;
  }

  void step() {
    ModelSequence& one = sequences_[random_.between(0, kNumSequences - 1)];
    if (!one.sequence) {
      return random_.between(0, 2) == 0 ? fork(one) : begin(one);
    }
    const int64_t dice = random_.between(0, 39);
    if (dice <= 2) return end(one);
    if (dice <= 8) return truncate(one);
    if (dice == 9) return evict_some();
    if (dice == 10 && random_.between(0, 9) == 0) return clear();
    append(one);
  }

  void check() {
    std::vector<std::vector<int>> users;  // of each class's blocks
    for (int c = 0; c < pool_.num_classes(); ++c) users.emplace_back(pool_.num_blocks(c));
    for (const ModelSequence& one : sequences_) {
      if (one.sequence) check_sequence(one, users);
    }
    for (int c = 0; c < pool_.num_classes(); ++c) check_class(c, users[c]);
  }

  int64_t num_hits = 0, num_forks = 0, num_copies = 0, num_truncations = 0, num_evicted = 0;
  int64_t num_refused = 0, num_cancelled = 0;

 private:
  static BlockPool make_pool(const Setup& setup) {
    const int64_t num_blocks = 5 * blocks_for(kMaxTokens, setup.block_size) / 2;
    std::vector<BlockClassSpec> classes;
    for (size_t group = 0; group < setup.groups.size(); ++group) {
      // [stamp of each token: uint32]
      const int64_t block_bytes = setup.block_size * 4;
      classes.push_back({fmt::format("packed {}", group), num_blocks, {block_bytes}});
      classes.push_back({fmt::format("full_precision {}", group), 20, {block_bytes}});
    }
    return BlockPool::create(host_memory(), classes, {setup.eviction, true}).value();
  }

  uint8_t* place(int block_class, int32_t id, int64_t offset) const {
    return pool_.region(block_class) + id * pool_.block_bytes(block_class) + offset * 4;
  }
  bool is_full_precision(const Sequence& sequence, int group, int64_t block) const {
    return shape_.groups[group].full_precision_window.is_on() &&
           (block < sequence.num_sink_blocks(group) || block >= sequence.first_recent_block(group));
  }
  int class_of(const Sequence& sequence, int group, int64_t block) const {
    const LayerGroup& facts = shape_.groups[group];
    return is_full_precision(sequence, group, block) ? facts.full_precision_class
                                                     : facts.packed_class;
  }
  int32_t tip(const ModelSequence& one) const {
    return one.nodes.empty() ? scopes_[one.scope] : one.nodes.back();
  }
  Prefix prefix_of(const ModelSequence& one, int64_t num_blocks) const {
    Prefix prefix = {one.scope};
    prefix.insert(prefix.end(), one.tokens.begin(),
                  one.tokens.begin() + num_blocks * shape_.block_size);
    return prefix;
  }

  // ---- operations

  void append(ModelSequence& one) {
    Sequence& sequence = *one.sequence;
    ASSERT_TRUE(sequence.release_expired(pool_).ok());
    const int64_t most =
        std::min(sequence.max_tokens() - sequence.num_tokens(), 5 * shape_.block_size);
    if (most == 0) return;
    const int64_t count = random_.between(1, most);
    std::vector<int64_t> needed(pool_.num_classes());
    sequence.add_needed_blocks(pool_, count, needed);
    bool has_room = true;
    for (int c = 0; c < pool_.num_classes(); ++c) has_room &= needed[c] <= pool_.num_available(c);
    SequenceGrowth growth;
    ASSERT_EQ(sequence.acquire(pool_, count, growth).ok(), has_room);
    if (!has_room) {
      ++num_refused;
      return;
    }
    for (const OpenBlockCopy& copy : growth.copies) {
      copy_stamps(copy.block_class, copy.from_id, copy.block_class, copy.to_id, copy.num_tokens);
    }
    for (const BlockMove& move : growth.moves) {
      const LayerGroup& facts = shape_.groups[move.group];
      copy_stamps(facts.full_precision_class, move.full_precision_id, facts.packed_class,
                  move.packed_id, shape_.block_size);
    }
    num_copies += static_cast<int64_t>(growth.copies.size());
    ASSERT_TRUE(sequence.commit_moves(pool_, growth).ok());
    for (const BlockMove& move : growth.moves) publish(one, move.group, move.block);
    const bool is_cancelled = random_.between(0, 9) == 0;
    const std::vector<int32_t> open_blocks = stamps_of_open_blocks(sequence);
    const Tokens before = one.tokens;
    for (int64_t i = 0; i < count; ++i) {
      one.tokens.push_back(static_cast<int32_t>(random_.between(0, 1)));
    }
    for (int group = 0; group < sequence.num_groups(); ++group) grow_group(one, group, growth);
    if (is_cancelled) {
      one.tokens = before;
      restore_open_blocks(sequence, open_blocks);
      ASSERT_TRUE(sequence.cancel(pool_, growth).ok());
      ++num_cancelled;
      return;
    }
    ASSERT_TRUE(sequence.commit(pool_, growth).ok());
    publish_full_blocks(one);
  }

  void copy_stamps(int from_class, int32_t from, int to_class, int32_t to, int64_t num_tokens) {
    std::memcpy(place(to_class, to, 0), place(from_class, from, 0), num_tokens * 4);
  }

  // All of a group's open block, where there is one: [groups][block_size].
  std::vector<int32_t> stamps_of_open_blocks(const Sequence& sequence) const {
    std::vector<int32_t> stamps(shape_.groups.size() * shape_.block_size);
    for_open_blocks(sequence, [&](int group, uint8_t* block) {
      std::memcpy(stamps.data() + group * shape_.block_size, block, shape_.block_size * 4);
    });
    return stamps;
  }
  void restore_open_blocks(const Sequence& sequence, const std::vector<int32_t>& stamps) const {
    for_open_blocks(sequence, [&](int group, uint8_t* block) {
      std::memcpy(block, stamps.data() + group * shape_.block_size, shape_.block_size * 4);
    });
  }
  template <class Visit>
  void for_open_blocks(const Sequence& sequence, const Visit& visit) const {
    if (sequence.num_tokens() % shape_.block_size == 0) return;
    const int64_t open = sequence.num_tokens() / shape_.block_size;
    for (int group = 0; group < sequence.num_groups(); ++group) {
      visit(group, place(class_of(sequence, group, open), sequence.table(group)[open], 0));
    }
  }

  // Writes the new tokens block by block, as a step does, and reads all at each moment.
  void grow_group(const ModelSequence& one, int group, const SequenceGrowth& growth) {
    const Sequence& sequence = *one.sequence;
    const LayerGroup& facts = shape_.groups[group];
    const int64_t bs = shape_.block_size;
    const std::vector<uint32_t> stamps = stamps_of(one.scope, one.tokens);
    const int64_t num_after = sequence.num_tokens() + growth.num_tokens;
    for (int64_t token = sequence.num_tokens(); token < num_after;) {
      const int64_t block = token / bs;
      if (const auto leaving = sequence.block_leaving_at(group, growth, block + 1)) {
        copy_stamps(facts.full_precision_class, growth.groups[group].id(*leaving),
                    facts.packed_class, growth.groups[group].packed_id(*leaving), bs);
      }
      std::vector<int32_t> row(block + 1);
      sequence.blocks_at(group, growth, block + 1, row);
      const int64_t first_recent = sequence.first_recent_block_at(group, growth, block + 1);
      const auto class_at = [&](int64_t b) {
        const FullPrecisionWindow& window = facts.full_precision_window;
        const bool is_full = window.is_on() && (b < window.sink_blocks || b >= first_recent);
        return is_full ? facts.full_precision_class : facts.packed_class;
      };
      ASSERT_EQ(pool_.use_count(class_at(block), row[block]), 1) << "a write to a shared block";
      const int64_t end = std::min(num_after, (block + 1) * bs);
      for (; token < end; ++token) {
        std::memcpy(place(class_at(block), row[block], token % bs), &stamps[token], 4);
      }
      for (int64_t t = 0; t < end; ++t) {
        if (row[t / bs] == kNoBlock) continue;
        uint32_t stamp;
        std::memcpy(&stamp, place(class_at(t / bs), row[t / bs], t % bs), 4);
        ASSERT_EQ(stamp, stamps[t]) << "group " << group << ", token " << t << " at " << end;
      }
    }
  }

  void publish_full_blocks(ModelSequence& one) {
    const auto num_full = static_cast<int64_t>(one.tokens.size()) / shape_.block_size;
    for (auto block = static_cast<int64_t>(one.nodes.size()); block < num_full; ++block) {
      const int32_t parent = tip(one);
      const std::span<const int32_t> tokens(one.tokens);
      const int32_t node =
          index_.insert(parent, tokens.subspan(block * shape_.block_size, shape_.block_size));
      ASSERT_NE(node, kNoNode);
      index_.pin(node);
      one.nodes.push_back(node);
      for (int group = 0; group < one.sequence->num_groups(); ++group) publish(one, group, block);
      index_.unpin(parent);
    }
  }

  void publish(ModelSequence& one, int group, int64_t block) {
    if (block >= static_cast<int64_t>(one.nodes.size())) return;
    const int32_t id = one.sequence->table(group)[block];
    if (id == kNoBlock) return;
    const BlockKind kind = is_full_precision(*one.sequence, group, block)
                               ? BlockKind::kFullPrecision
                               : BlockKind::kPacked;
    const int32_t node = one.nodes[block];
    const bool is_new = index_.block_of(node, group, kind) == kNoBlock;
    ASSERT_TRUE(index_.attach(node, group, kind, id).ok());
    ASSERT_NE(index_.block_of(node, group, kind), kNoBlock);
    if (is_new) cached_[class_of(*one.sequence, group, block)][id] = prefix_of(one, block + 1);
  }

  void begin(ModelSequence& one) {
    one.sequence = std::make_unique<Sequence>(Sequence::create(shape_).value());
    one.scope = static_cast<int>(random_.between(0, kNumScopes - 1));
    one.tokens.clear();
    one.nodes.clear();
    Tokens wanted;
    for (int64_t i = random_.between(0, kMaxTokens); i > 0; --i) {
      wanted.push_back(static_cast<int32_t>(random_.between(0, 1)));
    }
    // Half of them are likely to hit: another's tokens, with an end of their own.
    const ModelSequence& other = sequences_[random_.between(0, kNumSequences - 1)];
    const size_t num_common = std::min<size_t>(
        wanted.size(), random_.between(0, static_cast<int64_t>(other.tokens.size())));
    std::copy_n(other.tokens.begin(), num_common, wanted.begin());
    const PrefixMatch match = index_.match(scopes_[one.scope], wanted, kMaxTokens);
    ASSERT_EQ(match.num_blocks(), longest_match(one.scope, wanted));
    adopt(one, match, wanted);
    num_hits += match.num_blocks() > 0;
  }

  void adopt(ModelSequence& one, const PrefixMatch& match, const Tokens& wanted) {
    const int64_t num_blocks = match.num_blocks();
    std::vector<std::vector<int32_t>> ids;
    std::vector<GroupPrefix> prefixes;
    for (size_t group = 0; group < shape_.groups.size(); ++group) {
      std::vector<int32_t>& group_ids = ids.emplace_back();
      const GroupMatch& found = match.groups[group];
      for (int64_t block = 0; block < num_blocks; ++block) {
        const FullPrecisionWindow& ends = shape_.groups[group].full_precision_window;
        const bool full_precision =
            ends.is_on() && (block < ends.sink_blocks || block >= found.first_recent_block);
        group_ids.push_back(
            index_.block_of(match.nodes[block], static_cast<int>(group),
                            full_precision ? BlockKind::kFullPrecision : BlockKind::kPacked));
      }
    }
    for (size_t group = 0; group < ids.size(); ++group) {
      prefixes.push_back(
          {ids[group], match.groups[group].first_block, match.groups[group].first_recent_block});
    }
    const int64_t num_tokens = num_blocks * shape_.block_size;
    ASSERT_TRUE(one.sequence->adopt(pool_, num_tokens, prefixes).ok());
    one.tokens.assign(wanted.begin(), wanted.begin() + num_tokens);
    one.nodes.assign(match.nodes.begin(), match.nodes.end());
    index_.pin(tip(one));
  }

  void fork(ModelSequence& one) {
    const ModelSequence& other = sequences_[random_.between(0, kNumSequences - 1)];
    if (!other.sequence) return;
    one.sequence = std::make_unique<Sequence>(Sequence::create(shape_).value());
    ASSERT_TRUE(one.sequence->share(pool_, *other.sequence).ok());
    one.scope = other.scope;
    one.tokens = other.tokens;
    one.nodes = other.nodes;
    index_.pin(tip(one));
    ++num_forks;
  }

  void truncate(ModelSequence& one) {
    const auto length = static_cast<int64_t>(one.tokens.size());
    const int64_t num_tokens = random_.between(std::max<int64_t>(length - 15, 0), length);
    if (!one.sequence->truncate(pool_, num_tokens).ok()) return;
    ++num_truncations;
    one.tokens.resize(num_tokens);
    const int32_t old_tip = tip(one);
    const auto num_full = static_cast<size_t>(num_tokens / shape_.block_size);
    if (one.nodes.size() > num_full) one.nodes.resize(num_full);
    index_.pin(tip(one));
    index_.unpin(old_tip);
  }

  void end(ModelSequence& one) {
    ASSERT_TRUE(one.sequence->clear(pool_).ok());
    index_.unpin(tip(one));
    one.sequence.reset();
    one.tokens.clear();
  }

  void evict_some() {
    const int block_class = static_cast<int>(random_.between(0, pool_.num_classes() - 1));
    pool_.evict(block_class, random_.between(1, 3));
  }

  void clear() {
    ASSERT_TRUE(index_.clear().ok());
    for (std::vector<Prefix>& blocks : cached_) std::fill(blocks.begin(), blocks.end(), Prefix());
  }

  // ---- what must hold

  bool is_cached(const Prefix& prefix, int block_class) const {
    const std::vector<Prefix>& blocks = cached_[block_class];
    return std::find(blocks.begin(), blocks.end(), prefix) != blocks.end();
  }

  // By the definition: the most blocks that every group can serve.
  int64_t longest_match(int scope, const Tokens& tokens) const {
    for (auto n = static_cast<int64_t>(tokens.size()) / shape_.block_size; n > 0; --n) {
      bool is_served =
          std::all_of(shape_.groups.begin(), shape_.groups.end(),
                      [&](const LayerGroup& g) { return serves(g, scope, tokens, n); });
      if (is_served) return n;
    }
    return 0;
  }

  bool serves(const LayerGroup& group, int scope, const Tokens& tokens, int64_t n) const {
    const int64_t bs = shape_.block_size;
    const auto has = [&](int64_t block, int block_class) {
      Prefix prefix = {scope};
      prefix.insert(prefix.end(), tokens.begin(), tokens.begin() + (block + 1) * bs);
      return is_cached(prefix, block_class);
    };
    bool packed_from_here = false;  // walking down: once packed, always packed
    for (int64_t block = n - 1; block >= 0; --block) {
      const bool is_seen = group.window == 0 || n * bs - (block * bs + bs - 1) < group.window;
      if (!is_seen && block >= group.window_sink_blocks) continue;
      if (block < group.full_precision_window.sink_blocks) {
        if (!has(block, group.full_precision_class)) return false;
        continue;
      }
      const bool may_be_full_precision = group.full_precision_window.is_on() && !packed_from_here &&
                                         n - block <= group.full_precision_window.recent_blocks;
      if (may_be_full_precision && has(block, group.full_precision_class)) continue;
      packed_from_here = true;
      if (!has(block, group.packed_class)) return false;
    }
    return true;
  }

  void check_sequence(const ModelSequence& one, std::vector<std::vector<int>>& users) {
    const Sequence& sequence = *one.sequence;
    ASSERT_EQ(sequence.num_tokens(), static_cast<int64_t>(one.tokens.size()));
    const std::vector<uint32_t> stamps = stamps_of(one.scope, one.tokens);
    for (int group = 0; group < sequence.num_groups(); ++group) {
      const BlockTable& table = sequence.table(group);
      for (int64_t block = 0; block < table.size(); ++block) {
        if (table[block] == kNoBlock) continue;
        const int block_class = class_of(sequence, group, block);
        ++users[block_class][table[block]];
        for (int64_t offset = 0; offset < shape_.block_size; ++offset) {
          const int64_t token = block * shape_.block_size + offset;
          if (token >= sequence.num_tokens()) break;
          uint32_t stamp;
          std::memcpy(&stamp, place(block_class, table[block], offset), 4);
          ASSERT_EQ(stamp, stamps[token]) << "group " << group << ", token " << token;
        }
      }
    }
  }

  void check_class(int block_class, const std::vector<int>& users) const {
    int64_t num_active = 0, num_cached = 0;
    for (int32_t id = 0; id < pool_.num_blocks(block_class); ++id) {
      ASSERT_EQ(pool_.use_count(block_class, id), users[id]);
      const bool is_kept = !cached_[block_class][id].empty();
      ASSERT_EQ(pool_.is_kept(block_class, id), is_kept);
      num_active += users[id] > 0;
      num_cached += is_kept && users[id] == 0;
    }
    const BlockClassSnapshot seen = pool_.snapshot(block_class);
    ASSERT_EQ(seen.num_cached, num_cached);
    ASSERT_EQ(seen.num_active, num_active);
    ASSERT_EQ(seen.num_active + seen.num_cached + seen.num_free, pool_.num_blocks(block_class));
  }

  RandomHistory random_;
  SequenceShape shape_;
  BlockPool pool_;
  PrefixIndex index_;
  std::vector<int32_t> scopes_;
  std::vector<ModelSequence> sequences_;
  // [class][id]: what the index says the block holds, empty for nothing.
  std::vector<std::vector<Prefix>> cached_;
};

// Over all setups and seeds 10^6 operations, with KVX_TEST_FULL 10^8.
void run_history(const Setup& setup) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    ManagerHistory history(setup, seed);
    const int64_t num_steps = num_operations(48'000, 5'000'000);
    for (int64_t i = 0; i < num_steps; ++i) {
      history.step();
      history.check();
      if (testing::Test::HasFatalFailure()) FAIL() << "operation " << i;
    }
    // The history went where it should.
    EXPECT_GT(history.num_hits, num_steps / 200);
    EXPECT_GT(history.num_forks, num_steps / 200);
    EXPECT_GT(history.num_copies, num_steps / 200);
    EXPECT_GT(history.num_truncations, num_steps / 200);
    EXPECT_GT(history.num_evicted, num_steps / 200);
    EXPECT_GT(history.num_cancelled, num_steps / 200);
  }
}

TEST(Manager, FollowsItsModelWithImmediateAppend) {
  run_history({4, {{0, 1, {}, 0}}});
}

TEST(Manager, FollowsItsModelUnderLfu) {
  run_history({4, {{0, 1, {}, 0}}, EvictionKind::kLfu});
}

TEST(Manager, FollowsItsModelUnder2Q) {
  run_history({4, {{0, 1, {}, 0}}, EvictionKind::k2Q});
}

TEST(Manager, FollowsItsModelWithAWindowBesideFullLayers) {
  run_history({4, {{0, 1, {}, 0}, {2, 3, {}, 10}}});
}

TEST(Manager, FollowsItsModelWhereEveryLayerHasAWindow) {
  run_history({4, {{0, 1, {}, 9}}});
}

TEST(Manager, FollowsItsModelWithSinksBeforeAWindow) {
  run_history({4, {{0, 1, {}, 9, 2}, {2, 3, {}, 0}}});
}

TEST(Manager, FollowsItsModelWithFullPrecisionWindow) {
  run_history({4, {{0, 1, {1, 3}, 0}}});
}

TEST(Manager, FollowsItsModelWithFullPrecisionWindowInAWindow) {
  run_history({4, {{0, 1, {1, 3}, 0}, {2, 3, {1, 2}, 22}}});
}

TEST(Manager, FollowsItsModelWithFullPrecisionSinksBeforeAWindow) {
  run_history({4, {{0, 1, {2, 3}, 10, 1}}});
}

}  // namespace
}  // namespace kvx::cache::manager_model_test
