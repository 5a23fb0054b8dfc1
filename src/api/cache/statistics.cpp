// kvx_statistics_*: what an engine feeds, and the tables that are fitted from it.
#include "tune/statistics.hpp"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "api/cache/owned_cache.hpp"
#include "api/cache/tables.hpp"
#include "api/call.hpp"
#include "api/checks/rows_view.hpp"
#include "api/executor.hpp"
#include "api/guard.hpp"
#include "api/handle_map.hpp"
#include "api/kernels.hpp"
#include "api/verbs/device_verb.hpp"
#include "tune/cuda/device_statistics.hpp"
#include "tune/fit.hpp"

namespace kvx::boundary {
namespace {

using tune::Side;
using tune::Statistics;
using tune::StatisticsCollector;
using Handles = HandleMap<kvx_statistics_t, StatisticsCollector>;

// Never destroyed: threads may still call when static objects are.
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

Result<StatisticsCollector*> find(kvx_statistics_t handle, const char* name = "statistics") {
  if (handle == nullptr) return invalid_argument("{} is null", name);
  StatisticsCollector* const found = handles().find(handle);
  if (found == nullptr) return invalid_argument("{} is not a handle, or was freed", name);
  return found;
}

// With what GPUs have counted, for which this waits.
Result<Statistics*> find_collected(kvx_statistics_t handle, const char* name = "statistics") {
  KVX_ASSIGN_OR_RETURN(StatisticsCollector* const found, find(handle, name));
  return found->collected();
}

Status read_counts(const kvx_statistics_config_t& args, tune::StatisticsConfig& config) {
  const std::tuple<const char*, uint32_t, int*> counts[] = {
      {"num_layers", args.num_layers, &config.num_layers},
      {"num_q_heads", args.num_q_heads, &config.num_q_heads},
      {"num_kv_heads", args.num_kv_heads, &config.num_kv_heads},
      {"k_head_dim", args.k_head_dim, &config.k_head_dim},
      {"v_head_dim", args.v_head_dim, &config.v_head_dim}};
  for (const auto& [name, given, count] : counts) {
    if (given > INT32_MAX) return invalid_argument("config.{} is {}", name, given);
    *count = static_cast<int>(given);
  }
  return kv::check_geometry({.num_layers = config.num_layers,
                             .num_kv_heads = config.num_kv_heads,
                             .k_head_dim = config.k_head_dim,
                             .v_head_dim = config.v_head_dim});
}

Status create(const kvx_statistics_config_t* caller, kvx_statistics_t* result) {
  if (result == nullptr) return invalid_argument("statistics is null");
  KVX_ASSIGN_OR_RETURN(const kvx_statistics_config_t args, read_struct(caller, "config"));
  tune::StatisticsConfig config;
  KVX_RETURN_IF_ERROR(read_counts(args, config));
  if ((args.inv_freq == nullptr) != (args.num_inv_freq == 0) ||
      args.num_inv_freq > args.k_head_dim / 2 || args.rope_pairs > KVX_ROPE_PAIRS_INTERLEAVED) {
    return invalid_argument(
        "config.num_inv_freq is {} with inv_freq {} and rope_pairs {}; expected at most "
        "k_head_dim / 2 numbers, and 0 or 1",
        args.num_inv_freq, static_cast<const void*>(args.inv_freq), args.rope_pairs);
  }
  if (args.num_inv_freq > 0) {
    config.rope = kv::Rope{args.rope_pairs == KVX_ROPE_PAIRS_HALVES ? kv::RopePairs::kHalves
                                                                    : kv::RopePairs::kInterleaved,
                           {args.inv_freq, args.inv_freq + args.num_inv_freq},
                           args.attention_scaling == 0 ? 1.0 : args.attention_scaling};
  }
  KVX_ASSIGN_OR_RETURN(Statistics made, Statistics::create(std::move(config)));
  *result = handles().add(std::make_unique<StatisticsCollector>(std::move(made)));
  return {};
}

// A caller's rows as dense binary32, [num_rows, num_heads, head_dim].
Result<std::vector<float>> read_floats(const kvx_rows_t* caller, int num_rows, int num_heads,
                                       int head_dim, const char* name) {
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows rows, read_rows(caller, num_heads, head_dim, name));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  const int64_t row_size = int64_t{num_heads} * head_dim;
  std::vector<float> floats(static_cast<size_t>(num_rows * row_size));
  for (int t = 0; t < num_rows; ++t) {
    for (int h = 0; h < num_heads; ++h) {
      kernels->load_floats(rows.dtype, rows.row(t, h), head_dim,
                           floats.data() + t * row_size + int64_t{h} * head_dim);
    }
  }
  return floats;
}

Status check_feed(const kvx_statistics_rows_t& args, const tune::StatisticsConfig& shape) {
  constexpr int64_t kMostRows = 65536;
  if (args.num_rows < 1 || args.num_rows > kMostRows) {
    return invalid_argument("rows.num_rows is {}; expected 1 to {}", args.num_rows, kMostRows);
  }
  if (args.first_position < 0) {
    return invalid_argument("rows.first_position is {}; expected 0 or more", args.first_position);
  }
  if ((args.k == nullptr) != (args.v == nullptr) || (args.k == nullptr && args.q == nullptr)) {
    return invalid_argument("rows has {} of k, v and q; expected k and v, q, or all three",
                            (args.k != nullptr) + (args.v != nullptr) + (args.q != nullptr));
  }
  if (args.layer >= static_cast<uint32_t>(shape.num_layers)) {
    return out_of_range("rows.layer is {}; expected 0 to {}", args.layer, shape.num_layers - 1);
  }
  if (args.reserved != 0) {
    return invalid_argument("rows.reserved is {}; expected 0", args.reserved);
  }
  const bool is_host = args.memory == KVX_MEMORY_UNKNOWN || args.memory == KVX_MEMORY_HOST;
  if (!is_host && args.memory != KVX_MEMORY_DEVICE) {
    return invalid_argument("rows.memory is {}; expected 0, KVX_MEMORY_HOST or _DEVICE",
                            args.memory);
  }
  if (is_host && args.stream != nullptr) {
    return invalid_argument("rows.memory is {}; expected KVX_MEMORY_DEVICE with a stream",
                            args.memory);
  }
  return {};
}

Status feed_on_host(Statistics& statistics, const kvx_statistics_rows_t& args) {
  const tune::StatisticsConfig& shape = statistics.config();
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(args.executor));
  Executor& executor = chosen_executor(threads);
  const int layer = static_cast<int>(args.layer), num_rows = static_cast<int>(args.num_rows);
  std::vector<float> q;
  if (args.q != nullptr) {
    KVX_ASSIGN_OR_RETURN(
        q, read_floats(args.q, num_rows, shape.num_q_heads, shape.k_head_dim, "rows.q"));
    KVX_RETURN_IF_ERROR(statistics.check_queries(layer, args.first_position, num_rows, q.data()));
  }
  if (args.k != nullptr) {
    KVX_ASSIGN_OR_RETURN(
        const std::vector<float> k,
        read_floats(args.k, num_rows, shape.num_kv_heads, shape.k_head_dim, "rows.k"));
    KVX_ASSIGN_OR_RETURN(
        const std::vector<float> v,
        read_floats(args.v, num_rows, shape.num_kv_heads, shape.v_head_dim, "rows.v"));
    KVX_RETURN_IF_ERROR(
        statistics.feed(layer, args.first_position, num_rows, k.data(), v.data(), executor));
  }
  if (args.q == nullptr) return {};
  return statistics.feed_queries(layer, args.first_position, num_rows, q.data(), executor);
}

