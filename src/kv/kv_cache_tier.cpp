// KvCache: the tiers behind the pool.
#include <utility>

#include "kv/kv_cache.hpp"

namespace kvx::kv {

void KvCache::wait_for_tiers() {
  table_->lock_drained();
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
                                    std::span<const int32_t> tokens, int64_t max_blocks) {
  tier::Promotion promotion = table_->prefixes->promote(sequence, tokens, max_blocks);
  if (promotion.ran_short && table_->has_stores()) {  // on their way out blocks take room
    table_->drain_stores(lock);
    finish(lock, promotion);
    table_->tiers->release(promotion);
    promotion = table_->prefixes->promote(sequence, tokens, max_blocks);
  }
  finish(lock, promotion);
  return promotion;
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
  auto promotion = table_->tiers->promote(scope, way, tokens, most_cached_blocks(tokens));
  return Prefetch(*table_, scope, std::move(way), std::move(promotion));
}

Prefetch::Prefetch(Prefetch&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)),
      scope_(other.scope_),
      way_(std::move(other.way_)),
      promotion_(std::move(other.promotion_)) {}

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
  return tier::is_done(promotion_);
}

void Prefetch::wait() const {
  tier::wait(promotion_);
}

}  // namespace kvx::kv
