// ContiguousCache: kv::ContiguousCache for Python; kvx.marlin is built on it.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <type_traits>

#include "kv/contiguous/contiguous_cache.hpp"
#include "python/src/arguments.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/cuda_lane.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

// A GPU's tables of one append pass through memory of that many tokens.
constexpr int64_t kMostStepTokens = int64_t{1} << 20;

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

std::unique_ptr<CudaLane> lane_of(const std::string& device) {
  return device == "cpu" ? nullptr : std::make_unique<CudaLane>(device, nb::none());
}

kv::ContiguousConfig placed(kv::ContiguousConfig config, const CudaLane* lane) {
  if (lane == nullptr) return config;
  const int64_t whole = int64_t{config.batch_size} * config.max_seq_len;
  const int64_t wanted = std::clamp<int64_t>(whole, 1, kMostStepTokens);
  config.cuda = lane->placement(static_cast<int>(std::max<int64_t>(wanted, config.batch_size)));
  return config;
}

// An array of a layer's: the dtype of a number, and how many of them a row has.
struct Numbers {
  nb::dlpack::dtype dtype;
  int64_t bytes = 0;  // of one
};

Numbers unsigned_numbers(int64_t bytes) {
  return {{static_cast<uint8_t>(nb::dlpack::dtype_code::UInt), static_cast<uint8_t>(8 * bytes), 1},
          bytes};
}

Numbers floats(nb::dlpack::dtype_code code, int64_t bytes) {
  return {{static_cast<uint8_t>(code), static_cast<uint8_t>(8 * bytes), 1}, bytes};
}

// What a row of codes is made of: words of eight where a row shares one scale, the numbers
// themselves where nothing is packed (bf16 as its 16 bits on the CPU, since NumPy has no such
// type), else bytes.
Numbers numbers_of_codes(format::FormatId format, bool is_on_gpu) {
  using enum nb::dlpack::dtype_code;
  switch (format) {
    case format::FormatId::kFp4Row:
    case format::FormatId::kInt4Row:
      return unsigned_numbers(4);
    case format::FormatId::kF32:
      return floats(Float, 4);
    case format::FormatId::kF16:
      return floats(Float, 2);
    case format::FormatId::kInt8:
      return {{static_cast<uint8_t>(Int), 8, 1}, 1};
    case format::FormatId::kBF16:
      return is_on_gpu ? floats(Bfloat, 2) : unsigned_numbers(2);
    default:
      return unsigned_numbers(1);
  }
}

Numbers numbers_of_scales(int64_t scale_bytes) {
  if (scale_bytes == 1) return unsigned_numbers(1);
  return floats(nb::dlpack::dtype_code::Float, scale_bytes);
}

// Rows of a call are the sequences' tokens, one sequence after the other.
class Contiguous {
 public:
  Contiguous(kv::ContiguousConfig config, const std::string& device)
      : context_(current_context()),
        lane_(lane_of(device)),
        cache_(value_of(kv::ContiguousCache::create(placed(std::move(config), lane_.get()),
                                                    context_->cpu()))) {}

  void append(int layer, int num_tokens, nb::handle k, nb::handle v) {
    const kv::CacheGeometry& geometry = config().geometry;
    const int64_t rows = int64_t{config().batch_size} * num_tokens;
    const ArrayPlace place = place_of({k, v});
    const InputRows keys =
        input_rows(k, "k", {rows, geometry.num_kv_heads, geometry.k_head_dim}, place);
    const InputRows values =
        input_rows(v, "v", {rows, geometry.num_kv_heads, geometry.v_head_dim}, place);
    KeptArrays kept;
    keep(kept, place, k, keys.array);
    keep(kept, place, v, values.array);
    ordered(place, kept,
            [&] { throw_if_error(cache_.append(layer, num_tokens, keys.rows, values.rows)); });
  }
  void advance(int num_tokens) {
    locked([&] { throw_if_error(cache_.advance(num_tokens)); });
  }
  void reset() {
    locked([&] { cache_.reset(); });
  }

  void attend(int layer, int q_len, nb::handle q, nb::handle out, float softmax_scale,
              bool is_causal) {
    const kv::CacheGeometry& geometry = config().geometry;
    const int64_t rows = int64_t{config().batch_size} * q_len;
    const ArrayPlace place = place_of({out, q});
    const InputRows queries =
        input_rows(q, "q", {rows, config().num_q_heads, geometry.k_head_dim}, place);
    const OutputRows output =
        output_rows(out, "out", {rows, config().num_q_heads, geometry.v_head_dim}, place);
    check_apart(output.array, queries.array, "q");
    KeptArrays kept;
    keep(kept, place, q, queries.array);
    keep(kept, place, out, nb::ndarray<nb::ro>(output.array));
    ordered(place, kept, [&] {
      kv::ContiguousAttention attention;
      attention.softmax_scale = softmax_scale;
      attention.is_causal = is_causal;
      throw_if_error(cache_.attend(layer, q_len, queries.rows, output.rows, attention));
    });
  }

  void gather(int layer, nb::handle k, nb::handle v) {
    const kv::CacheGeometry& geometry = config().geometry;
    const ArrayPlace place = place_of({k, v});
    const OutputRows keys =
        output_rows(k, "k", {-1, geometry.num_kv_heads, geometry.k_head_dim}, place);
    const auto rows = static_cast<int64_t>(keys.array.shape(0));
    const OutputRows values =
        output_rows(v, "v", {rows, geometry.num_kv_heads, geometry.v_head_dim}, place);
    KeptArrays kept;
    keep(kept, place, k, nb::ndarray<nb::ro>(keys.array));
    keep(kept, place, v, nb::ndarray<nb::ro>(values.array));
    ordered(place, kept, [&] {
      check_layer(layer);
      const int64_t held = int64_t{config().batch_size} * cache_.num_held(layer);
      if (rows != held) {
        throw CoreError(invalid_argument("k has {} rows; layer {} holds {}", rows, layer, held));
      }
      throw_if_error(cache_.gather(layer, keys.rows, values.rows));
    });
  }

