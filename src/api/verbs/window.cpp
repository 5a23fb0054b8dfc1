// kvx_window_sizes, kvx_window_plan and kvx_window_forget: a full-precision window beside pages in
// the caller's memory.
#include <algorithm>
#include <cstring>

#include "api/call.hpp"
#include "api/checks/table_view.hpp"
#include "api/guard.hpp"
#include "api/verbs/device_verb.hpp"
#include "core/scratch.hpp"
#include "ops/window/plan_window.hpp"

namespace kvx::boundary {
namespace {

using ops::WindowState;
using ops::WindowUnit;

// A caller's window, checked, without its state.
struct WindowOfCaller {
  kvx_window_t args;
  cache::FullPrecisionWindow window;
  bool is_on_device = false;

  WindowUnit unit() const {
    return args.unit == KVX_WINDOW_BLOCKS ? WindowUnit::kBlocks : WindowUnit::kRows;
  }
  uint64_t state_bytes() const {
    return 4 *
           static_cast<uint64_t>(WindowState::num_words(args.num_blocks, args.num_window_blocks));
  }
  WindowState state() const {
    return {args.num_blocks, args.num_window_blocks, static_cast<int32_t*>(args.state)};
  }
  uint64_t blocks_per_sequence() const {
    return static_cast<uint64_t>(window.sink_blocks + window.recent_blocks);
  }
};

Result<WindowOfCaller> read_sizes(const kvx_window_t* caller) {
  WindowOfCaller result;
  KVX_ASSIGN_OR_RETURN(result.args, read_struct(caller, "window"));
  const kvx_window_t& args = result.args;
  if (args.block_size < 1 || args.block_size > INT32_MAX) {
    return invalid_argument("window.block_size is {}; expected the pages' tokens a block",
                            args.block_size);
  }
  if (args.sink_tokens > INT32_MAX || args.recent_tokens > INT32_MAX) {
    return invalid_argument("window.sink_tokens is {} and recent_tokens {}; expected at most {}",
                            args.sink_tokens, args.recent_tokens, INT32_MAX);
  }
  if (args.unit > KVX_WINDOW_BLOCKS) {
    return invalid_argument("window.unit is {}; expected KVX_WINDOW_ROWS 0 or BLOCKS 1", args.unit);
  }
  // Ids have 32 bits, and so has their number.
  if (args.num_blocks < 1 || args.num_blocks > INT32_MAX - 1) {
    return invalid_argument("window.num_blocks is {}; expected 1 to {}", args.num_blocks,
                            INT32_MAX - 1);
  }
  if (args.num_window_blocks < 1 || args.num_window_blocks > INT32_MAX / 8) {
    return invalid_argument("window.num_window_blocks is {}; expected 1 to {}",
                            args.num_window_blocks, INT32_MAX / 8);
  }
  KVX_ASSIGN_OR_RETURN(result.window, cache::make_full_precision_window(
                                          args.sink_tokens, args.recent_tokens, args.block_size));
  return result;
}

Result<WindowOfCaller> read_window(const kvx_window_t* caller) {
  KVX_ASSIGN_OR_RETURN(WindowOfCaller result, read_sizes(caller));
  const kvx_window_t& args = result.args;
  if (args.memory < KVX_MEMORY_HOST || args.memory > KVX_MEMORY_UNIFIED) {
    return invalid_argument("window.memory is {}; expected HOST 1, DEVICE 2 or UNIFIED 3",
                            args.memory);
  }
  result.is_on_device = args.memory != KVX_MEMORY_HOST;
  if (args.state == nullptr || args.state_bytes < result.state_bytes() ||
      reinterpret_cast<uintptr_t>(args.state) % alignof(int32_t) != 0) {
    return invalid_argument(
        "window.state is {} bytes at {}; expected {} (kvx_window_sizes) on a multiple of 4",
        args.state_bytes, args.state, result.state_bytes());
  }
  if (!result.is_on_device && args.counters != nullptr) {
    return invalid_argument("window.counters is set; a window on the host reports errors itself");
  }
  return result;
}

Status sizes(const kvx_window_t* caller, kvx_window_sizes_t* sizes) {
  KVX_ASSIGN_OR_RETURN(const WindowOfCaller window, read_sizes(caller));
  if (sizes == nullptr) return invalid_argument("sizes is null");
  if (sizes->size < 2 * sizeof(uint32_t)) {
    return invalid_argument("sizes.size is {}; expected at least 8", sizes->size);
  }
  ops::WindowPlanArgs plan;
  plan.window = window.window;
  kvx_window_sizes_t answer{};
  answer.size = std::min<uint32_t>(sizes->size, sizeof answer);
  answer.state_bytes = window.state_bytes();
  answer.window_blocks_per_sequence = window.blocks_per_sequence();
  answer.closing_blocks_per_sequence = static_cast<uint64_t>(plan.closing_blocks_per_sequence());
  memcpy(sizes, &answer, answer.size);
  return {};
}

// The lists of evicted and reopened blocks come together, and under KVX_WINDOW_BLOCKS.
Status check_reopening(const kvx_window_plan_args_t& args, WindowUnit unit) {
  const std::pair<const char*, bool> lists[] = {
      {"evicted_from", args.evicted_from != nullptr},
      {"evicted_to", args.evicted_to != nullptr},
      {"evicted_tokens", args.evicted_tokens != nullptr},
      {"reopened_from", args.reopened_from != nullptr},
      {"reopened_to", args.reopened_to != nullptr},
      {"reopened_tokens", args.reopened_tokens != nullptr}};
  const bool has_first = lists[0].second;
  for (const auto& [name, is_set] : lists) {
    if (is_set == has_first) continue;
    return invalid_argument(
        "args.{} is {}null and evicted_from is {}null; expected all six lists "
        "of evicted and reopened blocks, or none",
        name, is_set ? "not " : "", has_first ? "not " : "");
  }
  if (!has_first || unit == WindowUnit::kBlocks) return {};
  return invalid_argument("args.evicted_from is set; only KVX_WINDOW_BLOCKS evicts blocks");
}

Status check_lists(const kvx_window_plan_args_t& args, WindowUnit unit) {
  if (args.reserved != 0) return invalid_argument("args.reserved is {}; expected 0", args.reserved);
  if (args.num_tokens < 0) {
    return invalid_argument("args.num_tokens is {}; expected 0 or more", args.num_tokens);
  }
  const bool is_of_blocks = unit == WindowUnit::kBlocks;
  const bool has_rows = args.num_tokens > 0;
  const std::pair<const char*, bool> missing[] = {
      {"q_starts", args.q_starts == nullptr},
      {"block_ids", args.block_ids == nullptr},
      {"num_sink_blocks", args.num_sink_blocks == nullptr},
      {"first_recent_blocks", args.first_recent_blocks == nullptr},
      {"window_slots", has_rows && args.window_slots == nullptr},
      {"slots", is_of_blocks && has_rows && args.slots == nullptr},
      {"closing_from", is_of_blocks && args.closing_from == nullptr},
      {"closing_to", is_of_blocks && args.closing_to == nullptr},
      {"closing_tokens", is_of_blocks && args.closing_tokens == nullptr}};
  for (const auto& [name, is_missing] : missing) {
    if (is_missing) return invalid_argument("args.{} is null; the plan needs it", name);
  }
  return check_reopening(args, unit);
}

ops::WindowPlanArgs plan_args(const kvx_window_plan_args_t& args, const WindowOfCaller& window) {
  ops::WindowPlanArgs plan;
  plan.state = window.state();
  plan.window = window.window;
  plan.unit = window.unit();
  plan.block_size = static_cast<int>(window.args.block_size);
  plan.q_starts = args.q_starts;
  plan.num_tokens = args.num_tokens;
  plan.ids = args.block_ids;
  plan.num_sink_blocks = args.num_sink_blocks;
  plan.first_recent_block = args.first_recent_blocks;
  plan.slots = args.slots;
  plan.window_slots = args.window_slots;
  if (plan.unit == WindowUnit::kBlocks) {
    plan.closing_from = args.closing_from;
    plan.closing_to = args.closing_to;
    plan.closing_tokens = args.closing_tokens;
    plan.evicted_from = args.evicted_from;
    plan.evicted_to = args.evicted_to;
    plan.evicted_tokens = args.evicted_tokens;
    plan.reopened_from = args.reopened_from;
    plan.reopened_to = args.reopened_to;
    plan.reopened_tokens = args.reopened_tokens;
  }
  return plan;
}

Status plan_on_device(const kvx_window_plan_args_t& args, const WindowOfCaller& window,
                      void* stream) {
  KVX_ASSIGN_OR_RETURN(
      DeviceTable table,
      read_device_table(args.block_table, args.seq_lens, static_cast<int>(window.args.block_size),
                        args.block_table_stride));
  if (table.num_sequences == 0) return {};
  ops::WindowPlanArgs plan = plan_args(args, window);
  plan.num_sequences = table.num_sequences;
  plan.max_blocks_per_sequence = table.max_blocks;
  VerbAddresses addresses;
  addresses.add("window.state", plan.state.words);
  add_table(addresses, table);
  addresses.add("args.q_starts", plan.q_starts)
      .add("args.block_ids", plan.ids)
      .add("args.num_sink_blocks", plan.num_sink_blocks)
      .add("args.first_recent_blocks", plan.first_recent_block)
      .add("args.slots", plan.slots)
      .add("args.window_slots", plan.window_slots)
      .add("args.closing_from", plan.closing_from)
      .add("args.closing_to", plan.closing_to)
      .add("args.closing_tokens", plan.closing_tokens)
      .add("args.evicted_from", plan.evicted_from)
      .add("args.evicted_to", plan.evicted_to)
      .add("args.evicted_tokens", plan.evicted_tokens)
      .add("args.reopened_from", plan.reopened_from)
      .add("args.reopened_to", plan.reopened_to)
      .add("args.reopened_tokens", plan.reopened_tokens)
      .add("window.counters", window.args.counters);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb,
                       begin_on_device(addresses, window.args.counters, stream));
  KVX_RETURN_IF_ERROR(pack_if_needed(verb.context, table));
  plan.block_table = table.table;
  plan.seq_lens = table.seq_lens;
  return ops::plan_window(verb.context, plan, verb.counters);
}

Status plan(const kvx_window_plan_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_window_plan_args_t args, read_struct(caller, "args"));
  KVX_ASSIGN_OR_RETURN(const WindowOfCaller window, read_window(args.window));
  KVX_RETURN_IF_ERROR(check_lists(args, window.unit()));
  if (window.is_on_device) return plan_on_device(args, window, stream);
  Scratch<TableOfCaller> kept_table;
  TableOfCaller& table = *kept_table;
  KVX_RETURN_IF_ERROR(read_table(args.block_table, args.seq_lens,
                                 static_cast<int>(window.args.block_size), table,
                                 args.block_table_stride));
  ops::WindowPlanArgs plan = plan_args(args, window);
  plan.num_sequences = table.num_sequences;
  plan.block_table = table.table;
  plan.max_blocks_per_sequence = table.max_blocks;
  plan.seq_lens = table.seq_lens;
  return ops::plan_window(plan);
}