FloatRows readable_rows(const MutableFloatRows& rows) {
  return {rows.data, rows.dtype, rows.token_stride, rows.head_stride};
}

Status feed_on_device(StatisticsCollector& collector, const kvx_statistics_rows_t& args) {
  const tune::StatisticsConfig& shape = collector.config();
  const int layer = static_cast<int>(args.layer), num_rows = static_cast<int>(args.num_rows);
  MutableFloatRows k, v, q;
  VerbAddresses addresses;
  if (args.k != nullptr) {
    KVX_ASSIGN_OR_RETURN(k, read_rows(args.k, shape.num_kv_heads, shape.k_head_dim, "rows.k"));
    KVX_ASSIGN_OR_RETURN(v, read_rows(args.v, shape.num_kv_heads, shape.v_head_dim, "rows.v"));
    addresses.add_rows("rows.k", k).add_rows("rows.v", v);
  }
  if (args.q != nullptr) {
    KVX_ASSIGN_OR_RETURN(q, read_rows(args.q, shape.num_q_heads, shape.k_head_dim, "rows.q"));
    addresses.add_rows("rows.q", q);
  }
  KVX_RETURN_IF_ERROR(addresses.deferred_errors().status());
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* const device, find_device(addresses.all()));
  KVX_ASSIGN_OR_RETURN(tune::DeviceStatistics* const to, collector.on_device(device->index));
  if (args.k != nullptr) {
    KVX_RETURN_IF_ERROR(to->feed(args.stream, layer, args.first_position, num_rows,
                                 readable_rows(k), readable_rows(v)));
  }
  if (args.q == nullptr) return {};
  return to->feed_queries(args.stream, layer, args.first_position, num_rows, readable_rows(q));
}

