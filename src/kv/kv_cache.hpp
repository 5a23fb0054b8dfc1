// KvCache: the assembled cache. A recipe and a geometry become block pools; sequences grow in
// steps; each layer of a step appends its K and V and attends, straight from the packed bytes.
//
// Several threads may use one cache: a sequence belongs to one of them at a time (its writer), and
// each writer has a KvStep of its own (kv_step.hpp). Everything else here may be called by any
// thread; it takes the cache's lock, which files hold while they are read or written.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "kv/files/kv_cache_file.hpp"
#include "kv/sequence_table.hpp"
#include "ops/attend/precision.hpp"

namespace kvx::kv {

struct StepEntry {
  int sequence = 0;
  int num_tokens = 0;
  bool is_speculative = false;  // some may go again: KvCacheConfig::max_speculative_tokens
};

// Attention's own parameters of one layer. Its window is the geometry's.
struct AttentionParams {
  int num_q_heads = 0;
  float softmax_scale = 1.0f;
  float softcap = 0.0f;          // 0: none
  const float* sinks = nullptr;  // [num_q_heads], or null
  ops::Precision precision = ops::Precision::kAccurate;
  // [the step's tokens, tree_mask_stride], where q lies: whether a token sees the j-th token of its
  // entry, as in ops::AttendArgs. UNSUPPORTED where an entry fills several blocks of a cache with a
  // full-precision window. Null: causal.
  const uint8_t* tree_mask = nullptr;
  int64_t tree_mask_stride = 0;
};

// What the KV heads of a layer could not store as it came, [num_kv_heads] each.
using LayerCounts = LayerStore::Counts;

// What a cache holds and what happened since its creation.
struct KvCacheSnapshot {
  std::vector<cache::BlockClassSnapshot> classes;
  cache::PrefixCounters prefix;               // zeros while prefixes are off
  std::vector<tier::HostTierSnapshot> tiers;  // nearest first
  int num_sequences = 0;
  int64_t metadata_bytes = 0;  // of the prefix index
};

// What the blocks of a class are for.
struct BlockClassFacts {
  const std::string& name;  // the pool's
  int group = 0;
  bool is_full_precision = false;
  int window = 0;  // tokens; 0: every token is read
  int sinks = 0;   // tokens that the window does not leave behind
};

class KvStep;
class Prefetch;

class KvCache {
 public:
  // Allocates everything. INVALID_ARGUMENT names what does not fit: a geometry, an override, a
  // head_dim, a missing table; OUT_OF_RANGE: a budget below one sequence, with the bytes that it
  // needs.
  static Result<std::unique_ptr<KvCache>> create(KvCacheConfig config,
                                                 const ops::CpuContext& context);
  ~KvCache();

  // OUT_OF_RANGE: max_sequences are in use.
  Result<int> create_sequence();
  // Gives the sequence's blocks back. INVALID_ARGUMENT: no such sequence, or it is in an open step.
  Status free_sequence(int sequence);
  bool is_in_use(int sequence) const;
  // Its writer's to ask. Requires: the sequence is in use.
  int64_t num_tokens(int sequence) const { return table_->sequences[sequence].num_tokens(); }
  // The most tokens of this sequence that one step takes: all that it has room for; on a GPU at
  // most cuda.max_step_tokens. With a full-precision window a step goes block by block, and every
  // query sees just what it would see if its tokens came one by one.
  int64_t max_step_tokens(int sequence) const;

  // ---- sharing (kv_cache_sharing.cpp)

