// Statistics, tables that are fitted from them, and their file, for kvx.hf.tune.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <mutex>

#include "device/cuda_caller.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/cuda_lane.hpp"
#include "python/src/errors.hpp"
#include "tune/cuda/device_statistics.hpp"
#include "tune/fit.hpp"
#include "tune/transformed.hpp"
#include "tune/tune_file.hpp"

namespace kvx::python {
namespace {

using tune::Side;
using tune::Statistics;

// Rows of any strides and float type as dense f32 [num_tokens, num_heads, head_dim].
std::vector<float> dense_floats(const InputRows& rows, int head_dim,
                                const ops::cpu::KernelTable& kernels) {
  const int64_t row_size = int64_t{rows.num_heads} * head_dim;
  std::vector<float> floats(static_cast<size_t>(rows.num_tokens * row_size));
  for (int64_t t = 0; t < rows.num_tokens; ++t) {
    for (int head = 0; head < rows.num_heads; ++head) {
      kernels.load_floats(rows.rows.dtype, rows.rows.row(t, head), head_dim,
                          floats.data() + t * row_size + int64_t{head} * head_dim);
    }
  }
  return floats;
}

struct KvRows {
  std::vector<float> k;
  std::vector<float> v;
  int num_tokens = 0;
};

KvRows kv_rows(const tune::StatisticsConfig& shape, nb::handle k, nb::handle v,
               const ops::CpuContext& cpu) {
  const InputRows k_rows = input_rows(k, "k", {-1, shape.num_kv_heads, shape.k_head_dim});
  const InputRows v_rows =
      input_rows(v, "v", {k_rows.num_tokens, shape.num_kv_heads, shape.v_head_dim});
  nb::gil_scoped_release no_gil;
  return {dense_floats(k_rows, shape.k_head_dim, *cpu.kernels),
          dense_floats(v_rows, shape.v_head_dim, *cpu.kernels),
          static_cast<int>(k_rows.num_tokens)};
}

// Statistics of rows on the host or on GPUs, where they are counted.
class FedStatistics {
 public:
  explicit FedStatistics(Statistics statistics) : collector_(std::move(statistics)) {}

  const tune::StatisticsConfig& config() const { return collector_.config(); }
  Statistics& on_host() { return collector_.on_host(); }
  // Waits for the GPUs whose rows were fed.
  Statistics& collected() { return *value_of(collector_.collected()); }

  void feed(int layer, int64_t first_position, nb::handle k, nb::handle v) {
    if (cuda_device_of(k, "k") >= 0) return feed_on_cuda(layer, first_position, k, v);
    const auto context = current_context();
    const ops::CpuContext& cpu = context->cpu();
    const KvRows rows = kv_rows(config(), k, v, cpu);
    nb::gil_scoped_release no_gil;
    throw_if_error(on_host().feed(layer, first_position, rows.num_tokens, rows.k.data(),
                                  rows.v.data(), *cpu.executor));
  }

  void feed_queries(int layer, int64_t first_position, nb::handle q) {
    if (cuda_device_of(q, "q") >= 0) return feed_queries_on_cuda(layer, first_position, q);
    const auto context = current_context();
    const ops::CpuContext& cpu = context->cpu();
    const InputRows rows = query_rows(q, {});
    nb::gil_scoped_release no_gil;
    const std::vector<float> floats = dense_floats(rows, config().k_head_dim, *cpu.kernels);
    throw_if_error(on_host().feed_queries(layer, first_position, static_cast<int>(rows.num_tokens),
                                          floats.data(), *cpu.executor));
  }

 private:
  InputRows query_rows(nb::handle q, const ArrayPlace& place) const {
    return input_rows(q, "q", {-1, config().num_q_heads, config().k_head_dim}, place);
  }

  void feed_on_cuda(int layer, int64_t first_position, nb::handle k, nb::handle v) {
    CudaLane& lane = lane_of(cuda_device_of(k, "k"));
    const ArrayPlace place = lane.place_of(nb::none(), {k, v});
    const InputRows k_rows =
        input_rows(k, "k", {-1, config().num_kv_heads, config().k_head_dim}, place);
    const InputRows v_rows =
        input_rows(v, "v", {k_rows.num_tokens, config().num_kv_heads, config().v_head_dim}, place);
    KeptArrays kept;
    lane.keep(kept, place, k, k_rows.array);
    lane.keep(kept, place, v, v_rows.array);
    launch(lane, place, kept, k_rows.num_tokens,
           [&](tune::DeviceStatistics& to, device::CudaStream stream, int num_rows) {
             return to.feed(stream, layer, first_position, num_rows, k_rows.rows, v_rows.rows);
           });
  }

