// A caller's layer, checked, in the form that the verbs take.
#pragma once

#include <array>
#include <vector>

#include "api/checks/check_tensor.hpp"
#include "api/checks/memory_range.hpp"
#include "api/checks/v1_views.hpp"
#include "kvx/kvx_abi.h"
#include "ops/cache_view.hpp"
#include "ops/cuda/context.hpp"
#include "ops/transform.hpp"

namespace kvx::boundary {

inline constexpr int kMostHeads = 65535;  // a GPU's limit for a dimension of a grid

// The view's runs point into `runs`, so a LayerOfCaller is neither copied nor moved. Reading
// another layer into it reuses the vectors' memory: a warm call allocates nothing.
struct LayerOfCaller {
  std::vector<ops::HeadRun> runs;
  std::vector<ops::HeadRun> rest_runs;  // of K's second segment; empty: rows are one
  ops::LayerView rest;
  ops::LayerView view;
  ops::LayerTransform transform;
  std::vector<MemoryRange> memory;                 // where codes and scales lie
  std::array<std::vector<float>, 2> cache_scales;  // K's and V's of a v1 cache, unless they are F32
  // The same on a GPU, where widen_scales() makes them F32; without data: there are none.
  std::array<ScaleView, 2> narrow_scales;
  MemoryType kind = MemoryType::kHost;
  ops::DeviceCounters* counters = nullptr;  // in the GPU's memory, or null

  bool is_on_device() const { return kind != MemoryType::kHost; }

  bool has_narrow_scales() const {
    return narrow_scales[0].data != nullptr || narrow_scales[1].data != nullptr;
  }
  bool has_segments() const { return !rest_runs.empty(); }
  int k_head_dim() const { return view.key_dim(); }
  int v_head_dim() const { return runs.front().v.head_dim; }
  // Whether V is stored, and not as a part of K's rows.
  bool has_own_v() const { return v_head_dim() != 0 && !runs.front().v.is_alias; }
};

// The memory that a call accepts a layer in.
enum class LayerMemory { kHost, kHostOrDevice };

// INVALID_ARGUMENT, UNSUPPORTED or INCOMPATIBLE names the field. A layer on a GPU is UNSUPPORTED
// unless `allowed` accepts it; its scales and factors are not read.
Status read_layer(const kvx_layer_t* layer, std::string_view name, LayerOfCaller& result,
                  LayerMemory allowed = LayerMemory::kHost);

// For calls that copy stored rows. UNSUPPORTED: `to` keeps V as a part of K's rows and `from` does
// not.
Status check_values(const LayerOfCaller& from, const LayerOfCaller& to);

// INVALID_ARGUMENT: codes or scales of the two layers share memory.
Status check_apart(const LayerOfCaller& from, const LayerOfCaller& to);

}  // namespace kvx::boundary
