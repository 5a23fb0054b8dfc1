// PagedLayer: one layer's K and V in pages that belong to an engine. The verbs take the engine's
// own page memory, slots and block tables; the order inside a page is kvx's (cache/block_layout).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <mutex>
#include <optional>

#include "kv/plan/layer_store.hpp"
#include "ops/append/append.hpp"
#include "ops/attend/attend.hpp"
#include "ops/gather/gather.hpp"
#include "python/src/arguments.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

struct PageShape {
  kv::CacheGeometry geometry;
  kv::LayerPlan plan;
  cache::BlockLayout layout;
};

PageShape page_shape(const std::string& recipe_text, int num_kv_heads, int k_head_dim,
                     int v_head_dim, int block_size) {
  const auto recipe = value_of(kv::parse_recipe(recipe_text));
  if (recipe.has_full_precision_window) {
    throw CoreError(
        invalid_argument("recipe is '{}'; an engine's pages have no full-precision window (add "
                         "immediate, or leave auto, sink and recent out)",
                         recipe_text));
  }
  check_range("head_dim", k_head_dim, 1, format::kMaxHeadDim);
  PageShape shape;
  shape.geometry = {1, num_kv_heads, k_head_dim, v_head_dim};
  throw_if_error(kv::check_geometry(shape.geometry));
  shape.plan = value_of(kv::plan_layers(shape.geometry, recipe, {})).front();
  const cache::GroupBytes bytes{block_size, {kv::packed_bytes(shape.geometry, shape.plan)}};
  shape.layout = value_of(cache::layout_block(bytes));
  return shape;
}

// Refuses bad sizes here rather than at the first verb, under the names that Python uses.
void check_steps(const PageShape& shape, const kv::LayerCalibration& calibration) {
  const auto tables = kv::LayerTables::create(shape.geometry, 0, shape.plan, calibration);
  if (tables.ok()) return;
  Error error = tables.error();
  for (const char* side : {"k", "v"}) {
    const std::string table = fmt::format("layer 0 {}_group_scales", side);
    if (error.message.starts_with(table)) {
      error.message.replace(0, table.size(), fmt::format("{}_steps", side));
    }
  }
  throw CoreError(error);
}

struct Attention {
  std::optional<float> softmax_scale;
  float softcap = 0;
  int window = 0;
};

class PagedLayer {
 public:
  PagedLayer(PageShape shape, kv::LayerCalibration calibration)
      : context_(current_context()),
        shape_(std::move(shape)),
        calibration_(std::move(calibration)),
        page_bytes_(shape_.layout.block_bytes) {
    check_steps(shape_, calibration_);
  }

  int64_t page_bytes() const { return page_bytes_; }

  // Returns the non-finite inputs that given scales could not express.
  int64_t append(nb::handle pages, nb::handle k, nb::handle v, nb::handle slots) {
    const PageArray memory = page_array(pages);
    const auto slot_array = input_ints<int64_t>(slots, "slots", 1);
    const InputRows keys = input_rows(k, "k", {-1, heads(), geometry().k_head_dim});
    const InputRows values = input_rows(v, "v", {-1, heads(), geometry().v_head_dim});
    const size_t tokens = slot_array.shape(0);
    check_rows("k", keys.num_tokens, tokens);
    check_rows("v", values.num_tokens, tokens);

    nb::gil_scoped_release no_gil;
    const ops::CpuContext& cpu = context_->cpu();
    const std::span slot_numbers(static_cast<const int64_t*>(slot_array.data()), tokens);
    check_slots(slot_numbers, memory.num_pages);
    const std::lock_guard lock(mutex_);
    const kv::LayerStore& store = store_of(memory);
    ops::AppendArgs args;
    args.cache = store.packed();
    args.transform = store.transform();
    args.k = keys.rows;
    args.v = values.rows;
    args.slot_mapping = slot_numbers;
    return value_of(ops::append(cpu, args)).nonfinite_inputs;
  }

