// The rules of plan_window, one sequence or block at a time, the same on the CPU and on a GPU.
//
// A step is planned in four phases, each of which reads what the one before has written:
//   touch    copies in the step's windows are marked with the step; pages that are written without
//            a copy lose the one that they had
//   choose   window blocks without that mark are listed, one for each new block of a window and,
//            where blocks are reopened, for each block that is continued without a copy
//   assign   these blocks get them
//   place    tables and lists of slots are written
#pragma once

#include "core/host_device.hpp"
#include "ops/window/plan_window.hpp"

namespace kvx::ops::window {

enum Header { kStep, kNext, kWanted, kGiven };
// is_open of a window block that the step has assigned and not placed yet.
inline constexpr int32_t kJustAssigned = -1;

// The parts of a state. A number is stored plus one, so that zero is none.
struct Parts {
  KVX_INLINE explicit Parts(const WindowState& state)
      : header(state.words),
        copy_of(header + WindowState::kHeaderWords),
        page_of(copy_of + state.num_blocks),
        last_step(page_of + state.num_window_blocks),
        is_open(last_step + state.num_window_blocks),
        chosen(is_open + state.num_window_blocks),
        wanted(chosen + state.num_window_blocks),
        num_pages(state.num_blocks),
        num_copies(state.num_window_blocks) {}

  // The page's window block, or -1. The words are a caller's memory and are not trusted.
  KVX_INLINE int32_t find(int32_t page) const {
    const int32_t copy = copy_of[page] - 1;
    return copy >= 0 && copy < num_copies && page_of[copy] == page + 1 ? copy : -1;
  }
  KVX_INLINE void forget(int32_t page) const {
    const int32_t copy = find(page);
    copy_of[page] = 0;
    if (copy < 0) return;
    page_of[copy] = 0;
    is_open[copy] = 0;
  }

  int32_t* header;
  int32_t* copy_of;    // [num_blocks] window block + 1
  int32_t* page_of;    // [num_window_blocks] page + 1
  int32_t* last_step;  // [num_window_blocks] in whose windows it was
  int32_t* is_open;    // [num_window_blocks] rows that its page has not, under kBlocks; 0: none
  int32_t* chosen;     // [num_window_blocks] those that this step may take
  int32_t* wanted;     // [num_window_blocks] pages that want one
  int64_t num_pages;
  int64_t num_copies;
};

// One sequence of the step, in blocks.
struct SequencePlan {
  KVX_INLINE SequencePlan(const WindowPlanArgs& of_step, int sequence)
      : args(of_step), s(sequence) {
    const int64_t seq_len = args.seq_lens[s];
    first_row = args.q_starts[s];
    num_rows = args.q_starts[s + 1] - first_row;
    is_valid = first_row >= 0 && num_rows >= 0 && num_rows + first_row <= args.num_tokens &&
               seq_len >= num_rows && seq_len <= args.max_blocks_per_sequence * args.block_size;
    if (!is_valid) return;
    begin = seq_len - num_rows;
    length = seq_len;
    end_block = (seq_len + args.block_size - 1) / args.block_size;
    const int64_t recent = end_block - args.window.recent_blocks;
    tail = recent > args.window.sink_blocks ? recent : args.window.sink_blocks;
  }

  // Blocks of the window: item i of num_items(), which may lie behind the end.
  KVX_INLINE static int64_t num_items(const WindowPlanArgs& args) {
    return args.window.sink_blocks + args.window.recent_blocks;
  }
  KVX_INLINE int64_t block_of_item(int64_t i) const {
    return i < args.window.sink_blocks ? i : tail + (i - args.window.sink_blocks);
  }
  KVX_INLINE bool is_in_window(int64_t block) const {
    return block < args.window.sink_blocks || block >= tail;
  }
  // Blocks that may want a copy: item i of num_touched(), which may lie behind the end; -1: none.
  KVX_INLINE static int64_t num_touched(const WindowPlanArgs& args) {
    return num_items(args) + (args.reopens() ? 1 : 0);
  }
  KVX_INLINE int64_t block_of_touched(int64_t i) const {
    if (i < num_items(args)) return block_of_item(i);
    return is_in_window(first_written()) ? -1 : first_written();
  }
  // Whether the block has rows from before the step, and from the step.
  KVX_INLINE bool continues(int64_t block) const {
    return num_rows > 0 && block == first_written() && !is_new(block);
  }
  // Whether all rows of the block are this step's.
  KVX_INLINE bool is_new(int64_t block) const { return block * args.block_size >= begin; }
  // The first block that the step writes.
  KVX_INLINE int64_t first_written() const { return begin / args.block_size; }
  KVX_INLINE int32_t id(int64_t block) const {
    return args.block_table.ids[s * args.block_table.row_stride + block];
  }
  // The block's page, or -1 where the state has no such page.
  KVX_INLINE int32_t page(int64_t block) const {
    const int32_t id = this->id(block);
    return id >= 0 && id < args.state.num_blocks ? id : -1;
  }

