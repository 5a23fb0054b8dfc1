// PagedLayer: one layer's K and V in pages that belong to an engine, on the CPU or on a GPU. The
// verbs take the engine's own page memory, slots and block tables; the order inside a page is kvx's
// (cache/block_layout), on a GPU the one that it decodes fastest.
//
// On a GPU a verb is launched on the caller's stream and returns. Lengths, slots and tables are not
// read by the host: what is out of range there is skipped and counted (ops::DeviceCounters).
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ops/append/append.hpp"
#include "python/src/arrays.hpp"
#include "python/src/block_copy_arrays.hpp"
#include "python/src/context.hpp"
#include "python/src/cuda_lane.hpp"
#include "python/src/page_shape.hpp"
#include "python/src/workspaces.hpp"

namespace kvx::python {

// A full-precision window's blocks and what append does there; all None without a window.
struct WindowAppend {
  nb::handle pages = nb::none();
  nb::handle slots = nb::none();
  BlockCopyArrays closing;  // none: pages are written at once
  BlockCopyArrays evicted;
  BlockCopyArrays reopened;
};
// Which blocks of a step's sequences are the window's; both None without a window.
struct StepWindow {
  nb::handle num_sink_blocks = nb::none();
  nb::handle first_recent_blocks = nb::none();
};

// How scores become weights.
struct Attention {
  std::optional<float> softmax_scale;
  float softcap = 0;
  int window = 0;
  nb::handle sinks = nb::none();
};

// What shapes a launch on a GPU, where the lengths are not known. The CPU reads the lengths.
struct BatchBounds {
  std::optional<int> max_q_len;
  std::optional<int64_t> max_seq_len;
  int num_decodes = 0;
  std::optional<int64_t> num_queries;
};

// Where the pages and queries of a step's sequences are; the same for all layers.
struct StepBatch {
  // Throws CoreError naming what does not fit.
  StepBatch(nb::handle block_table, nb::handle seq_lens, nb::handle q_starts,
            const BatchBounds& bounds, nb::handle workspace, const StepWindow& window,
            const ArrayPlace& place);

  bool has_window() const { return num_sink_blocks.is_valid(); }

  nb::ndarray<nb::ro> block_table;          // int32 [sequences, pages], rows may be apart
  nb::ndarray<nb::ro> seq_lens;             // int32 [sequences]
  nb::ndarray<nb::ro> q_starts;             // int32 [sequences + 1]
  nb::ndarray<nb::ro> num_sink_blocks;      // int32 [sequences], or none
  nb::ndarray<nb::ro> first_recent_blocks;  // int32 [sequences], or none
  nb::ndarray<> workspace_array;
  GivenWorkspace workspace;
  BatchBounds bounds;
  int num_sequences = 0;
  KeptArrays kept;  // those of them whose libraries name no stream

 private:
  void read_window(const StepWindow& window, const ArrayPlace& place);
};

class PagedLayer {
 public:
  PagedLayer(PageShape shape, const kv::LayerCalibration& calibration, const std::string& device);

  int64_t page_bytes() const { return page_bytes_; }
  int64_t window_block_bytes() const { return shape_.window_layout.block_bytes; }
  std::string device() const;
  const char* order() const;
  bool is_latent() const { return geometry().is_latent; }
  // -1: the CPU.
  int cuda_device() const { return lane_ ? lane_->device() : -1; }

  // Whether K has block offsets, which append() finds by the tokens' positions.
  bool needs_positions() const;

  // Returns the non-finite inputs that given scales could not express; None on a GPU, which counts
  // them itself.
  nb::object append(nb::handle pages, nb::handle k, nb::handle v, nb::handle slots,
                    nb::handle positions, const WindowAppend& window, nb::handle stream);

  // What append() leaves to it where its window has no closing blocks: those, quantised.
  void close_blocks(nb::handle pages, nb::handle window_pages, const BlockCopyArrays& closing,
                    nb::handle stream);

  void attend(nb::handle pages, nb::handle q, nb::handle out, nb::handle block_table,
              nb::handle seq_lens, nb::handle q_starts, const Attention& attention,
              const BatchBounds& bounds, nb::handle workspace, nb::handle lse,
              nb::handle window_pages, const StepWindow& window, nb::handle stream);
  // The same with what was made of the step's arrays.
  void attend_batch(nb::handle pages, nb::handle q, nb::handle out, const StepBatch& batch,
                    const Attention& attention, nb::handle lse, nb::handle window_pages,
                    nb::handle stream);

  // All tokens of the sequences, one after the other.
  void gather(nb::handle pages, nb::handle block_table, nb::handle seq_lens, nb::handle k,
              nb::handle v, nb::handle stream);

