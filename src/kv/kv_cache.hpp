// KvCache: the assembled cache. A recipe and a geometry become block pools; sequences grow in
// steps; each layer of a step appends its K and V and attends, straight from the packed bytes.
//
// Several threads may use one cache: a sequence belongs to one of them at a time (its writer), and
// each writer has a KvStep of its own (kv_step.hpp). Everything else here may be called by any
// thread; it takes the cache's lock, which files hold while they are read or written.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cache/sequence.hpp"
#include "kv/plan/group_plan.hpp"
#include "kv/plan/layer_store.hpp"
#include "kv/prefix_cache.hpp"
#include "kv/speculation.hpp"
#include "kv/verbs/cuda_place.hpp"
#include "ops/attend/precision.hpp"

namespace kvx::kv {

// Of a sequence: positions and lengths are int32 in the verbs.
inline constexpr int64_t kMaxTokens = int64_t{1} << 30;

struct KvCacheConfig {
  CacheGeometry geometry;
  Recipe recipe;
  std::vector<RecipeOverride> overrides;      // later ones win
  std::vector<LayerCalibration> calibration;  // [num_layers], or empty
  int block_size = 64;                        // tokens, 1 to 1024
  int max_sequences = 1;
  int64_t max_tokens_per_sequence = 0;
  // Tokens of a sequence in steps that say is_speculative, since the last that stayed for sure: a
  // cut reaches back to any of them, also where pages share scales and append is immediate. Costs
  // memory for their rows and a block a group; elsewhere cuts are exact without it. 0: none.
  int max_speculative_tokens = 0;
  int64_t memory_budget_bytes = 0;  // of all regions; 0: what max_sequences full sequences need
  PrefixCacheConfig prefix;         // off: a block is free when its last sequence leaves
  cache::EvictionKind eviction = cache::EvictionKind::kLru;  // of cached blocks
  bool zeroes_on_free = false;      // a freed block's bytes are overwritten with zeros
  cache::Memory* memory = nullptr;  // of the pools, on the host, outlives the cache; null: kvx's
  // The pools lie in a GPU's memory: rows given to the cache and taken from it (k, v, q, out) and
  // attention's sinks are then in memory that it reads, and calls return when their work is on its
  // way in the stream.
  std::optional<CudaPlacement> cuda;
  tier::HostTierConfig host_tier;  // behind the pool; needs prefixes
};

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
};

// What a cache holds and what happened since its creation.
struct KvCacheSnapshot {
  std::vector<cache::BlockClassSnapshot> classes;
  cache::PrefixCounters prefix;  // zeros while prefixes are off
  tier::HostTierSnapshot host;   // zeros without a host tier
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

struct SaveOptions {
  int zstd_level = 0;  // 0: blocks lie in the file as they lie in the pool
  // Called as blocks are written, with their number so far and in all; it must not call back.
  std::function<void(int64_t, int64_t)> on_block = {};
};

// What load_prefixes() did with a file's blocks; a bad block is a miss, never data.
struct LoadReport {
  int64_t num_blocks = 0;
  int64_t num_loaded = 0;
  int64_t num_known = 0;  // were there already
  int64_t num_bad = 0;    // damaged, or after a damaged one
  int64_t num_no_room = 0;
  std::string first_problem;  // empty: none
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
  int64_t num_tokens(int sequence) const { return sequences_[sequence].num_tokens(); }
  // The most tokens of this sequence that one step takes: with full-precision window the rest of
  // the open block, since a block is written before it leaves the window and every query sees just
  // what it would see if its tokens came one by one; on a GPU cuda.max_step_tokens.
  int64_t max_step_tokens(int sequence) const;

  // ---- sharing (kv_cache_sharing.cpp)

