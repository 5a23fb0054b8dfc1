// plan_window on the CPU: the four phases, one sequence after the other.
#include <algorithm>

#include "core/checked.hpp"
#include "ops/window/window_rules.hpp"

namespace kvx::ops {
namespace {

using namespace window;

Status check_sequence(const WindowPlanArgs& args, int s) {
  const int64_t first = args.q_starts[s], last = args.q_starts[s + 1];
  if (first < 0 || last < first || last > args.num_tokens) {
    return invalid_argument("q_starts[{}..{}] is {}, {}; expected 0 to num_tokens {}, in order", s,
                            s + 1, first, last, args.num_tokens);
  }
  const int64_t seq_len = args.seq_lens[s];
  if (seq_len < last - first) {
    return invalid_argument("seq_lens[{}] is {}; expected at least its {} new tokens", s, seq_len,
                            last - first);
  }
  const int64_t num_blocks = ceil_div<int64_t>(seq_len, args.block_size);
  if (num_blocks > args.max_blocks_per_sequence) {
    return out_of_range("seq_lens[{}] is {}; {} blocks of {} tokens hold less", s, seq_len,
                        args.max_blocks_per_sequence, args.block_size);
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int32_t id = args.block_table.at(s, b);
    if (id >= 0 && id < args.state.num_blocks) continue;
    return out_of_range("block_table[{}][{}] is {}; expected a block in [0, {})", s, b, id,
                        args.state.num_blocks);
  }
  return {};
}

// Every block that a step leaves open has a window block then.
Status check_window_blocks(const WindowPlanArgs& args) {
  if (!args.reopens()) return {};
  int64_t num_sequences = 0;
  for (int s = 0; s < args.num_sequences; ++s) num_sequences += args.seq_lens[s] > 0 ? 1 : 0;
  const int64_t needed = num_sequences * args.closing_blocks_per_sequence();
  if (needed <= args.state.num_window_blocks) return {};
  return invalid_argument(
      "num_window_blocks is {}; {} sequences whose blocks are reopened need {} ({} each)",
      args.state.num_window_blocks, num_sequences, needed, args.closing_blocks_per_sequence());
}

void touch(const WindowPlanArgs& args, const Parts& parts) {
  int64_t num_wanted = 0;
  for (int s = 0; s < args.num_sequences; ++s) {
    const SequencePlan plan(args, s);
    for (int64_t i = 0; i < SequencePlan::num_touched(args); ++i) {
      const int32_t page = touch_item(plan, parts, i);
      if (page >= 0 && num_wanted < args.state.num_window_blocks) parts.wanted[num_wanted++] = page;
    }
    for (int64_t b = plan.first_written(); b < plan.end_block; ++b) touch_written(plan, parts, b);
  }
  parts.header[kWanted] = static_cast<int32_t>(num_wanted);
}

void choose(const WindowPlanArgs& args, const Parts& parts) {
  const int64_t num = args.state.num_window_blocks;
  const int32_t first = parts.header[kNext];
  int32_t num_given = 0;
  for (int round = 0; round < num_rounds(args); ++round) {
    for (int64_t i = 0; i < num && num_given < parts.header[kWanted]; ++i) {
      const int64_t copy = (first + i) % num;
      if (!may_take(args, parts, copy, round)) continue;
      parts.chosen[num_given++] = static_cast<int32_t>(copy);
      parts.header[kNext] = static_cast<int32_t>((copy + 1) % num);
    }
  }
  parts.header[kGiven] = num_given;
}

void place(const WindowPlanArgs& args, const Parts& parts, int s) {
  const SequencePlan plan(args, s);
  const Edges edges = find_edges(plan, parts);
  args.num_sink_blocks[s] = static_cast<int32_t>(edges.num_sinks);
  args.first_recent_block[s] = static_cast<int32_t>(edges.first_recent);
  for (int64_t b = 0; b < args.max_blocks_per_sequence; ++b) {
    args.ids[s * args.max_blocks_per_sequence + b] = placed_id(plan, parts, edges, b);
  }
  for (int64_t row = 0; row < plan.num_rows; ++row) place_row(plan, parts, row);
  if (args.unit != WindowUnit::kBlocks) return;
  if (args.reopens()) place_reopened(plan, parts);
  for (int64_t i = 0; i < args.closing_blocks_per_sequence(); ++i) place_closing(plan, parts, i);
}

}  // namespace

Status plan_window(const WindowPlanArgs& args) {
  for (int s = 0; s < args.num_sequences; ++s) KVX_RETURN_IF_ERROR(check_sequence(args, s));
  KVX_RETURN_IF_ERROR(check_window_blocks(args));
  const Parts parts(args.state);
  begin_step(parts);
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    args.window_slots[i] = -1;
    if (args.slots != nullptr) args.slots[i] = -1;
  }
  if (args.reopens()) {
    std::fill_n(args.evicted_from, args.num_evicted(), 0);
    std::fill_n(args.evicted_to, args.num_evicted(), 0);
    std::fill_n(args.evicted_tokens, args.num_evicted(), 0);
  }
  touch(args, parts);
  choose(args, parts);
  for (int32_t i = 0; i < parts.header[kGiven]; ++i) assign(args, parts, i);
  for (int s = 0; s < args.num_sequences; ++s) place(args, parts, s);
  return {};
}

Status forget_window_blocks(const WindowState& state, std::span<const int64_t> blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i] >= 0 && blocks[i] < state.num_blocks) continue;
    return out_of_range("blocks[{}] is {}; expected a block in [0, {})", i, blocks[i],
                        state.num_blocks);
  }
  const Parts parts(state);
  for (const int64_t block : blocks) parts.forget(static_cast<int32_t>(block));
  return {};
}

}  // namespace kvx::ops
