// Metrics: reads a cache's snapshot, which takes its lock for as long as copying some counters
// takes.
#include "observe/metrics.hpp"

#include <algorithm>

namespace kvx::observe {
namespace {

using Labels = std::vector<std::pair<std::string, std::string>>;

Labels with(Labels labels, std::initializer_list<std::pair<std::string, std::string>> more) {
  labels.insert(labels.end(), more);
  return labels;
}

std::string format_name(const kv::KvCache& cache, int block_class) {
  const kv::Recipe& recipe = cache.config().recipe;
  if (cache.facts_of_class(block_class).is_full_precision) {
    return std::string(recipe.full_precision_spec.facts->name);
  }
  const std::string k(recipe.k.spec.facts->name);
  const std::string v(recipe.v.spec.facts->name);
  return k == v ? k : fmt::format("{}/{}", k, v);
}

}  // namespace

MetricFamily& Metrics::family(const std::string& name, MetricKind kind, const char* help) {
  const auto found = std::ranges::find(families_, name, &MetricFamily::name);
  if (found != families_.end()) return *found;
  families_.push_back({name, help, kind, {}});
  return families_.back();
}

void Metrics::put(const std::string& name, MetricKind kind, const char* help, Labels labels,
                  double value) {
  family(name, kind, help).samples.push_back({std::move(labels), value});
}

void Metrics::add(const kv::KvCache& cache, const std::string& name) {
  const Labels labels = {{"cache", name}};
  const kv::KvCacheConfig& config = cache.config();
  const kv::KvCacheSnapshot seen = cache.snapshot();
  put("kvx_cache_config_info", MetricKind::kGauge, "What the cache was made from; always 1.",
      with(labels, {{"recipe", config.recipe.text},
                    {"block_size", std::to_string(config.block_size)},
                    {"num_layers", std::to_string(config.geometry.num_layers)},
                    {"num_kv_heads", std::to_string(config.geometry.num_kv_heads)},
                    {"device", config.cuda ? "cuda" : "cpu"},
                    {"policy", std::string(name_of(config.eviction))}}),
      1);
  put("kvx_sequences", MetricKind::kGauge, "Sequences in use.", labels, seen.num_sequences);
  add_pool(cache, labels, "pool", 0, config.eviction, seen.classes);
  if (config.prefix.is_on) {
    add_prefixes(labels, "kvx_", "the pool", seen.prefix, config.block_size);
  }
  for (size_t i = 0; i < seen.tiers.size(); ++i) {
    const tier::HostTierSnapshot& tier = seen.tiers[i];
    const int level = static_cast<int>(i) + 1;
    const std::string kind(cache::name_of(tier.tier));
    const Labels of_tier = with(labels, {{"tier", kind}, {"level", std::to_string(level)}});
    add_pool(cache, labels, kind, level, config.tiers[i].eviction, tier.classes);
    add_prefixes(of_tier, "kvx_external_", "the tiers behind the pool", tier.prefix,
                 config.block_size);
    add_tier(of_tier, tier);
  }
  add_inputs(cache, labels);
  add_latencies(cache, labels);
}

void Metrics::add_pool(const kv::KvCache& cache, const Labels& labels, const std::string& tier,
                       int level, cache::EvictionKind policy,
                       const std::vector<cache::BlockClassSnapshot>& classes) {
  double used_bytes = 0;
  double all_bytes = 0;
  for (size_t c = 0; c < classes.size(); ++c) {
    const cache::BlockClassSnapshot& one = classes[c];
    const Labels of_class = with(labels, {{"tier", tier},
                                          {"level", std::to_string(level)},
                                          {"pool", cache.facts_of_class(static_cast<int>(c)).name},
                                          {"format", format_name(cache, static_cast<int>(c))}});
    const auto bytes = static_cast<double>(one.block_bytes);
    const std::pair<const char*, int64_t> states[] = {
        {"used", one.num_active}, {"cached", one.num_cached}, {"free", one.num_free}};
    for (const auto& [state, count] : states) {
      const auto blocks = static_cast<double>(count);
      put("kvx_blocks", MetricKind::kGauge, "Blocks by what they hold.",
          with(of_class, {{"state", state}}), blocks);
      put("kvx_block_bytes", MetricKind::kGauge, "Their bytes.", with(of_class, {{"state", state}}),
          blocks * bytes);
      all_bytes += blocks * bytes;
    }
    used_bytes += static_cast<double>(one.num_active) * bytes;
    const Labels with_policy = with(of_class, {{"policy", std::string(name_of(policy))}});
    put("kvx_evictions_total", MetricKind::kCounter, "Cached blocks that made room for others.",
        with_policy, static_cast<double>(one.num_evicted));
    put("kvx_revivals_total", MetricKind::kCounter, "Cached blocks that were used again.",
        with_policy, static_cast<double>(one.num_revived));
  }
  if (level != 0) return;
  put("kvx_kv_cache_usage_perc", MetricKind::kGauge,
      "Share of the pool's bytes in blocks that sequences use; 1 is all.", labels,
      all_bytes > 0 ? used_bytes / all_bytes : 0);
}

void Metrics::add_prefixes(const Labels& labels, const std::string& prefix, const std::string& of,
                           const cache::PrefixCounters& counters, int block_size) {
  const auto counter = [&](const char* name, const std::string& help, int64_t count) {
    put(prefix + name, MetricKind::kCounter, help.c_str(), labels, static_cast<double>(count));
  };
  counter("prefix_cache_queries_total", "Tokens of full blocks that were looked up in " + of + ".",
          (counters.num_hit_blocks + counters.num_miss_blocks) * block_size);
  counter("prefix_cache_hits_total", "Tokens of blocks that were found in " + of + ".",
          counters.num_hit_blocks * block_size);
  counter("prefix_cache_lookups_total", "Look-ups in " + of + ".", counters.num_queries);
  counter("prefix_blocks_stored_total", "Blocks that became findable in " + of + ".",
          counters.num_stored);
  counter("prefix_blocks_removed_total", "Blocks that are no longer found in " + of + ".",
          counters.num_removed);
  counter("prefix_blocks_refused_total", "Blocks that the index of " + of + " had no room for.",
          counters.num_refused);
}

void Metrics::add_tier(const Labels& labels, const tier::HostTierSnapshot& seen) {
  const std::pair<const char*, int64_t> outcomes[] = {{"stored", seen.num_stored},
                                                      {"loaded", seen.num_loaded},
                                                      {"bad", seen.num_bad},
                                                      {"dropped", seen.num_dropped},
                                                      {"moved_down", seen.num_moved_down}};
  for (const auto& [outcome, count] : outcomes) {
    put("kvx_tier_blocks_total", MetricKind::kCounter,
        "Blocks that a tier stored, loaded back, found damaged, dropped, or moved down.",
        with(labels, {{"outcome", outcome}}), static_cast<double>(count));
  }
  const std::pair<const char*, int64_t> queues[] = {{"store", seen.stores_queued},
                                                    {"load", seen.loads_queued}};
  for (const auto& [direction, count] : queues) {
    put("kvx_tier_queued_blocks", MetricKind::kGauge, "Blocks that wait for their copy.",
        with(labels, {{"direction", direction}}), static_cast<double>(count));
  }
  const std::pair<const char*, const tier::Latency*> latencies[] = {{"store", &seen.store_latency},
                                                                    {"load", &seen.load_latency}};
  for (const auto& [direction, latency] : latencies) {
    const Histogram histogram{{latency->counts.begin(), latency->counts.end()},
                              1e-6,
                              1e-6 * static_cast<double>(latency->total_microseconds)};
    family("kvx_tier_seconds", MetricKind::kHistogram, "How long blocks were under way.")
        .samples.push_back({with(labels, {{"direction", direction}}), 0, histogram});
  }
}

// Asking a cache on a GPU would wait for the device, and end what captures its stream.
void Metrics::add_inputs(const kv::KvCache& cache, const Labels& labels) {
  if (cache.config().cuda) return;
  const Result<std::vector<kv::LayerCounts>> layers = cache.head_counts();
  if (!layers.ok()) return;
  for (size_t layer = 0; layer < layers.value().size(); ++layer) {
    const kv::LayerCounts& counts = layers.value()[layer];
    const std::pair<const char*, const std::vector<ops::HeadCounts>*> sides[] = {{"k", &counts.k},
                                                                                 {"v", &counts.v}};
    for (const auto& [side, heads] : sides) {
      double num_saturated = 0;
      double num_nonfinite = 0;
      for (const ops::HeadCounts& head : *heads) {
        num_saturated += static_cast<double>(head.saturated);
        num_nonfinite += static_cast<double>(head.nonfinite);
      }
      const Labels of_layer = with(labels, {{"layer", std::to_string(layer)}, {"side", side}});
      put("kvx_saturated_inputs_total", MetricKind::kCounter,
          "Numbers that a static scale clipped.", of_layer, num_saturated);
      put("kvx_nonfinite_inputs_total", MetricKind::kCounter,
          "NaN and infinite numbers that no code expresses.", of_layer, num_nonfinite);
    }
  }
}

void Metrics::add_latencies(const kv::KvCache& cache, const Labels& labels) {
  const auto add = [&](const char* name, const char* help, const LatencyHistogram& histogram) {
    const LatencyHistogram::Snapshot seen = histogram.snapshot();
    const Histogram copy{
        {seen.counts.begin(), seen.counts.end()}, LatencyHistogram::kFirstBound, seen.sum_seconds};
    family(name, MetricKind::kHistogram, help).samples.push_back({labels, 0, copy});
  };
  const kv::Latencies& latencies = cache.latencies();
  add("kvx_step_seconds", "From a step's beginning to its end, the model's own work included.",
      latencies.step);
  add("kvx_step_begin_seconds", "Acquiring a step's blocks, evictions included.",
      latencies.step_begin);
  add("kvx_prefix_lookup_seconds",
      "Beginning a sequence from a prefix, waiting for tiers included.", latencies.lookup);
  add("kvx_file_save_seconds", "Saving a sequence or prefixes.", latencies.save);
  add("kvx_file_load_seconds", "Loading a sequence or prefixes.", latencies.load);
}

}  // namespace kvx::observe