  void feed_queries_on_cuda(int layer, int64_t first_position, nb::handle q) {
    CudaLane& lane = lane_of(cuda_device_of(q, "q"));
    const ArrayPlace place = lane.place_of(nb::none(), {q});
    const InputRows rows = query_rows(q, place);
    KeptArrays kept;
    lane.keep(kept, place, q, rows.array);
    launch(lane, place, kept, rows.num_tokens,
           [&](tune::DeviceStatistics& to, device::CudaStream stream, int num_rows) {
             return to.feed_queries(stream, layer, first_position, num_rows, rows.rows);
           });
  }

  // feed(statistics of the device, stream, number of rows) launches; it waits for nothing.
  template <class Feed>
  void launch(CudaLane& lane, const ArrayPlace& place, KeptArrays& kept, int64_t num_rows,
              const Feed& feed) {
    if (num_rows == 0) return;
    nb::gil_scoped_release no_gil;
    const std::lock_guard lock(launches_);
    const auto current = value_of(device::CurrentCudaDevice::set(lane.device()));
    tune::DeviceStatistics& to = *value_of(collector_.on_device(lane.device()));
    throw_if_error(lane.begin(place, kept));
    throw_if_error(feed(to, lane.context(place).stream, static_cast<int>(num_rows)));
    throw_if_error(lane.end(place, kept));
  }

  // Called with the GIL held.
  CudaLane& lane_of(int device) {
    std::unique_ptr<CudaLane>& lane = lanes_[device];
    if (!lane) lane = CudaLane::of_callers(fmt::format("cuda:{}", device), "first array");
    return *lane;
  }

  tune::StatisticsCollector collector_;
  std::map<int, std::unique_ptr<CudaLane>> lanes_;
  std::mutex launches_;
};

std::unique_ptr<FedStatistics> make_statistics(int num_layers, int num_q_heads, int num_kv_heads,
                                               int k_head_dim, int v_head_dim,
                                               const std::vector<double>& inv_freq,
                                               bool interleaved, double attention_scaling) {
  tune::StatisticsConfig config;
  config.num_layers = num_layers;
  config.num_q_heads = num_q_heads;
  config.num_kv_heads = num_kv_heads;
  config.k_head_dim = k_head_dim;
  config.v_head_dim = v_head_dim;
  if (!inv_freq.empty()) {
    config.rope = kv::Rope{interleaved ? kv::RopePairs::kInterleaved : kv::RopePairs::kHalves,
                           inv_freq, attention_scaling};
  }
  return std::make_unique<FedStatistics>(value_of(Statistics::create(std::move(config))));
}

Side side_named(const std::string& name) {
  if (name == "k") return Side::kK;
  if (name == "v") return Side::kV;
  throw CoreError(invalid_argument("side is '{}'; expected k or v", name));
}

// The head's whole row where count is 0.
double percentile(FedStatistics& fed, int layer, const std::string& side_name, int head,
                  double percent, int first, int count) {
  throw_if_error(tune::check_percentile(percent));
  const Statistics& statistics = fed.collected();
  const Side side = side_named(side_name);
  const int head_dim = statistics.head_dim(side);
  const int last = count == 0 ? head_dim : first + count;
  const tune::StatisticsConfig& shape = statistics.config();
  if (layer < 0 || layer >= shape.num_layers || head < 0 || head >= shape.num_kv_heads ||
      first < 0 || count < 0 || first >= last || last > head_dim) {
    throw CoreError(invalid_argument(
        "layer {}, head {}, channels {} to {}; there are {} layers, {} heads and {} channels",
        layer, head, first, last, shape.num_layers, shape.num_kv_heads, head_dim));
  }
  return statistics.percentile(layer, side, head, first, last - first, percent);
}

// A recipe with the tables that were fitted for it.
class FittedCache {
 public:
  FittedCache(FedStatistics& fed, const std::string& recipe,
              std::vector<std::string> layer_overrides, const tune::FitOptions& options)
      : shape_(fed.config()), options_(options) {
    const Statistics& statistics = fed.collected();
    throw_if_error(statistics.check_complete());
    throw_if_error(tune::check_percentile(options.percentile));
    if (options.k_block_offset && !shape_.rope) {
      throw CoreError(unsupported("k_block_offset needs the model's rotation, which is not known"));
    }
    file_.recipe = recipe;
    file_.layer_overrides = std::move(layer_overrides);
    file_.geometry.num_layers = shape_.num_layers;
    file_.geometry.num_kv_heads = shape_.num_kv_heads;
    file_.geometry.k_head_dim = shape_.k_head_dim;
    file_.geometry.v_head_dim = shape_.v_head_dim;
    const tune::TunedRecipe read = value_of(tune::recipe_of(file_));
    plans_ = value_of(kv::plan_layers(file_.geometry, read.recipe, read.overrides));
    for (int i = 0; i < shape_.num_layers; ++i) {
      file_.layers.push_back(value_of(tune::fit_tables(statistics, i, options, plans_[i])));
    }
  }

