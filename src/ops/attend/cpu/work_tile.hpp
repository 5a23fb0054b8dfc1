// A work tile of attention: one tile of query rows of one sequence and one KV head, over the tokens
// that they see or a part of them.
#pragma once

#include "ops/attend/attend.hpp"
#include "ops/attend/cpu/tile_kernels.hpp"
#include "ops/attend/tiling.hpp"

namespace kvx::ops {

// Whether scores are the products of queries and keys and nothing else.
inline bool has_plain_scores(const AttendArgs& args) {
  return args.softcap == 0 && args.transform.k.block_offset == nullptr &&
         args.packed.next_segment == nullptr;
}

// What all work tiles of a call share.
struct CpuAttendPlan {
  const CpuContext& context;
  const AttendArgs& args;
  const cpu::TileKernels& math;
  Tiling tiling;
  bool on_matrix_unit;  // work tiles with enough rows
  int q_per_kv;
  int key_dim;  // of all segments of a row
  int value_dim;
  int heads_together;  // KV heads of a work tile
  // Work tiles are numbered slot * (num_kv_heads / heads_together) + first head / heads_together;
  // sequence s owns the slots from first_slot(s) on.
  int64_t num_work_tiles;
  Split split;
  // [num_work_tiles, num_parts] partial results, each [heads_together][rows][sum, max, value_dim
  // weighted sums]; null without a split.
  float* partial_results;

  int64_t floats_per_head() const { return int64_t{tiling.rows} * (value_dim + 2); }
  int64_t floats_per_part() const { return heads_together * floats_per_head(); }
  int work_tiles_per_slot() const { return args.packed.num_kv_heads / heads_together; }
};

// Sequence s's rows are q_len(s) * q_per_kv and need at most first_slot(s + 1) - first_slot(s)
// tiles: a closed form, so that finding a work tile's sequence needs no table. A slot may turn out
// empty.
inline int64_t first_slot(const CpuAttendPlan& plan, int sequence) {
  const int64_t rows_before =
      (int64_t{plan.args.q_starts[sequence]} - plan.args.q_starts[0]) * plan.q_per_kv;
  return rows_before / plan.tiling.rows + sequence;
}

// Without a split: the whole work tile.
void attend_work_tile(const CpuAttendPlan& plan, int64_t work_tile);

// With one: every part of every work tile, then every work tile's merge.
void attend_part(const CpuAttendPlan& plan, int64_t work_tile, int part);
void merge_parts(const CpuAttendPlan& plan, int64_t work_tile);

}  // namespace kvx::ops
