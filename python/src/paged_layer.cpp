// The verbs of one layer. Its store is made once, at an address of its own, and its views are moved
// to whatever pages a call brings: nothing is allocated for that.
#include "python/src/paged_layer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/cuda_async.hpp"
#include "device/cuda_caller.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "python/src/arguments.hpp"
#include "python/src/errors.hpp"
#include "python/src/exchange.hpp"
#include "python/src/interrupt.hpp"
#include "python/src/step_arrays.hpp"

namespace kvx::python {
namespace {

// Where the store believes its pages to lie. Never read or written.
constexpr uintptr_t kStoreAddress = 4096;
// A GPU's fast kernels copy rows by so many bytes at once.
constexpr int64_t kCudaPageAlignment = 16;

uint8_t* store_address() {
  return reinterpret_cast<uint8_t*>(kStoreAddress);
}

// An error about given scales, under the names that Python uses.
Error in_pythons_words(Error error) {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"layer 0 k_group_scales", "k_steps"},
      {"layer 0 v_group_scales", "v_steps"},
      {"layer 0 k_tensor_scales", "k_tensor_scales"},
      {"layer 0 v_tensor_scales", "v_tensor_scales"}};
  for (const auto& [table, argument] : kNames) {
    if (error.message.starts_with(table)) {
      error.message.replace(0, std::string_view(table).size(), argument);
    }
  }
  return error;
}

void check_rows(const char* name, int64_t rows, int64_t needed) {
  if (rows >= needed && needed >= 0) return;
  throw CoreError(invalid_argument("{} has {} tokens; the step has {}", name, rows, needed));
}

}  // namespace

StepBatch::StepBatch(nb::handle table, nb::handle lengths, nb::handle starts,
                     const BatchBounds& given_bounds, nb::handle given_workspace,
                     const StepWindow& window, const ArrayPlace& place)
    : block_table(input_ints<int32_t>(table, "block_table", 2, place)),
      seq_lens(input_ints<int32_t>(lengths, "seq_lens", 1, place)),
      q_starts(input_ints<int32_t>(starts, "q_starts", 1, place)),
      bounds(given_bounds) {
  const size_t sequences = block_table.shape(0);
  if (seq_lens.shape(0) != sequences || q_starts.shape(0) != sequences + 1) {
    throw CoreError(
        invalid_argument("block_table has {} sequences, seq_lens {} numbers and q_starts {}; "
                         "expected n, n and n + 1",
                         sequences, seq_lens.shape(0), q_starts.shape(0)));
  }
  check_range("num_sequences", static_cast<int64_t>(sequences), 0, std::numeric_limits<int>::max());
  num_sequences = static_cast<int>(sequences);
  check_range("max_q_len", bounds.max_q_len.value_or(1), 1, std::numeric_limits<int>::max());
  check_range("max_seq_len", bounds.max_seq_len.value_or(1), 1, std::numeric_limits<int>::max());
  check_range("num_decodes", bounds.num_decodes, 0, num_sequences);
  read_window(window, place);
  const std::pair<nb::handle, const nb::ndarray<nb::ro>*> arrays[] = {
      {table, &block_table},
      {lengths, &seq_lens},
      {starts, &q_starts},
      {window.num_sink_blocks, &num_sink_blocks},
      {window.first_recent_blocks, &first_recent_blocks}};
  for (const auto& [object, array] : arrays) {
    if (place.cuda_device < 0 || place.are_all_ready) break;
    if (!array->is_valid()) continue;
    if (!current_stream(object, place.cuda_device)) kept.push_back(*array);
  }
  if (given_workspace.is_none()) return;
  if (place.cuda_device < 0) {
    throw CoreError(invalid_argument("workspace is given; attention on the CPU takes none"));
  }
  workspace_array = scratch_bytes(given_workspace, "workspace", place);
  workspace = {static_cast<uint8_t*>(workspace_array.data()),
               static_cast<int64_t>(workspace_array.size())};
}