  FittedCache(FittedCache&&) = default;
  FittedCache& operator=(FittedCache&&) = default;

  bool wants_scales() const { return options_.has_scales(); }

  // Rows on the host as this cache quantises them, for fit_scales().
  void feed_transformed(FedStatistics& transformed, int layer, int64_t first_position, nb::handle k,
                        nb::handle v, int block_size) {
    const auto context = current_context();
    const ops::CpuContext& cpu = context->cpu();
    const KvRows rows = kv_rows(shape_, k, v, cpu);
    nb::gil_scoped_release no_gil;
    const int64_t end = first_position + rows.num_tokens;
    if (block_size != transform_block_size_ || end > transform_tokens_) {
      transforms_ =
          value_of(tune::transforms_of(file_.geometry, plans_, file_.layers, block_size, 2 * end));
      transform_block_size_ = block_size;
      transform_tokens_ = 2 * end;
    }
    throw_if_error(tune::feed_transformed(
        transformed.on_host(), cpu, transforms_[layer].transform(), block_size, layer,
        first_position, rows.num_tokens, rows.k.data(), rows.v.data()));
  }

  void fit_scales(FedStatistics& fed) {
    const Statistics& transformed = fed.collected();
    for (int i = 0; i < shape_.num_layers; ++i) {
      throw_if_error(tune::fit_scales(transformed, i, options_, plans_[i], file_.layers[i]));
    }
  }

  nb::dict scales(int layer, const std::string& side) const {
    const kv::StaticScales& scales =
        side_named(side) == Side::kK ? file_.layers.at(layer).k : file_.layers.at(layer).v;
    nb::dict dict;
    dict["group_scales"] = scales.group_scales;
    dict["tensor_scales"] = scales.tensor_scales;
    return dict;
  }

  void write(const std::string& path, const std::string& model_name,
             const std::string& architecture, const std::string& date,
             const std::string& measured) const {
    tune::TuneFile file = file_;
    file.model.name = model_name;
    file.model.architecture = architecture;
    file.date = date;
    file.measured = measured;
    nb::gil_scoped_release no_gil;
    throw_if_error(tune::write_tune_file(path, file));
  }

