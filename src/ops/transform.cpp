// The terms of a transform, one row at a time; the Hadamard rotation is the CPU level's kernel.
#include "ops/transform.hpp"

#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops {
namespace {

// A head's part of a [num_kv_heads, head_dim] table; null when the term is absent.
const float* of_head(const float* table, const HeadPlace& place) {
  return table == nullptr ? nullptr : table + int64_t{place.head} * place.head_dim;
}

const float* offset_of(const SideTransform& transform, const HeadPlace& place, int64_t block) {
  if (transform.block_offset == nullptr) return nullptr;
  return of_head(transform.block_offset + block * place.num_kv_heads * place.head_dim, place);
}

}  // namespace

void apply_transform(const cpu::KernelTable& kernels, const SideTransform& transform,
                     const HeadPlace& place, const RowPositions& positions, float* rows,
                     int num_rows) {
  if (transform.is_identity()) return;
  const int head_dim = place.head_dim;
  const float* mean = of_head(transform.mean, place);
  const float* factor = of_head(transform.factor, place);
  for (int r = 0; r < num_rows; ++r) {
    float* x = rows + int64_t{r} * head_dim;
    const float* offset = offset_of(transform, place, positions.block_of(r));
    if (mean != nullptr) {
      for (int d = 0; d < head_dim; ++d) x[d] -= mean[d];
    }
    if (offset != nullptr) {
      for (int d = 0; d < head_dim; ++d) x[d] -= offset[d];
    }
    if (factor != nullptr) {
      for (int d = 0; d < head_dim; ++d) x[d] *= factor[d];
    }
  }
  if (transform.hadamard) kernels.hadamard_rows(rows, num_rows, head_dim);
}

void undo_transform(const cpu::KernelTable& kernels, const SideTransform& transform,
                    const HeadPlace& place, const RowPositions& positions, float* rows,
                    int num_rows) {
  if (transform.is_identity()) return;
  const int head_dim = place.head_dim;
  const float* mean = of_head(transform.mean, place);
  const float* factor = of_head(transform.factor, place);
  if (transform.hadamard) kernels.hadamard_rows(rows, num_rows, head_dim);
  for (int r = 0; r < num_rows; ++r) {
    float* x = rows + int64_t{r} * head_dim;
    const float* offset = offset_of(transform, place, positions.block_of(r));
    if (factor != nullptr) {
      for (int d = 0; d < head_dim; ++d) x[d] /= factor[d];
    }
    if (offset != nullptr) {
      for (int d = 0; d < head_dim; ++d) x[d] += offset[d];
    }
    if (mean != nullptr) {
      for (int d = 0; d < head_dim; ++d) x[d] += mean[d];
    }
  }
}

}  // namespace kvx::ops
