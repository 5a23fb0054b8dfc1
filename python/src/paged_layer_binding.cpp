// kvx.PagedLayer and kvx.BatchAttention as Python sees them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "python/src/arguments.hpp"
#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "python/src/exchange.hpp"
#include "python/src/paged_layer.hpp"

namespace kvx::python {
namespace {

// A step's batch, for any number of layers.
class BatchAttention {
 public:
  void plan(nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
            const BatchBounds& bounds, nb::handle workspace, const StepWindow& window) {
    ArrayPlace place;
    place.owner = "batch";
    place.cuda_device = cuda_device_of(block_table, "block_table");
    if (place.cuda_device >= 0) {
      place.stream = current_stream(block_table, place.cuda_device).value_or(nullptr);
      place.also_behind = place.stream;
    }
    auto batch = std::make_shared<const StepBatch>(block_table, seq_lens, q_starts, bounds,
                                                   workspace, window, place);
    batch_ = std::move(batch);
    device_ = place.cuda_device;
  }

  void run(PagedLayer& layer, nb::handle pages, nb::handle q, nb::handle out,
           const Attention& attention, nb::handle lse, nb::handle window_pages, nb::handle stream) {
    if (!batch_) throw CoreError(invalid_argument("nothing is planned; call plan() first"));
    if (layer.cuda_device() != device_) {
      throw CoreError(invalid_argument(
          "the layer lies on {} and the planned block_table on {}; expected one device",
          layer.device(), device_ < 0 ? "the CPU" : fmt::format("cuda:{}", device_)));
    }
    const std::shared_ptr<const StepBatch> batch = batch_;  // another thread may plan meanwhile
    layer.attend_batch(pages, q, out, *batch, attention, lse, window_pages, stream);
  }