PagedLayer::PagedLayer(PageShape shape, const kv::LayerCalibration& calibration,
                       const std::string& device)
    : context_(current_context()),
      lane_(device == "cpu" ? nullptr : CudaLane::of_callers(device, "layer")),
      shape_(std::move(shape)),
      page_bytes_(shape_.layout.block_bytes) {
  const kv::LayerMemory memory{store_address(), 1, &shape_.layout, 0};
  const kv::LayerMemory window_memory{store_address(), 1, &shape_.window_layout, 0};
  std::optional<device::CurrentCudaDevice> current;
  if (lane_) {
    current.emplace(value_of(device::CurrentCudaDevice::set(lane_->device())));
    cuda_place_ = value_of(kv::CudaPlace::create(lane_->placement(1).context));
  }
  auto store = kv::LayerStore::create(shape_.geometry, 0, shape_.plan,
                                      value_of(format::make_spec(kWindowFormat)), calibration,
                                      memory, window_memory, cuda_place_.get());
  if (!store.ok()) throw CoreError(in_pythons_words(store.error()));
  store_ = std::move(store).value();
  // Its tables and counters are there before a stream that waits for no other reads them.
  if (lane_) throw_if_error(device::cuda_synchronize(nullptr));
}

std::string PagedLayer::device() const {
  return lane_ ? fmt::format("cuda:{}", lane_->device()) : "cpu";
}

const char* PagedLayer::order() const {
  const auto is_interleaved = [](const ops::HeadRun& run) { return run.k.is_interleaved; };
  return std::ranges::any_of(store_->packed().runs, is_interleaved) ? "interleaved" : "pool";
}

ArrayPlace PagedLayer::place_of(nb::handle stream, std::initializer_list<nb::handle> arrays) const {
  if (lane_) return lane_->place_of(stream, arrays);
  if (!stream.is_none()) {
    throw CoreError(invalid_argument("stream is given; a layer on the CPU has none"));
  }
  ArrayPlace place;
  place.owner = "kvx.PagedLayer";
  return place;
}

PagedLayer::PageArray PagedLayer::page_array(nb::handle pages, const char* name, int64_t page_bytes,
                                             const ArrayPlace& place) const {
  const PageMemory memory = page_memory(pages, name, page_bytes, place);
  const PageArray array{nb::ndarray<nb::ro>(memory.array),
                        static_cast<uint8_t*>(memory.array.data()),
                        static_cast<int64_t>(memory.array.shape(0)), memory.page_stride};
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(array.base) %
                                           static_cast<uintptr_t>(kCudaPageAlignment));
  if (lane_ && (offset != 0 || array.page_stride % kCudaPageAlignment != 0)) {
    throw CoreError(
        invalid_argument("{} begins {} bytes after a multiple of {}, with pages {} bytes apart; "
                         "expected multiples of {} on a GPU",
                         name, offset, kCudaPageAlignment, array.page_stride, kCudaPageAlignment));
  }
  return array;
}

void PagedLayer::check_slots(const char* name, std::span<const int64_t> slots,
                             int64_t num_pages) const {
  const int64_t num_slots = num_pages * shape_.layout.block_size;
  for (size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < num_slots) continue;
    throw CoreError(out_of_range("{}[{}] is {}; {} pages of {} tokens have {} slots", name, t,
                                 slots[t], num_pages, shape_.layout.block_size, num_slots));
  }
}

void PagedLayer::check_q_heads(int num_q_heads) const {
  if (num_q_heads >= 1 && num_q_heads % heads() == 0) return;
  throw CoreError(invalid_argument("q has {} heads; expected a multiple of num_kv_heads, {}",
                                   num_q_heads, heads()));
}

ops::LayerView PagedLayer::view_of(const PageArray& pages) {
  return place_view(pages, view_);
}

ops::LayerView PagedLayer::place_view(const PageArray& pages, PlacedView& view) const {
  return view.move(pages, store_->packed(), shape_.layout);
}

