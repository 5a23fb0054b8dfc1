// KvCache: the host tier behind the pool.
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

// What the host tier has of the tokens, in the pool; the lock is open while this waits.
tier::Promotion KvCache::bring_back(std::unique_lock<std::mutex>& lock, int sequence,
                                    std::span<const int32_t> tokens, int64_t max_blocks) {
  tier::Promotion promotion = table_->prefixes->promote(sequence, tokens, max_blocks);
  if (promotion.ran_short && table_->host->num_stores() > 0) {  // on their way out blocks take room
    table_->drain(lock);
    table_->host->release(promotion);
    promotion = table_->prefixes->promote(sequence, tokens, max_blocks);
  }
  while (!table_->host->is_done(promotion)) {
    lock.unlock();
    table_->host->wait_for_some();
    lock.lock();
    table_->collect();  // while others are on their way
  }
  table_->collect();
  return promotion;
}

Result<Prefetch> KvCache::prefetch(const cache::PrefixKeys& keys, std::span<const int32_t> tokens) {
  if (!table_->host)
    return unsupported(
        "there is no host tier; expected a cache with host_tier.budget_bytes (C: host_tier_bytes)");
  const std::lock_guard lock(table_->mutex);
  table_->collect();
  KVX_ASSIGN_OR_RETURN(const int32_t scope, table_->prefixes->index().pin_scope(keys));
  const Result<int32_t> host_scope = table_->host->nodes().pin_scope(keys);
  if (!host_scope.ok()) {
    table_->prefixes->index().unpin(scope);
    return host_scope.error();
  }
  return Prefetch(
      *table_, scope, host_scope.value(),
      table_->host->promote(scope, host_scope.value(), tokens, most_cached_blocks(tokens)));
}

Prefetch::Prefetch(Prefetch&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)),
      scope_(other.scope_),
      host_scope_(other.host_scope_),
      promotion_(std::move(other.promotion_)) {}

Prefetch::~Prefetch() {
  if (!table_) return;
  wait();
  const std::lock_guard lock(table_->mutex);
  table_->collect();
  table_->host->release(promotion_);
  table_->prefixes->index().unpin(scope_);
  table_->host->nodes().unpin(host_scope_);
}

bool Prefetch::is_done() const {
  return table_->host->is_done(promotion_);
}

void Prefetch::wait() const {
  table_->host->wait(promotion_);
}

}  // namespace kvx::kv
