// The window's state lives here; every array of a step is the caller's.
#include "python/src/paged_window.hpp"

#include <nanobind/stl/string.h>

#include <limits>

#include "device/cuda_async.hpp"
#include "device/cuda_caller.hpp"
#include "python/src/arguments.hpp"
#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

// The arrays of a list of block copies, to write to.
struct OutputCopies {
  nb::ndarray<> from, to, tokens;
};

OutputCopies output_copies(const BlockCopyArrays& arrays, const std::string& name, int64_t count,
                           const ArrayPlace& place) {
  const std::string plan = "plan." + name;
  return {output_ints<int64_t>(arrays.from, (plan + "_from").c_str(), count, place),
          output_ints<int64_t>(arrays.to, (plan + "_to").c_str(), count, place),
          output_ints<int32_t>(arrays.tokens, (plan + "_tokens").c_str(), count, place)};
}

}  // namespace

PagedWindow::PagedWindow(const WindowSizes& sizes, const std::string& device)
    : lane_(device == "cpu" ? nullptr : CudaLane::of_callers(device, "window")) {
  check_range("num_pages", sizes.num_pages, 1, std::numeric_limits<int32_t>::max() - 1);
  check_range("num_blocks", sizes.num_blocks, 1, std::numeric_limits<int32_t>::max() / 8);
  check_range("block_size", sizes.block_size, 1, cache::kMaxBlockSize);
  args_.window = value_of(
      cache::make_full_precision_window(sizes.sink_tokens, sizes.recent_tokens, sizes.block_size));
  args_.unit = sizes.is_of_blocks ? ops::WindowUnit::kBlocks : ops::WindowUnit::kRows;
  args_.block_size = sizes.block_size;
  const int64_t bytes = 4 * ops::WindowState::num_words(sizes.num_pages, sizes.num_blocks);
  if (lane_) {
    const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
    cuda_place_ = value_of(kv::CudaPlace::create(lane_->placement(1).context));
    state_ = value_of(cuda_place_->memory->allocate(bytes, "the window's state"));
    throw_if_error(device::cuda_synchronize(nullptr));  // zeros are there for every stream
  } else {
    state_ = value_of(cache::host_memory().allocate(bytes, "the window's state"));
  }
  args_.state = {sizes.num_pages, sizes.num_blocks, reinterpret_cast<int32_t*>(state_.data())};
}

ArrayPlace PagedWindow::place_of(nb::handle stream,
                                 std::initializer_list<nb::handle> arrays) const {
  if (lane_) return lane_->place_of(stream, arrays);
  if (!stream.is_none()) {
    throw CoreError(invalid_argument("stream is given; a window on the CPU has none"));
  }
  ArrayPlace place;
  place.owner = "kvx.PagedWindow";
  return place;
}

template <class F>
void PagedWindow::on_device(const ArrayPlace& place, KeptArrays& kept, F verb) {
  const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
  throw_if_error(lane_->begin(place, kept));
  throw_if_error(verb(lane_->context(place)));
  throw_if_error(lane_->end(place, kept));
}

void PagedWindow::plan(nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
                       const WindowLists& lists, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {lists.block_table, block_table, seq_lens, q_starts});
  const auto table = input_ints<int32_t>(block_table, "block_table", 2, place);
  const auto lengths = input_ints<int32_t>(seq_lens, "seq_lens", 1, place);
  const auto starts = input_ints<int32_t>(q_starts, "q_starts", 1, place);
  const auto sequences = static_cast<int64_t>(table.shape(0));
  if (static_cast<int64_t>(lengths.shape(0)) != sequences ||
      static_cast<int64_t>(starts.shape(0)) != sequences + 1) {
    throw CoreError(
        invalid_argument("block_table has {} sequences, seq_lens {} numbers and q_starts {}; "
                         "expected n, n and n + 1",
                         sequences, lengths.shape(0), starts.shape(0)));
  }
  check_range("num_sequences", sequences, 0, 65535);
  ops::WindowPlanArgs args = args_;
  args.num_sequences = static_cast<int>(sequences);
  args.block_table = {numbers<int32_t>(table), table.stride(0)};
  args.max_blocks_per_sequence = static_cast<int64_t>(table.shape(1));
  args.seq_lens = numbers<int32_t>(lengths);
  args.q_starts = numbers<int32_t>(starts);
  const auto ids = output_ints<int32_t>(lists.block_table, "plan.block_table",
                                        sequences * args.max_blocks_per_sequence, place);
  const auto sinks =
      output_ints<int32_t>(lists.num_sink_blocks, "plan.num_sink_blocks", sequences, place);
  const auto recent =
      output_ints<int32_t>(lists.first_recent_blocks, "plan.first_recent_blocks", sequences, place);
  const auto window_slots = output_ints<int64_t>(lists.window_slots, "plan.window_slots", 0, place);
  args.num_tokens = static_cast<int64_t>(window_slots.size());
  const auto slots = output_ints<int64_t>(lists.slots, "plan.slots", args.num_tokens, place);
  OutputCopies closing, evicted, reopened;
  if (args.unit == ops::WindowUnit::kBlocks) {
    closing = output_copies(lists.closing, "closing", args.num_evicted(), place);
    evicted = output_copies(lists.evicted, "evicted", args.num_evicted(), place);
    reopened = output_copies(lists.reopened, "reopened", sequences, place);
    args.closing_from = numbers<int64_t>(closing.from);
    args.closing_to = numbers<int64_t>(closing.to);
    args.closing_tokens = numbers<int32_t>(closing.tokens);
    args.evicted_from = numbers<int64_t>(evicted.from);
    args.evicted_to = numbers<int64_t>(evicted.to);
    args.evicted_tokens = numbers<int32_t>(evicted.tokens);
    args.reopened_from = numbers<int64_t>(reopened.from);
    args.reopened_to = numbers<int64_t>(reopened.to);
    args.reopened_tokens = numbers<int32_t>(reopened.tokens);
  }
  args.ids = numbers<int32_t>(ids);
  args.num_sink_blocks = numbers<int32_t>(sinks);
  args.first_recent_block = numbers<int32_t>(recent);
  args.slots = numbers<int64_t>(slots);
  args.window_slots = numbers<int64_t>(window_slots);
  KeptArrays kept;
  if (lane_) {
    lane_->keep(kept, place, block_table, table);
    lane_->keep(kept, place, seq_lens, lengths);
    lane_->keep(kept, place, q_starts, starts);
  }

  nb::gil_scoped_release no_gil;
  const std::lock_guard lock(mutex_);
  if (!lane_) {
    throw_if_error(ops::plan_window(args));
    return;
  }
  on_device(place, kept, [&](const ops::CudaContext& context) {
    return ops::plan_window(context, args, cuda_place_->counters());
  });
}

