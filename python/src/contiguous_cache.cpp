// ContiguousCache: kv::ContiguousCache for Python; kvx.marlin is built on it.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <type_traits>

#include "kv/contiguous/contiguous_cache.hpp"
#include "python/src/arguments.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

kv::ContiguousConfig config_of(kv::CacheGeometry geometry, const std::string& recipe,
                               int batch_size, int num_q_heads, int max_seq_len, bool evict,
                               int max_append) {
  check_range("head_dim", geometry.k_head_dim, 1, format::kMaxHeadDim);
  kv::ContiguousConfig config;
  config.geometry = std::move(geometry);
  config.recipe = value_of(kv::parse_recipe(recipe));
  config.batch_size = batch_size;
  config.num_q_heads = num_q_heads;
  config.max_seq_len = max_seq_len;
  config.overflow = evict ? kv::Overflow::kEvict : kv::Overflow::kError;
  config.max_append = max_append;
  return config;
}

// Rows of a call are the sequences' tokens, one sequence after the other.
class Contiguous {
 public:
  explicit Contiguous(kv::ContiguousConfig config)
      : context_(current_context()),
        cache_(value_of(kv::ContiguousCache::create(std::move(config), context_->cpu()))) {}

  void append(int layer, int num_tokens, nb::handle k, nb::handle v) {
    const kv::CacheGeometry& geometry = config().geometry;
    const int64_t rows = int64_t{config().batch_size} * num_tokens;
    const InputRows keys = input_rows(k, "k", {rows, geometry.num_kv_heads, geometry.k_head_dim});
    const InputRows values = input_rows(v, "v", {rows, geometry.num_kv_heads, geometry.v_head_dim});
    locked([&] { throw_if_error(cache_.append(layer, num_tokens, keys.rows, values.rows)); });
  }
  void advance(int num_tokens) {
    locked([&] { throw_if_error(cache_.advance(num_tokens)); });
  }
  void reset() {
    locked([&] { cache_.reset(); });
  }

  void attend(int layer, int q_len, nb::handle q, nb::handle out, float softmax_scale) {
    const kv::CacheGeometry& geometry = config().geometry;
    const int64_t rows = int64_t{config().batch_size} * q_len;
    const InputRows queries = input_rows(q, "q", {rows, config().num_q_heads, geometry.k_head_dim});
    const OutputRows output =
        output_rows(out, "out", {rows, config().num_q_heads, geometry.v_head_dim});
    check_apart(output.array, queries.array, "q");
    locked([&] {
      kv::ContiguousAttention attention;
      attention.softmax_scale = softmax_scale;
      throw_if_error(cache_.attend(layer, q_len, queries.rows, output.rows, attention));
    });
  }

  void gather(int layer, nb::handle k, nb::handle v) {
    const kv::CacheGeometry& geometry = config().geometry;
    const OutputRows keys = output_rows(k, "k", {-1, geometry.num_kv_heads, geometry.k_head_dim});
    const auto rows = static_cast<int64_t>(keys.array.shape(0));
    const OutputRows values =
        output_rows(v, "v", {rows, geometry.num_kv_heads, geometry.v_head_dim});
    locked([&] {
      check_layer(layer);
      const int64_t held = int64_t{config().batch_size} * cache_.num_held(layer);
      if (rows != held) {
        throw CoreError(invalid_argument("k has {} rows; layer {} holds {}", rows, layer, held));
      }
      throw_if_error(cache_.gather(layer, keys.rows, values.rows));
    });
  }

  int num_held(int layer) {
    return locked([&] {
      check_layer(layer);
      return cache_.num_held(layer);
    });
  }
  int seq_len() {
    return locked([&] { return cache_.seq_len(); });
  }
  int64_t allocated_bytes() const { return cache_.allocated_bytes(); }
  int64_t used_bytes() {
    return locked([&] { return cache_.used_bytes(); });
  }
  int64_t read_bytes_per_step() {
    return locked([&] { return cache_.read_bytes_per_step(); });
  }

 private:
  const kv::ContiguousConfig& config() const { return cache_.config(); }

  void check_layer(int layer) const {
    if (layer < 0 || layer >= config().geometry.num_layers) {
      throw CoreError(invalid_argument("layer is {}; the cache has layers 0 to {}", layer,
                                       config().geometry.num_layers - 1));
    }
  }

  template <class F>
  std::invoke_result_t<F> locked(F f) {
    nb::gil_scoped_release no_gil;
    context_->home().check();
    const std::lock_guard lock(mutex_);
    return f();
  }

  std::shared_ptr<const Context> context_;
  std::mutex mutex_;
  kv::ContiguousCache cache_;
};

}  // namespace

void bind_contiguous_cache(nb::module_& module) {
  nb::class_<Contiguous>(module, "ContiguousCache")
      .def(
          "__init__",
          [](Contiguous* self, int num_layers, int num_kv_heads, int num_q_heads, int head_dim,
             std::vector<int> layer_windows, const std::string& recipe, int batch_size,
             int max_seq_len, bool evict, int max_append) {
            kv::CacheGeometry geometry{num_layers, num_kv_heads, head_dim, head_dim,
                                       std::move(layer_windows)};
            new (self) Contiguous(config_of(std::move(geometry), recipe, batch_size, num_q_heads,
                                            max_seq_len, evict, max_append));
          },
          nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("num_q_heads"),
          nb::arg("head_dim"), nb::arg("layer_windows"), nb::arg("recipe"), nb::arg("batch_size"),
          nb::arg("max_seq_len"), nb::arg("evict"), nb::arg("max_append"))
      .def("append", &Contiguous::append, nb::arg("layer"), nb::arg("num_tokens"),
           nb::arg("k").none(), nb::arg("v").none())
      .def("advance", &Contiguous::advance, nb::arg("num_tokens"))
      .def("reset", &Contiguous::reset)
      .def("attend", &Contiguous::attend, nb::arg("layer"), nb::arg("q_len"), nb::arg("q").none(),
           nb::arg("out").none(), nb::arg("softmax_scale"))
      .def("gather", &Contiguous::gather, nb::arg("layer"), nb::arg("k").none(),
           nb::arg("v").none())
      .def("num_held", &Contiguous::num_held, nb::arg("layer"))
      .def("allocated_bytes", &Contiguous::allocated_bytes)
      .def("used_bytes", &Contiguous::used_bytes)
      .def("read_bytes_per_step", &Contiguous::read_bytes_per_step)
      .def_prop_ro("seq_len", &Contiguous::seq_len);
}

}  // namespace kvx::python