// Scales that are given lie in tables of the store, not in pages. A window's runs may be cut: they
// are parts of the layout's only run. A window's rows lie in one piece, also where they are read as
// two segments.
ops::LayerView PagedLayer::PlacedView::move(const PageArray& pages, const ops::LayerView& stored,
                                            const cache::BlockLayout& layout) {
  if (base != pages.base || num_pages != pages.num_pages || page_stride != pages.page_stride) {
    base = pages.base;
    num_pages = pages.num_pages;
    page_stride = pages.page_stride;
    const auto move_side = [&pages](ops::SideView& side, const cache::SidePlace& at) {
      if (!at.is_stored) return;
      side.codes.base = pages.base + (side.codes.base - store_address());
      side.codes.block_stride = pages.page_stride;
      if (side.spec.is_dual()) {
        side.channels.base = pages.base + (side.channels.base - store_address());
        side.channels.block_stride = pages.page_stride;
      }
      if (!at.has_scales) return;
      side.scales.base = pages.base + (side.scales.base - store_address());
      side.scales.block_stride = pages.page_stride;
    };
    const auto& places = layout.layers.front().runs;
    const auto place_of_run = [&places](size_t r) -> const cache::RunPlace& {
      return places[std::min(r, places.size() - 1)];
    };
    runs.assign(stored.runs.begin(), stored.runs.end());
    for (size_t r = 0; r < runs.size(); ++r) {
      const cache::RunPlace& place = place_of_run(r);
      ops::HeadRun& run = runs[r];
      move_side(run.k, place.k);
      move_side(run.v, run.v.is_alias ? place.k : place.v);
    }
    more_runs.clear();
    if (stored.next_segment != nullptr) {
      more_runs.assign(stored.next_segment->runs.begin(), stored.next_segment->runs.end());
    }
    for (size_t r = 0; r < more_runs.size(); ++r) {
      const cache::RunPlace& place = place_of_run(r);
      move_side(more_runs[r].k, place.k_more.is_stored ? place.k_more : place.k);
    }
  }
  ops::LayerView view = {pages.num_pages, stored.block_size, stored.num_kv_heads, runs};
  if (stored.next_segment != nullptr) {
    more = view;
    more.runs = more_runs;
    view.next_segment = &more;
  }
  return view;
}

// Runs a verb in the order of the caller's stream.
template <class F>
void PagedLayer::on_device(const ArrayPlace& place, KeptArrays& kept, F verb) {
  const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
  throw_if_error(lane_->begin(place, kept));
  throw_if_error(verb(lane_->context(place)));
  throw_if_error(lane_->end(place, kept));
}

bool PagedLayer::needs_positions() const {
  return store_->transform().k.block_offset != nullptr;
}

nb::object PagedLayer::append(nb::handle pages, nb::handle k, nb::handle v, nb::handle slots,
                              nb::handle positions, const WindowAppend& window, nb::handle stream) {
  const ArrayPlace place =
      place_of(stream, {pages, k, v, slots, positions, window.pages, window.slots});
  const PageArray memory = page_array(pages, "pages", page_bytes_, place);
  const auto slot_array = input_ints<int64_t>(slots, "slots", 1, place);
  const InputRows keys = input_rows(k, "k", {-1, heads(), geometry().k_head_dim}, place);
  const InputRows values = value_rows(v, -1, geometry(), place);
  const size_t tokens = slot_array.shape(0);
  check_rows("k", keys.num_tokens, static_cast<int64_t>(tokens));
  if (!geometry().is_latent) check_rows("v", values.num_tokens, static_cast<int64_t>(tokens));
  nb::ndarray<nb::ro> position_array;
  if (needs_positions()) {
    if (positions.is_none()) {
      throw CoreError(invalid_argument(
          "positions is None; expected the tokens' positions, which K's block offsets go by"));
    }
    position_array = input_ints<int64_t>(positions, "positions", 1, place);
    check_rows("positions", static_cast<int64_t>(position_array.shape(0)),
               static_cast<int64_t>(tokens));
  }
  const WindowArrays arrays = window_arrays(window, tokens, place);
  KeptArrays kept;
  if (lane_) {
    lane_->keep(kept, place, k, keys.array);
    lane_->keep(kept, place, v, values.array);
    lane_->keep(kept, place, slots, slot_array);
    keep_window(kept, place, window, arrays);
    if (needs_positions()) lane_->keep(kept, place, positions, position_array);
  }

  int64_t nonfinite = 0;
  {
    nb::gil_scoped_release no_gil;
    const ops::CpuContext& cpu = context_->cpu();
    const std::span slot_numbers(numbers<int64_t>(slot_array), tokens);
    if (!lane_) check_slots("slots", slot_numbers, memory.num_pages);
    if (!lane_) check_window(arrays, memory.num_pages);
    const std::lock_guard lock(mutex_);
    ops::AppendArgs args;
    args.cache = view_of(memory);
    args.transform = store_->transform();
    args.k = keys.rows;
    args.v = values.rows;
    args.slot_mapping = slot_numbers;
    if (needs_positions()) args.positions = {numbers<int64_t>(position_array), tokens};
    args.window_dtype = kWindowDtype;
    if (lane_) {
      on_device(place, kept, [&](const ops::CudaContext& context) -> Status {
        if (tokens == 0) return {};
        KVX_RETURN_IF_ERROR(reopen_blocks(args, arrays, &context));
        KVX_RETURN_IF_ERROR(ops::append(context, args, device_counters()));
        return append_to_window(args, arrays, &context);
      });
    } else {
      throw_if_error(reopen_blocks(args, arrays, nullptr));
      nonfinite = value_of(ops::append(cpu, args)).nonfinite_inputs;
      nonfinite_inputs_ += nonfinite;
      throw_if_error(append_to_window(args, arrays, nullptr));
    }
  }
  return lane_ ? nb::object(nb::none()) : nb::object(nb::int_(nonfinite));
}

