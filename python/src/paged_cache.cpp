// PagedCache: kv::KvCache for Python. One lock a cache, taken without the GIL, so that threads wait
// for each other and never observe half a step. Threads with a PagedStep of their own do not wait.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <optional>
#include <type_traits>

#include "kv/kv_cache.hpp"
#include "observe/event_publisher.hpp"
#include "observe/metrics_server.hpp"
#include "python/src/arguments.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/cuda_lane.hpp"
#include "python/src/errors.hpp"
#include "python/src/interrupt.hpp"
#include "python/src/paged_step.hpp"
#include "python/src/text.hpp"
#include "transfer/sequence_export.hpp"
#include "transfer/sequence_import.hpp"
#include "tune/tuned_recipe.hpp"

namespace kvx::python {
namespace {

using Tokens = std::vector<int32_t>;

struct Options {
  kv::CacheGeometry geometry;
  std::string recipe;
  std::optional<int> first_layer;  // of a tuned recipe; none: the cache has all of its layers
  std::vector<std::string> layer_overrides;
  std::vector<std::string> head_overrides;
  int block_size = 64;
  int max_sequences = 1;
  int64_t max_tokens = 0;
  int64_t memory_budget_bytes = 0;
  std::optional<std::string> prefix_model;  // none: prefixes are off
  std::string prefix_hash;
  int64_t host_tier_bytes = 0;
  std::string host_tier_folder;  // empty: in memory
  std::string tiers;             // instead of these two
  int64_t tier_shares = 1;       // caches among which their budgets are divided
  std::string device;
  int max_step_tokens = 0;  // on a GPU
  int max_speculative_tokens = 0;
};

cache::HashAlgorithm hash_algorithm(const std::string& name) {
  if (name == "xxh3") return cache::HashAlgorithm::kXxh3;
  if (name == "sha256") return cache::HashAlgorithm::kSha256;
  throw CoreError(invalid_argument("prefix_hash is '{}'; expected xxh3 or sha256", name));
}

std::vector<tier::TierConfig> tiers_of(const Options& options) {
  if (options.host_tier_bytes < 0) {
    throw CoreError(
        invalid_argument("host_tier_bytes is {}; expected 0 or more", options.host_tier_bytes));
  }
  if (options.host_tier_bytes > 0 && !options.prefix_model) {
    throw CoreError(invalid_argument("host_tier_bytes is {}; expected a prefix_model with it",
                                     options.host_tier_bytes));
  }
  if (options.host_tier_bytes == 0 && !options.host_tier_folder.empty()) {
    throw CoreError(invalid_argument("host_tier_folder is '{}'; expected host_tier_bytes with it",
                                     options.host_tier_folder));
  }
  auto tiers = value_of(tier::parse_tiers(options.tiers));
  check_range("tier_shares", options.tier_shares, 1, 1 << 20);
  for (tier::TierConfig& one : tiers) one.budget_bytes /= options.tier_shares;
  if (!tiers.empty() && !options.prefix_model) {
    throw CoreError(
        invalid_argument("tiers is '{}'; expected a prefix_model with it", options.tiers));
  }
  if (options.host_tier_bytes == 0) return tiers;
  if (!tiers.empty()) {
    throw CoreError(invalid_argument("host_tier_bytes is {}; expected 0 with tiers, '{}'",
                                     options.host_tier_bytes, options.tiers));
  }
  const bool is_disk = !options.host_tier_folder.empty();
  return {{.kind = is_disk ? tier::TierKind::kDisk : tier::TierKind::kHost,
           .budget_bytes = options.host_tier_bytes,
           .folder = options.host_tier_folder}};
}

// None on the CPU.
std::shared_ptr<CudaLane> lane_of(const std::string& device, nb::handle stream) {
  if (device != "cpu") return std::make_shared<CudaLane>(device, stream);
  if (stream.is_none()) return nullptr;
  throw CoreError(invalid_argument("stream is given; a cache on the CPU has none"));
}

kv::KvCacheConfig config_of(const Options& options, const CudaLane* lane) {
  kv::KvCacheConfig config;
  config.geometry = options.geometry;
  config.block_size = options.block_size;
  auto recipe = value_of(tune::read_recipe(options.recipe));
  if (options.first_layer) {
    recipe = value_of(
        tune::layers_of(std::move(recipe), *options.first_layer, options.geometry.num_layers));
  }
  for (const std::string& text : options.layer_overrides) {
    config.overrides.push_back(value_of(kv::parse_layer_override(text)));
  }
  for (const std::string& text : options.head_overrides) {
    config.overrides.push_back(value_of(kv::parse_head_override(text)));
  }
  check_range("head_dim", options.geometry.k_head_dim, 1, format::kMaxHeadDim);
  check_range("v_head_dim", options.geometry.v_head_dim, 1, format::kMaxHeadDim);
  check_range("max_tokens", options.max_tokens, 1, kv::kMaxTokens);
  throw_if_error(tune::use_recipe(recipe, config));
  config.max_sequences = options.max_sequences;
  config.max_tokens_per_sequence = options.max_tokens;
  config.memory_budget_bytes = options.memory_budget_bytes;
  check_range("max_speculative_tokens", options.max_speculative_tokens, 0, kv::kMaxTokens);
  config.max_speculative_tokens = options.max_speculative_tokens;
  config.prefix.is_on = options.prefix_model.has_value();
  config.prefix.model = options.prefix_model.value_or("");
  config.prefix.hash = hash_algorithm(options.prefix_hash);
  config.tiers = tiers_of(options);
  if (lane != nullptr) config.cuda = lane->placement(options.max_step_tokens);
  return config;
}

// A sequence on offer to other processes.
class Export {
 public:
  Export(std::shared_ptr<const Context> context, std::unique_ptr<transfer::SequenceExport> offer)
      : context_(std::move(context)), offer_(std::move(offer)) {}
  Export(Export&&) = default;
  // The destructor of an offer would wait for its thread.
  ~Export() {
    if (offer_ && !context_->home().is_this()) static_cast<void>(offer_.release());
  }

