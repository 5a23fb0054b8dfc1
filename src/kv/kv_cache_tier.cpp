// KvCache: the tiers behind the pool.
#include <algorithm>
#include <utility>

#include "kv/kv_cache.hpp"

namespace kvx::kv {

void KvCache::wait_for_tiers() {
  table_->lock_drained();
  if (table_->tiers) table_->tiers->wait_for_stores();
}

// ---- back to the pool

// The last token is left to compute.
int64_t KvCache::most_cached_blocks(std::span<const int32_t> tokens) const {
  const auto num_wanted = static_cast<int64_t>(tokens.size()) - 1;
  const int64_t num_most = std::min(num_wanted, storage().config.max_tokens_per_sequence);
  return std::max<int64_t>(num_most, 0) / storage().config.block_size;
}

// What the tiers have of the tokens, in the pool; the lock is open while this waits.
tier::Promotion KvCache::bring_back(std::unique_lock<std::mutex>& lock, int sequence,
                                    std::span<const int32_t> tokens, int64_t max_blocks,
                                    tier::LoadOrder order) {
  const auto answers = ask_stores(lock, sequence, tokens, max_blocks);
  tier::Promotion promotion =
      table_->prefixes->promote(sequence, tokens, max_blocks, answers, order);
  if (promotion.ran_short && table_->has_stores()) {  // on their way out blocks take room
    table_->drain_stores(lock);
    finish(lock, promotion);
    finish_layers(lock, promotion);
    table_->tiers->release(promotion);
    promotion = table_->prefixes->promote(sequence, tokens, max_blocks, answers, order);
  }
  finish(lock, promotion);
  return promotion;
}

// Opens the lock while it waits for the stores' answers; those that came in time.
std::vector<tier::StoreAnswer> KvCache::ask_stores(std::unique_lock<std::mutex>& lock, int sequence,
                                                   std::span<const int32_t> tokens,
                                                   int64_t max_blocks) {
  auto answers = table_->prefixes->look_up(sequence, tokens, max_blocks);
  if (answers.empty()) return answers;
  lock.unlock();
  std::erase_if(answers, [](const auto& one) { return !one.tier->wait_for(*one.lookup); });
  lock.lock();
  table_->collect();
  return answers;
}

// Opens the lock while it waits until the promotion's blocks are in the pool.
void KvCache::finish(std::unique_lock<std::mutex>& lock, const tier::Promotion& promotion) {
  while (!tier::is_done(promotion)) {
    lock.unlock();
    tier::wait_for_some(promotion);
    lock.lock();
    table_->collect();  // while others are on their way
  }
  table_->collect();
}

// The same of what comes layer by layer.
void KvCache::finish_layers(std::unique_lock<std::mutex>& lock, const tier::Promotion& promotion) {
  if (promotion.layers.empty()) return;
  lock.unlock();
  tier::wait_for_layer(promotion, tier::num_layers(promotion) - 1);
  lock.lock();
  table_->collect();
}

Status KvCache::wait_for_layer(int sequence, int layer) const {
  const int num_layers = config().geometry.num_layers;
  if (layer < 0 || layer >= num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer, num_layers - 1);
  }
  std::shared_ptr<tier::Promotion> load;
  {
    const std::lock_guard lock(table_->mutex);
    if (!table_->holds(sequence)) {
      return invalid_argument("sequence is {}; it is not in use", sequence);
    }
    load = table_->loads[sequence];
  }
  return load ? table_->wait_for_layer(*load, layer) : Status();
}

Status KvCache::end_loading(int sequence) {
  std::unique_lock lock(table_->mutex);
  return table_->end_load(lock, sequence);
}

Result<Prefetch> KvCache::prefetch(const cache::PrefixKeys& keys, std::span<const int32_t> tokens) {
  if (!table_->tiers) {
    return unsupported(
        "there is no tier behind the pool; expected a cache with tiers (C: options.tiers)");
  }
  const std::lock_guard lock(table_->mutex);
  table_->collect();
  KVX_ASSIGN_OR_RETURN(const int32_t scope, table_->prefixes->index().pin_scope(keys));
  tier::Way way;
  const Status begun = table_->tiers->begin(way, keys);
  if (!begun.ok()) {
    table_->prefixes->index().unpin(scope);
    return begun.error();
  }
  const int64_t max_blocks = most_cached_blocks(tokens);
  Prefetch prefetch(*table_, scope, std::move(way));
  prefetch.begin(tokens, max_blocks);
  return prefetch;
}

Prefetch::Prefetch(Prefetch&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)),
      scope_(other.scope_),
      way_(std::move(other.way_)),
      tokens_(std::move(other.tokens_)),
      max_blocks_(other.max_blocks_),
      answers_(std::move(other.answers_)),
      promotion_(std::move(other.promotion_)) {}

// Requires: the cache's lock.
void Prefetch::begin(std::span<const int32_t> tokens, int64_t max_blocks) {
  tokens_.assign(tokens.begin(), tokens.end());
  max_blocks_ = max_blocks;
  answers_ = table_->tiers->look_up(scope_, way_, tokens_, max_blocks_);
  if (answers_.empty()) promotion_ = table_->tiers->promote(scope_, way_, tokens_, max_blocks_);
}

// The stores have answered: what they have sets out. Requires: the cache's lock.
void Prefetch::go_on() const {
  promotion_ = table_->tiers->promote(scope_, way_, tokens_, max_blocks_, answers_);
  answers_.clear();
}

Prefetch::~Prefetch() {
  if (!table_) return;
  wait();
  const std::lock_guard lock(table_->mutex);
  table_->collect();
  table_->tiers->release(promotion_);
  table_->prefixes->index().unpin(scope_);
  table_->tiers->end(way_);
}

bool Prefetch::is_done() const {
  const std::lock_guard lock(table_->mutex);
  if (answers_.empty()) return tier::is_done(promotion_);
  const bool are_answered = std::ranges::all_of(
      answers_, [](const auto& one) { return one.tier->is_answered(*one.lookup); });
  if (are_answered) go_on();
  return false;
}

void Prefetch::wait() const {
  for (const tier::StoreAnswer& one : answers_) (void)one.tier->wait_for(*one.lookup);
  {
    const std::lock_guard lock(table_->mutex);
    std::erase_if(answers_, [](const auto& one) { return !one.tier->is_answered(*one.lookup); });
    if (!answers_.empty()) go_on();
  }
  tier::wait(promotion_);
}

}  // namespace kvx::kv