void PagedLayer::close_blocks(nb::handle pages, nb::handle window_pages,
                              const BlockCopyArrays& closing, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {pages, window_pages, closing.from});
  const PageArray memory = page_array(pages, "pages", page_bytes_, place);
  const PageArray window = page_array(window_pages, "window_pages", window_block_bytes(), place);
  if (!closing.is_given()) {
    throw CoreError(
        invalid_argument("the plan closes no blocks; expected one of a window with unit 'block'"));
  }
  const CopyArrays list = copy_arrays(closing, "closing", place);
  KeptArrays kept;
  if (lane_) keep_list(*lane_, kept, place, closing, list);
  if (!lane_) check_list("closing", list, window.num_pages, memory.num_pages);
  nb::gil_scoped_release no_gil;
  const std::lock_guard lock(mutex_);
  const ops::LayerView from = window_view(window, true), to = view_of(memory);
  if (!lane_) return throw_if_error(copy_listed(from, to, list, nullptr));
  on_device(place, kept,
            [&](const ops::CudaContext& context) { return copy_listed(from, to, list, &context); });
}

void PagedLayer::attend(nb::handle pages, nb::handle q, nb::handle out, nb::handle block_table,
                        nb::handle seq_lens, nb::handle q_starts, const Attention& attention,
                        const BatchBounds& bounds, nb::handle workspace, nb::handle lse,
                        nb::handle window_pages, const StepWindow& window, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {out, q, pages, block_table, seq_lens, q_starts,
                                             workspace, lse, attention.sinks, window_pages});
  const StepBatch batch(block_table, seq_lens, q_starts, bounds, workspace, window, place);
  attend_at(place, pages, q, out, batch, attention, lse, window_pages);
}

void PagedLayer::attend_batch(nb::handle pages, nb::handle q, nb::handle out,
                              const StepBatch& batch, const Attention& attention, nb::handle lse,
                              nb::handle window_pages, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {out, q, pages, lse, attention.sinks, window_pages});
  attend_at(place, pages, q, out, batch, attention, lse, window_pages);
}