  std::string endpoint() const { return offer_ ? offer_->endpoint() : ""; }
  // (bytes, bytes_sent, taken, refused, last_refusal, layers, layers_there, problem)
  nb::tuple state() const {
    const transfer::ExportState state = open().state();
    return nb::make_tuple(state.bytes, state.bytes_sent, state.num_taken, state.num_refused,
                          text_of(state.last_refusal), state.num_layers, state.num_layers_there,
                          text_of(state.problem));
  }
  bool wait(int64_t timeout_ms) const {
    const nb::gil_scoped_release no_gil;
    return open().wait(timeout_ms);
  }
  void close() {
    const nb::gil_scoped_release no_gil;
    offer_.reset();
  }

 private:
  const transfer::SequenceExport& open() const {
    if (!offer_) throw CoreError(invalid_argument("the offer is closed; make another one"));
    return *offer_;
  }

  std::shared_ptr<const Context> context_;
  std::unique_ptr<transfer::SequenceExport> offer_;
};

class PagedCache {
 public:
  PagedCache(const Options& options, nb::handle stream)
      : parts_(std::make_shared<CacheParts>()), context_(current_context()) {
    parts_->context = context_;
    parts_->lane = lane_of(options.device, stream);
    lane_ = parts_->lane.get();
    cache_ = value_of(kv::KvCache::create(config_of(options, lane_), context_->cpu()));
    shown_ = std::make_unique<observe::ShownCache>(*cache_, "");
    geometry_ = cache_->config().geometry;
    has_appended_.assign(geometry_.num_layers, false);
  }
  // The destructor of a tier waits for its threads, and one of them may be a Python store's.
  ~PagedCache() {
    if (context_->home().is_this()) {
      const nb::gil_scoped_release no_gil;
      publisher_.reset();
      shown_.reset();
      if (parts_.use_count() == 1) cache_.reset();  // else a step has it
      return;
    }
    static_cast<void>(publisher_.release());
    static_cast<void>(shown_.release());
    static_cast<void>(new std::shared_ptr<kv::KvCache>(std::move(cache_)));
  }

  std::unique_ptr<PagedStep> new_step() {
    return locked([&] { return std::make_unique<PagedStep>(parts_); });
  }

  void close() {
    locked(
        [&] {
          publisher_.reset();
          shown_.reset();
          cache_.reset();
        },
        kMayBeClosed);
  }