Status forget(const kvx_window_t* caller, const int64_t* blocks, int64_t num_blocks, void* stream) {
  KVX_ASSIGN_OR_RETURN(const WindowOfCaller window, read_window(caller));
  if (num_blocks < 0 || (num_blocks > 0 && blocks == nullptr)) {
    return invalid_argument("num_blocks is {} with blocks {}; expected 0 or more, and blocks",
                            num_blocks, static_cast<const void*>(blocks));
  }
  if (num_blocks == 0) return {};
  const std::span<const int64_t> list(blocks, static_cast<size_t>(num_blocks));
  if (!window.is_on_device) return ops::forget_window_blocks(window.state(), list);
  VerbAddresses addresses;
  addresses.add("window.state", window.state().words)
      .add("blocks", blocks)
      .add("window.counters", window.args.counters);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb,
                       begin_on_device(addresses, window.args.counters, stream));
  return ops::forget_window_blocks(verb.context, window.state(), list, verb.counters);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_window_sizes(const kvx_window_t* window, kvx_window_sizes_t* sizes) {
  return kvx::boundary::run_call([&] { return kvx::boundary::sizes(window, sizes); });
}

extern "C" kvx_status_t kvx_window_plan(const kvx_window_plan_args_t* args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::plan(args, stream); });
}

extern "C" kvx_status_t kvx_window_forget(const kvx_window_t* window, const int64_t* blocks,
                                          int64_t num_blocks, void* stream) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::forget(window, blocks, num_blocks, stream); });
}
