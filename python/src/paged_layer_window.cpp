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
std::span<const T> numbers(const nb::ndarray<nb::ro>& array) {
  return {static_cast<const T*>(array.data()), array.size()};
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
  if (window.closing_from.is_none()) return arrays;
  arrays.closing_from = input_ints<int64_t>(window.closing_from, "plan.closing_from", 1, place);
  arrays.closing_to = input_ints<int64_t>(window.closing_to, "plan.closing_to", 1, place);
  arrays.closing_tokens =
      input_ints<int32_t>(window.closing_tokens, "plan.closing_tokens", 1, place);
  const size_t count = arrays.closing_from.size();
  if (arrays.closing_to.size() != count || arrays.closing_tokens.size() != count) {
    throw CoreError(invalid_argument("plan.closing has {}, {} and {} numbers; expected as many",
                                     count, arrays.closing_to.size(),
                                     arrays.closing_tokens.size()));
  }
  return arrays;
}

void PagedLayer::keep_window(KeptArrays& kept, const ArrayPlace& place, const WindowAppend& window,
                             const WindowArrays& arrays) const {
  if (!arrays.is_given()) return;
  lane_->keep(kept, place, window.slots, arrays.slots);
  if (!arrays.closing_from.is_valid()) return;
  lane_->keep(kept, place, window.closing_from, arrays.closing_from);
  lane_->keep(kept, place, window.closing_to, arrays.closing_to);
  lane_->keep(kept, place, window.closing_tokens, arrays.closing_tokens);
}

void PagedLayer::check_window(const WindowArrays& arrays, int64_t num_pages) const {
  if (!arrays.is_given()) return;
  check_slots("plan.window_slots", numbers<int64_t>(arrays.slots), arrays.pages.num_pages);
  if (!arrays.closing_from.is_valid()) return;
  const auto from = numbers<int64_t>(arrays.closing_from);
  const auto to = numbers<int64_t>(arrays.closing_to);
  for (size_t i = 0; i < from.size(); ++i) {
    const bool fits =
        from[i] >= 0 && from[i] < arrays.pages.num_pages && to[i] >= 0 && to[i] < num_pages;
    if (fits) continue;
    throw CoreError(
        out_of_range("plan.closing copies block {} of window_pages, which has {}, to page {} of {}",
                     from[i], arrays.pages.num_pages, to[i], num_pages));
  }
}

ops::LayerView PagedLayer::window_view(const PageArray& pages, bool is_cut) {
  return is_cut ? cut_window_view_.move(pages, store_->full_precision_in_packed_runs(),
                                        shape_.window_layout)
                : window_view_.move(pages, store_->full_precision(), shape_.window_layout);
}

Status PagedLayer::append_to_window(ops::AppendArgs args, const WindowArrays& arrays,
                                    const ops::CudaContext* context) {
  if (!arrays.is_given()) return {};
  const ops::LayerView pages = args.cache;
  args.cache = window_view(arrays.pages, false);
  args.slot_mapping = numbers<int64_t>(arrays.slots).first(args.slot_mapping.size());
  if (context != nullptr) {
    KVX_RETURN_IF_ERROR(ops::append(*context, args, device_counters()));
  } else {
    KVX_RETURN_IF_ERROR(ops::append(context_->cpu(), args));
  }
  if (!arrays.closing_from.is_valid()) return {};
  const ops::LayerView window = window_view(arrays.pages, true);
  const auto from = numbers<int64_t>(arrays.closing_from);
  const auto to = numbers<int64_t>(arrays.closing_to);
  const auto tokens = numbers<int32_t>(arrays.closing_tokens);
  if (context != nullptr) {
    const ops::CudaBlockCopies copies{.count = static_cast<int64_t>(from.size()),
                                      .from_blocks = from.data(),
                                      .to_blocks = to.data(),
                                      .num_tokens = tokens.data()};
    return ops::copy_blocks(*context, window, pages, copies, device_counters());
  }
  std::vector<ops::BlockCopy> copies;
  for (size_t i = 0; i < from.size(); ++i) {
    if (tokens[i] > 0) copies.push_back({from[i], to[i], tokens[i]});
  }
  KVX_RETURN_IF_ERROR(ops::copy_blocks(context_->cpu(), window, pages, copies));
  return {};
}

}  // namespace kvx::python