 private:
  std::shared_ptr<const StepBatch> batch_;
  int device_ = -1;
};

}  // namespace

void bind_paged_layer(nb::module_& module) {
  nb::class_<PagedLayer>(module, "PagedLayer")
      .def(
          "__init__",
          [](PagedLayer* self, const std::string& recipe_text, int num_kv_heads, int k_head_dim,
             int v_head_dim, int block_size, std::vector<float> k_steps, std::vector<float> v_steps,
             std::vector<float> k_tensor_scales, std::vector<float> v_tensor_scales,
             const std::string& device, std::optional<int> layer, int64_t max_tokens,
             bool is_latent) {
            kv::LayerCalibration calibration;
            calibration.k.group_scales = std::move(k_steps);
            calibration.v.group_scales = std::move(v_steps);
            calibration.k.tensor_scales = std::move(k_tensor_scales);
            calibration.v.tensor_scales = std::move(v_tensor_scales);
            const tune::CacheRecipe recipe = layer_recipe(recipe_text, layer);
            const kv::CacheGeometry geometry{.num_layers = 1,
                                             .num_kv_heads = num_kv_heads,
                                             .k_head_dim = k_head_dim,
                                             .v_head_dim = v_head_dim,
                                             .is_latent = is_latent};
            PageShape shape = page_shape(recipe, geometry, block_size);
            calibration = page_tables(recipe, shape, max_tokens, std::move(calibration));
            new (self) PagedLayer(std::move(shape), calibration, device);
          },
          nb::arg("recipe"), nb::arg("num_kv_heads"), nb::arg("k_head_dim"), nb::arg("v_head_dim"),
          nb::arg("block_size"), nb::arg("k_steps"), nb::arg("v_steps"), nb::arg("k_tensor_scales"),
          nb::arg("v_tensor_scales"), nb::arg("device"), nb::arg("layer").none(),
          nb::arg("max_tokens"), nb::arg("is_latent"))
      .def_prop_ro("is_latent", &PagedLayer::is_latent)
      .def_prop_ro("needs_positions", &PagedLayer::needs_positions)
      .def_prop_ro("page_bytes", &PagedLayer::page_bytes)
      .def_prop_ro("window_block_bytes", &PagedLayer::window_block_bytes)
      .def_prop_ro("device", &PagedLayer::device, "\"cpu\", or the GPU: \"cuda:0\".")
      .def_prop_ro("order", &PagedLayer::order)
      .def(
          "append",
          [](PagedLayer& self, nb::handle pages, nb::handle k, nb::handle v, nb::handle slots,
             nb::handle positions, nb::handle window_pages, nb::handle window_slots,
             nb::handle closing, nb::handle evicted, nb::handle reopened, nb::handle stream) {
            const WindowAppend window = {window_pages, window_slots, BlockCopyArrays::of(closing),
                                         BlockCopyArrays::of(evicted),
                                         BlockCopyArrays::of(reopened)};
            return self.append(pages, k, v, slots, positions, window, stream);
          },
          nb::arg("pages").none(), nb::arg("k").none(), nb::arg("v").none(),
          nb::arg("slots").none(), nb::arg("positions").none(), nb::arg("window_pages").none(),
          nb::arg("window_slots").none(), nb::arg("closing").none(), nb::arg("evicted").none(),
          nb::arg("reopened").none(), nb::arg("stream").none())
      .def(
          "close_blocks",
          [](PagedLayer& self, nb::handle pages, nb::handle window_pages, nb::handle closing,
             nb::handle stream) {
            self.close_blocks(pages, window_pages, BlockCopyArrays::of(closing), stream);
          },
          nb::arg("pages").none(), nb::arg("window_pages").none(), nb::arg("closing").none(),
          nb::arg("stream").none())
      .def(
          "attend",
          [](PagedLayer& self, nb::handle pages, nb::handle q, nb::handle out,
             nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
             std::optional<float> softmax_scale, float softcap, int window, nb::handle sinks,
             std::optional<int> max_q_len, std::optional<int64_t> max_seq_len, int num_decodes,
             std::optional<int64_t> num_queries, nb::handle workspace, nb::handle lse,
             nb::handle window_pages, nb::handle num_sink_blocks, nb::handle first_recent_blocks,
             nb::handle stream) {
            self.attend(pages, q, out, block_table, seq_lens, q_starts,
                        {softmax_scale, softcap, window, sinks},
                        {max_q_len, max_seq_len, num_decodes, num_queries}, workspace, lse,
                        window_pages, {num_sink_blocks, first_recent_blocks}, stream);
          },
          nb::arg("pages").none(), nb::arg("q").none(), nb::arg("out").none(),
          nb::arg("block_table").none(), nb::arg("seq_lens").none(), nb::arg("q_starts").none(),
          nb::arg("softmax_scale").none(), nb::arg("softcap"), nb::arg("window"),
          nb::arg("sinks").none(), nb::arg("max_q_len").none(), nb::arg("max_seq_len").none(),
          nb::arg("num_decodes"), nb::arg("num_queries").none(), nb::arg("workspace").none(),
          nb::arg("lse").none(), nb::arg("window_pages").none(), nb::arg("num_sink_blocks").none(),
          nb::arg("first_recent_blocks").none(), nb::arg("stream").none())
      .def("gather", &PagedLayer::gather, nb::arg("pages").none(), nb::arg("block_table").none(),
           nb::arg("seq_lens").none(), nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("stream").none())
      .def("copy_blocks", &PagedLayer::copy_blocks, nb::arg("pages").none(),
           nb::arg("to_pages").none(), nb::arg("from_blocks").none(), nb::arg("to_blocks").none(),
           nb::arg("stream").none())
      .def(
          "workspace_bytes",
          [](const PagedLayer& self, int num_q_heads, int max_sequences, int64_t max_queries,
             int max_q_len, int64_t max_seq_len, int window, bool has_window_pages) {
            return self.workspace_bytes(num_q_heads, {max_q_len, max_seq_len, 0, max_queries},
                                        max_sequences, window, has_window_pages);
          },
          nb::arg("num_q_heads"), nb::arg("max_sequences"), nb::arg("max_queries"),
          nb::arg("max_q_len"), nb::arg("max_seq_len"), nb::arg("window"),
          nb::arg("has_window_pages"))
      .def("counters", &PagedLayer::counters)
      .def("reset_counters", &PagedLayer::reset_counters);

  nb::class_<BatchAttention>(module, "BatchAttention")
      .def(nb::init<>())
      .def(
          "plan",
          [](BatchAttention& self, nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
             std::optional<int> max_q_len, std::optional<int64_t> max_seq_len, int num_decodes,
             std::optional<int64_t> num_queries, nb::handle workspace, nb::handle num_sink_blocks,
             nb::handle first_recent_blocks) {
            self.plan(block_table, seq_lens, q_starts,
                      {max_q_len, max_seq_len, num_decodes, num_queries}, workspace,
                      {num_sink_blocks, first_recent_blocks});
          },
          nb::arg("block_table").none(), nb::arg("seq_lens").none(), nb::arg("q_starts").none(),
          nb::arg("max_q_len").none(), nb::arg("max_seq_len").none(), nb::arg("num_decodes"),
          nb::arg("num_queries").none(), nb::arg("workspace").none(),
          nb::arg("num_sink_blocks").none(), nb::arg("first_recent_blocks").none())
      .def(
          "run",
          [](BatchAttention& self, PagedLayer& layer, nb::handle pages, nb::handle q,
             nb::handle out, std::optional<float> softmax_scale, float softcap, int window,
             nb::handle sinks, nb::handle lse, nb::handle window_pages, nb::handle stream) {
            self.run(layer, pages, q, out, {softmax_scale, softcap, window, sinks}, lse,
                     window_pages, stream);
          },
          nb::arg("layer"), nb::arg("pages").none(), nb::arg("q").none(), nb::arg("out").none(),
          nb::arg("softmax_scale").none(), nb::arg("softcap"), nb::arg("window"),
          nb::arg("sinks").none(), nb::arg("lse").none(), nb::arg("window_pages").none(),
          nb::arg("stream").none());
}

}  // namespace kvx::python
