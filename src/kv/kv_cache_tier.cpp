// KvCache: the host tier behind the pool.
#include <utility>

#include "kv/kv_cache.hpp"

namespace kvx::kv {

Status KvCache::create_host_tier() {
  const tier::HostTierConfig& config = config_.host_tier;
  if (config.budget_bytes == 0) {
    if (config.folder.empty()) return {};
    return invalid_argument("host_tier.folder is '{}'; expected budget_bytes above 0 with it",
                            config.folder);
  }
  if (!prefixes_) {
    return invalid_argument("host_tier.budget_bytes is {}; expected 0 while prefixes are off",
                            config.budget_bytes);
  }
  tier::TierLink link = tier::host_link();
  if (place_) {
    const ops::CudaContext& context = place_->context;
    KVX_ASSIGN_OR_RETURN(link,
                         tier::cuda_link(context.device.index, context.stream, *place_->pinned));
  }
  KVX_ASSIGN_OR_RETURN(host_, tier::HostTier::create(*pool_, prefixes_->index(), sequence_shape(),
                                                     prefixes_->fingerprint(), config_.prefix.hash,
                                                     config, std::move(link)));
  prefixes_->set_host_tier(host_.get());
  return {};
}

// ---- what is under way

// The books of what has finished by now.
void KvCache::collect() const {
  if (host_) host_->collect();
}

void KvCache::drain(std::unique_lock<std::mutex>& lock) const {
  while (!is_drained()) {
    lock.unlock();
    host_->wait_for_all();
    lock.lock();
    collect();
  }
}

std::unique_lock<std::mutex> KvCache::lock_drained() const {
  std::unique_lock lock(state_mutex_);
  drain(lock);
  return lock;
}

void KvCache::wait_for_tiers() {
  lock_drained();
}

// ---- back to the pool

// The last token is left to compute.
int64_t KvCache::most_cached_blocks(std::span<const int32_t> tokens) const {
  const auto num_wanted = static_cast<int64_t>(tokens.size()) - 1;
  const int64_t num_most = std::min(num_wanted, config_.max_tokens_per_sequence);
  return std::max<int64_t>(num_most, 0) / config_.block_size;
}

// What the host tier has of the tokens, in the pool; the lock is open while this waits.
tier::Promotion KvCache::bring_back(std::unique_lock<std::mutex>& lock, int sequence,
                                    std::span<const int32_t> tokens, int64_t max_blocks) {
  tier::Promotion promotion = prefixes_->promote(sequence, tokens, max_blocks);
  if (promotion.ran_short && host_->num_stores() > 0) {  // on their way out blocks take room
    drain(lock);
    host_->release(promotion);
    promotion = prefixes_->promote(sequence, tokens, max_blocks);
  }
  while (!host_->is_done(promotion)) {
    lock.unlock();
    host_->wait_for_some();
    lock.lock();
    collect();  // while others are on their way
  }
  collect();
  return promotion;
}

Result<Prefetch> KvCache::prefetch(const cache::PrefixKeys& keys, std::span<const int32_t> tokens) {
  if (!host_)
    return unsupported(
        "there is no host tier; expected a cache with host_tier.budget_bytes (C: host_tier_bytes)");
  const std::lock_guard lock(state_mutex_);
  collect();
  KVX_ASSIGN_OR_RETURN(const int32_t scope, prefixes_->index().pin_scope(keys));
  const Result<int32_t> host_scope = host_->nodes().pin_scope(keys);
  if (!host_scope.ok()) {
    prefixes_->index().unpin(scope);
    return host_scope.error();
  }
  return Prefetch(*this, scope, host_scope.value(),
                  host_->promote(scope, host_scope.value(), tokens, most_cached_blocks(tokens)));
}

Prefetch::Prefetch(Prefetch&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)),
      scope_(other.scope_),
      host_scope_(other.host_scope_),
      promotion_(std::move(other.promotion_)) {}

Prefetch::~Prefetch() {
  if (!cache_) return;
  wait();
  const std::lock_guard lock(cache_->state_mutex_);
  cache_->collect();
  cache_->host_->release(promotion_);
  cache_->prefixes_->index().unpin(scope_);
  cache_->host_->nodes().unpin(host_scope_);
}

bool Prefetch::is_done() const {
  return cache_->host_->is_done(promotion_);
}

void Prefetch::wait() const {
  cache_->host_->wait(promotion_);
}

}  // namespace kvx::kv