  const WindowPlanArgs& args;
  int s;
  int64_t first_row = 0;
  int64_t num_rows = 0;
  bool is_valid = false;
  int64_t begin = 0;   // tokens before the step
  int64_t length = 0;  // and after it
  int64_t end_block = 0;
  int64_t tail = 0;  // the first recent block
};

// ---- touch

KVX_INLINE void mark(const Parts& parts, int32_t copy) {
  parts.last_step[copy] = parts.header[kStep];
}

// Returns the page if the item is a block that wants a window block, else -1: a new one, or where
// blocks are reopened one that is continued.
KVX_INLINE int32_t touch_item(const SequencePlan& plan, const Parts& parts, int64_t item) {
  if (!plan.is_valid) return -1;
  const int64_t block = plan.block_of_touched(item);
  if (block < 0 || block >= plan.end_block) return -1;
  const int32_t page = plan.page(block);
  if (page < 0) return -1;
  const int32_t copy = parts.find(page);
  if (copy >= 0) mark(parts, copy);  // a new block of a page that has one keeps it
  const bool is_wanted =
      plan.is_new(block) ? plan.is_in_window(block) : plan.args.reopens() && plan.continues(block);
  return copy < 0 && is_wanted ? page : -1;
}

// A block that the step writes and that is not in the window: the block that was open before keeps
// its copy for this step, and whole new blocks have none.
KVX_INLINE void touch_written(const SequencePlan& plan, const Parts& parts, int64_t block) {
  if (plan.is_in_window(block)) return;
  const int32_t page = plan.page(block);
  if (page < 0) return;
  const int32_t copy = parts.find(page);
  if (copy < 0) return;
  if (plan.is_new(block)) {
    parts.forget(page);
  } else {
    mark(parts, copy);
  }
}

// ---- choose

// Steps are numbered from 1. Window blocks are taken in turn.
KVX_INLINE void begin_step(const Parts& parts) {
  const int32_t step = parts.header[kStep];
  parts.header[kStep] = step < 0 || step == INT32_MAX ? 1 : step + 1;
  const int32_t next = parts.header[kNext];
  parts.header[kNext] = next < 0 || next >= parts.num_copies ? 0 : next;
}

// Where blocks are reopened, window blocks are taken in rounds: by how many steps ago they were in
// a window (128 and more, 64 and more, ..., 1), and of one age those whose pages are complete
// before open ones. Copies of sequences that have ended, of which nobody tells, are mostly the
// oldest.
inline constexpr int kAges = 8;
KVX_INLINE int num_rounds(const WindowPlanArgs& args) {
  return args.reopens() ? 2 * kAges : 1;
}
KVX_INLINE bool may_take(const WindowPlanArgs& args, const Parts& parts, int64_t copy, int round) {
  const int32_t step = parts.header[kStep];
  if (parts.last_step[copy] == step) return false;
  const bool is_open = parts.is_open[copy] > 0;
  if (!args.reopens()) return !is_open;
  int round_of_age = kAges - 1;
  auto age = static_cast<uint32_t>(step) - static_cast<uint32_t>(parts.last_step[copy]);
  for (; age > 1 && round_of_age > 0; age /= 2) --round_of_age;
  return round == 2 * round_of_age + (is_open ? 1 : 0);
}

// ---- assign

// Entry i of what leaves the window unfinished.
KVX_INLINE void place_evicted(const WindowPlanArgs& args, int64_t i, int32_t copy, int32_t page,
                              int32_t num_tokens) {
  args.evicted_from[i] = copy;
  args.evicted_to[i] = page;
  args.evicted_tokens[i] = num_tokens < args.block_size ? num_tokens : args.block_size;
}

// Wanted page i gets chosen window block i.
KVX_INLINE void assign(const WindowPlanArgs& args, const Parts& parts, int64_t i) {
  const int32_t page = parts.wanted[i];
  const int32_t copy = parts.chosen[i];
  const int32_t before = parts.page_of[copy] - 1;
  const bool is_page = before >= 0 && before < parts.num_pages;
  if (is_page && parts.copy_of[before] == copy + 1) {
    parts.copy_of[before] = 0;
    if (args.reopens() && parts.is_open[copy] > 0) {
      place_evicted(args, i, copy, before, parts.is_open[copy]);
    }
  }
  parts.page_of[copy] = page + 1;
  parts.copy_of[page] = copy + 1;
  parts.is_open[copy] = args.reopens() ? kJustAssigned : 0;
  mark(parts, copy);
}

// ---- place

// The window block of a block of the sequence, or -1.
KVX_INLINE int32_t copy_of_block(const SequencePlan& plan, const Parts& parts, int64_t block) {
  const int32_t page = plan.page(block);
  return page < 0 ? -1 : parts.find(page);
}

struct Edges {
  int64_t num_sinks;
  int64_t first_recent;
};

// The window as far as its blocks have copies: sinks from the front, recent blocks from the end.
KVX_INLINE Edges find_edges(const SequencePlan& plan, const Parts& parts) {
  if (!plan.is_valid) return {0, plan.args.max_blocks_per_sequence};
  Edges edges{0, plan.end_block};
  const int64_t sinks_end =
      plan.args.window.sink_blocks < plan.end_block ? plan.args.window.sink_blocks : plan.end_block;
  while (edges.num_sinks < sinks_end && copy_of_block(plan, parts, edges.num_sinks) >= 0) {
    ++edges.num_sinks;
  }
  while (edges.first_recent > edges.num_sinks && plan.is_in_window(edges.first_recent - 1) &&
         copy_of_block(plan, parts, edges.first_recent - 1) >= 0) {
    --edges.first_recent;
  }
  return edges;
}

// Blocks behind the end are read by no query; 0 is a block of either layer.
KVX_INLINE int32_t placed_id(const SequencePlan& plan, const Parts& parts, const Edges& edges,
                             int64_t block) {
  if (!plan.is_valid || block >= plan.end_block) return 0;
  const bool is_copy = block < edges.num_sinks || block >= edges.first_recent;
  return is_copy ? copy_of_block(plan, parts, block) : plan.id(block);
}

KVX_INLINE void place_row(const SequencePlan& plan, const Parts& parts, int64_t row) {
  const WindowPlanArgs& args = plan.args;
  const int64_t position = plan.begin + row;
  const int64_t block = position / args.block_size;
  const int64_t offset = position - block * args.block_size;
  const int32_t page = plan.page(block);
  const int32_t copy = page < 0 ? -1 : parts.find(page);
  args.window_slots[plan.first_row + row] =
      copy < 0 ? -1 : int64_t{copy} * args.block_size + offset;
  if (args.slots == nullptr) return;
  const bool waits = copy >= 0 && args.unit == WindowUnit::kBlocks;
  args.slots[plan.first_row + row] =
      page < 0 || waits ? -1 : int64_t{page} * args.block_size + offset;
}

// The block that the sequence continues, if its rows must come back from its page. Requires: the
// sequence's closing blocks are not placed yet.
KVX_INLINE void place_reopened(const SequencePlan& plan, const Parts& parts) {
  const WindowPlanArgs& args = plan.args;
  args.reopened_from[plan.s] = args.reopened_to[plan.s] = 0;
  args.reopened_tokens[plan.s] = 0;
  const int64_t block = plan.first_written();
  if (!plan.is_valid || !plan.continues(block)) return;
  const int32_t copy = copy_of_block(plan, parts, block);
  if (copy < 0 || parts.is_open[copy] != kJustAssigned) return;
  args.reopened_from[plan.s] = plan.page(block);
  args.reopened_to[plan.s] = copy;
  args.reopened_tokens[plan.s] = static_cast<int32_t>(plan.begin - block * args.block_size);
}

// Entry i of the sequence's closing blocks: item i of the window, or behind the items the block
// that was open before the step, where that has left the window. Marks blocks that stay open.
KVX_INLINE void place_closing(const SequencePlan& plan, const Parts& parts, int64_t i) {
  const WindowPlanArgs& args = plan.args;
  const int64_t entry = plan.s * args.closing_blocks_per_sequence() + i;
  args.closing_from[entry] = args.closing_to[entry] = 0;
  args.closing_tokens[entry] = 0;
  if (!plan.is_valid || plan.num_rows == 0) return;
  const int64_t num_items = SequencePlan::num_items(args);
  const int64_t block = i < num_items ? plan.block_of_item(i) : plan.first_written();
  const bool is_listed = i < num_items || !plan.is_in_window(block);
  if (!is_listed || block < plan.first_written() || block >= plan.end_block) return;
  const int32_t copy = copy_of_block(plan, parts, block);
  if (copy < 0) return;
  const bool is_closed = (block + 1) * args.block_size <= plan.length;
  parts.is_open[copy] = is_closed ? 0 : static_cast<int32_t>(plan.length - block * args.block_size);
  if (!is_closed) return;
  args.closing_from[entry] = copy;
  args.closing_to[entry] = plan.page(block);
  args.closing_tokens[entry] = args.block_size;
}

}  // namespace kvx::ops::window