  // A new sequence that begins with the longest cached prefix of `tokens` under these keys: its
  // num_tokens() says how much. At least the last token is left, so that its logits can be
  // computed. With full-precision window the sequence is as one cut to that length: blocks that are
  // cached packed stay packed, and the window grows again. Blocks that only the host tier has are
  // brought back first; this waits for them. UNSUPPORTED: prefixes are off, or a tenant without
  // sha256; OUT_OF_RANGE: max_sequences are in use.
  Result<int> create_sequence_from(const cache::PrefixKeys& keys, std::span<const int32_t> tokens);
  // Says which tokens the sequence holds, in order, after the steps that added them; blocks full of
  // recorded tokens can be found by later sequences. Nothing while prefixes are off.
  // INVALID_ARGUMENT or OUT_OF_RANGE, nothing changed: no such sequence, it is in an open step,
  // more tokens than it has, other tokens than a fork recorded for a block that both have.
  Status record_tokens(int sequence, std::span<const int32_t> tokens);
  // What was recorded; empty while prefixes are off. Requires: the sequence is in use.
  std::span<const int32_t> recorded_tokens(int sequence) const {
    return prefixes_ ? prefixes_->tokens(sequence) : std::span<const int32_t>();
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
  // Forgets up to num_blocks cached blocks of every class, in the policy's order; how many in all.
  // INVALID_ARGUMENT: a negative number.
  Result<int64_t> evict_blocks(int64_t num_blocks);
  KvCacheSnapshot snapshot() const;
  // Requires: 0 <= block_class < snapshot().classes.size().
  BlockClassFacts facts_of_class(int block_class) const;
  // Called for every cached block that comes or goes; it must not call back.
  void set_prefix_listener(std::function<void(const cache::PrefixEvent&)> listener);

  // ---- the host tier (kv_cache_tier.cpp)

  // A hint that a sequence of these tokens will come: what only the host tier has of them sets out
  // for the pool, as far as there is room; this does not wait. UNSUPPORTED: no host tier, or as
  // create_sequence_from.
  Result<Prefetch> prefetch(const cache::PrefixKeys& keys, std::span<const int32_t> tokens);
  // Waits until no block is under way between the tiers.
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
  // another cache (the message says in what they differ), or one without a sequence; INCOMPATIBLE:
  // a newer version or the other byte order; OUT_OF_RANGE: too few blocks, or too long.
  Result<int> load_sequence(const std::string& path);
  // Blocks of the file that can be found from now on, as many as there is free room for. Errors as
  // load_sequence; damaged blocks are no error but reported.
  Result<LoadReport> load_prefixes(const std::string& path);
  // What the file's blocks must agree in. Empty while prefixes are off.
  std::string_view fingerprint() const;

  // ---- steps

  // The cache's own step, for callers with one thread. A step adds tokens to some sequences, each
  // named once. begin_step reserves their blocks in
  // every layer group and quantises the blocks that leave the window; then every layer calls
  // append_and_attend once; end_step makes the tokens part of the sequences. INVALID_ARGUMENT or
  // OUT_OF_RANGE, nothing changed: a sequence not in use or named twice, more tokens than
  // max_step_tokens or max_tokens_per_sequence, too few free blocks.
  Status begin_step(std::span<const StepEntry> entries);
  // Rows are the entries' tokens, one entry after the other. k, v: [tokens, num_kv_heads, head_dim]
  // after RoPE; q: [tokens, num_q_heads, k head_dim]; out: [tokens, num_q_heads, v head_dim].
  Status append_and_attend(int layer, const AttentionParams& params, FloatRows q, FloatRows k,
                           FloatRows v, MutableFloatRows out);
  Status end_step();
  // The same after a verification: of entry i's tokens the first kept_tokens[i] stay, 0 of them
  // perhaps. INVALID_ARGUMENT, the step stays open: a count out of range; UNSUPPORTED and
  // OUT_OF_RANGE as truncate_sequence.
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

  const KvCacheConfig& config() const { return config_; }
  const ops::CpuContext& context() const { return context_; }
  // NaN or infinite inputs that given or page-shared scales could not express, since creation. On a
  // GPU this waits; an error of what was launched is logged and counts none.
  int64_t nonfinite_inputs() const;
  // KvStep::check_rows, of begin_step's.
  Status check_step_rows() const;
  // Waits for what was launched on a GPU; nothing on the host. INTERNAL_ERROR: some of it failed.
  Status synchronize() const { return verbs_->synchronize(); }
  cache::PoolAccount account() const;
  // Bytes that the sequence's tokens take, whole blocks; and K and V bytes that its next token's
  // attention reads.
  cache::ByteCount sequence_bytes(int64_t num_tokens) const;
  int64_t bytes_read_per_step(int64_t num_tokens) const;

 private:
  friend class KvStep;
  friend class Prefetch;
  enum class Use : uint8_t { kFree, kIdle, kInStep };

  KvCache(KvCacheConfig config, const ops::CpuContext& context);

  static Error prefixes_are_off() {
    return unsupported(
        "prefix caching is off; expected a cache with prefix.is_on (C: KVX_CACHE_PREFIXES)");
  }
  Status create_place();
  // What a writer's steps move bytes with.
  Result<std::unique_ptr<Verbs>> create_verbs();
  Status create_pool();
  Status create_layers(std::span<const LayerPlan> plans);
  Status create_sequences();
  Status create_speculations();
  Status create_prefix_cache(std::span<const LayerPlan> plans);
  cache::SequenceShape sequence_shape() const;
  Status create_host_tier();
  // The lock, when no block is under way.
  std::unique_lock<std::mutex> lock_drained() const;

  // The lock is held by who calls these.
  void drain(std::unique_lock<std::mutex>& lock) const;
  bool is_drained() const { return !host_ || host_->is_idle(); }
  void collect() const;
  tier::Promotion bring_back(std::unique_lock<std::mutex>& lock, int sequence,
                             std::span<const int32_t> tokens, int64_t max_blocks);
  int64_t most_cached_blocks(std::span<const int32_t> tokens) const;
  Result<int> acquire_sequence();
  bool is_known(int sequence) const {
    return sequence >= 0 && sequence < config_.max_sequences && uses_[sequence] != Use::kFree;
  }
  Status check_sequence(int sequence) const;
  Status check_cut(int sequence, int64_t num_tokens, int64_t num_tokens_before) const;
  // ---- kv_cache_speculation.cpp
  // Whether a page's scale may grow under codes that are there already.
  bool has_growing_pages() const;
  bool cuts_growing_page(int64_t num_tokens, int64_t num_tokens_before) const {
    return has_growing_pages() && num_tokens % config_.block_size != 0 &&
           num_tokens < num_tokens_before;
  }
  Status cut(Verbs& verbs, int sequence, int64_t num_tokens, int64_t num_written);
  Status restore_page(Verbs& verbs, int sequence);
  Status append_again(Verbs& verbs, int sequence, int64_t first_token);
  void forget_block(int block_class, int32_t id);
  void warn_of_nonfinite_inputs();
  // A group's layers, for copies from packed to packed blocks, full-precision to full-precision, or
  // full-precision to packed.
  enum class CopyKind : uint8_t { kPacked, kFullPrecision, kPack };
  std::vector<LayerCopy> layer_copies(int group, CopyKind kind) const;
  std::span<uint8_t> block_bytes(int block_class, int32_t id) const;
  // A block as files have it, codes in nibbles; room: memory for it, where the pool has
  // interleaved.
  Result<std::span<const uint8_t>> bytes_for_file(int block_class, int32_t id,
                                                  std::vector<uint8_t>& room) const;
  // A block as it came from a file, on the host, becomes what the pool has.
  void take_pools_order(int block_class, std::span<uint8_t> block) const;
  std::vector<const ops::LayerView*> layers_interleaved(int block_class) const;
  int packed_class(int group) const { return has_full_precision_window() ? 2 * group : group; }
  int full_precision_class(int group) const { return 2 * group + 1; }
  bool has_full_precision_window() const { return full_precision_window_.is_on(); }

  KvCacheConfig config_;
  ops::CpuContext context_;
  cache::FullPrecisionWindow full_precision_window_;
  std::vector<GroupPlan> groups_;
  std::vector<int> group_of_layer_;
  std::unique_ptr<CudaPlace> place_;  // null on the host
  std::vector<std::unique_ptr<LayerStore>> layers_;
  // Guards what follows; bytes of blocks and a sequence in a step are its writer's.
  mutable std::mutex state_mutex_;
  std::unique_ptr<cache::BlockPool> pool_;
  std::vector<cache::Sequence> sequences_;
  std::vector<Use> uses_;                  // [sequences]
  std::vector<Speculation> speculations_;  // [sequences], or none
  std::unique_ptr<PrefixCache> prefixes_;  // null while they are off
  bool has_warned_of_nonfinite_ = false;
  std::atomic<int64_t> nonfinite_inputs_ = 0;
  std::unique_ptr<tier::HostTier> host_;  // null without one
  std::unique_ptr<Verbs> verbs_;          // of what is no step's
  std::unique_ptr<KvStep> step_;          // the cache's own
};

// Blocks on their way back from the host tier; they stay in the pool as long as this lives. The
// cache outlives it.
class Prefetch {
 public:
  Prefetch(Prefetch&& other) noexcept;
  Prefetch& operator=(Prefetch&&) = delete;
  // Waits, and lets go of the blocks.
  ~Prefetch();

  bool is_done() const;
  void wait() const;
  int64_t num_blocks() const { return promotion_.num_loads; }  // that set out

 private:
  friend class KvCache;
  Prefetch(KvCache& cache, int32_t scope, int32_t host_scope, tier::Promotion promotion)
      : cache_(&cache), scope_(scope), host_scope_(host_scope), promotion_(std::move(promotion)) {}

  KvCache* cache_;
  int32_t scope_;
  int32_t host_scope_;
  tier::Promotion promotion_;
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