  int create_sequence() {
    return locked([&] { return value_of(cache_->create_sequence()); });
  }
  void free_sequence(int sequence) {
    locked([&] { throw_if_error(cache_->free_sequence(sequence)); });
  }
  int fork_sequence(int sequence) {
    return locked([&] { return value_of(cache_->fork_sequence(sequence)); });
  }
  void truncate(int sequence, int64_t num_tokens) {
    locked([&] { throw_if_error(cache_->truncate_sequence(sequence, num_tokens)); });
  }
  int64_t num_tokens(int sequence) {
    return locked([&] {
      check_in_use(sequence);
      return cache_->num_tokens(sequence);
    });
  }
  int64_t max_step_tokens(int sequence) {
    return locked([&] {
      check_in_use(sequence);
      return cache_->max_step_tokens(sequence);
    });
  }

  int create_sequence_from(const Tokens& tokens, std::string adapter, std::string image,
                           std::string tenant, const std::string& session, bool by_layer) {
    const cache::PrefixKeys keys{std::move(adapter), std::move(image), std::move(tenant)};
    const auto order = by_layer ? tier::LoadOrder::kLayerByLayer : tier::LoadOrder::kWholeBlocks;
    return locked(
        [&] { return value_of(cache_->create_sequence_from(keys, tokens, session, order)); });
  }
  void wait_for_layer(int sequence, int layer) {
    locked([&] { throw_if_error(cache_->wait_for_layer(sequence, layer)); });
  }
  int64_t end_loading(int sequence) {
    return locked([&] {
      throw_if_error(cache_->end_loading(sequence));
      return cache_->num_tokens(sequence);
    });
  }
  void retain(int sequence, int64_t first_token, int64_t num_tokens, int priority, bool pin,
              int64_t duration_ms) {
    const kv::RetentionRange range{first_token, num_tokens, priority, pin, duration_ms};
    locked([&] { throw_if_error(cache_->retain(sequence, {&range, 1})); });
  }
  int64_t end_session(const std::string& session) {
    return locked([&] { return value_of(cache_->end_session(session)); });
  }
  int64_t delete_session(const std::string& session) {
    return locked([&] { return value_of(cache_->delete_session(session)); });
  }
  void record_tokens(int sequence, const Tokens& tokens) {
    locked([&] { throw_if_error(cache_->record_tokens(sequence, tokens)); });
  }
  Tokens recorded_tokens(int sequence) {
    return locked([&] {
      check_in_use(sequence);
      const std::span<const int32_t> tokens = cache_->recorded_tokens(sequence);
      return Tokens(tokens.begin(), tokens.end());
    });
  }
  void clear_prefixes() {
    locked([&] { throw_if_error(cache_->clear_prefixes()); });
  }

  void publish_events(const nb::kwargs& given) {
    observe::EventPublisherOptions options;
    options.endpoint = nb::cast<std::string>(given["endpoint"]);
    options.replay_endpoint = nb::cast<std::string>(given["replay_endpoint"]);
    options.topic = nb::cast<std::string>(given["topic"]);
    options.buffer_batches = nb::cast<int64_t>(given["buffer_batches"]);
    options.high_water_mark = nb::cast<int64_t>(given["high_water_mark"]);
    options.queue_events = nb::cast<int64_t>(given["queue_events"]);
    options.data_parallel_rank = nb::cast<int>(given["data_parallel_rank"]);
    options.hashes_are_integers = nb::cast<bool>(given["integer_hashes"]);
    locked([&] {
      publisher_.reset();  // it may have bound the same endpoint
      publisher_ = value_of(observe::EventPublisher::create(*cache_, options));
    });
  }
  void set_name(std::string name) {
    locked([&] {
      shown_.reset();
      shown_ = std::make_unique<observe::ShownCache>(*cache_, std::move(name));
    });
  }
  void stop_events() {
    locked([&] { publisher_.reset(); });
  }
  // (endpoint, replay_endpoint, events, batches, dropped, replays)
  nb::tuple event_publisher() {
    std::string endpoint;
    std::string replay_endpoint;
    const kvx_observe_publisher_counts counts = locked([&] {
      if (!publisher_) {
        throw CoreError(invalid_argument("no events are published; call publish_events() first"));
      }
      endpoint = publisher_->endpoint();
      replay_endpoint = publisher_->replay_endpoint();
      return publisher_->counts();
    });
    return nb::make_tuple(endpoint, replay_endpoint, counts.num_events, counts.num_batches,
                          counts.num_dropped, counts.num_replays);
  }

