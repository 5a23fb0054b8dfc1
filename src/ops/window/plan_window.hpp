// plan_window: which blocks of an engine's pages have a copy in 16 bits (the full-precision
// window), and where a step's verbs read and write. Pure integers, once a step for all layers.
//
// The window is a pool of 16-bit blocks and a state that names, for each page, its copy there. So
// it follows pages, not requests: sequences that share a page share its copy, and a sequence needs
// no name. The step's new blocks get copies of their own, in the place of those that no sequence of
// the step has in its window, the oldest first.
#pragma once

#include <span>

#include "cache/full_precision_window.hpp"
#include "core/host_device.hpp"
#include "ops/cache_view.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// When a row is written to its page.
enum class WindowUnit : uint8_t {
  kRows,    // at once, and to the window beside it: every page is complete at any time
  kBlocks,  // with its block, quantised whole from the window when its last row is there
};

// The state: kHeaderWords, then per page, then per window block. A state of zeros names no copies.
struct WindowState {
  static constexpr int64_t kHeaderWords = 4;  // step, the next window block to take, wanted, given
  static constexpr int64_t kWordsPerWindowBlock = 5;

  int64_t num_blocks = 0;         // pages
  int64_t num_window_blocks = 0;  // of the layer in 16 bits
  int32_t* words = nullptr;

  static constexpr int64_t num_words(int64_t num_blocks, int64_t num_window_blocks) {
    return kHeaderWords + num_blocks + kWordsPerWindowBlock * num_window_blocks;
  }
};

struct WindowPlanArgs {
  WindowState state;
  cache::FullPrecisionWindow window;  // recent_blocks > 0
  WindowUnit unit = WindowUnit::kRows;
  int block_size = 0;

  // The step, as attend takes it: all lengths include the new tokens.
  int num_sequences = 0;
  BlockTable block_table;
  int64_t max_blocks_per_sequence = 0;
  const int32_t* seq_lens = nullptr;  // [num_sequences]
  const int32_t* q_starts = nullptr;  // [num_sequences + 1]
  int64_t num_tokens = 0;             // of the lists of slots; those behind q_starts' last get -1

  // What attend reads.
  int32_t* ids = nullptr;                 // [num_sequences, max_blocks_per_sequence]
  int32_t* num_sink_blocks = nullptr;     // [num_sequences]
  int32_t* first_recent_block = nullptr;  // [num_sequences]
  // What append writes: slots of the new rows in the pages and in the window; -1: not there.
  int64_t* slots = nullptr;         // [num_tokens], or null
  int64_t* window_slots = nullptr;  // [num_tokens]
  // kBlocks alone, what copy_blocks copies from the window to the pages after append:
  // [num_sequences, closing_blocks_per_sequence()]; entries without a copy have 0 tokens.
  int64_t* closing_from = nullptr;
  int64_t* closing_to = nullptr;
  int32_t* closing_tokens = nullptr;
  // For formats that cannot store a part of a block row by row (kBlocks alone; null otherwise),
  // what copy_blocks copies before append, so that every block which a step continues has its copy:
  // first, from the window to the pages, the rows of open blocks that give up their window block,
  // [num_sequences, closing_blocks_per_sequence()]; then, from the pages to the window, those of
  // blocks that are continued without a copy, [num_sequences].
  int64_t* evicted_from = nullptr;
  int64_t* evicted_to = nullptr;
  int32_t* evicted_tokens = nullptr;
  int64_t* reopened_from = nullptr;
  int64_t* reopened_to = nullptr;
  int32_t* reopened_tokens = nullptr;

  KVX_HOST_DEVICE bool reopens() const { return evicted_from != nullptr; }
  // Window blocks that a sequence may fill in one step: sinks, recent blocks and the one that was
  // open before.
  KVX_HOST_DEVICE int64_t closing_blocks_per_sequence() const {
    return window.sink_blocks + window.recent_blocks + 1;
  }
  KVX_HOST_DEVICE int64_t num_evicted() const {
    return num_sequences * closing_blocks_per_sequence();
  }
};

// INVALID_ARGUMENT or OUT_OF_RANGE, nothing written: lengths, starts or pages that do not fit;
// where blocks are reopened, fewer window blocks than closing_blocks_per_sequence() of each
// sequence.
Status plan_window(const WindowPlanArgs& args);
// The same state and lists. A sequence whose lengths do not fit has no window and no slots, and a
// page beyond the state has no copy; both are counted, and so are window blocks that are missing.
Status plan_window(const CudaContext& context, const WindowPlanArgs& args,
                   DeviceCounters* counters);

// Pages that were written by anything but a planned step, or whose sequence has ended under
// kBlocks: their copies are no longer used. Ids beyond the pages are OUT_OF_RANGE; on a GPU
// counted.
Status forget_window_blocks(const WindowState& state, std::span<const int64_t> blocks);
Status forget_window_blocks(const CudaContext& context, const WindowState& state,
                            std::span<const int64_t> blocks, DeviceCounters* counters);

}  // namespace kvx::ops