void PagedLayer::attend_at(const ArrayPlace& place, nb::handle pages, nb::handle q, nb::handle out,
                           const StepBatch& batch, const Attention& attention, nb::handle lse,
                           nb::handle window_pages) {
  const PageArray memory = page_array(pages, "pages", page_bytes_, place);
  PageArray window;
  if (batch.has_window() != !window_pages.is_none()) {
    throw CoreError(invalid_argument(
        "window_pages is {} and the step is planned {} a window; "
        "expected both or none",
        window_pages.is_none() ? "None" : "given", batch.has_window() ? "with" : "without"));
  }
  if (batch.has_window()) {
    window = page_array(window_pages, "window_pages", window_block_bytes(), place);
  }
  const InputRows queries = input_rows(q, "q", {-1, -1, geometry().k_head_dim}, place);
  const OutputRows output =
      output_rows(out, "out", {-1, queries.num_heads, geometry().v_head_dim}, place);
  check_apart(output.array, queries.array, "q");
  check_apart(output.array, memory.array, "pages");
  check_apart(output.array, window.array, "window_pages");
  const int64_t num_queries = batch.bounds.num_queries.value_or(queries.num_tokens);
  check_range("num_queries", num_queries, 0, queries.num_tokens);
  // On a GPU the host does not know how many of the rows there are.
  const int64_t needed =
      lane_ ? num_queries : numbers<int32_t>(batch.q_starts)[batch.num_sequences];
  check_rows("q", num_queries, needed);
  check_rows("out", static_cast<int64_t>(output.array.shape(0)), needed);
  nb::ndarray<nb::ro> sink_array;
  if (!attention.sinks.is_none()) {
    sink_array = input_floats(attention.sinks, "sinks", queries.num_heads, place);
  }
  nb::ndarray<> lse_array;
  if (!lse.is_none()) {
    lse_array = output_floats(lse, "lse", std::max<int64_t>(needed, 0), queries.num_heads, place);
    check_apart(output.array, nb::ndarray<nb::ro>(lse_array), "lse");
  }
  // out must not overwrite what was checked before it is read.
  check_apart(output.array, batch.block_table, "block_table");
  check_apart(output.array, batch.seq_lens, "seq_lens");
  check_apart(output.array, batch.q_starts, "q_starts");
  check_apart(output.array, sink_array, "sinks");
  check_q_heads(queries.num_heads);
  KeptArrays kept;
  if (lane_) {
    lane_->keep(kept, place, q, queries.array);
    lane_->keep(kept, place, attention.sinks, sink_array);
    kept.insert(kept.end(), batch.kept.begin(), batch.kept.end());
  }

  nb::gil_scoped_release no_gil;
  const ops::CpuContext& cpu = context_->cpu();
  const std::lock_guard lock(mutex_);
  ops::AttendArgs args;
  args.packed = view_of(memory);
  if (batch.has_window()) {
    args.full_precision = window_view(window, false);
    args.num_sink_blocks = numbers<int32_t>(batch.num_sink_blocks);
    args.first_recent_block = numbers<int32_t>(batch.first_recent_blocks);
  }
  args.transform = store_->transform();
  args.num_sequences = batch.num_sequences;
  args.block_table = {numbers<int32_t>(batch.block_table), batch.block_table.stride(0)};
  args.max_blocks_per_sequence = static_cast<int64_t>(batch.block_table.shape(1));
  args.seq_lens = numbers<int32_t>(batch.seq_lens);
  args.q_starts = numbers<int32_t>(batch.q_starts);
  args.num_q_heads = queries.num_heads;
  args.q = queries.rows;
  args.out = output.rows;
  args.softmax_scale =
      attention.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(geometry().k_head_dim)));
  args.softcap = attention.softcap;
  args.window = attention.window;
  if (sink_array.is_valid()) args.sinks = numbers<float>(sink_array);
  if (lse_array.is_valid()) args.lse = static_cast<float*>(lse_array.data());
  if (!lane_) {
    interruptibly([&] { throw_if_error(ops::attend(cpu, args)); });
    return;
  }
  ops::CudaAttendLimits limits;
  limits.total_q = num_queries;
  limits.max_q_len = batch.bounds.max_q_len.value_or(
      static_cast<int>(std::clamp<int64_t>(num_queries, 1, std::numeric_limits<int>::max())));
  limits.max_tokens = batch.bounds.max_seq_len.value_or(0);
  limits.num_decodes = batch.bounds.num_decodes;
  on_device(place, kept, [&](const ops::CudaContext& context) -> Status {
    KVX_ASSIGN_OR_RETURN(const ops::AttendPlan* plan,
                         ops::AttendPlan::of_thread(context, args, limits));
    KVX_ASSIGN_OR_RETURN(uint8_t* const workspace,
                         workspace_of(context, plan->workspace_bytes(), batch.workspace));
    return ops::attend(context, args, *plan, workspace, device_counters());
  });
}