  int64_t erase_tenant(const std::string& tenant) {
    return locked([&] { return value_of(cache_->erase_tenant(tenant)); });
  }
  int64_t erase_session(const Tokens& tokens, int64_t first_token, std::string adapter,
                        std::string image, std::string tenant) {
    const cache::PrefixKeys keys{std::move(adapter), std::move(image), std::move(tenant)};
    return locked([&] { return value_of(cache_->erase_session(keys, tokens, first_token)); });
  }

  void wait_for_tier() {
    locked([&] { cache_->wait_for_tiers(); });
  }
  nb::list tiers() {
    nb::list list;
    for (const tier::HostTierSnapshot& one : locked([&] { return cache_->snapshot().tiers; })) {
      nb::dict dict;
      dict["name"] = text_of(std::string(name_of(one.tier)));
      dict["allocated"] = one.allocated_bytes;
      dict["held"] = one.held_bytes;
      dict["stored"] = one.num_stored;
      dict["loaded"] = one.num_loaded;
      dict["moved_down"] = one.num_moved_down;
      dict["bad"] = one.num_bad;
      dict["dropped"] = one.num_dropped;
      dict["failed_calls"] = one.num_failed_calls;
      dict["load_p99_us"] = one.load_latency.quantile(0.99);
      dict["last_problem"] = text_of(one.last_problem);
      list.append(dict);
    }
    return list;
  }

  void save_sequence(int sequence, const nb::bytes& path_bytes, int zstd_level) {
    const std::string path = path_bytes.c_str();
    locked([&] {
      interruptibly([&] { throw_if_error(cache_->save_sequence(sequence, path, {zstd_level})); });
    });
  }
  void save_prefixes(const nb::bytes& path_bytes, int zstd_level) {
    const std::string path = path_bytes.c_str();
    locked(
        [&] { interruptibly([&] { throw_if_error(cache_->save_prefixes(path, {zstd_level})); }); });
  }
  int load_sequence(const nb::bytes& path_bytes) {
    const std::string path = path_bytes.c_str();
    return locked(
        [&] { return interruptibly([&] { return value_of(cache_->load_sequence(path)); }); });
  }
  nb::dict load_prefixes(const nb::bytes& path_bytes) {
    const std::string path = path_bytes.c_str();
    const kv::LoadReport report = locked(
        [&] { return interruptibly([&] { return value_of(cache_->load_prefixes(path)); }); });
    nb::dict dict;
    dict["blocks"] = report.num_blocks;
    dict["loaded"] = report.num_loaded;
    dict["known"] = report.num_known;
    dict["bad"] = report.num_bad;
    dict["no_room"] = report.num_no_room;
    dict["first_problem"] = text_of(report.first_problem);
    return dict;
  }
  Export export_sequence(int sequence, const std::string& endpoint) {
    return {context_, locked([&] {
              return value_of(transfer::SequenceExport::create(*cache_, sequence, {endpoint}));
            })};
  }
  Export export_layers(int sequence, const Tokens& tokens, const std::string& endpoint) {
    return {context_, locked([&] {
              return value_of(
                  transfer::SequenceExport::create_by_layer(*cache_, sequence, tokens, {endpoint}));
            })};
  }
  // (sequence, bytes, asked_again, shared). Other threads may use the cache while this waits for
  // the exporter.
  nb::tuple import_sequence(const std::string& endpoint, bool transcode, int64_t timeout_ms,
                            int first_head, int num_heads) {
    transfer::ImportOptions options{endpoint, timeout_ms, transcode, {}};
    if (num_heads != 0) {
      options.heads = {first_head, first_head + geometry_.num_kv_heads, num_heads};
    }
    transfer::ImportReport report;
    const std::shared_ptr<kv::KvCache> cache = locked([&] { return cache_; });
    const int sequence = [&] {
      const nb::gil_scoped_release no_gil;
      return value_of(transfer::import_sequence(*cache, options, &report));
    }();
    return nb::make_tuple(sequence, report.bytes, report.num_asked_again, report.was_shared);
  }
  std::string fingerprint() {
    return locked([&] { return std::string(cache_->fingerprint()); });
  }