Status feed(kvx_statistics_t handle, const kvx_statistics_rows_t* caller) {
  KVX_ASSIGN_OR_RETURN(StatisticsCollector* const collector, find(handle));
  KVX_ASSIGN_OR_RETURN(const kvx_statistics_rows_t args, read_struct(caller, "rows"));
  KVX_RETURN_IF_ERROR(check_feed(args, collector->config()));
  return args.memory == KVX_MEMORY_DEVICE ? feed_on_device(*collector, args)
                                          : feed_on_host(collector->on_host(), args);
}

Status merge(kvx_statistics_t to, kvx_statistics_t from) {
  KVX_ASSIGN_OR_RETURN(StatisticsCollector* const target, find(to, "to"));
  KVX_ASSIGN_OR_RETURN(const Statistics* const source, find_collected(from, "from"));
  if (&target->on_host() == source) {
    return invalid_argument("to and from are the same statistics");
  }
  return target->on_host().merge(*source);
}

// ---- what was collected

Result<int> read_layer_number(const Statistics& statistics, uint32_t layer) {
  const int num_layers = statistics.config().num_layers;
  if (layer < static_cast<uint32_t>(num_layers)) return static_cast<int>(layer);
  return out_of_range("layer is {}; expected 0 to {}", layer, num_layers - 1);
}

void fill(const std::vector<float>& numbers, float* to) {
  if (to != nullptr) std::copy(numbers.begin(), numbers.end(), to);
}

Status layer(kvx_statistics_t handle, uint32_t number, kvx_statistics_layer_t* caller) {
  KVX_ASSIGN_OR_RETURN(const Statistics* const statistics, find_collected(handle));
  KVX_ASSIGN_OR_RETURN(const int layer, read_layer_number(*statistics, number));
  KVX_ASSIGN_OR_RETURN(const kvx_statistics_layer_t args, read_struct(caller, "values"));
  constexpr uint32_t kLeast = offsetof(kvx_statistics_layer_t, k_mean);
  if (args.size < kLeast) {
    return invalid_argument("values.size is {}; expected at least {}", args.size, kLeast);
  }
  if (args.reserved != 0) {
    return invalid_argument("values.reserved is {}; expected 0", args.reserved);
  }
  const bool has_rope = statistics->config().rope.has_value();
  if (args.k_rope_mean != nullptr && !has_rope) {
    return invalid_argument("values.k_rope_mean is set; these statistics have no rope");
  }
  if (args.k_mean || args.v_mean || args.k_rope_mean) {
    KVX_RETURN_IF_ERROR(statistics->check_rows_of(layer));
  }
  if (args.query_moments) KVX_RETURN_IF_ERROR(statistics->check_queries_of(layer));
  caller->num_rows = statistics->of(layer, Side::kK).num_rows;
  fill(statistics->of(layer, Side::kK).largest, args.k_largest);
  fill(statistics->of(layer, Side::kV).largest, args.v_largest);
  fill(statistics->mean(layer, Side::kK), args.k_mean);
  fill(statistics->mean(layer, Side::kV), args.v_mean);
  if (args.k_rope_mean) fill(statistics->rope_mean(layer), args.k_rope_mean);
  if (args.query_moments == nullptr) return {};
  float* to = args.query_moments;
  for (int head = 0; head < statistics->config().num_kv_heads; ++head) {
    for (const double moment : statistics->query_moments(layer, head)) {
      *to++ = static_cast<float>(moment);
    }
  }
  return {};
}

Status percentiles(kvx_statistics_t handle, uint32_t number, uint32_t is_v, uint32_t group_size,
                   double percent, float* result) {
  KVX_ASSIGN_OR_RETURN(const Statistics* const statistics, find_collected(handle));
  KVX_ASSIGN_OR_RETURN(const int layer, read_layer_number(*statistics, number));
  if (is_v > 1) return invalid_argument("is_v is {}; expected 0 for K or 1 for V", is_v);
  const Side side = is_v == 1 ? Side::kV : Side::kK;
  const int head_dim = statistics->head_dim(side);
  if (group_size < 1 || group_size > static_cast<uint32_t>(head_dim) ||
      head_dim % static_cast<int>(group_size) != 0) {
    return invalid_argument("group_size is {}; expected a divisor of the head_dim {}", group_size,
                            head_dim);
  }
  KVX_RETURN_IF_ERROR(tune::check_percentile(percent));
  if (result == nullptr) return invalid_argument("percentiles is null");
  const int group = static_cast<int>(group_size);
  for (int head = 0; head < statistics->config().num_kv_heads; ++head) {
    for (int first = 0; first < head_dim; first += group) {
      *result++ =
          static_cast<float>(statistics->percentile(layer, side, head, first, group, percent));
    }
  }
  return {};
}

// ---- tables

