// Transforms: cheap changes of K and V before quantisation that fold into q and the output when
// attention reads them. docs/numbers.md, section 6, defines them. They belong to a layer and its
// heads, not to a format.
#pragma once

#include <cstdint>

namespace kvx::ops {

// Pointers are null where a term is absent. Their memory belongs to the caller and outlives the
// call.
struct SideTransform {
  const float* mean = nullptr;    // [num_kv_heads, head_dim]
  const float* factor = nullptr;  // [num_kv_heads, head_dim], positive and finite
  // [num_offset_blocks, num_kv_heads, head_dim], indexed by position / block_size; K only.
  const float* block_offset = nullptr;
  int64_t num_offset_blocks = 0;
  bool hadamard = false;

  bool is_identity() const { return !mean && !factor && !block_offset && !hadamard; }
};

struct LayerTransform {
  SideTransform k;
  SideTransform v;
};

// The Hadamard block: the largest power of two that divides head_dim. Requires: head_dim > 0.
constexpr int hadamard_block(int head_dim) {
  return head_dim & -head_dim;
}

}  // namespace kvx::ops