  // speculative: of each entry, or empty: none is.
  void begin_step(const Entries& entries, const std::vector<bool>& speculative) {
    if (!speculative.empty() && speculative.size() != entries.size()) {
      throw CoreError(invalid_argument("speculative has {} marks; the step has {} entries",
                                       speculative.size(), entries.size()));
    }
    locked([&] {
      std::vector<kv::StepEntry> step;
      int64_t tokens = 0;
      for (const auto& [sequence, num_tokens] : entries) {
        const size_t i = step.size();
        step.push_back({sequence, num_tokens, !speculative.empty() && speculative[i]});
        tokens += num_tokens;
      }
      throw_if_error(cache_->begin_step(step));
      step_tokens_ = tokens;
      has_appended_.assign(geometry_.num_layers, false);
    });
  }

  void append_and_attend(int layer, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                         std::optional<float> softmax_scale, float softcap, nb::handle sinks,
                         bool is_fast, nb::handle tree_mask, nb::handle stream) {
    const ArrayPlace place = place_of(stream, {out, q, k, v, sinks, tree_mask});
    StepArrays arrays = step_arrays(
        {q, k, v, out, sinks, softmax_scale, softcap, is_fast, tree_mask}, geometry_, lane_, place);
    ordered(place, arrays.kept, [&] {
      check_layer_is_due(layer, arrays.params.num_q_heads, arrays.q.num_tokens);
      interruptibly([&] {
        throw_if_error(cache_->append_and_attend(layer, arrays.params, arrays.q.rows, arrays.k.rows,
                                                 arrays.v.rows, arrays.out.rows));
        has_appended_[layer] = true;
      });
    });
  }

  // kept_tokens: of each entry, or none: all.
  void end_step(const std::optional<std::vector<int>>& kept_tokens) {
    locked([&] {
      for (int layer = 0; step_tokens_ > 0 && layer < geometry_.num_layers; ++layer) {
        if (has_appended_[layer]) continue;
        throw CoreError(
            invalid_argument("layer {} has not appended in this step; call "
                             "append_and_attend for every layer, or cancel_step",
                             layer));
      }
      throw_if_error(kept_tokens ? cache_->end_step(*kept_tokens) : cache_->end_step());
      step_tokens_ = 0;
    });
  }
  void cancel_step() {
    locked([&] {
      throw_if_error(cache_->cancel_step());
      step_tokens_ = 0;
    });
  }

  void gather(int sequence, int layer, int64_t first_token, nb::handle k, nb::handle v,
              nb::handle stream) {
    const ArrayPlace place = place_of(stream, {k, v});
    const OutputRows keys =
        output_rows(k, "k", {-1, geometry_.num_kv_heads, geometry_.k_head_dim}, place);
    const auto tokens = static_cast<int64_t>(keys.array.shape(0));
    const OutputRows values =
        output_rows(v, "v", {tokens, geometry_.num_kv_heads, geometry_.v_head_dim}, place);
    check_apart(keys.array, nb::ndarray<nb::ro>(values.array), "v");
    KeptArrays kept;
    if (lane_) {
      lane_->keep(kept, place, k, nb::ndarray<nb::ro>(keys.array));
      lane_->keep(kept, place, v, nb::ndarray<nb::ro>(values.array));
    }
    ordered(place, kept, [&] {
      throw_if_error(cache_->gather(sequence, layer, first_token, tokens, keys.rows, values.rows));
    });
  }