  // A layer's codes of K or V as they lie, [batch, heads, capacity, numbers]; read only on the CPU.
  nb::object codes(int layer, bool is_value) {
    const ops::SideView side = side_of(layer, is_value);
    return array_of(layer, side.codes, numbers_of_codes(side.spec.facts->id, lane_ != nullptr));
  }
  // Its scales, [batch, heads, capacity, groups], or None.
  nb::object scales(int layer, bool is_value) {
    const ops::SideView side = side_of(layer, is_value);
    if (side.scales.token_stride == 0) return nb::none();
    return array_of(layer, side.scales, numbers_of_scales(side.scales.group_stride));
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

  // Requires: one run of heads, as every recipe without overrides makes.
  ops::SideView side_of(int layer, bool is_value) {
    return locked([&] {
      check_layer(layer);
      const ops::LayerView view = cache_.view(layer);
      return is_value ? view.runs.front().v : view.runs.front().k;
    });
  }

  // Of codes or scales, whose rows follow each other.
  template <class Address>
  nb::object array_of(int layer, const Address& rows, const Numbers& numbers) {
    const int64_t row_numbers = rows.token_stride / numbers.bytes;
    const size_t shape[] = {static_cast<size_t>(config().batch_size),
                            static_cast<size_t>(config().geometry.num_kv_heads),
                            static_cast<size_t>(config().capacity(layer)),
                            static_cast<size_t>(row_numbers)};
    const int64_t strides[] = {rows.block_stride / numbers.bytes, rows.head_stride / numbers.bytes,
                               row_numbers, 1};
    const nb::object owner = nb::find(this);
    if (lane_) {
      return nb::cast(nb::ndarray<>(rows.base, 4, shape, owner, strides, numbers.dtype,
                                    nb::device::cuda::value, lane_->device()));
    }
    return nb::cast(
        nb::ndarray<nb::numpy, nb::ro>(rows.base, 4, shape, owner, strides, numbers.dtype));
  }

  ArrayPlace place_of(std::initializer_list<nb::handle> arrays) const {
    return lane_ ? lane_->place_of(nb::none(), arrays) : ArrayPlace();
  }
  void keep(KeptArrays& kept, const ArrayPlace& place, nb::handle object,
            const nb::ndarray<nb::ro>& array) const {
    if (lane_) lane_->keep(kept, place, object, array);
  }

  // A verb in the order of its arrays' streams.
  template <class F>
  void ordered(const ArrayPlace& place, KeptArrays& kept, F f) {
    locked([&] {
      if (lane_) throw_if_error(lane_->begin(place, kept));
      f();
      if (lane_) throw_if_error(lane_->end(place, kept));
    });
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
  std::unique_ptr<CudaLane> lane_;  // null: the CPU
  kv::ContiguousCache cache_;
};

}  // namespace

void bind_contiguous_cache(nb::module_& module) {
  nb::class_<Contiguous>(module, "ContiguousCache")
      .def(
          "__init__",
          [](Contiguous* self, int num_layers, int num_kv_heads, int num_q_heads, int head_dim,
             std::vector<int> layer_windows, const std::string& recipe, int batch_size,
             int max_seq_len, bool evict, int max_append, const std::string& device) {
            kv::CacheGeometry geometry{num_layers, num_kv_heads, head_dim, head_dim,
                                       std::move(layer_windows)};
            new (self) Contiguous(config_of(std::move(geometry), recipe, batch_size, num_q_heads,
                                            max_seq_len, evict, max_append),
                                  device);
          },
          nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("num_q_heads"),
          nb::arg("head_dim"), nb::arg("layer_windows"), nb::arg("recipe"), nb::arg("batch_size"),
          nb::arg("max_seq_len"), nb::arg("evict"), nb::arg("max_append"),
          nb::arg("device") = "cpu")
      .def("append", &Contiguous::append, nb::arg("layer"), nb::arg("num_tokens"),
           nb::arg("k").none(), nb::arg("v").none())
      .def("advance", &Contiguous::advance, nb::arg("num_tokens"))
      .def("reset", &Contiguous::reset)
      .def("attend", &Contiguous::attend, nb::arg("layer"), nb::arg("q_len"), nb::arg("q").none(),
           nb::arg("out").none(), nb::arg("softmax_scale"), nb::arg("is_causal") = true)
      .def("gather", &Contiguous::gather, nb::arg("layer"), nb::arg("k").none(),
           nb::arg("v").none())
      .def("codes", &Contiguous::codes, nb::arg("layer"), nb::arg("is_value"))
      .def("scales", &Contiguous::scales, nb::arg("layer"), nb::arg("is_value"))
      .def("num_held", &Contiguous::num_held, nb::arg("layer"))
      .def("allocated_bytes", &Contiguous::allocated_bytes)
      .def("used_bytes", &Contiguous::used_bytes)
      .def("read_bytes_per_step", &Contiguous::read_bytes_per_step)
      .def_prop_ro("seq_len", &Contiguous::seq_len);
}

}  // namespace kvx::python
