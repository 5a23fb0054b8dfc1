// A piece of attention: one tile of query rows of one sequence and one KV head, over all tokens
// that they see.
#pragma once

#include "ops/attend/attend.hpp"
#include "ops/attend/cpu/tile_kernels.hpp"
#include "ops/attend/tiling.hpp"

namespace kvx::ops {

// What all pieces of a call share.
struct AttendPlan {
  const CpuContext& context;
  const AttendArgs& args;
  const cpu::TileKernels& math;
  Tiling tiling;
  int q_per_kv;
  int key_dim;
  int value_dim;
  // Pieces are numbered slot * num_kv_heads + kv_head; sequence s owns the slots from first_slot(s)
  // on.
  int64_t num_pieces;
};

// Sequence s's rows are q_len(s) * q_per_kv and need at most first_slot(s + 1) - first_slot(s)
// tiles: a closed form, so that finding a piece's sequence needs no table. A slot may turn out
// empty.
inline int64_t first_slot(const AttendPlan& plan, int sequence) {
  const int64_t rows_before =
      (int64_t{plan.args.q_starts[sequence]} - plan.args.q_starts[0]) * plan.q_per_kv;
  return rows_before / plan.tiling.rows + sequence;
}

void attend_piece(const AttendPlan& plan, int64_t piece);

}  // namespace kvx::ops