  // A new sequence that begins with the longest cached prefix of `tokens` under these keys: its
  // num_tokens() says how much. At least the last token is left, so that its logits can be
  // computed. With full-precision window the sequence is as one cut to that length: blocks that are
  // cached packed stay packed, and the window grows again. Blocks that only the tiers have are
  // brought back first; this waits for them. UNSUPPORTED: prefixes are off, or a tenant without
  // sha256; OUT_OF_RANGE: max_sequences are in use.
  // session: the conversation that it belongs to, for end_session() and delete_session(); "": none.
  // Blocks of equal tokens are shared between sessions.
  // kLayerByLayer: this does not wait for blocks of the host's and disks' tiers. Each layer of the
  // sequence's first step waits for its own part of them. Until that step has ended, or
  // end_loading(), the sequence can be in steps and can be freed; nothing else takes it.
  Result<int> create_sequence_from(const cache::PrefixKeys& keys, std::span<const int32_t> tokens,
                                   std::string_view session = {},
                                   tier::LoadOrder order = tier::LoadOrder::kWholeBlocks);
  // Waits until layers [0, layer] of a sequence that loads are there; a step's layers do it
  // themselves. Requires: the sequence's writer calls it. INVALID_ARGUMENT: no such sequence or
  // layer; INTERNAL_ERROR: a block's bytes have changed in their tier, or a disk did not give them
  // back: the sequence's step is to be cancelled, and end_loading() leaves it what came whole.
  Status wait_for_layer(int sequence, int layer) const;
  // Waits until all layers are there; num_tokens() is what the sequence has then. INVALID_ARGUMENT:
  // no such sequence, or it is in an open step.
  Status end_loading(int sequence);
  // Says which tokens the sequence holds, in order, after the steps that added them; blocks full of
  // recorded tokens can be found by later sequences. Nothing while prefixes are off.
  // INVALID_ARGUMENT or OUT_OF_RANGE, nothing changed: no such sequence, it is in an open step,
  // more tokens than it has, other tokens than a fork recorded for a block that both have.
  Status record_tokens(int sequence, std::span<const int32_t> tokens);
  // What was recorded; empty while prefixes are off. Requires: the sequence is in use.
  std::span<const int32_t> recorded_tokens(int sequence) const {
    return table_->prefixes ? table_->prefixes->tokens(sequence) : std::span<const int32_t>();
  }

  // A fork with the same tokens in the same blocks; the open block is copied by whoever writes to
  // it first. Errors as free_sequence and create_sequence.
  Result<int> fork_sequence(int sequence);
  // Forgets the tokens from num_tokens on. The rest is bit for bit as if they had never come with
  // immediate append, and with full-precision window while no block left the window for them: one
  // that did stays packed, and the window grows again. What is left is no speculation any more.
  // Sequence::truncate's errors; UNSUPPORTED: a cut inside a packed block, or inside a page whose
  // shared scale may have grown, before the tokens of speculative steps; OUT_OF_RANGE: others hold
  // such a page and no block is left for a new one.
  Status truncate_sequence(int sequence, int64_t num_tokens);
  // Forgets all cached blocks that no sequence uses.
  Status clear_prefixes();
  // Erases all blocks of a tenant from the pool, all tiers and their stores, and leaves no bytes of
  // them there; how many of the pool and the tiers. INVALID_ARGUMENT, nothing changed: an empty
  // tenant, or one who has a sequence or a prefetch; INTERNAL_ERROR: a store did not remove its
  // records, and the rest is done (kv_cache_erase.cpp).
  Result<int64_t> erase_tenant(const std::string& tenant);
  // The same of a session, from the block with first_token on, with all that came after it.
  // OUT_OF_RANGE, nothing changed: first_token is not in [0, tokens.size()].
  Result<int64_t> erase_session(const cache::PrefixKeys& keys, std::span<const int32_t> tokens,
                                int64_t first_token);
  // Forgets up to num_blocks cached blocks of every class, in the policy's order; how many in all.
  // INVALID_ARGUMENT: a negative number.
  Result<int64_t> evict_blocks(int64_t num_blocks);
  // How long the sequence's blocks stay in the pool after it, those to come included; of two ranges
  // that overlap the later one counts. INVALID_ARGUMENT: no such sequence, a range or a priority
  // that cannot be; OUT_OF_RANGE: half of a class's blocks are pinned, and the rest of the ranges
  // holds; UNSUPPORTED: prefixes are off.
  Status retain(int sequence, std::span<const RetentionRange> ranges);
  // The conversation is over: blocks that it alone used go first, in the pool and the host tier.
  // How many blocks of tokens. INVALID_ARGUMENT: a sequence of it is in use, or the name is empty;
  // UNSUPPORTED: prefixes are off.
  Result<int64_t> end_session(std::string_view session);
  // The same, and they are forgotten at once, and their bytes overwritten, in every tier.
  Result<int64_t> delete_session(std::string_view session);
  KvCacheSnapshot snapshot() const;
  // Any thread reads them, at any time.
  const Latencies& latencies() const { return table_->latencies; }
  // Requires: 0 <= block_class < snapshot().classes.size().
  BlockClassFacts facts_of_class(int block_class) const;
  // Called for every cached block that comes or goes; it must not call back.
  void set_prefix_listener(PrefixListener listener);
  // A second one, for what publishes events (src/observe). tell_stored hears at once of every block
  // that can be found already, as if it were stored now. UNSUPPORTED: prefixes are off.
  Status set_event_publisher(PrefixListener publisher, const PrefixListener& tell_stored);