  nb::dict memory() {
    const cache::PoolAccount account = locked([&] { return cache_->account(); });
    nb::dict dict;
    dict["allocated"] = account.allocated.total();
    dict["used"] = account.used.total();
    dict["used_codes"] = account.used.codes;
    dict["used_scales"] = account.used.scales;
    dict["used_padding"] = account.used.padding;
    return dict;
  }
  nb::dict cost(int64_t num_tokens) {
    const kv::RecipeCost cost =
        locked([&] { return value_of(kv::cost_of(cache_->config(), num_tokens)); });
    nb::dict dict;
    dict["bits_per_value"] = cost.bits_per_value;
    dict["bytes_per_token"] = cost.bytes_per_token;
    dict["tokens_per_gib"] = cost.tokens_per_gib;
    return dict;
  }
  int64_t nonfinite_inputs() {
    return locked([&] { return cache_->nonfinite_inputs(); });
  }
  // [num_layers, K and V, num_kv_heads, saturated and nonfinite]
  nb::list head_counts() {
    const auto layers = locked([&] { return value_of(cache_->head_counts()); });
    const auto side = [](const std::vector<ops::HeadCounts>& heads) {
      nb::list list;
      for (const ops::HeadCounts& one : heads) {
        list.append(nb::make_tuple(one.saturated, one.nonfinite));
      }
      return list;
    };
    nb::list list;
    for (const kv::LayerCounts& layer : layers) {
      list.append(nb::make_tuple(side(layer.k), side(layer.v)));
    }
    return list;
  }
  void synchronize() {
    locked([&] { throw_if_error(cache_->synchronize()); });
  }

  // Fixed at creation.
  std::string device() const { return lane_ ? fmt::format("cuda:{}", lane_->device()) : "cpu"; }
  int num_layers() const { return geometry_.num_layers; }
  int num_kv_heads() const { return geometry_.num_kv_heads; }
  int k_head_dim() const { return geometry_.k_head_dim; }
  int v_head_dim() const { return geometry_.v_head_dim; }
  bool is_latent() const { return geometry_.is_latent; }

 private:
  enum Closed { kMustBeOpen, kMayBeClosed };

  template <class F>
  std::invoke_result_t<F> locked(F f, Closed closed = kMustBeOpen) {
    nb::gil_scoped_release no_gil;
    context_->home().check();
    const std::lock_guard lock(mutex_);
    if (!cache_ && closed == kMustBeOpen) {
      throw CoreError(invalid_argument("the cache is closed; make another one"));
    }
    return f();
  }

  ArrayPlace place_of(nb::handle stream, std::initializer_list<nb::handle> arrays) const {
    if (lane_) return lane_->place_of(stream, arrays);
    if (stream.is_none()) return {};
    throw CoreError(invalid_argument("stream is given; a cache on the CPU has none"));
  }

  // Runs a verb in the order of the caller's stream.
  template <class F>
  void ordered(const ArrayPlace& place, KeptArrays& kept, F verb) {
    locked([&] { in_order(*parts_, place, kept, verb); });
  }

  void check_in_use(int sequence) const {
    if (!cache_->is_in_use(sequence)) {
      throw CoreError(invalid_argument("sequence is {}; it is not in use", sequence));
    }
  }

  void check_layer_is_due(int layer, int num_q_heads, int64_t tokens) const {
    if (step_tokens_ == 0) {
      throw CoreError(invalid_argument("no step is open; call begin_step first"));
    }
    if (tokens != step_tokens_) {
      throw CoreError(
          invalid_argument("q has {} tokens; the open step has {}", tokens, step_tokens_));
    }
    if (num_q_heads < 1 || num_q_heads % geometry_.num_kv_heads != 0) {
      throw CoreError(invalid_argument("q has {} heads; expected a multiple of num_kv_heads, {}",
                                       num_q_heads, geometry_.num_kv_heads));
    }
    if (layer >= 0 && layer < geometry_.num_layers && has_appended_[layer]) {
      throw CoreError(invalid_argument("layer {} has already appended in this step", layer));
    }
  }

