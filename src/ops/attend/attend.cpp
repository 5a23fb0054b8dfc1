// attend: checks, cuts the work into pieces that depend on shapes only, and hands them to the
// executor.
#include "ops/attend/attend.hpp"

#include <limits>

#include "core/checked.hpp"
#include "ops/attend/check.hpp"
#include "ops/attend/piece.hpp"

namespace kvx::ops {

Status attend(const CpuContext& context, const AttendArgs& args) {
  KVX_RETURN_IF_ERROR(check_attend(args));
  if (args.num_sequences == 0) return {};
  const HeadRun& run = args.packed.runs.front();
  AttendPlan plan = {
      .context = context,
      .args = args,
      .math = cpu::tile_kernels(context.kernels->level),
      .tiling = choose_tiling(run.k.head_dim, run.v.head_dim),
      .q_per_kv = args.num_q_heads / args.packed.num_kv_heads,
      .key_dim = run.k.head_dim,
      .value_dim = run.v.head_dim,
      .num_pieces = 0,
  };
  plan.num_pieces = first_slot(plan, args.num_sequences) * args.packed.num_kv_heads;
  if (plan.num_pieces > std::numeric_limits<int>::max()) {
    return out_of_range("q_starts[{}] is {}; {} pieces of work are more than one call can take",
                        args.num_sequences, args.q_starts[args.num_sequences], plan.num_pieces);
  }
  // One captured pointer fits into the std::function: nothing is allocated.
  context.executor->parallel_for(static_cast<int>(plan.num_pieces),
                                 [p = &plan](int piece) { attend_piece(*p, piece); });
  return {};
}

}  // namespace kvx::ops