  void attend(nb::handle pages, nb::handle q, nb::handle out, nb::handle block_table,
              nb::handle seq_lens, nb::handle q_starts, const Attention& attention,
              nb::handle sinks) {
    const PageArray memory = page_array(pages);
    const InputRows queries = input_rows(q, "q", {-1, -1, geometry().k_head_dim});
    const OutputRows output =
        output_rows(out, "out", {-1, queries.num_heads, geometry().v_head_dim});
    check_apart(output.array, queries.array, "q");
    check_apart(output.array, memory.array, "pages");
    const auto table = input_ints<int32_t>(block_table, "block_table", 2);
    const auto lengths = input_ints<int32_t>(seq_lens, "seq_lens", 1);
    const auto starts = input_ints<int32_t>(q_starts, "q_starts", 1);
    const auto* start = static_cast<const int32_t*>(starts.data());
    const size_t sequences = table.shape(0);
    if (lengths.shape(0) != sequences || starts.shape(0) != sequences + 1) {
      throw CoreError(
          invalid_argument("block_table has {} sequences, seq_lens {} numbers and q_starts {}; "
                           "expected n, n and n + 1",
                           sequences, lengths.shape(0), starts.shape(0)));
    }
    check_rows("q", queries.num_tokens, start[sequences]);
    check_rows("out", static_cast<int64_t>(output.array.shape(0)), start[sequences]);
    nb::ndarray<nb::ro> sink_array;
    if (!sinks.is_none()) sink_array = input_floats(sinks, "sinks", queries.num_heads);
    // out must not overwrite what was checked before it is read.
    check_apart(output.array, table, "block_table");
    check_apart(output.array, lengths, "seq_lens");
    check_apart(output.array, starts, "q_starts");
    check_apart(output.array, sink_array, "sinks");
    if (queries.num_heads < 1 || queries.num_heads % heads() != 0) {
      throw CoreError(invalid_argument("q has {} heads; expected a multiple of num_kv_heads, {}",
                                       queries.num_heads, heads()));
    }

    nb::gil_scoped_release no_gil;
    const ops::CpuContext& cpu = context_->cpu();
    const std::lock_guard lock(mutex_);
    const kv::LayerStore& store = store_of(memory);
    ops::AttendArgs args;
    args.packed = store.packed();
    args.transform = store.transform();
    args.num_sequences = static_cast<int>(sequences);
    args.block_table = {static_cast<const int32_t*>(table.data()), table.stride(0)};
    args.max_blocks_per_sequence = static_cast<int64_t>(table.shape(1));
    args.seq_lens = static_cast<const int32_t*>(lengths.data());
    args.q_starts = start;
    args.num_q_heads = queries.num_heads;
    args.q = queries.rows;
    args.out = output.rows;
    args.softmax_scale = attention.softmax_scale.value_or(
        1.0f / std::sqrt(static_cast<float>(geometry().k_head_dim)));
    args.softcap = attention.softcap;
    args.window = attention.window;
    if (sink_array.is_valid()) args.sinks = static_cast<const float*>(sink_array.data());
    throw_if_error(ops::attend(cpu, args));
  }

  // The first tokens of one sequence.
  void gather(nb::handle pages, nb::handle block_ids, nb::handle k, nb::handle v) {
    const PageArray memory = page_array(pages);
    const auto ids = input_ints<int32_t>(block_ids, "block_ids", 1);
    const OutputRows keys = output_rows(k, "k", {-1, heads(), geometry().k_head_dim});
    const auto tokens = static_cast<int64_t>(keys.array.shape(0));
    const OutputRows values = output_rows(v, "v", {tokens, heads(), geometry().v_head_dim});
    check_apart(keys.array, nb::ndarray<nb::ro>(values.array), "v");

    nb::gil_scoped_release no_gil;
    const ops::CpuContext& cpu = context_->cpu();
    const std::lock_guard lock(mutex_);
    const kv::LayerStore& store = store_of(memory);
    const ops::GatherRange range{0, 0, tokens, 0};
    ops::GatherArgs args;
    args.cache = store.packed();
    args.transform = store.transform();
    args.block_table = {static_cast<const int32_t*>(ids.data()), 0};
    args.max_blocks_per_sequence = static_cast<int64_t>(ids.shape(0));
    args.num_sequences = 1;
    args.ranges = {&range, 1};
    args.k = keys.rows;
    args.v = values.rows;
    throw_if_error(ops::gather(cpu, args));
  }

 private:
  struct PageArray {
    nb::ndarray<nb::ro> array;  // the verbs that write have checked that they may
    uint8_t* base = nullptr;
    int64_t num_pages = 0;
    int64_t page_stride = 0;
  };