  const std::shared_ptr<CacheParts> parts_;
  std::shared_ptr<const Context> context_;
  CudaLane* lane_ = nullptr;  // null on the CPU
  std::mutex mutex_;
  std::shared_ptr<kv::KvCache>& cache_ = parts_->cache;  // null once closed
  std::unique_ptr<observe::ShownCache> shown_;
  std::unique_ptr<observe::EventPublisher> publisher_;  // null: nobody is told
  kv::CacheGeometry geometry_;
  int64_t step_tokens_ = 0;  // of the open step; 0 without one
  std::vector<bool> has_appended_;
};

}  // namespace

void bind_paged_cache(nb::module_& module) {
  nb::class_<Export>(module, "Export")
      .def_prop_ro("endpoint", &Export::endpoint)
      .def("state", &Export::state)
      .def("wait", &Export::wait, nb::arg("timeout_ms"))
      .def("close", &Export::close);
  module.def(
      "parse_tiers",
      [](const std::string& text) {
        nb::list tiers;
        for (const tier::TierConfig& one : value_of(tier::parse_tiers(text))) {
          const bool is_registered = one.kind == tier::TierKind::kCaller;
          tiers.append(nb::make_tuple(std::string(name_of(one.kind)), one.budget_bytes,
                                      text_of(is_registered ? one.store : one.folder)));
        }
        return tiers;
      },
      nb::arg("text"), "Name, budget in bytes and folder of each tier that the text names.");
  nb::class_<PagedCache>(module, "PagedCache")
      .def(
          "__init__",
          [](PagedCache* self, int num_layers, int num_kv_heads, int k_head_dim, int v_head_dim,
             bool is_latent, std::vector<int> layer_windows, std::string recipe,
             std::optional<int> first_layer, std::vector<std::string> layer_overrides,
             std::vector<std::string> head_overrides, int block_size, int max_sequences,
             int64_t max_tokens, int64_t memory_budget_bytes,
             std::optional<std::string> prefix_model, std::string prefix_hash,
             int64_t host_tier_bytes, const nb::bytes& host_tier_folder, std::string tiers,
             int64_t tier_shares, std::string device, int max_step_tokens,
             int max_speculative_tokens, nb::handle stream) {
            new (self) PagedCache({{.num_layers = num_layers,
                                    .num_kv_heads = num_kv_heads,
                                    .k_head_dim = k_head_dim,
                                    .v_head_dim = v_head_dim,
                                    .layer_windows = std::move(layer_windows),
                                    .is_latent = is_latent},
                                   std::move(recipe),
                                   first_layer,
                                   std::move(layer_overrides),
                                   std::move(head_overrides),
                                   block_size,
                                   max_sequences,
                                   max_tokens,
                                   memory_budget_bytes,
                                   std::move(prefix_model),
                                   std::move(prefix_hash),
                                   host_tier_bytes,
                                   host_tier_folder.c_str(),
                                   std::move(tiers),
                                   tier_shares,
                                   std::move(device),
                                   max_step_tokens,
                                   max_speculative_tokens},
                                  stream);
          },
          nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("k_head_dim"),
          nb::arg("v_head_dim"), nb::arg("is_latent"), nb::arg("layer_windows"), nb::arg("recipe"),
          nb::arg("first_layer").none(), nb::arg("layer_overrides"), nb::arg("head_overrides"),
          nb::arg("block_size"), nb::arg("max_sequences"), nb::arg("max_tokens"),
          nb::arg("memory_budget_bytes"), nb::arg("prefix_model").none(), nb::arg("prefix_hash"),
          nb::arg("host_tier_bytes"), nb::arg("host_tier_folder"), nb::arg("tiers"),
          nb::arg("tier_shares"), nb::arg("device"), nb::arg("max_step_tokens"),
          nb::arg("max_speculative_tokens"), nb::arg("stream").none())
      .def("close", &PagedCache::close,
           "Gives the memory back, once no kvx.Step of the cache is left. Later calls raise "
           "kvx.Error; a second close does nothing.")
      .def("new_step", &PagedCache::new_step)
      .def("create_sequence", &PagedCache::create_sequence)
      .def("free_sequence", &PagedCache::free_sequence, nb::arg("sequence"))
      .def("fork_sequence", &PagedCache::fork_sequence, nb::arg("sequence"))
      .def("truncate", &PagedCache::truncate, nb::arg("sequence"), nb::arg("num_tokens"))
      .def("create_sequence_from", &PagedCache::create_sequence_from, nb::arg("tokens"),
           nb::arg("adapter"), nb::arg("image"), nb::arg("tenant"), nb::arg("session"),
           nb::arg("by_layer"))
      .def("wait_for_layer", &PagedCache::wait_for_layer, nb::arg("sequence"), nb::arg("layer"))
      .def("end_loading", &PagedCache::end_loading, nb::arg("sequence"))
      .def("retain", &PagedCache::retain, nb::arg("sequence"), nb::arg("first_token"),
           nb::arg("num_tokens"), nb::arg("priority"), nb::arg("pin"), nb::arg("duration_ms"))
      .def("end_session", &PagedCache::end_session, nb::arg("session"))
      .def("delete_session", &PagedCache::delete_session, nb::arg("session"))
      .def("record_tokens", &PagedCache::record_tokens, nb::arg("sequence"), nb::arg("tokens"))
      .def("recorded_tokens", &PagedCache::recorded_tokens, nb::arg("sequence"))
      .def("clear_prefixes", &PagedCache::clear_prefixes,
           "Forgets all cached blocks that no sequence uses. Raises kvx.Error: a step is open.")
      .def("publish_events", &PagedCache::publish_events)
      .def("set_name", &PagedCache::set_name, nb::arg("name"),
           "Names the cache in kvx.metrics(); it has a number before.")
      .def("stop_events", &PagedCache::stop_events,
           "Sends no more events; nothing where none are sent.")
      .def("event_publisher", &PagedCache::event_publisher)
      .def("erase_tenant", &PagedCache::erase_tenant, nb::arg("tenant"))
      .def("erase_session", &PagedCache::erase_session, nb::arg("tokens"), nb::arg("first_token"),
           nb::arg("adapter"), nb::arg("image"), nb::arg("tenant"))
      .def("wait_for_tier", &PagedCache::wait_for_tier,
           "Until no block is on its way to or from a tier.")
      .def("tiers", &PagedCache::tiers)
      .def("save_sequence", &PagedCache::save_sequence, nb::arg("sequence"), nb::arg("path"),
           nb::arg("zstd_level"))
      .def("save_prefixes", &PagedCache::save_prefixes, nb::arg("path"), nb::arg("zstd_level"))
      .def("load_sequence", &PagedCache::load_sequence, nb::arg("path"))
      .def("load_prefixes", &PagedCache::load_prefixes, nb::arg("path"))
      .def("export_sequence", &PagedCache::export_sequence, nb::arg("sequence"),
           nb::arg("endpoint"))
      .def("export_layers", &PagedCache::export_layers, nb::arg("sequence"), nb::arg("tokens"),
           nb::arg("endpoint"))
      .def("import_sequence", &PagedCache::import_sequence, nb::arg("endpoint"),
           nb::arg("transcode"), nb::arg("timeout_ms"), nb::arg("first_head"), nb::arg("num_heads"))
      .def("fingerprint", &PagedCache::fingerprint,
           "What a file's blocks must agree in to be loaded here; empty while prefixes are off.")
      .def("num_tokens", &PagedCache::num_tokens, nb::arg("sequence"))
      .def("max_step_tokens", &PagedCache::max_step_tokens, nb::arg("sequence"))
      .def("begin_step", &PagedCache::begin_step, nb::arg("entries"), nb::arg("speculative"))
      .def("append_and_attend", &PagedCache::append_and_attend, nb::arg("layer"),
           nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("out").none(),
           nb::arg("softmax_scale").none(), nb::arg("softcap"), nb::arg("sinks").none(),
           nb::arg("is_fast"), nb::arg("tree_mask").none(), nb::arg("stream").none())
      .def("end_step", &PagedCache::end_step, nb::arg("kept_tokens").none())
      .def("cancel_step", &PagedCache::cancel_step,
           "Leaves the open step without its tokens. Raises kvx.Error: no step is open.")
      .def("gather", &PagedCache::gather, nb::arg("sequence"), nb::arg("layer"),
           nb::arg("first_token"), nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("stream").none())
      .def("synchronize", &PagedCache::synchronize,
           "Waits for what was launched on a GPU; nothing on the CPU. Raises kvx.InternalError: "
           "some of it failed.")
      .def("memory", &PagedCache::memory)
      .def("cost", &PagedCache::cost, nb::arg("num_tokens"))
      .def("nonfinite_inputs", &PagedCache::nonfinite_inputs,
           "NaN or infinite inputs that given or page-shared scales could not express, since "
           "creation.")
      .def("head_counts", &PagedCache::head_counts)
      .def_prop_ro("device", &PagedCache::device)
      .def_prop_ro("num_layers", &PagedCache::num_layers)
      .def_prop_ro("num_kv_heads", &PagedCache::num_kv_heads)
      .def_prop_ro("k_head_dim", &PagedCache::k_head_dim)
      .def_prop_ro("v_head_dim", &PagedCache::v_head_dim)
      .def_prop_ro("is_latent", &PagedCache::is_latent);
}

}  // namespace kvx::python
