// Transforms: cheap changes of K and V before quantisation that fold into q and the output when
// attention reads them. docs/numbers.md, section 6, defines them. They belong to a layer and its
// heads, not to a format.
#pragma once

#include <cstdint>

namespace kvx::ops::cpu {
struct KernelTable;
}

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

// Which rows of the transform's tables belong to a head.
struct HeadPlace {
  int head = 0;  // of the layer
  int num_kv_heads = 0;
  int head_dim = 0;
};

// Absolute positions of consecutive rows: list[r], or first + r without a list.
struct RowPositions {
  const int64_t* list = nullptr;
  int64_t first = 0;
  int block_size = 1;

  int64_t block_of(int row) const { return (list ? list[row] : first + row) / block_size; }
};

// In place, rows [num_rows, head_dim] of one head. With a block_offset, every row's block is inside
// its table (checked by the verb). undo(apply(x)) is x up to rounding.
void apply_transform(const cpu::KernelTable& kernels, const SideTransform& transform,
                     const HeadPlace& place, const RowPositions& positions, float* rows,
                     int num_rows);
void undo_transform(const cpu::KernelTable& kernels, const SideTransform& transform,
                    const HeadPlace& place, const RowPositions& positions, float* rows,
                    int num_rows);

}  // namespace kvx::ops
