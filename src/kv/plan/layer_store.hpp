// LayerStore: one layer of the cache as the verbs see it: views of its packed and its
// full-precision blocks, its transform, and the calibrated tables that those point into.
#pragma once

#include <memory>
#include <vector>

#include "cache/block_layout.hpp"
#include "kv/plan/layer_tables.hpp"
#include "kv/verbs/cuda_place.hpp"

namespace kvx::kv {

// Row sizes of a layer, for cache::layout_block.
cache::LayerBytes packed_bytes(const CacheGeometry& geometry, const LayerPlan& plan);
cache::LayerBytes full_precision_bytes(const CacheGeometry& geometry,
                                       const format::FormatSpec& full_precision);

// Where a layer's blocks lie: base is the address of block 0 of its class.
struct LayerMemory {
  uint8_t* base = nullptr;
  int64_t num_blocks = 0;
  const cache::BlockLayout* layout = nullptr;
  int layer_in_group = 0;
};

// Views point into the store: it stays where it is.
class LayerStore {
 public:
  // full_precision.layout is null without full-precision window; device: where the blocks lie,
  // null: the host. There codes may lie in interleaved order. Errors as LayerTables::create and
  // LayerTables::place_in.
  static Result<std::unique_ptr<LayerStore>> create(const CacheGeometry& geometry, int layer,
                                                    const LayerPlan& plan,
                                                    const format::FormatSpec& full_precision_spec,
                                                    const LayerCalibration& calibration,
                                                    const LayerMemory& packed,
                                                    const LayerMemory& full_precision,
                                                    const CudaPlace* device = nullptr);

  const ops::LayerView& packed() const { return packed_.view; }
  const ops::LayerView& full_precision() const { return full_precision_.view; }
  // The same, its runs of heads cut as packed()'s are.
  const ops::LayerView& full_precision_in_packed_runs() const {
    return full_precision_in_packed_runs_.view;
  }
  const ops::LayerTransform& transform() const { return tables_.transform(); }

  // What was lost on the way into packed blocks, [num_kv_heads] each. Requires: a device where the
  // blocks lie is current, and its stream was waited for.
  struct Counts {
    std::vector<ops::HeadCounts> k;
    std::vector<ops::HeadCounts> v;
  };
  Result<Counts> counts() const;

 private:
  // A view with what it points to.
  struct OwnedView {
    std::vector<ops::HeadRun> runs;
    std::vector<ops::HeadRun> more_runs;  // of the rows' second segment; empty: they have one
    ops::LayerView more;
    ops::LayerView view;

    // Requires: the runs are complete, and this stays where it is.
    void complete(const CacheGeometry& geometry, const LayerMemory& memory);
  };

  LayerStore() = default;
  Status create_counts(int num_kv_heads, const CudaPlace* device);
  // Of K or V, where the verbs add to them.
  ops::HeadCounts* counts_of(bool is_k) const;
  Result<Counts> counts_on_device() const;
  void create_packed(const CacheGeometry& geometry, const LayerPlan& plan,
                     const LayerMemory& memory, const CudaPlace* device);
  void create_full_precision(const CacheGeometry& geometry, const LayerPlan& plan,
                             const format::FormatSpec& spec, const LayerMemory& memory);

  LayerTables tables_;
  mutable Counts counts_;           // atomic loads want them to be no constants; zeros on a device
  cache::Region counts_on_device_;  // [K and V, num_kv_heads]; none on the host
  OwnedView packed_;
  OwnedView full_precision_;
  OwnedView full_precision_in_packed_runs_;
};

}  // namespace kvx::kv