  // ---- the tiers (kv_cache_tier.cpp)

  // A hint that a sequence of these tokens will come: what only the tiers have of them sets out
  // for the pool, as far as there is room; this does not wait. UNSUPPORTED: no tier, or as
  // create_sequence_from.
  Result<Prefetch> prefetch(const cache::PrefixKeys& keys, std::span<const int32_t> tokens);
  // Waits until no block is under way between the tiers, and nothing waits for a store.
  void wait_for_tiers();

  // ---- files (kv_cache_file.cpp, docs/cache-file.md)

  // The sequence with its tokens, all of which must have been recorded. Whatever fails, what was at
  // `path` stays there. UNSUPPORTED: prefixes are off; INVALID_ARGUMENT: no such sequence, it is in
  // an open step, unrecorded tokens, the file cannot be written; OUT_OF_RANGE: no free block to
  // copy the open one to.
  Status save_sequence(int sequence, const std::string& path, const SaveOptions& options = {});
  // All blocks that could be found by a new sequence.
  Status save_prefixes(const std::string& path, const SaveOptions& options = {}) const;
  // A new sequence as it was saved. All or nothing; INVALID_ARGUMENT: a damaged file, one of
  // another cache (the message names the difference), or one without a sequence; INCOMPATIBLE:
  // a newer version or the other byte order; OUT_OF_RANGE: too few blocks, or too long.
  Result<int> load_sequence(const std::string& path);
  // Blocks of the file that can be found from now on, as many as there is free room for. Errors as
  // load_sequence; damaged blocks are no error but reported.
  Result<LoadReport> load_prefixes(const std::string& path);
  // The sequence goes to another process layer by layer, in the step that brings it to all of
  // `tokens`, those that it has included. INVALID_ARGUMENT: no such sequence, it is in an open
  // step, on its way already, or complete; its tokens are not all recorded, or other ones;
  // OUT_OF_RANGE: longer than max_tokens_per_sequence; UNSUPPORTED: prefixes are off, or an order
  // in which a layer is no run of bytes.
  // for_peers: pages of a cache on a GPU stay there, where other processes of the host map them.
  Result<std::shared_ptr<OutgoingSequence>> hand_on(int sequence, std::span<const int32_t> tokens,
                                                    bool for_peers);
  // What the file's blocks must agree in. Empty while prefixes are off.
  std::string_view fingerprint() const;

  // ---- steps

  // The cache's own step, for callers with one thread. A step adds tokens to some sequences, each
  // named once. begin_step acquires their blocks in every layer group and packs the blocks that
  // leave the full-precision window; then every layer calls append_and_attend once; end_step makes
  // the tokens part of the sequences. INVALID_ARGUMENT or
  // OUT_OF_RANGE, nothing changed: a sequence not in use or named twice, more tokens than
  // max_step_tokens or max_tokens_per_sequence, too few free blocks.
  Status begin_step(std::span<const StepEntry> entries);
  // Rows are the entries' tokens, one entry after the other. k, v: [tokens, num_kv_heads, head_dim]
  // after RoPE; q: [tokens, num_q_heads, k head_dim]; out: [tokens, num_q_heads, v head_dim].
  Status append_and_attend(int layer, const AttentionParams& params, FloatRows q, FloatRows k,
                           FloatRows v, MutableFloatRows out);
  Status end_step();
  // The same after a verification: of entry i's tokens the first kept_tokens[i] stay, 0 of them
  // perhaps. The step stays open after INVALID_ARGUMENT, a count out of range, and after
  // UNSUPPORTED and OUT_OF_RANGE as truncate_sequence.
  Status end_step(std::span<const int> kept_tokens);
  // Gives back what sliding windows have left behind, as the sequence's next step would.
  // INVALID_ARGUMENT: no such sequence, or it is in an open step.
  Status release_expired(int sequence);
  // Leaves the open step without its tokens, whatever its layers have appended. A page's shared
  // scale that they made grow stays, unless they are speculative. INVALID_ARGUMENT: no step is
  // open.
  Status cancel_step();

  // Stored rows of tokens [first_token, first_token + num_tokens), transforms undone, to
  // [num_tokens, num_kv_heads, head_dim]; a side whose data is null is not wanted. OUT_OF_RANGE:
  // tokens that the sequence has not.
  Status gather(int sequence, int layer, int64_t first_token, int64_t num_tokens,
                MutableFloatRows k, MutableFloatRows v) const;

