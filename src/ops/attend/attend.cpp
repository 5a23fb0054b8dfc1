// attend: checks, cuts the work into work tiles that depend on shapes only, and hands them to the
// executor.
#include "ops/attend/attend.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/checked.hpp"
#include "core/scratch.hpp"
#include "core/stop.hpp"
#include "ops/attend/check.hpp"
#include "ops/attend/cpu/work_tile.hpp"

namespace kvx::ops {
namespace {

// The most rows of a sequence and a KV head, and the most tokens that a work tile reads.
struct LargestWorkTile {
  int64_t rows = 0;
  int64_t tokens = 0;
};

LargestWorkTile largest_work_tile(const AttendArgs& args, int q_per_kv) {
  LargestWorkTile largest;
  for (int s = 0; s < args.num_sequences; ++s) {
    const int64_t q_len = args.q_starts[s + 1] - args.q_starts[s];
    if (q_len == 0) continue;
    const int64_t seen = args.window > 0 ? std::min<int64_t>(args.seq_lens[s], args.window + q_len)
                                         : args.seq_lens[s];
    largest.rows = std::max(largest.rows, q_len * q_per_kv);
    largest.tokens = std::max(largest.tokens, seen);
  }
  return largest;
}

// Whether the heads' rows of a token lie side by side and those of the next token after them.
bool is_token_major(const SideView& side, int num_heads) {
  const int row_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
  return !side.codes.is_fragmented() && side.codes.head_stride == row_bytes &&
         side.codes.token_stride >= int64_t{num_heads} * row_bytes;
}

int heads_together(const AttendArgs& args, const Tiling& tiling, int64_t num_work_tiles,
                   int64_t max_tokens) {
  const HeadRun& run = args.packed.runs.front();
  const int num_heads = args.packed.num_kv_heads;
  const bool is_alone = args.packed.runs.size() == 1 && args.num_sink_blocks == nullptr &&
                        args.packed.next_segment == nullptr;
  if (!is_alone || !is_token_major(run.k, num_heads) || !is_token_major(run.v, num_heads)) return 1;
  return choose_heads_together(tiling, run.k.head_dim, run.v.head_dim, num_heads, num_work_tiles,
                               std::max<int64_t>(max_tokens / kFewestPartTokens, 1));
}

// Whether a side's packed kernels take as many query rows as a tile has.
bool has_packed_kernels(const cpu::TileKernels& math, const SideView& side) {
  const auto* kernels = math.find_packed(side.spec, side.head_dim, Precision::kAccurate);
  return kernels != nullptr && kernels->most_rows >= kMaxTileRows;
}

// Whether a matrix unit is the fastest way to products with the side's rows. Rows that have packed
// kernels for many query rows are packed for the unit where every score is a product alone; else
// they would be decoded for it, which pays for one product, and not for affine nibbles.
bool suits_matrix_unit(const cpu::TileKernels& math, const AttendArgs& args, const SideView& side) {
  const int bits = side.spec.facts->element_bits;
  if (bits > 16 || side.spec.is_dual()) return false;  // two parts have 16 bits
  if (!has_packed_kernels(math, side) || has_plain_scores(args)) return true;
  const bool is_slow_to_decode = side.spec.is_affine() && bits < 8;
  return args.precision == Precision::kFast && !is_slow_to_decode;
}

bool suits_matrix_unit(const cpu::TileKernels& math, const AttendArgs& args) {
  if (math.matrix == nullptr) return false;
  for (const LayerView* view : {&args.packed, &args.full_precision}) {
    if (view == &args.full_precision && args.num_sink_blocks == nullptr) continue;
    for (const HeadRun& run : view->runs) {
      if (!fits_matrix_unit(run.k.head_dim, run.v.head_dim) ||
          !suits_matrix_unit(math, args, run.k) || !suits_matrix_unit(math, args, run.v)) {
        return false;
      }
    }
  }
  return true;
}

// No rows: the matrix unit takes none of the work tiles.
Tiling matrix_tiling_of(const cpu::TileKernels& math, const AttendArgs& args, int64_t max_rows) {
  if (!suits_matrix_unit(math, args)) return {};
  const HeadRun& run = args.packed.runs.front();
  const Tiling tiling = choose_matrix_tiling(args.packed.key_dim(), run.v.head_dim, max_rows);
  const bool is_packed = has_packed_kernels(math, run.k) || has_packed_kernels(math, run.v);
  return is_packed && tiling.rows < math.matrix->fewest_packed_rows ? Tiling{} : tiling;
}

void run_split(CpuAttendPlan& plan) {
  const int num_parts = plan.split.num_parts;
  const int num_work_tiles = static_cast<int>(plan.num_work_tiles);
  Scratch<std::vector<float>> memory;  // it grows to the largest call's size and stays
  const auto num_floats =
      static_cast<size_t>(plan.num_work_tiles * num_parts * plan.floats_per_part());
  if (memory->size() < num_floats) memory->resize(num_floats);
  plan.partial_results = memory->data();
  StopWish* const stop = stop_wish();
  plan.context.executor->parallel_for(num_work_tiles * num_parts, [p = &plan, stop](int i) {
    if (is_stop_wished(stop)) return;
    attend_part(*p, i / p->split.num_parts, i % p->split.num_parts);
  });
  if (is_stop_wished(stop)) return;
  plan.context.executor->parallel_for(num_work_tiles, [p = &plan](int i) { merge_parts(*p, i); });
}

}  // namespace

Status attend(const CpuContext& context, const AttendArgs& args) {
  KVX_RETURN_IF_ERROR(check_attend(args));
  if (args.num_sequences == 0) return {};
  const int key_dim = args.packed.key_dim();
  const int value_dim = args.packed.runs.front().v.head_dim;
  const int q_per_kv = args.num_q_heads / args.packed.num_kv_heads;
  const LargestWorkTile largest = largest_work_tile(args, q_per_kv);
  const cpu::TileKernels& math = cpu::tile_kernels(context.kernels->level);
  const Tiling matrix_tiling = matrix_tiling_of(math, args, largest.rows);
  const bool on_matrix_unit = matrix_tiling.rows > 0;
  CpuAttendPlan plan = {
      .context = context,
      .args = args,
      .math = math,
      .tiling = on_matrix_unit ? matrix_tiling : choose_tiling(key_dim, value_dim, largest.rows),
      .on_matrix_unit = on_matrix_unit,
      .q_per_kv = q_per_kv,
      .key_dim = key_dim,
      .value_dim = value_dim,
      .heads_together = 1,
      .num_work_tiles = 0,
      .split = {},
      .partial_results = nullptr,
  };
  plan.num_work_tiles = first_slot(plan, args.num_sequences) * args.packed.num_kv_heads;
  if (plan.num_work_tiles > std::numeric_limits<int>::max()) {
    return out_of_range("q_starts[{}] is {}; {} work_tiles of work are more than one call can take",
                        args.num_sequences, args.q_starts[args.num_sequences], plan.num_work_tiles);
  }
  plan.heads_together = heads_together(args, plan.tiling, plan.num_work_tiles, largest.tokens);
  plan.num_work_tiles /= plan.heads_together;
  plan.split = choose_split(plan.num_work_tiles, largest.tokens);
  if (plan.split.num_parts > 1) {
    run_split(plan);
    return {};
  }
  // Two captured pointers fit into the std::function: nothing is allocated.
  context.executor->parallel_for(static_cast<int>(plan.num_work_tiles),
                                 [p = &plan, stop = stop_wish()](int work_tile) {
                                   if (is_stop_wished(stop)) return;
                                   attend_work_tile(*p, work_tile);
                                 });
  return {};
}

}  // namespace kvx::ops
