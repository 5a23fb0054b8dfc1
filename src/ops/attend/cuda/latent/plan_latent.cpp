// The latent kernel's calls: rows in 16 bits of 576 numbers, the first 512 of which are the value.
#include "ops/attend/cuda/latent/plan_latent.hpp"

#include "device/cuda.hpp"
#include "ops/attend/cuda/common/tile_side.hpp"

namespace kvx::ops::cuda {
namespace {

// A V that is no part of K's rows has bytes of its own.
bool is_prefix_of_k(const HeadRun& run) {
  const CodeAddress &k = run.k.codes, &v = run.v.codes;
  return run.v.is_alias ||
         (run.v.spec == run.k.spec && v.base == k.base && v.block_stride == k.block_stride &&
          v.token_stride == k.token_stride && v.head_stride == k.head_stride);
}

}  // namespace

LatentKernel latent_instance(const CudaContext& context, const AttendArgs& args,
                             const HeadRun& run) {
  const bool has_hopper_code = device::cuda_code_version(context.device) == 90;
  const bool is_plain = args.transform.k.is_identity() && args.transform.v.is_identity() &&
                        args.num_sink_blocks == nullptr && args.window_sinks == 0;
  if (!has_hopper_code || !is_plain || !is_prefix_of_k(run)) return {};
  if (args.packed.block_size % kTileTokens != 0 ||
      !can_copy(run.k, args.packed.block_size, run.num_heads, false))
    return {};
  const LatentKernel kernel =
      find_latent_kernel(run.k.spec.facts->id, run.k.head_dim, run.v.head_dim);
  return kernel.shared_bytes <= context.device.shared_bytes_per_cta ? kernel : LatentKernel{};
}

void plan_latent(const CudaContext& context, const AttendArgs& args, SplitShape shape,
                 int64_t most_parts, WorkTilePlan& plan) {
  shape.num_slots = context.device.num_multiprocessors;  // one CTA each
  shape.granule = kLatentStepTokens;
  // In steps of a CTA: its queries, first copies and outputs; a launch that merges.
  shape.overhead = 1;
  shape.merge = 1;
  plan.num_splits = plan_splits(shape).num_splits;
  constexpr int64_t kWorkTilesOfSequence = 3;
  if (args.num_sequences < 2 || args.window > 0 || shape.max_tokens < kLongSequence) return;
  const int64_t tiles_of_sequence = shape.num_work_tiles / args.num_sequences;
  const int64_t waves = ceil_div(kWorkTilesOfSequence * shape.num_work_tiles, shape.num_slots);
  const int64_t parts_of_budget = tiles_of_sequence * kLatentRows;
  const int64_t budget =
      std::min(waves * shape.num_slots / tiles_of_sequence, most_parts / parts_of_budget);
  if (budget >= 2 * int64_t{args.num_sequences})
    plan.balanced_work_tiles = static_cast<int>(budget);
}

}  // namespace kvx::ops::cuda
