// PagedLayer's part of a full-precision window: where append writes in it, and its views. The
// window's state and plans are PagedWindow's.
#include "ops/append/append.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/copy_blocks/copy_blocks.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "python/src/errors.hpp"
#include "python/src/paged_layer.hpp"

namespace kvx::python {
namespace {

template <class T>
std::span<const T> span_of(const nb::ndarray<nb::ro>& array) {
  return {numbers<T>(array), array.size()};
}

}  // namespace

void StepBatch::read_window(const StepWindow& window, const ArrayPlace& place) {
  if (window.num_sink_blocks.is_none() && window.first_recent_blocks.is_none()) return;
  num_sink_blocks = input_ints<int32_t>(window.num_sink_blocks, "plan.num_sink_blocks", 1, place);
  first_recent_blocks =
      input_ints<int32_t>(window.first_recent_blocks, "plan.first_recent_blocks", 1, place);
  for (const auto* array : {&num_sink_blocks, &first_recent_blocks}) {
    if (static_cast<int64_t>(array->shape(0)) >= num_sequences) continue;
    throw CoreError(invalid_argument("the plan's window has {} sequences; block_table has {}",
                                     array->shape(0), num_sequences));
  }
}

PagedLayer::WindowArrays PagedLayer::window_arrays(const WindowAppend& window, size_t tokens,
                                                   const ArrayPlace& place) const {
  WindowArrays arrays;
  if (window.pages.is_none() != window.slots.is_none()) {
    throw CoreError(invalid_argument("{} is None; expected window_pages and plan, or neither",
                                     window.pages.is_none() ? "window_pages" : "plan"));
  }
  if (window.pages.is_none()) return arrays;
  arrays.pages = page_array(window.pages, "window_pages", window_block_bytes(), place);
  arrays.slots = input_ints<int64_t>(window.slots, "plan.window_slots", 1, place);
  if (arrays.slots.shape(0) < tokens) {
    throw CoreError(invalid_argument("plan.window_slots has {} tokens; the step has {}",
                                     arrays.slots.shape(0), tokens));
  }
  arrays.closing = copy_arrays(window.closing, "closing", place);
  arrays.evicted = copy_arrays(window.evicted, "evicted", place);
  arrays.reopened = copy_arrays(window.reopened, "reopened", place);
  return arrays;
}

PagedLayer::CopyArrays PagedLayer::copy_arrays(const BlockCopyArrays& arrays, const char* name,
                                               const ArrayPlace& place) {
  if (!arrays.is_given()) return {};
  const std::string plan = fmt::format("plan.{}", name);
  CopyArrays list = {input_ints<int64_t>(arrays.from, (plan + "_from").c_str(), 1, place),
                     input_ints<int64_t>(arrays.to, (plan + "_to").c_str(), 1, place),
                     input_ints<int32_t>(arrays.tokens, (plan + "_tokens").c_str(), 1, place)};
  const size_t count = list.from.size();
  if (list.to.size() != count || list.tokens.size() != count) {
    throw CoreError(invalid_argument("{} has {}, {} and {} numbers; expected as many", plan, count,
                                     list.to.size(), list.tokens.size()));
  }
  return list;
}

void PagedLayer::keep_window(KeptArrays& kept, const ArrayPlace& place, const WindowAppend& window,
                             const WindowArrays& arrays) const {
  if (!arrays.is_given()) return;
  lane_->keep(kept, place, window.slots, arrays.slots);
  keep_list(*lane_, kept, place, window.closing, arrays.closing);
  keep_list(*lane_, kept, place, window.evicted, arrays.evicted);
  keep_list(*lane_, kept, place, window.reopened, arrays.reopened);
}

void PagedLayer::keep_list(const CudaLane& lane, KeptArrays& kept, const ArrayPlace& place,
                           const BlockCopyArrays& objects, const CopyArrays& list) {
  if (!list.is_given()) return;
  lane.keep(kept, place, objects.from, list.from);
  lane.keep(kept, place, objects.to, list.to);
  lane.keep(kept, place, objects.tokens, list.tokens);
}

void PagedLayer::check_window(const WindowArrays& arrays, int64_t num_pages) const {
  if (!arrays.is_given()) return;
  const int64_t num_window_blocks = arrays.pages.num_pages;
  check_slots("plan.window_slots", span_of<int64_t>(arrays.slots), num_window_blocks);
  check_list("closing", arrays.closing, num_window_blocks, num_pages);
  check_list("evicted", arrays.evicted, num_window_blocks, num_pages);
  check_list("reopened", arrays.reopened, num_pages, num_window_blocks);
}

void PagedLayer::check_list(const char* name, const CopyArrays& list, int64_t num_from,
                            int64_t num_to) const {
  if (!list.is_given()) return;
  const auto check_ids = [name](const char* part, const nb::ndarray<nb::ro>& array, int64_t num) {
    for (const int64_t id : span_of<int64_t>(array)) {
      if (id >= 0 && id < num) continue;
      throw CoreError(
          out_of_range("plan.{}_{} has block {}; expected 0 to {}", name, part, id, num - 1));
    }
  };
  check_ids("from", list.from, num_from);
  check_ids("to", list.to, num_to);
  for (const int32_t tokens : span_of<int32_t>(list.tokens)) {
    if (tokens >= 0 && tokens <= shape_.layout.block_size) continue;
    throw CoreError(out_of_range("plan.{}_tokens has {}; expected 0 to {}", name, tokens,
                                 shape_.layout.block_size));
  }
}

ops::LayerView PagedLayer::window_view(const PageArray& pages, bool is_cut) {
  return is_cut ? cut_window_view_.move(pages, store_->full_precision_in_packed_runs(),
                                        shape_.window_layout)
                : window_view_.move(pages, store_->full_precision(), shape_.window_layout);
}

// Every block that the step continues has its copy then.
Status PagedLayer::reopen_blocks(const ops::AppendArgs& args, const WindowArrays& arrays,
                                 const ops::CudaContext* context) {
  if (!arrays.is_given() || !arrays.evicted.is_given()) return {};
  if (context == nullptr) KVX_RETURN_IF_ERROR(ops::check_append(args));
  const ops::LayerView window = window_view(arrays.pages, true);
  KVX_RETURN_IF_ERROR(copy_listed(window, args.cache, arrays.evicted, context));
  return copy_listed(args.cache, window, arrays.reopened, context);
}

Status PagedLayer::append_to_window(ops::AppendArgs args, const WindowArrays& arrays,
                                    const ops::CudaContext* context) {
  if (!arrays.is_given()) return {};
  const ops::LayerView pages = args.cache;
  args.cache = window_view(arrays.pages, false);
  args.slot_mapping = span_of<int64_t>(arrays.slots).first(args.slot_mapping.size());
  if (context != nullptr) {
    KVX_RETURN_IF_ERROR(ops::append(*context, args, device_counters()));
  } else {
    KVX_RETURN_IF_ERROR(ops::append(context_->cpu(), args));
  }
  return copy_listed(window_view(arrays.pages, true), pages, arrays.closing, context);
}

Status PagedLayer::copy_listed(const ops::LayerView& from, const ops::LayerView& to,
                               const CopyArrays& list, const ops::CudaContext* context) {
  if (!list.is_given()) return {};
  const auto from_blocks = span_of<int64_t>(list.from);
  const auto to_blocks = span_of<int64_t>(list.to);
  const auto tokens = span_of<int32_t>(list.tokens);
  if (context != nullptr) {
    const ops::CudaBlockCopies copies{.count = std::ssize(from_blocks),
                                      .from_blocks = from_blocks.data(),
                                      .to_blocks = to_blocks.data(),
                                      .num_tokens = tokens.data()};
    return ops::copy_blocks(*context, from, to, copies, device_counters());
  }
  std::vector<ops::BlockCopy> copies;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] > 0) copies.push_back({from_blocks[i], to_blocks[i], tokens[i]});
  }
  if (copies.empty()) return {};
  KVX_RETURN_IF_ERROR(ops::copy_blocks(context_->cpu(), from, to, copies));
  return {};
}

}  // namespace kvx::python