  // Whole pages to other pages of the same memory or of another one.
  void copy_blocks(nb::handle pages, nb::handle to_pages, nb::handle from_blocks,
                   nb::handle to_blocks, nb::handle stream);

  // Enough for every call within these bounds.
  int64_t workspace_bytes(int num_q_heads, const BatchBounds& bounds, int max_sequences, int window,
                          bool has_window_pages) const;

  // Waits for the device.
  nb::dict counters();
  void reset_counters();

 private:
  struct PageArray {
    nb::ndarray<nb::ro> array;  // the verbs that write have checked that they may
    uint8_t* base = nullptr;
    int64_t num_pages = 0;
    int64_t page_stride = 0;
  };
  // A list of block copies, between a window's blocks and pages.
  struct CopyArrays {
    nb::ndarray<nb::ro> from, to, tokens;
    bool is_given() const { return from.is_valid(); }
  };
  // What append's arrays of a window are.
  struct WindowArrays {
    PageArray pages;
    nb::ndarray<nb::ro> slots;
    CopyArrays closing, evicted, reopened;
    bool is_given() const { return slots.is_valid(); }
  };
  // A view of the store's, at an engine's pages.
  struct PlacedView {
    // Moves the runs that the store has for `stored`, whose blocks are laid out by `layout`.
    ops::LayerView move(const PageArray& pages, const ops::LayerView& stored,
                        const cache::BlockLayout& layout);

    const uint8_t* base = nullptr;
    int64_t num_pages = -1;
    int64_t page_stride = 0;
    std::vector<ops::HeadRun> runs;
    std::vector<ops::HeadRun> more_runs;  // of the rows' second segment
    ops::LayerView more;
  };

  const kv::CacheGeometry& geometry() const { return shape_.geometry; }
  int heads() const { return shape_.geometry.num_kv_heads; }
  void attend_at(const ArrayPlace& place, nb::handle pages, nb::handle q, nb::handle out,
                 const StepBatch& batch, const Attention& attention, nb::handle lse,
                 nb::handle window_pages);
  ArrayPlace place_of(nb::handle stream, std::initializer_list<nb::handle> arrays) const;
  PageArray page_array(nb::handle pages, const char* name, int64_t page_bytes,
                       const ArrayPlace& place) const;
  void check_slots(const char* name, std::span<const int64_t> slots, int64_t num_pages) const;
  void check_q_heads(int num_q_heads) const;
  // Requires: the lock.
  ops::LayerView view_of(const PageArray& pages);
  ops::LayerView place_view(const PageArray& pages, PlacedView& view) const;
  // A window's blocks; with their heads as attend takes them, or cut as the pages' runs are.
  ops::LayerView window_view(const PageArray& pages, bool is_cut);
  ops::DeviceCounters* device_counters() const { return cuda_place_->counters(); }

  // A window's part of append: its arrays, checked before anything is written, and its writes,
  // before and behind the pages'. context: null on the CPU. Requires of the last three: the lock.
  WindowArrays window_arrays(const WindowAppend& window, size_t tokens,
                             const ArrayPlace& place) const;
  void keep_window(KeptArrays& kept, const ArrayPlace& place, const WindowAppend& window,
                   const WindowArrays& arrays) const;
  static CopyArrays copy_arrays(const BlockCopyArrays& arrays, const char* name,
                                const ArrayPlace& place);
  static void keep_list(const CudaLane& lane, KeptArrays& kept, const ArrayPlace& place,
                        const BlockCopyArrays& objects, const CopyArrays& list);
  void check_window(const WindowArrays& arrays, int64_t num_pages) const;
  void check_list(const char* name, const CopyArrays& list, int64_t num_from, int64_t num_to) const;
  Status reopen_blocks(const ops::AppendArgs& args, const WindowArrays& arrays,
                       const ops::CudaContext* context);
  Status append_to_window(ops::AppendArgs args, const WindowArrays& arrays,
                          const ops::CudaContext* context);
  Status copy_listed(const ops::LayerView& from, const ops::LayerView& to, const CopyArrays& list,
                     const ops::CudaContext* context);

  template <class F>
  void on_device(const ArrayPlace& place, KeptArrays& kept, F verb);

  std::shared_ptr<const Context> context_;
  std::unique_ptr<CudaLane> lane_;             // null on the CPU
  std::unique_ptr<kv::CudaPlace> cuda_place_;  // of the tables and the counters
  const PageShape shape_;
  const int64_t page_bytes_;
  std::unique_ptr<kv::LayerStore> store_;
  std::mutex mutex_;
  PlacedView view_;
  PlacedView other_view_;         // of pages that are copied to
  PlacedView window_view_;        // of a window's blocks, for attend
  PlacedView cut_window_view_;    // the same, in the pages' runs of heads
  int64_t nonfinite_inputs_ = 0;  // on the CPU
};

}  // namespace kvx::python