Result<tune::FitOptions> read_fit_options(const kvx_fit_config_t& args, bool has_rope) {
  constexpr uint32_t kAll = KVX_FIT_K_MEAN | KVX_FIT_V_MEAN | KVX_FIT_K_BLOCK_OFFSET |
                            KVX_FIT_K_FACTOR | KVX_FIT_K_FEEDBACK;
  if (args.tables == 0 || (args.tables & ~kAll) != 0) {
    return invalid_argument("config.tables is {}; expected KVX_FIT_* numbers, at most {}",
                            args.tables, kAll);
  }
  tune::FitOptions options;
  options.k_mean = (args.tables & KVX_FIT_K_MEAN) != 0;
  options.v_mean = (args.tables & KVX_FIT_V_MEAN) != 0;
  options.k_block_offset = (args.tables & KVX_FIT_K_BLOCK_OFFSET) != 0;
  options.k_factor = (args.tables & KVX_FIT_K_FACTOR) != 0;
  options.k_feedback = (args.tables & KVX_FIT_K_FEEDBACK) != 0;
  if (options.k_block_offset && !has_rope) {
    return invalid_argument(
        "config.tables has KVX_FIT_K_BLOCK_OFFSET; these statistics have no rope");
  }
  return options;
}

Status fit(kvx_statistics_t handle, const kvx_fit_config_t* caller, kvx_tables_t* result) {
  KVX_ASSIGN_OR_RETURN(const Statistics* const statistics, find_collected(handle));
  if (result == nullptr) return invalid_argument("tables is null");
  KVX_ASSIGN_OR_RETURN(const kvx_fit_config_t args, read_struct(caller, "config"));
  const tune::StatisticsConfig& shape = statistics->config();
  KVX_ASSIGN_OR_RETURN(const tune::FitOptions options,
                       read_fit_options(args, shape.rope.has_value()));
  if (args.recipe == nullptr) return invalid_argument("config.recipe is null");
  KVX_RETURN_IF_ERROR(statistics->check_complete());
  tune::TuneFile file;
  file.recipe = args.recipe;
  file.geometry = {.num_layers = shape.num_layers,
                   .num_kv_heads = shape.num_kv_heads,
                   .k_head_dim = shape.k_head_dim,
                   .v_head_dim = shape.v_head_dim};
  if (args.model_name != nullptr) file.model.name = args.model_name;
  KVX_ASSIGN_OR_RETURN(const tune::TunedRecipe recipe, tune::recipe_of(file));
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::LayerPlan> plans,
                       kv::plan_layers(file.geometry, recipe.recipe, recipe.overrides));
  for (int i = 0; i < shape.num_layers; ++i) {
    KVX_ASSIGN_OR_RETURN(kv::LayerCalibration tables,
                         tune::fit_tables(*statistics, i, options, plans[i]));
    file.layers.push_back(std::move(tables));
  }
  KVX_RETURN_IF_ERROR(tune::check_tune_file(file));
  return own_tables(std::move(file), result);
}

}  // namespace
}  // namespace kvx::boundary

using kvx::boundary::run_call;

extern "C" kvx_status_t kvx_statistics_create(const kvx_statistics_config_t* config,
                                              kvx_statistics_t* statistics) {
  return run_call([&] { return kvx::boundary::create(config, statistics); });
}

extern "C" void kvx_statistics_free(kvx_statistics_t statistics) {
  (void)kvx::boundary::handles().remove(statistics,
                                        [](const kvx::tune::StatisticsCollector&) { return true; });
}

extern "C" kvx_status_t kvx_statistics_feed(kvx_statistics_t statistics,
                                            const kvx_statistics_rows_t* rows) {
  return run_call([&] { return kvx::boundary::feed(statistics, rows); });
}

extern "C" kvx_status_t kvx_statistics_merge(kvx_statistics_t to, kvx_statistics_t from) {
  return run_call([&] { return kvx::boundary::merge(to, from); });
}

extern "C" kvx_status_t kvx_statistics_layer(kvx_statistics_t statistics, uint32_t layer,
                                             kvx_statistics_layer_t* values) {
  return run_call([&] { return kvx::boundary::layer(statistics, layer, values); });
}

extern "C" kvx_status_t kvx_statistics_percentiles(kvx_statistics_t statistics, uint32_t layer,
                                                   uint32_t is_v, uint32_t group_size,
                                                   double percent, float* percentiles) {
  return run_call([&] {
    return kvx::boundary::percentiles(statistics, layer, is_v, group_size, percent, percentiles);
  });
}

extern "C" kvx_status_t kvx_statistics_fit(kvx_statistics_t statistics,
                                           const kvx_fit_config_t* config, kvx_tables_t* tables) {
  return run_call([&] { return kvx::boundary::fit(statistics, config, tables); });
}
