// Views: where the rows and scales of one layer lie, for every verb. A view is checked where it is
// made (at the API boundary, or by the pool that owns the memory) and cannot be wrong afterwards.
#pragma once

#include <cstdint>
#include <span>

#include "core/host_device.hpp"
#include "format/format_spec.hpp"

namespace kvx::ops {

// Codes of (block, token, head) begin at base + block * block_stride + token * token_stride + head
// * head_stride. All strides are bytes; head counts from the run's first head. A row's codes are
// contiguous, or lie in fragments, as in [block, head, head_dim / pack, token, pack]: then byte i
// is i % fragment_bytes of fragment i / fragment_bytes, which begins that many fragment_strides
// further on.
struct CodeAddress {
  uint8_t* base = nullptr;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t fragment_stride = 0;
  // 0: contiguous. Fragments have no page-shared scales. On a GPU fast kernels read them joined,
  // where their numbers have 16 bits, or not at all.
  int fragment_bytes = 0;

  bool is_fragmented() const { return fragment_bytes != 0; }
  uint8_t* at(int64_t block, int64_t token, int head) const {
    return base + block * block_stride + token * token_stride + head * head_stride;
  }
};

// The scale of (block, token, head, group), likewise. A zero stride shares it: all zero is per
// tensor, only the head's is per head, all but the token's is shared by a page. Null when the
// format has no scale.
struct ScaleAddress {
  uint8_t* base = nullptr;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t group_stride = 0;

  uint8_t* at(int64_t block, int64_t token, int head) const {
    return base + block * block_stride + token * token_stride + head * head_stride;
  }
};

// The steps and zeros of (block, head) of a dual-scale format, likewise. Null for other formats.
struct ChannelAddress {
  uint8_t* base = nullptr;
  int64_t block_stride = 0;
  int64_t head_stride = 0;

  uint8_t* at(int64_t block, int head) const {
    return base + block * block_stride + head * head_stride;
  }
};

// What one KV head's K or V could not store as it came (format/saturation.hpp). The verbs add to
// it, from several threads; it lies where the blocks lie.
struct HeadCounts {
  int64_t nonfinite = 0;  // AppendReport's
  int64_t saturated = 0;  // finite numbers beyond the largest code
};

// K or V of a run of heads that are stored alike.
struct SideView {
  format::FormatSpec spec;
  int head_dim = 0;  // 0: this side is not stored
  CodeAddress codes;
  ScaleAddress scales;
  ChannelAddress channels;
  const float* tensor_scales = nullptr;  // [heads of the run]; null means 1
  // [heads of the run, head_dim, head_dim], weights above the diagonal, errors' weights or 0 on it
  // and 0 below: rows are rounded with error feedback (docs/numbers.md, sections 8 and 9). Null:
  // they are not.
  const float* feedback = nullptr;
  bool is_alias = false;         // V that is a part of K's rows (latent caches): never written
  bool is_interleaved = false;   // E2M1: format/interleaved_order.hpp, the GPU's verbs alone; int4
                                 // in fragments: ggml's q4_0 blocks (format/q4_0.hpp)
  HeadCounts* counts = nullptr;  // [heads of the run]; null: nobody wants them

  // Whether rows of its own are written: not of a side without numbers, nor of an alias.
  KVX_HOST_DEVICE bool is_stored() const { return head_dim > 0 && !is_alias; }
  float tensor_scale(int head) const { return tensor_scales ? tensor_scales[head] : 1.0f; }
  KVX_HOST_DEVICE const float* feedback_of(int head) const {
    return feedback ? feedback + int64_t{head} * head_dim * head_dim : nullptr;
  }
};

// Heads [first_head, first_head + num_heads) of a layer: one format for K, one for V.
struct HeadRun {
  int first_head = 0;
  int num_heads = 0;
  SideView k;
  SideView v;
};

// One layer of a cache. Block ids are [0, num_blocks), slots block * block_size + token.
// All runs of a layer have the same head_dim for K, and for V.
struct LayerView {
  int64_t num_blocks = 0;
  int block_size = 0;
  int num_kv_heads = 0;
  std::span<const HeadRun> runs;
  // K's rows may be a list of segments, each with formats and addresses of its own: the numbers
  // behind those of `runs` are this view's, which has the same blocks and heads and no V. A layer's
  // transforms are of its first segment alone. Null: there are no more.
  const LayerView* next_segment = nullptr;

  // Numbers of a row of K, all segments together. Requires: a run.
  int key_dim() const {
    int dim = 0;
    for (const LayerView* view = this; view != nullptr; view = view->next_segment) {
      dim += view->runs.front().k.head_dim;
    }
    return dim;
  }
};

// Block ids of a batch: block b of sequence s is ids[s * row_stride + b].
struct BlockTable {
  const int32_t* ids = nullptr;
  int64_t row_stride = 0;

  int32_t at(int sequence, int64_t block) const { return ids[sequence * row_stride + block]; }
};

}  // namespace kvx::ops
