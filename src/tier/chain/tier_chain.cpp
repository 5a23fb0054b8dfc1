// TierChain: what is done for each tier.
#include "tier/chain/tier_chain.hpp"

#include <algorithm>

#include "tier/store/open_store.hpp"

namespace kvx::tier {

// ---- creation

Result<std::unique_ptr<TierChain>> TierChain::create(const FirstTier& first,
                                                     std::string fingerprint,
                                                     cache::HashAlgorithm algorithm,
                                                     std::span<const TierConfig> configs,
                                                     const MakeLink& make_link) {
  std::unique_ptr<TierChain> chain(new TierChain(first, fingerprint, algorithm));
  for (const TierConfig& config : configs) {
    if (is_store(config.kind)) {
      KVX_RETURN_IF_ERROR(chain->add_store(config, make_link));
      continue;
    }
    KVX_ASSIGN_OR_RETURN(TierLink link, make_link());
    KVX_ASSIGN_OR_RETURN(
        auto tier,
        HostTier::create(*first.pool, *first.index, *first.shape, fingerprint, algorithm, config,
                         std::move(link), first.parts == nullptr ? BlockParts{} : *first.parts));
    chain->tiers_.push_back(std::move(tier));
  }
  for (size_t i = 0; i + 1 < chain->tiers_.size(); ++i) {
    chain->demotions_.push_back(
        std::make_unique<Demotion>(*chain->tiers_[i], *chain->tiers_[i + 1]));
  }
  return chain;
}

Status TierChain::add_store(const TierConfig& config, const MakeLink& make_link) {
  const int64_t most_bytes = record_bytes(first_.shape->block_size, first_.pool->max_block_bytes());
  KVX_ASSIGN_OR_RETURN(std::shared_ptr<RemoteStore> store, open_store(config, most_bytes));
  RemoteTierOptions options;
  options.timeout = std::chrono::milliseconds(config.timeout_ms);
  KVX_ASSIGN_OR_RETURN(options.key, record_key_of(config));
  KVX_ASSIGN_OR_RETURN(TierLink store_link, make_link());
  KVX_ASSIGN_OR_RETURN(TierLink load_link, make_link());
  KVX_ASSIGN_OR_RETURN(auto tier, RemoteTier::create(first_, std::move(store), options,
                                                     std::move(store_link), std::move(load_link)));
  stores_.push_back(std::move(tier));
  return {};
}

// ---- a sequence's way

Status TierChain::begin(Way& way, const cache::PrefixKeys& keys, std::string_view session) {
  way.tiers.resize(tiers_.size());
  for (size_t i = 0; i < tiers_.size(); ++i) {
    const Result<int32_t> scope = tiers_[i]->nodes().pin_scope(keys);
    if (!scope.ok()) {
      for (size_t back = i; back-- > 0;) tiers_[back]->nodes().unpin(way.tiers[back].scope);
      return scope.error();
    }
    way.tiers[i].scope = scope.value();
  }
  for (size_t i = 0; i < tiers_.size(); ++i) {
    way.tiers[i].session = tiers_[i]->nodes().sessions().join(session);
  }
  if (!stores_.empty()) way.store_scope = store_scope_of(algorithm_, fingerprint_, keys);
  return {};
}

void TierChain::end(Way& way) {
  for (size_t i = 0; i < tiers_.size(); ++i) {
    tiers_[i]->nodes().unpin(way.tiers[i].tip());
    way.tiers[i].nodes.clear();
    tiers_[i]->nodes().sessions().leave(way.tiers[i].session);
    way.tiers[i].session = cache::kNoSession;
  }
}

void TierChain::fork(const Way& from, Way& to) {
  to = from;
  for (size_t i = 0; i < tiers_.size(); ++i) {
    tiers_[i]->nodes().pin(to.tiers[i].tip());
    tiers_[i]->nodes().sessions().join(to.tiers[i].session);
  }
}

void TierChain::truncate(Way& way, int64_t num_blocks) {
  for (size_t i = 0; i < tiers_.size(); ++i) {
    Way::InTier& here = way.tiers[i];
    if (std::ssize(here.nodes) <= num_blocks) continue;
    const int32_t old_tip = here.tip();
    here.nodes.resize(static_cast<size_t>(num_blocks));
    tiers_[i]->nodes().pin(here.tip());
    tiers_[i]->nodes().unpin(old_tip);
  }
}

void TierChain::follow(Way& way, std::span<const int32_t> tokens, int64_t num_blocks) {
  const auto block_size = static_cast<size_t>(first_.shape->block_size);
  for (size_t i = 0; i < tiers_.size(); ++i) {
    cache::PrefixIndex& index = tiers_[i]->nodes();
    Way::InTier& here = way.tiers[i];
    while (std::ssize(here.nodes) < num_blocks) {
      const int32_t parent = here.tip();
      const int32_t node = index.insert(
          parent, tokens.subspan(here.nodes.size() * block_size, block_size), here.session);
      if (node == cache::kNoNode) break;
      index.pin(node);
      here.nodes.push_back(node);
      index.unpin(parent);
    }
  }
}

void TierChain::store(const Way& way, int64_t block, int group, cache::BlockKind kind,
                      int32_t first_id) {
  for (const auto& one : stores_) one->store(way.store_scope, group, kind, first_id);
  if (tiers_.empty()) return;
  const Way::InTier& here = way.tiers.front();
  if (block >= std::ssize(here.nodes)) return;
  tiers_.front()->store(here.nodes[block], group, kind, first_id);
  if (!demotions_.empty()) demotions_.front()->fill();
}

Promotion TierChain::promote(int32_t first_scope, const Way& way, std::span<const int32_t> tokens,
                             int64_t max_blocks, std::span<const StoreAnswer> answers,
                             LoadOrder order) {
  return tier::promote(first_, first_scope, scopes_of(way), tokens, max_blocks, answers, order);
}

std::vector<TierScope> TierChain::scopes_of(const Way& way) const {
  std::vector<TierScope> scopes;
  for (size_t i = 0; i < tiers_.size(); ++i) {
    scopes.push_back({tiers_[i].get(), way.tiers[i].scope});
  }
  return scopes;
}

std::vector<StoreAnswer> TierChain::look_up(int32_t first_scope, const Way& way,
                                            std::span<const int32_t> tokens, int64_t max_blocks) {
  std::vector<StoreAnswer> answers;
  for (const auto& one : stores_) {
    std::shared_ptr<StoreLookup> lookup = make_lookup(first_, first_scope, scopes_of(way), tokens,
                                                      max_blocks, way.store_scope, algorithm_);
    if (!lookup) break;
    one->begin_lookup(lookup);
    answers.push_back({one.get(), std::move(lookup)});
  }
  return answers;
}

// ---- what is under way

void TierChain::collect() {
  for (const auto& one : tiers_) one->collect();
  for (size_t i = 0; i < demotions_.size(); ++i) {
    demotions_[i]->collect();
    tiers_[i]->start_waiting(false);
    demotions_[i]->fill();
    // Nothing moves, so nobody is waited for.
    if (demotions_[i]->is_idle()) tiers_[i]->start_waiting(true);
  }
  for (const auto& one : stores_) one->collect();
}

bool TierChain::is_idle() const {
  return std::ranges::all_of(tiers_, [](const auto& one) { return one->is_idle(); }) &&
         std::ranges::all_of(demotions_, [](const auto& one) { return one->is_idle(); }) &&
         std::ranges::all_of(stores_, [](const auto& one) { return one->is_idle(); });
}

void TierChain::wait_for_all() const {
  for (const auto& one : tiers_) one->wait_for_all();
  for (const auto& one : demotions_) one->wait_for_all();
  for (const auto& one : stores_) one->wait_until_idle();
}

void TierChain::wait_for_stores() const {
  for (const auto& one : stores_) one->wait_for_all();
}

bool TierChain::is_at_rest() const {
  return is_idle() &&
         std::ranges::all_of(stores_, [](const auto& one) { return one->is_at_rest(); });
}

int64_t TierChain::num_stores() const {
  int64_t num_stores = tiers_.empty() ? 0 : tiers_.front()->num_stores();
  for (const auto& one : stores_) num_stores += one->num_stores();
  return num_stores;
}

bool TierChain::has_late_loads() const {
  return std::ranges::any_of(stores_, [](const auto& one) { return one->has_late_loads(); });
}

void TierChain::cancel_late_loads() {
  for (const auto& one : stores_) one->cancel_late_loads();
}

void TierChain::cancel_waiting_stores() {
  const bool is_slow = !tiers_.empty() && tiers_.front()->kind() == TierKind::kDisk;
  if (is_slow) tiers_.front()->cancel_waiting_stores();
  for (const auto& one : stores_) one->cancel_waiting_stores();
}

bool TierChain::has_stores_without_room() const {
  return !tiers_.empty() && tiers_.front()->has_waiting_stores();
}

bool TierChain::wait_for_room_until(std::chrono::steady_clock::time_point end) const {
  return std::ranges::all_of(demotions_,
                             [end](const auto& one) { return one->wait_for_all_until(end); });
}

void TierChain::make_room_for_stores() {
  if (!tiers_.empty()) tiers_.front()->start_waiting(true);
}

bool TierChain::wait_for_stores_until(std::chrono::steady_clock::time_point end) const {
  const bool are_there = tiers_.empty() || tiers_.front()->wait_for_all_until(end);
  return are_there && std::ranges::all_of(stores_, [end](const auto& one) {
           return one->wait_for_stores_until(end);
         });
}

// ---- all tiers

namespace {

HostTierSnapshot snapshot_of(const RemoteTier& store) {
  const RemoteCounters counters = store.counters();
  HostTierSnapshot snapshot;
  snapshot.tier = cache::Tier::kStore;
  snapshot.allocated_bytes = store.staging_bytes();
  snapshot.num_stored = counters.num_stored;
  snapshot.num_loaded = counters.num_loaded;
  snapshot.num_bad = counters.num_bad;
  snapshot.num_dropped = counters.num_dropped;
  snapshot.num_failed_calls = counters.num_failed_calls;
  snapshot.prefix.num_hit_blocks = counters.num_loaded;
  snapshot.prefix.num_miss_blocks = counters.num_missed;
  snapshot.stores_queued = store.num_queued(Direction::kStore);
  snapshot.loads_queued = store.num_queued(Direction::kLoad);
  snapshot.store_latency = counters.store_latency;
  snapshot.load_latency = counters.load_latency;
  snapshot.last_problem = counters.last_problem;
  return snapshot;
}

}  // namespace

Status TierChain::clear() {
  for (const auto& one : tiers_) KVX_RETURN_IF_ERROR(one->clear());
  return {};
}

std::vector<HostTierSnapshot> TierChain::snapshot() const {
  std::vector<HostTierSnapshot> snapshots;
  for (const auto& one : tiers_) snapshots.push_back(one->snapshot());
  for (const auto& one : stores_) snapshots.push_back(snapshot_of(*one));
  return snapshots;
}

void TierChain::set_listener(const std::function<void(const cache::PrefixEvent&)>& listener) {
  for (const auto& one : tiers_) one->set_listener(listener);
}

}  // namespace kvx::tier