  const kv::CacheGeometry& geometry() const { return shape_.geometry; }
  int heads() const { return shape_.geometry.num_kv_heads; }

  PageArray page_array(nb::handle pages) const {
    const PageMemory memory = page_memory(pages, "pages", page_bytes_);
    return {nb::ndarray<nb::ro>(memory.array), static_cast<uint8_t*>(memory.array.data()),
            static_cast<int64_t>(memory.array.shape(0)), memory.page_stride};
  }

  static void check_rows(const char* name, int64_t rows, int64_t needed) {
    if (rows >= needed && needed >= 0) return;
    throw CoreError(invalid_argument("{} has {} tokens; the step has {}", name, rows, needed));
  }

  void check_slots(std::span<const int64_t> slots, int64_t num_pages) const {
    const int64_t num_slots = num_pages * shape_.layout.block_size;
    for (size_t t = 0; t < slots.size(); ++t) {
      if (slots[t] < num_slots) continue;
      throw CoreError(out_of_range("slots[{}] is {}; {} pages of {} tokens have {} slots", t,
                                   slots[t], num_pages, shape_.layout.block_size, num_slots));
    }
  }

  // The views of these pages. They are made anew when the engine's memory has moved.
  const kv::LayerStore& store_of(const PageArray& pages) {
    if (!store_ || pages.base != base_ || pages.num_pages != num_pages_ ||
        pages.page_stride != shape_.layout.block_bytes) {
      shape_.layout.block_bytes = pages.page_stride;
      base_ = pages.base;
      num_pages_ = pages.num_pages;
      store_ = value_of(kv::LayerStore::create(geometry(), 0, shape_.plan, {}, calibration_,
                                               {base_, num_pages_, &shape_.layout, 0}, {}));
    }
    return *store_;
  }

  std::shared_ptr<const Context> context_;
  std::mutex mutex_;
  PageShape shape_;  // its layout's block_bytes is the stride of the pages that store_ views
  const kv::LayerCalibration calibration_;
  const int64_t page_bytes_;
  uint8_t* base_ = nullptr;
  int64_t num_pages_ = 0;
  std::unique_ptr<kv::LayerStore> store_;
};

}  // namespace

void bind_paged_layer(nb::module_& module) {
  nb::class_<PagedLayer>(module, "PagedLayer")
      .def(
          "__init__",
          [](PagedLayer* self, const std::string& recipe, int num_kv_heads, int k_head_dim,
             int v_head_dim, int block_size, std::vector<float> k_steps,
             std::vector<float> v_steps) {
            kv::LayerCalibration calibration;
            calibration.k.group_scales = std::move(k_steps);
            calibration.v.group_scales = std::move(v_steps);
            new (self)
                PagedLayer(page_shape(recipe, num_kv_heads, k_head_dim, v_head_dim, block_size),
                           std::move(calibration));
          },
          nb::arg("recipe"), nb::arg("num_kv_heads"), nb::arg("k_head_dim"), nb::arg("v_head_dim"),
          nb::arg("block_size"), nb::arg("k_steps"), nb::arg("v_steps"))
      .def_prop_ro("page_bytes", &PagedLayer::page_bytes)
      .def("append", &PagedLayer::append, nb::arg("pages").none(), nb::arg("k").none(),
           nb::arg("v").none(), nb::arg("slots").none())
      .def(
          "attend",
          [](PagedLayer& self, nb::handle pages, nb::handle q, nb::handle out,
             nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
             std::optional<float> softmax_scale, float softcap, int window, nb::handle sinks) {
            self.attend(pages, q, out, block_table, seq_lens, q_starts,
                        {softmax_scale, softcap, window}, sinks);
          },
          nb::arg("pages").none(), nb::arg("q").none(), nb::arg("out").none(),
          nb::arg("block_table").none(), nb::arg("seq_lens").none(), nb::arg("q_starts").none(),
          nb::arg("softmax_scale").none(), nb::arg("softcap"), nb::arg("window"),
          nb::arg("sinks").none())
      .def("gather", &PagedLayer::gather, nb::arg("pages").none(), nb::arg("block_ids").none(),
           nb::arg("k").none(), nb::arg("v").none());
}

}  // namespace kvx::python
