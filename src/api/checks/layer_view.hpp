// A caller's layer as the verbs see it.
#pragma once

#include <vector>

#include "api/checks/check_tensor.hpp"
#include "api/checks/memory_range.hpp"
#include "kvx/kvx_abi.h"
#include "ops/cache_view.hpp"
#include "ops/cuda/context.hpp"
#include "ops/transform.hpp"

namespace kvx::boundary {

inline constexpr int kMostHeads = 65535;  // of a grid's dimension, on a GPU

// The view's runs point into `runs`: a layer stays where it is. Reading another layer into it keeps
// the memory, so that a warm call allocates nothing.
struct LayerOfCaller {
  std::vector<ops::HeadRun> runs;
  ops::LayerView view;
  ops::LayerTransform transform;
  std::vector<MemoryRange> memory;  // of codes and scales
  MemoryKind kind = MemoryKind::kHost;
  ops::DeviceCounters* counters = nullptr;  // of a layer on a GPU, or null

  bool is_on_device() const { return kind != MemoryKind::kHost; }

  int k_head_dim() const { return runs.front().k.head_dim; }
  int v_head_dim() const { return runs.front().v.head_dim; }
  // Whether V has rows of its own: it is stored, and not as a part of K's.
  bool has_own_v() const { return v_head_dim() != 0 && !runs.front().v.is_alias; }
};

enum class LayerPlace { kHost, kAnywhere };

// INVALID_ARGUMENT, UNSUPPORTED or INCOMPATIBLE names the field. A layer on a GPU is UNSUPPORTED
// for calls that do not say kAnywhere; its scales and factors are not looked at.
Status read_layer(const kvx_layer_t* layer, std::string_view name, LayerOfCaller& result,
                  LayerPlace place = LayerPlace::kHost);

// Of calls that move stored rows. UNSUPPORTED: a V that is a part of K's rows cannot take in one
// that is not.
Status check_values(const LayerOfCaller& from, const LayerOfCaller& to);

// INVALID_ARGUMENT: their codes or scales share memory.
Status check_apart(const LayerOfCaller& from, const LayerOfCaller& to);

}  // namespace kvx::boundary