 private:
  tune::StatisticsConfig shape_;
  tune::FitOptions options_;
  tune::TuneFile file_;
  std::vector<kv::LayerPlan> plans_;
  std::vector<kv::LayerTables> transforms_;
  int transform_block_size_ = 0;
  int64_t transform_tokens_ = 0;
};

// A head's step for each of its groups.
std::vector<float> for_groups(const std::vector<float>& of_heads, int num_groups) {
  std::vector<float> steps;
  for (const float step : of_heads) steps.insert(steps.end(), num_groups, step);
  return steps;
}

// One side of a layer: tensor scales where the format has them, else given scales.
kv::StaticScales static_scales(const format::FormatSpec& spec, int head_dim,
                               const std::vector<float>& of_heads) {
  kv::StaticScales scales;
  if (spec.facts->has_tensor_scale) {
    scales.tensor_scales = of_heads;
  } else if (spec.has_scale() && spec.scale_source == format::ScaleSource::kGiven) {
    scales.group_scales = for_groups(of_heads, format::groups_per_row(spec, head_dim));
  } else {
    throw CoreError(
        invalid_argument("recipe stores {}, which reads no given scales", spec.facts->name));
  }
  return scales;
}

// k_steps, v_steps: [num_layers][num_kv_heads].
void write_scales(const std::string& path, const std::string& recipe, int head_dim,
                  const std::vector<std::vector<float>>& k_steps,
                  const std::vector<std::vector<float>>& v_steps, const std::string& model_name,
                  const std::string& architecture) {
  tune::TuneFile file;
  file.recipe = recipe;
  file.geometry.num_layers = static_cast<int>(k_steps.size());
  file.geometry.num_kv_heads = static_cast<int>(k_steps.at(0).size());
  file.geometry.k_head_dim = file.geometry.v_head_dim = head_dim;
  file.model.name = model_name;
  file.model.architecture = architecture;
  const tune::TunedRecipe read = value_of(tune::recipe_of(file));
  for (size_t i = 0; i < k_steps.size(); ++i) {
    kv::LayerCalibration layer;
    layer.k = static_scales(read.recipe.k.spec, head_dim, k_steps[i]);
    layer.v = static_scales(read.recipe.v.spec, head_dim, v_steps.at(i));
    file.layers.push_back(std::move(layer));
  }
  nb::gil_scoped_release no_gil;
  throw_if_error(tune::write_tune_file(path, file));
}

}  // namespace

void bind_tune(nb::module_& module) {
  nb::class_<FedStatistics>(module, "Statistics")
      .def(nb::new_(&make_statistics), nb::kw_only(), nb::arg("num_layers"), nb::arg("num_q_heads"),
           nb::arg("num_kv_heads"), nb::arg("k_head_dim"), nb::arg("v_head_dim"),
           nb::arg("inv_freq") = std::vector<double>{}, nb::arg("interleaved") = false,
           nb::arg("attention_scaling") = 1.0)
      .def("feed", &FedStatistics::feed, nb::arg("layer"), nb::arg("first_position"),
           nb::arg("k").none(), nb::arg("v").none())
      .def("feed_queries", &FedStatistics::feed_queries, nb::arg("layer"),
           nb::arg("first_position"), nb::arg("q").none())
      .def("merge",
           [](FedStatistics& to, FedStatistics& from) {
             throw_if_error(to.on_host().merge(from.collected()));
           })
      .def("wait",
           [](FedStatistics& self) {
             nb::gil_scoped_release no_gil;
             self.collected();
           })
      .def("percentile", &percentile, nb::arg("layer"), nb::arg("side"), nb::arg("head"),
           nb::arg("percent"), nb::arg("first") = 0, nb::arg("count") = 0)
      .def_prop_ro("has_rope",
                   [](const FedStatistics& self) { return self.config().rope.has_value(); });

  nb::class_<tune::FitOptions>(module, "FitOptions")
      .def(nb::init<>())
      .def_rw("k_mean", &tune::FitOptions::k_mean)
      .def_rw("v_mean", &tune::FitOptions::v_mean)
      .def_rw("k_block_offset", &tune::FitOptions::k_block_offset)
      .def_rw("k_factor", &tune::FitOptions::k_factor)
      .def_rw("k_feedback", &tune::FitOptions::k_feedback)
      .def_rw("given_scales", &tune::FitOptions::given_scales)
      .def_rw("percentile", &tune::FitOptions::percentile)
      .def_prop_rw(
          "tensor_scales",
          [](const tune::FitOptions& self) {
            return self.tensor_scales != tune::TensorScaleRule::kNone;
          },
          [](tune::FitOptions& self, bool is_on) {
            self.tensor_scales =
                is_on ? tune::TensorScaleRule::kAmaxBy448 : tune::TensorScaleRule::kNone;
          });

  module.def("write_scales", &write_scales, nb::arg("path"), nb::arg("recipe"), nb::arg("head_dim"),
             nb::arg("k_steps"), nb::arg("v_steps"), nb::arg("model_name"),
             nb::arg("architecture"));

  nb::class_<FittedCache>(module, "FittedCache")
      .def(nb::init<FedStatistics&, const std::string&, std::vector<std::string>,
                    const tune::FitOptions&>(),
           nb::arg("statistics"), nb::arg("recipe"), nb::arg("layer_overrides"), nb::arg("options"))
      .def_prop_ro("wants_scales", &FittedCache::wants_scales)
      .def("feed_transformed", &FittedCache::feed_transformed, nb::arg("statistics"),
           nb::arg("layer"), nb::arg("first_position"), nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("block_size"))
      .def("fit_scales", &FittedCache::fit_scales, nb::arg("transformed"))
      .def("scales", &FittedCache::scales, nb::arg("layer"), nb::arg("side"))
      .def("write", &FittedCache::write, nb::arg("path"), nb::arg("model_name"),
           nb::arg("architecture"), nb::arg("date"), nb::arg("measured"));
}

}  // namespace kvx::python
