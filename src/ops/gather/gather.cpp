// gather: checks every range, then decodes it block by block, undoes the transform and stores the
// caller's type.
#include "ops/gather/gather.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked.hpp"
#include "format/spec.hpp"
#include "ops/segments.hpp"
#include "ops/side_rows.hpp"
#include "ops/task_grid.hpp"

namespace kvx::ops {
namespace {

Status check_blocks(const GatherArgs& args, const GatherRange& range, size_t index) {
  const int64_t end = range.first_token + range.num_tokens;
  const int64_t block_size = args.cache.block_size;
  for (int64_t b = range.first_token / block_size; b * block_size < end; ++b) {
    const int64_t id = args.block_table.at(range.sequence, b);
    if (id >= 0 && id < args.cache.num_blocks) continue;
    return out_of_range("block {} of sequence {} is {}; ranges[{}] needs an id in 0 to {}", b,
                        range.sequence, id, index, args.cache.num_blocks - 1);
  }
  return {};
}

Status check_range(const GatherArgs& args, const GatherRange& range, size_t index) {
  const int64_t capacity = args.max_blocks_per_sequence * args.cache.block_size;
  if (range.sequence < 0 || range.sequence >= args.num_sequences) {
    return out_of_range("ranges[{}].sequence is {}; the block table has {} sequences", index,
                        range.sequence, args.num_sequences);
  }
  if (range.first_token < 0 || range.num_tokens < 0 || range.first_token > capacity ||
      range.num_tokens > capacity - range.first_token) {
    return out_of_range("ranges[{}] is {} tokens from {}; a block table row covers {}", index,
                        range.num_tokens, range.first_token, capacity);
  }
  if (range.first_row < 0 || range.num_tokens > args.num_rows ||
      range.first_row > args.num_rows - range.num_tokens) {
    return out_of_range("ranges[{}] goes to {} rows from row {}; expected rows in [0, {})", index,
                        range.num_tokens, range.first_row, args.num_rows);
  }
  const int64_t end = range.first_token + range.num_tokens;
  for (const SideTransform* transform : {&args.transform.k, &args.transform.v}) {
    const int64_t covered = transform->num_offset_blocks * args.cache.block_size;
    if (transform->block_offset == nullptr || end <= covered) continue;
    return out_of_range("ranges[{}] ends at token {}; block_offset covers {}", index, end, covered);
  }
  return range.num_tokens == 0 ? Status() : check_blocks(args, range, index);
}

// Some tokens of one block and where they go.
struct GatherRun {
  TokenRun tokens;
  int64_t first_position;  // of the first token, in its sequence
  int64_t first_row;       // of the output
};

// One call's work, shared by its tasks.
struct GatherTask {
  const CpuContext& context;
  const GatherArgs& args;
  TaskGrid tasks;

  void run(int task) {
    const int head = tasks.head_of(task);
    const HeadRun& heads = run_of_head(args.cache, head);
    const int64_t block_size = args.cache.block_size;
    int64_t run_number = 0;
    for (const GatherRange& range : args.ranges) {
      const int64_t end = range.first_token + range.num_tokens;
      for (int64_t t = range.first_token; t < end; ++run_number) {
        const int64_t block = t / block_size;
        const int64_t stop = std::min({end, (block + 1) * block_size, t + kTokensAtOnce});
        if (run_number % tasks.num_stripes == tasks.stripe_of(task)) {
          const TokenRun tokens = {args.block_table.at(range.sequence, block),
                                   static_cast<int>(t % block_size), static_cast<int>(stop - t)};
          const GatherRun found = {tokens, t, range.first_row + t - range.first_token};
          gather_side(heads.k, head - heads.first_head, head, found, args.k, args.transform.k);
          gather_side(heads.v, head - heads.first_head, head, found, args.v, args.transform.v);
        }
        t = stop;
      }
    }
  }

  void gather_side(const SideView& side, int head_in_run, int head, const GatherRun& run,
                   const MutableFloatRows& output, const SideTransform& transform) const {
    if (side.head_dim == 0 || output.data == nullptr) return;
    if (transform.is_identity() && stored_dtype(side.spec) == output.dtype) {
      copy_rows(side, head_in_run, head, run, output);
      return;
    }
    const int num_tokens = run.tokens.num_tokens;
    float* rows = scratch_floats(int64_t{num_tokens} * side.head_dim);
    decode_rows(*context.kernels, side, head_in_run, run.tokens, format::DecodeFor::kGather, rows);
    undo_transform(*context.kernels, transform, {head, args.cache.num_kv_heads, side.head_dim},
                   {.first = run.first_position, .block_size = args.cache.block_size}, rows,
                   num_tokens);
    for (int t = 0; t < num_tokens; ++t) {
      context.kernels->store_floats(output.dtype, rows + int64_t{t} * side.head_dim, side.head_dim,
                                    output.row(run.first_row + t, head));
    }
  }

  // The cache's own type: the bits stay, whatever they are.
  void copy_rows(const SideView& side, int head_in_run, int head, const GatherRun& run,
                 const MutableFloatRows& output) const {
    const int row_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
    for (int t = 0; t < run.tokens.num_tokens; ++t) {
      load_codes(side.codes,
                 side.codes.at(run.tokens.block, run.tokens.first_token + t, head_in_run),
                 row_bytes, output.row(run.first_row + t, head));
    }
  }
};

}  // namespace

Status check_gather(const GatherArgs& args) {
  for (size_t i = 0; i < args.ranges.size(); ++i) {
    KVX_RETURN_IF_ERROR(check_range(args, args.ranges[i], i));
  }
  return {};
}

Status gather(const CpuContext& context, const GatherArgs& args) {
  KVX_RETURN_IF_ERROR(check_gather(args));
  if (args.cache.next_segment != nullptr && args.k.data != nullptr) {
    KVX_RETURN_IF_ERROR(gather(context, next_segment_of(args)));
  }
  int64_t num_tokens = 0;
  for (const GatherRange& range : args.ranges) num_tokens += range.num_tokens;
  const int64_t num_floats = num_tokens * floats_per_token(args.cache);
  GatherTask task{
      context, args,
      cut_into_tasks(args.cache.num_kv_heads, ceil_div<int64_t>(num_tokens, 8), num_floats)};
  run_tasks(*context.executor, task.tasks.count(), num_floats, task);
  return {};
}

}  // namespace kvx::ops