  const KvCacheConfig& config() const { return storage().config; }
  const ops::CpuContext& context() const { return storage().context; }
  // NaN or infinite inputs that given or page-shared scales could not express, since creation. On a
  // GPU this waits; an error of what was launched is logged and counts none.
  int64_t nonfinite_inputs() const;
  // Numbers that packed blocks could not store as they came, since creation, [num_layers]: finite
  // ones beyond the largest code and those of nonfinite_inputs(). On a GPU this waits;
  // INTERNAL_ERROR: some of what was launched failed.
  Result<std::vector<LayerCounts>> head_counts() const;
  // The saturated ones of all heads; none where head_counts() fails.
  std::optional<int64_t> saturated_inputs() const;
  // KvStep::check_rows, of begin_step's.
  Status check_step_rows() const;
  // Waits for what was launched on a GPU; nothing on the host. INTERNAL_ERROR: some of it failed.
  Status synchronize() const { return verbs_->synchronize(); }
  cache::PoolAccount account() const;
  // Bytes that the sequence's tokens take, whole blocks; and K and V bytes that its next token's
  // attention reads.
  cache::ByteCount sequence_bytes(int64_t num_tokens) const;
  int64_t bytes_read_per_step(int64_t num_tokens) const;

  // What steps and files share with the cache.
  SequenceTable& table() const { return *table_; }

 private:
  explicit KvCache(std::unique_ptr<SequenceTable> table);

  static Error prefixes_are_off() {
    return unsupported(
        "prefix caching is off; expected a cache with prefix.is_on (C: KVX_CACHE_PREFIXES)");
  }
  const CacheStorage& storage() const { return table_->storage; }
  Status check_gather(int sequence, int layer, int64_t first_token, int64_t num_tokens) const;
  Result<int64_t> erase(const cache::Erasure& erasure);
  // The lock is held by who calls these.
  tier::Promotion bring_back(std::unique_lock<std::mutex>& lock, int sequence,
                             std::span<const int32_t> tokens, int64_t max_blocks,
                             tier::LoadOrder order);
  std::vector<tier::StoreAnswer> ask_stores(std::unique_lock<std::mutex>& lock, int sequence,
                                            std::span<const int32_t> tokens, int64_t max_blocks);
  void finish(std::unique_lock<std::mutex>& lock, const tier::Promotion& promotion);
  void finish_layers(std::unique_lock<std::mutex>& lock, const tier::Promotion& promotion);
  int64_t most_cached_blocks(std::span<const int32_t> tokens) const;

  std::unique_ptr<SequenceTable> table_;
  std::unique_ptr<Verbs> verbs_;  // of what is no step's
  std::unique_ptr<KvStep> step_;  // the cache's own
};

// Blocks on their way back from the tiers; they stay in the pool as long as this lives. The
// cache outlives it.
class Prefetch {
 public:
  // KvCache::prefetch() makes one of what it has pinned and promoted.
  Prefetch(SequenceTable& table, int32_t scope, tier::Way way)
      : table_(&table), scope_(scope), way_(std::move(way)) {}
  Prefetch(Prefetch&& other) noexcept;
  Prefetch& operator=(Prefetch&&) = delete;
  // Waits, and lets go of the blocks.
  ~Prefetch();

  // What stores have sets out when they have answered and this, or wait(), is called.
  bool is_done() const;
  void wait() const;
  int64_t num_blocks() const { return promotion_.num_loads; }  // that set out

 private:
  friend class KvCache;
  void begin(std::span<const int32_t> tokens, int64_t max_blocks);
  void go_on() const;

  SequenceTable* table_;
  int32_t scope_;
  tier::Way way_;  // its scopes
  std::vector<int32_t> tokens_;
  int64_t max_blocks_ = 0;
  mutable std::vector<tier::StoreAnswer> answers_;  // of stores that have not all answered
  mutable tier::Promotion promotion_;
};

// What a recipe costs when every sequence is num_tokens long, full-precision window included;
// nothing is allocated.
struct RecipeCost {
  double bits_per_value =
      0;  // of packed blocks: codes and scales, averaged over layers, heads, K and V
  double bytes_per_token = 0;  // all layers, at num_tokens
  int64_t tokens_per_gib = 0;
};
Result<RecipeCost> cost_of(const KvCacheConfig& config, int64_t num_tokens);

}  // namespace kvx::kv
