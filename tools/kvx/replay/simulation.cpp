// replay: a block of the trace is a block of one token, whose token is its hash id.
#include "tools/kvx/replay/simulation.hpp"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "cache/prefix/prefix_index.hpp"

namespace kvx::tool {
namespace {

// One tier: blocks of one class, found by their ids.
class SimulatedTier final : public cache::EvictionListener {
 public:
  static Result<std::unique_ptr<SimulatedTier>> create(int64_t num_blocks, int64_t max_blocks,
                                                       cache::EvictionKind eviction) {
    const cache::BlockClassSpec spec{"trace", num_blocks, {1}};  // a byte that nobody reads
    KVX_ASSIGN_OR_RETURN(
        cache::BlockPool pool,
        cache::BlockPool::create(cache::host_memory(), std::span(&spec, 1), {eviction, false}));
    std::unique_ptr<SimulatedTier> tier(new SimulatedTier(std::move(pool)));
    tier->shape_ = {1, max_blocks, {{0, 0, {}, 0}}};
    KVX_ASSIGN_OR_RETURN(cache::PrefixIndex index,
                         cache::PrefixIndex::create(tier->pool_, tier->shape_, "trace",
                                                    cache::HashAlgorithm::kXxh3));
    tier->index_ = std::make_unique<cache::PrefixIndex>(std::move(index));
    KVX_ASSIGN_OR_RETURN(tier->scope_, tier->index_->pin_scope({}));
    tier->pool_.set_eviction_listener(tier.get());
    return tier;
  }

  void on_evict(int block_class, int32_t id) override { index_->on_evict(block_class, id); }

  // Runs a request and returns how many of its blocks were there.
  Result<int64_t> run(std::span<const int32_t> ids, const TraceRequest& request) {
    const int32_t session = index_->sessions().join(request.session);
    KVX_ASSIGN_OR_RETURN(const int64_t num_hits, run_in(ids, session));
    index_->sessions().leave(session);
    if (request.session_ends && pool_.keeps_shared_longer()) index_->end_session(request.session);
    return num_hits;
  }

  int64_t num_blocks() const { return pool_.num_blocks(0); }
  int64_t num_evicted() const { return pool_.snapshot(0).num_evicted; }
  int64_t most_blocks() const { return most_blocks_; }

 private:
  explicit SimulatedTier(cache::BlockPool pool) : pool_(std::move(pool)) {}

  Result<int64_t> run_in(std::span<const int32_t> ids, int32_t session) {
    KVX_ASSIGN_OR_RETURN(cache::Sequence sequence, cache::Sequence::create(shape_));
    const cache::PrefixMatch match = index_->match(scope_, ids, static_cast<int64_t>(ids.size()));
    std::vector<int32_t> blocks;
    for (int32_t node : match.nodes) {
      blocks.push_back(index_->block_of(node, 0, cache::BlockKind::kPacked));
      KVX_RETURN_IF_ERROR(pool_.touch(0, blocks.back()));
    }
    index_->share(match.nodes, session);
    const int64_t num_hits = match.num_blocks();
    int32_t node = match.nodes.empty() ? scope_ : match.nodes.back();
    const cache::GroupPrefix prefix{blocks, 0, num_hits};
    KVX_RETURN_IF_ERROR(sequence.adopt(pool_, num_hits, std::span(&prefix, 1)));
    const auto num_new = static_cast<int64_t>(ids.size()) - num_hits;
    if (num_new > 0) KVX_RETURN_IF_ERROR(sequence.append(pool_, num_new));
    for (size_t i = num_hits; i < ids.size(); ++i) {
      node = index_->insert(node, ids.subspan(i, 1), session);
      if (node == cache::kNoNode) break;
      KVX_RETURN_IF_ERROR(index_->attach(node, 0, cache::BlockKind::kPacked, sequence.table(0)[i]));
    }
    most_blocks_ = std::max(most_blocks_, pool_.num_blocks(0) - pool_.num_free(0));
    KVX_RETURN_IF_ERROR(sequence.clear(pool_));
    return num_hits;
  }

  cache::BlockPool pool_;
  cache::SequenceShape shape_;
  std::unique_ptr<cache::PrefixIndex> index_;
  int32_t scope_ = cache::kNoNode;
  int32_t most_blocks_ = 0;
};

// Ids of a trace are any numbers; those of the index are 32 bits.
std::vector<std::vector<int32_t>> dense_ids(const std::vector<TraceRequest>& trace) {
  std::unordered_map<int64_t, int32_t> names;
  std::vector<std::vector<int32_t>> requests;
  for (const TraceRequest& request : trace) {
    std::vector<int32_t>& ids = requests.emplace_back();
    for (int64_t id : request.hash_ids) {
      ids.push_back(names.emplace(id, static_cast<int32_t>(names.size())).first->second);
    }
  }
  return requests;
}

}  // namespace

Result<ReplayCounters> replay(const std::vector<TraceRequest>& trace, const ReplayOptions& options,
                              const std::function<void(double)>& on_progress) {
  if (options.num_blocks < 1 || options.num_host_blocks < 0) {
    return invalid_argument("blocks are {} and host blocks {}; expected 1 or more, and 0 or more",
                            options.num_blocks, options.num_host_blocks);
  }
  const std::vector<std::vector<int32_t>> requests = dense_ids(trace);
  int64_t max_blocks = 1;
  for (const auto& ids : requests) {
    max_blocks = std::max(max_blocks, static_cast<int64_t>(ids.size()));
  }
  KVX_ASSIGN_OR_RETURN(const auto first,
                       SimulatedTier::create(options.num_blocks, max_blocks, options.eviction));
  std::unique_ptr<SimulatedTier> host;
  if (options.num_host_blocks > 0) {
    KVX_ASSIGN_OR_RETURN(
        host, SimulatedTier::create(options.num_host_blocks, max_blocks, options.eviction));
  }
  ReplayCounters counters;
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::vector<int32_t>& ids = requests[i];
    const auto tokens = [&](int64_t num_blocks) {
      return std::min(num_blocks * kTraceBlockTokens, trace[i].input_length);
    };
    ++counters.num_requests;
    counters.input_tokens += trace[i].input_length;
    const auto num_ids = static_cast<int64_t>(ids.size());
    if (num_ids > first->num_blocks()) {
      ++counters.num_too_long;
      continue;
    }
    KVX_ASSIGN_OR_RETURN(const int64_t first_hits, first->run(ids, trace[i]));
    int64_t host_hits = 0;
    if (host && num_ids <= host->num_blocks()) {
      KVX_ASSIGN_OR_RETURN(host_hits, host->run(ids, trace[i]));
    }
    const int64_t hits = std::max(first_hits, host_hits);
    counters.hit_tokens += tokens(hits);
    counters.host_hit_tokens += tokens(hits) - tokens(first_hits);
    if (i % 256 == 0) on_progress(static_cast<double>(i) / static_cast<double>(requests.size()));
  }
  counters.num_evicted = first->num_evicted();
  counters.most_blocks = first->most_blocks();
  if (host) counters.most_host_blocks = host->most_blocks();
  return counters;
}

}  // namespace kvx::tool