void PagedLayer::gather(nb::handle pages, nb::handle block_table, nb::handle seq_lens, nb::handle k,
                        nb::handle v, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {k, v, pages, block_table, seq_lens});
  const PageArray memory = page_array(pages, "pages", page_bytes_, place);
  const auto table = input_ints<int32_t>(block_table, "block_table", 2, place);
  const auto lengths = input_ints<int32_t>(seq_lens, "seq_lens", 1, place);
  if (table.shape(0) != lengths.shape(0)) {
    throw CoreError(invalid_argument("block_table has {} sequences and seq_lens {} numbers",
                                     table.shape(0), lengths.shape(0)));
  }
  const OutputRows keys = output_rows(k, "k", {-1, heads(), geometry().k_head_dim}, place);
  const auto tokens = static_cast<int64_t>(keys.array.shape(0));
  const OutputRows values = output_rows(v, "v", {tokens, heads(), geometry().v_head_dim}, place);
  check_apart(keys.array, nb::ndarray<nb::ro>(values.array), "v");
  KeptArrays kept;
  if (lane_) {
    lane_->keep(kept, place, block_table, table);
    lane_->keep(kept, place, seq_lens, lengths);
  }

  nb::gil_scoped_release no_gil;
  const ops::CpuContext& cpu = context_->cpu();
  const std::lock_guard lock(mutex_);
  ops::GatherArgs args;
  args.cache = view_of(memory);
  args.transform = store_->transform();
  args.block_table = {numbers<int32_t>(table), table.stride(0)};
  args.max_blocks_per_sequence = static_cast<int64_t>(table.shape(1));
  args.num_sequences = static_cast<int>(table.shape(0));
  args.k = keys.rows;
  args.v = values.rows;
  args.num_rows = tokens;
  if (lane_) {
    const int64_t most = args.max_blocks_per_sequence * shape_.layout.block_size;
    const ops::CudaGatherRanges ranges{.count = args.num_sequences,
                                       .seq_lens = numbers<int32_t>(lengths)};
    on_device(place, kept, [&](const ops::CudaContext& context) {
      if (tokens == 0 || args.num_sequences == 0) return Status();
      return ops::gather(context, args, ranges, std::min(most, tokens), device_counters());
    });
    return;
  }
  std::vector<ops::GatherRange> ranges;
  int64_t row = 0;
  for (int s = 0; s < args.num_sequences; ++s) {
    const int32_t length = numbers<int32_t>(lengths)[s];
    if (length < 0)
      throw CoreError(out_of_range("seq_lens[{}] is {}; expected 0 or more", s, length));
    ranges.push_back({s, 0, length, row});
    row += length;
  }
  args.ranges = ranges;
  throw_if_error(ops::gather(cpu, args));
}

void PagedLayer::copy_blocks(nb::handle pages, nb::handle to_pages, nb::handle from_blocks,
                             nb::handle to_blocks, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {to_pages, pages, from_blocks, to_blocks});
  const PageArray from = page_array(pages, "pages", page_bytes_, place);
  const PageArray to = page_array(to_pages, "to_pages", page_bytes_, place);
  const auto from_ids = input_ints<int64_t>(from_blocks, "from_blocks", 1, place);
  const auto to_ids = input_ints<int64_t>(to_blocks, "to_blocks", 1, place);
  const size_t count = from_ids.shape(0);
  if (to_ids.shape(0) != count) {
    throw CoreError(invalid_argument(
        "from_blocks has {} numbers and to_blocks {}; expected as many", count, to_ids.shape(0)));
  }
  KeptArrays kept;
  if (lane_) {
    lane_->keep(kept, place, from_blocks, from_ids);
    lane_->keep(kept, place, to_blocks, to_ids);
  }

  nb::gil_scoped_release no_gil;
  const ops::CpuContext& cpu = context_->cpu();
  const std::lock_guard lock(mutex_);
  const ops::LayerView source = view_of(from);
  const ops::LayerView target = place_view(to, other_view_);
  if (lane_) {
    const ops::CudaBlockCopies copies{.count = static_cast<int64_t>(count),
                                      .from_blocks = numbers<int64_t>(from_ids),
                                      .to_blocks = numbers<int64_t>(to_ids)};
    on_device(place, kept, [&](const ops::CudaContext& context) {
      return count == 0 ? Status()
                        : ops::copy_blocks(context, source, target, copies, device_counters());
    });
    return;
  }
  std::vector<ops::BlockCopy> copies;
  for (size_t i = 0; i < count; ++i) {
    copies.push_back({numbers<int64_t>(from_ids)[i], numbers<int64_t>(to_ids)[i],
                      static_cast<int>(shape_.layout.block_size)});
  }
  value_of(ops::copy_blocks(cpu, source, target, copies));
}