void PagedWindow::forget(nb::handle blocks, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {blocks});
  const auto ids = input_ints<int64_t>(blocks, "pages", 1, place);
  KeptArrays kept;
  if (lane_) lane_->keep(kept, place, blocks, ids);

  nb::gil_scoped_release no_gil;
  const std::lock_guard lock(mutex_);
  const std::span<const int64_t> list(numbers<int64_t>(ids), ids.shape(0));
  if (!lane_) {
    throw_if_error(ops::forget_window_blocks(args_.state, list));
    return;
  }
  on_device(place, kept, [&](const ops::CudaContext& context) {
    return ops::forget_window_blocks(context, args_.state, list, cuda_place_->counters());
  });
}

int64_t PagedWindow::num_out_of_range() {
  nb::gil_scoped_release no_gil;
  if (!lane_) return 0;
  const std::lock_guard lock(mutex_);
  ops::DeviceCounters found;
  const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
  throw_if_error(device::cuda_synchronize_device(lane_->device()));
  throw_if_error(device::cuda_copy(&found, cuda_place_->counters(), sizeof found));
  return static_cast<int64_t>(found.out_of_range);
}

void bind_paged_window(nb::module_& module) {
  nb::class_<PagedWindow>(module, "PagedWindow")
      .def(
          "__init__",
          [](PagedWindow* self, int64_t num_pages, int64_t num_blocks, int block_size,
             int64_t sink_tokens, int64_t recent_tokens, bool is_of_blocks,
             const std::string& device) {
            new (self) PagedWindow(
                {num_pages, num_blocks, block_size, sink_tokens, recent_tokens, is_of_blocks},
                device);
          },
          nb::arg("num_pages"), nb::arg("num_blocks"), nb::arg("block_size"),
          nb::arg("sink_tokens"), nb::arg("recent_tokens"), nb::arg("is_of_blocks"),
          nb::arg("device"))
      .def_prop_ro("device", &PagedWindow::device, "\"cpu\", or the GPU: \"cuda:0\".")
      .def_prop_ro("closing_blocks_per_sequence", &PagedWindow::closing_blocks_per_sequence)
      .def(
          "plan",
          [](PagedWindow& self, nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
             nb::handle ids, nb::handle num_sink_blocks, nb::handle first_recent_blocks,
             nb::handle slots, nb::handle window_slots, nb::handle closing, nb::handle evicted,
             nb::handle reopened, nb::handle stream) {
            self.plan(block_table, seq_lens, q_starts,
                      {ids, num_sink_blocks, first_recent_blocks, slots, window_slots,
                       BlockCopyArrays::of(closing), BlockCopyArrays::of(evicted),
                       BlockCopyArrays::of(reopened)},
                      stream);
          },
          nb::arg("block_table").none(), nb::arg("seq_lens").none(), nb::arg("q_starts").none(),
          nb::arg("ids").none(), nb::arg("num_sink_blocks").none(),
          nb::arg("first_recent_blocks").none(), nb::arg("slots").none(),
          nb::arg("window_slots").none(), nb::arg("closing").none(), nb::arg("evicted").none(),
          nb::arg("reopened").none(), nb::arg("stream").none())
      .def("forget", &PagedWindow::forget, nb::arg("pages").none(), nb::arg("stream").none())
      .def("num_out_of_range", &PagedWindow::num_out_of_range);
}

}  // namespace kvx::python
