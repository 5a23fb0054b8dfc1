// PrefixCache: what KvCache's sequences hold as text, so that full blocks are found again: the
// token log of each sequence and its way through the prefix index.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/prefix/prefix_index.hpp"
#include "tier/chain/tier_chain.hpp"

namespace kvx::kv {

struct PrefixCacheConfig {
  bool is_on = false;
  cache::HashAlgorithm hash = cache::HashAlgorithm::kXxh3;  // kSha256 where tenants share
  // Names or hashes what computes K and V: blocks of another model are never taken.
  std::string model;
};

// How long blocks of these tokens stay when no sequence uses them.
struct RetentionRange {
  int64_t first_token = 0;
  int64_t num_tokens = 0;  // 0: to the sequence's end, tokens that are still to come included
  int priority = cache::kDefaultPriority;
  bool is_pinned = false;   // with all tokens before them, without which nobody finds them
  int64_t duration_ms = 0;  // 0: for good
};

// One thread at a time. Logs are allocated once: recording allocates nothing.
class PrefixCache final : public cache::EvictionListener {
 public:
  // pool outlives it and stays where it is. Errors as PrefixIndex::create.
  static Result<std::unique_ptr<PrefixCache>> create(cache::BlockPool& pool,
                                                     const cache::SequenceShape& shape,
                                                     const PrefixCacheConfig& config,
                                                     std::string fingerprint, int max_sequences);
  ~PrefixCache() override;

  // Blocks that can be found are copied there from now on. Requires: no sequence is in use; the
  // tiers outlive the sequences. Null: nowhere.
  void set_tiers(tier::TierChain* tiers) { tiers_ = tiers; }

  // The sequence is in use from now on, empty, under these keys and in this session ("": none).
  // PrefixIndex::pin_scope's errors.
  Status begin(int sequence, const cache::PrefixKeys& keys, std::string_view session = {});
  // The sequence is about to give its blocks back: the last ones, full-precision to the end, go to
  // the tiers too.
  void store_tail(int sequence);
  void end(int sequence);
  // Requires: `to` is not in use.
  void fork(int from, int to);
  // Sends what the tiers have of `tokens` on its way to the pool. Requires: set_tiers().
  tier::Promotion promote(int sequence, std::span<const int32_t> tokens, int64_t max_blocks,
                          std::span<const tier::StoreAnswer> answers, tier::LoadOrder order) {
    const Log& log = logs_[sequence];
    return tiers_->promote(log.scope, log.way, tokens, max_blocks, answers, order);
  }
  // Asks the stores for what nobody here has of `tokens`. Requires: set_tiers().
  std::vector<tier::StoreAnswer> look_up(int sequence, std::span<const int32_t> tokens,
                                         int64_t max_blocks) {
    const Log& log = logs_[sequence];
    return tiers_->look_up(log.scope, log.way, tokens, max_blocks);
  }
  // Begins `sequence` with the longest cached prefix of `tokens`, at most max_blocks; returns how
  // many tokens. `coming` counts as cached. Requires: begin() was called and nothing recorded.
  Result<int64_t> adopt(int sequence, cache::Sequence& blocks, std::span<const int32_t> tokens,
                        int64_t max_blocks, const cache::ComingBlocks& coming = {});
  // What was coming when the sequence adopted it is cached now: stores get it.
  void store_blocks(int sequence);

  // The sequence's next tokens: blocks that are full of them can be found from now on.
  // OUT_OF_RANGE, nothing changed: more tokens than the sequence has.
  Status record(int sequence, const cache::Sequence& blocks, std::span<const int32_t> tokens);
  // Blocks that were packed can be found in their new format too.
  Status record_moves(int sequence, std::span<const cache::BlockMove> moves);
  // The recorded tokens from num_tokens on are no longer the sequence's.
  void truncate(int sequence, int64_t num_tokens);

  // Holds for blocks that the sequence has in the index and for those to come; of two ranges the
  // later one counts. OUT_OF_RANGE: too many blocks are pinned; the others are retained all the
  // same.
  Status retain(int sequence, std::span<const RetentionRange> ranges);
  // Of the pool and the host tier; how many blocks of tokens. INVALID_ARGUMENT: a sequence of the
  // session is in use.
  Result<int64_t> end_session(std::string_view session);
  Result<int64_t> delete_session(std::string_view session);

  std::span<const int32_t> tokens(int sequence) const { return logs_[sequence].tokens; }
  const cache::PrefixKeys& keys(int sequence) const { return logs_[sequence].keys; }
  cache::PrefixIndex& index() { return index_; }
  const cache::PrefixIndex& index() const { return index_; }
  const cache::SequenceShape& shape() const { return shape_; }
  const std::string& fingerprint() const { return fingerprint_; }

  void on_evict(int block_class, int32_t id) override { index_.on_evict(block_class, id); }

 private:
  struct Range {
    int64_t first_block = 0;
    int64_t end_block = 0;
    cache::Retention retention;
  };
  struct Log {
    bool is_in_use = false;
    cache::PrefixKeys keys;
    int32_t scope = cache::kNoNode;
    std::vector<int32_t> tokens;
    std::vector<int32_t> nodes;  // of full blocks; fewer than there are when the index was full
    tier::Way way;               // the same in the tiers
    int32_t session = cache::kNoSession;
    std::vector<Range> ranges;
  };

  PrefixCache(cache::BlockPool& pool, const cache::SequenceShape& shape, cache::PrefixIndex index,
              std::string fingerprint, int max_sequences);
  static int32_t tip(const Log& log) { return log.nodes.empty() ? log.scope : log.nodes.back(); }
  void store_block(const Log& log, int64_t block, bool with_tail);
  bool is_full_precision(const cache::Sequence& blocks, int group, int64_t block) const;
  void retain_block(const Log& log, int64_t block);
  Status check_session_is_idle(std::string_view session) const;
  Status check_shared_blocks(const Log& log, const cache::Sequence& blocks) const;
  int32_t node_of_block(const cache::Sequence& blocks, int64_t block) const;
  int32_t node_before(int32_t node, int64_t first, int64_t end,
                      std::span<const int32_t> tokens) const;
  Status attach_block(int32_t node, const cache::Sequence& blocks, int64_t block);

  cache::BlockPool* pool_;
  cache::SequenceShape shape_;
  cache::PrefixIndex index_;
  std::string fingerprint_;
  std::vector<Log> logs_;
  std::vector<std::vector<int32_t>> ids_;  // [groups], of adopt()
  tier::TierChain* tiers_ = nullptr;
};

}  // namespace kvx::kv