int64_t PagedLayer::workspace_bytes(int num_q_heads, const BatchBounds& bounds, int max_sequences,
                                    int window, bool has_window_pages) const {
  check_q_heads(num_q_heads);
  check_range("max_sequences", max_sequences, 0, ops::kMaxCudaSequences);
  check_range("max_queries", *bounds.num_queries, 0, std::numeric_limits<int>::max());
  check_range("max_q_len", *bounds.max_q_len, 1, std::numeric_limits<int>::max());
  check_range("max_seq_len", *bounds.max_seq_len, 1, std::numeric_limits<int>::max());
  if (!lane_) return 0;
  const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
  const int64_t block_size = shape_.layout.block_size;
  PlacedView view, window_view;
  ops::AttendArgs args;
  args.packed = place_view({{}, store_address(), 1, page_bytes_}, view);
  if (has_window_pages) {
    static constexpr int32_t kAnyBlock = 0;  // that there is such an array is what matters
    args.full_precision = window_view.move({{}, store_address(), 1, window_block_bytes()},
                                           store_->full_precision(), shape_.window_layout);
    args.num_sink_blocks = args.first_recent_block = &kAnyBlock;
  }
  args.transform = store_->transform();
  args.max_blocks_per_sequence = (*bounds.max_seq_len + block_size - 1) / block_size;
  args.num_q_heads = num_q_heads;
  args.window = window;
  const ops::CudaAttendBounds most{max_sequences, *bounds.num_queries, *bounds.max_q_len,
                                   *bounds.max_seq_len};
  int64_t bytes = 0;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    args.q = dense_rows(static_cast<const void*>(store_address()), dtype, num_q_heads,
                        geometry().k_head_dim);
    args.out =
        dense_rows(static_cast<void*>(store_address()), dtype, num_q_heads, geometry().v_head_dim);
    const ops::CudaContext context = lane_->context({});
    bytes = std::max(bytes, ops::attend_workspace_bytes_up_to(context, args, most));
  }
  return bytes;
}

nb::dict PagedLayer::counters() {
  ops::DeviceCounters found;
  {
    nb::gil_scoped_release no_gil;
    context_->home().check();
    const std::lock_guard lock(mutex_);
    found.nonfinite_inputs = static_cast<unsigned long long>(nonfinite_inputs_);
    if (lane_) {
      const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
      throw_if_error(device::cuda_synchronize_device(lane_->device()));
      throw_if_error(device::cuda_copy(&found, device_counters(), sizeof found));
    }
  }
  nb::dict dict;
  dict["out_of_range"] = found.out_of_range;
  dict["nonfinite_inputs"] = found.nonfinite_inputs;
  return dict;
}

void PagedLayer::reset_counters() {
  nb::gil_scoped_release no_gil;
  context_->home().check();
  const std::lock_guard lock(mutex_);
  nonfinite_inputs_ = 0;
  if (!lane_) return;
  const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
  throw_if_error(device::cuda_synchronize_device(lane_->device()));
  throw_if_error(device::cuda_fill(device_counters(), 0, sizeof(ops::DeviceCounters)));
}

}  // namespace kvx::python
