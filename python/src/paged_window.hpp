// PagedWindow: the state of a full-precision window beside an engine's pages, and the plan of each
// step, on the CPU or on a GPU (ops/window/plan_window.hpp). The window's blocks themselves are the
// caller's memory, an array a layer.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "cache/block_layout.hpp"
#include "cache/full_precision_window.hpp"
#include "kv/verbs/cuda_place.hpp"
#include "ops/window/plan_window.hpp"
#include "python/src/arrays.hpp"
#include "python/src/block_copy_arrays.hpp"
#include "python/src/cuda_lane.hpp"

namespace kvx::python {

// The arrays that a plan writes; those of block copies are None for a window of rows.
struct WindowLists {
  nb::handle block_table;
  nb::handle num_sink_blocks;
  nb::handle first_recent_blocks;
  nb::handle slots;
  nb::handle window_slots;
  BlockCopyArrays closing;
  BlockCopyArrays evicted;
  BlockCopyArrays reopened;
};

struct WindowSizes {
  int64_t num_pages = 0;
  int64_t num_blocks = 0;  // of the window
  int block_size = 0;
  int64_t sink_tokens = 0;
  int64_t recent_tokens = 0;
  bool is_of_blocks = false;
};

class PagedWindow {
 public:
  PagedWindow(const WindowSizes& sizes, const std::string& device);

  std::string device() const { return lane_ ? fmt::format("cuda:{}", lane_->device()) : "cpu"; }
  int64_t closing_blocks_per_sequence() const { return args_.closing_blocks_per_sequence(); }

  void plan(nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
            const WindowLists& lists, nb::handle stream);
  void forget(nb::handle blocks, nb::handle stream);
  // Waits for the device.
  int64_t num_out_of_range();

 private:
  ArrayPlace place_of(nb::handle stream, std::initializer_list<nb::handle> arrays) const;
  template <class F>
  void on_device(const ArrayPlace& place, KeptArrays& kept, F verb);

  ops::WindowPlanArgs args_;  // without a step
  std::unique_ptr<CudaLane> lane_;
  std::unique_ptr<kv::CudaPlace> cuda_place_;
  cache::Region state_;
  std::mutex mutex_;
};

}  // namespace kvx::python
