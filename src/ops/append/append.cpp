// append: checks every slot, cuts the tokens into runs inside a block, and encodes run by run.
#include "ops/append/append.hpp"

#include <atomic>
#include <cstring>
#include <vector>

#include "core/scratch.hpp"
#include "ops/append/dual_scale/window_rounding.hpp"
#include "ops/segments.hpp"
#include "ops/side_rows.hpp"
#include "ops/task_grid.hpp"

namespace kvx::ops {
namespace {

// Consecutive tokens of the call in consecutive slots of one block.
struct AppendRun {
  TokenRun tokens;
  int64_t first_row;  // of the caller's k and v
  int64_t place;      // runs that may share bytes have the same place
};

Status check_slots(const AppendArgs& args) {
  const int64_t num_slots = args.cache.num_blocks * args.cache.block_size;
  for (size_t t = 0; t < args.slot_mapping.size(); ++t) {
    if (args.slot_mapping[t] < num_slots) continue;
    return out_of_range("slot_mapping[{}] is {}; the cache has {} slots ({} blocks of {})", t,
                        args.slot_mapping[t], num_slots, args.cache.num_blocks,
                        args.cache.block_size);
  }
  return {};
}

Status check_positions(const AppendArgs& args, const SideTransform& transform) {
  if (transform.block_offset == nullptr) return {};
  if (args.positions.size() < args.slot_mapping.size()) {
    return invalid_argument("positions has {} entries; a block_offset transform needs {}",
                            args.positions.size(), args.slot_mapping.size());
  }
  const int64_t num_positions = transform.num_offset_blocks * args.cache.block_size;
  for (size_t t = 0; t < args.slot_mapping.size(); ++t) {
    if (args.slot_mapping[t] < 0) continue;
    if (args.positions[t] >= 0 && args.positions[t] < num_positions) continue;
    return invalid_argument("positions[{}] is {}; block_offset covers 0 to {} ({} blocks of {})", t,
                            args.positions[t], num_positions - 1, transform.num_offset_blocks,
                            args.cache.block_size);
  }
  return {};
}

// Returns how many tokens the runs hold.
int64_t cut_into_runs(const AppendArgs& args, std::vector<AppendRun>& runs) {
  const std::span<const int64_t> slots = args.slot_mapping;
  const int block_size = args.cache.block_size;
  const int longest = tokens_encoded_at_once(args.cache);
  const int64_t places_per_block = (block_size + longest - 1) / longest;
  const int64_t num_tokens = static_cast<int64_t>(slots.size());
  int64_t written = 0;
  runs.clear();
  for (int64_t t = 0; t < num_tokens;) {
    if (slots[t] < 0) {
      ++t;
      continue;
    }
    const int64_t block = slots[t] / block_size;
    const int offset = static_cast<int>(slots[t] % block_size);
    const int place = offset / longest;
    const int room = std::min((place + 1) * longest, block_size) - offset;
    int n = 1;
    while (n < room && t + n < num_tokens && slots[t + n] == slots[t] + n) ++n;
    runs.push_back({{block, offset, n}, t, block * places_per_block + place});
    written += n;
    t += n;
  }
  return written;
}

// A dual-scale block is quantised whole: its tokens come together. Requires: the layer has some.
Status check_whole_blocks(const AppendArgs& args, std::span<const AppendRun> runs) {
  const format::FormatSpec* spec = dual_format_of(args.cache);
  for (const AppendRun& run : runs) {
    if (run.tokens.num_tokens == args.cache.block_size) continue;
    return invalid_argument(
        "slot_mapping[{}] begins {} tokens of block {}; {} quantises whole blocks: pass the {} "
        "tokens of a block in one call, or append them to a window and copy the block when it is "
        "full",
        run.first_row, run.tokens.num_tokens, run.tokens.block, spec->facts->name,
        args.cache.block_size);
  }
  return {};
}

// One call's work, shared by its tasks.
struct AppendTask {
  const CpuContext& context;
  const AppendArgs& args;
  std::span<const AppendRun> runs;
  TaskGrid tasks;
  std::atomic<int64_t> nonfinite{0};

  void run(int task) {
    const int head = tasks.head_of(task);
    int64_t found = 0;
    for (const AppendRun& run : runs) {
      if (run.place % tasks.num_stripes != tasks.stripe_of(task)) continue;
      const HeadRun& heads = run_of_head(args.cache, head);
      const int head_in_run = head - heads.first_head;
      prefetch_rows(heads.k, head, run, args.k);
      prefetch_rows(heads.v, head, run, args.v);
      found += append_side(heads.k, head_in_run, head, run, args.k, args.transform.k);
      found += append_side(heads.v, head_in_run, head, run, args.v, args.transform.v);
    }
    if (found != 0) nonfinite += found;
  }

  // Returns the number of non-finite inputs that no code can express.
  int64_t append_side(const SideView& side, int head_in_run, int head, const AppendRun& run,
                      const FloatRows& input, const SideTransform& transform) const {
    if (!side.is_stored()) return 0;
    if (transform.is_identity() && stored_dtype(side.spec) == input.dtype) {
      copy_rows(side, head_in_run, head, run, input);
      return 0;
    }
    const bool is_rounded =
        side.spec.is_dual() && args.window_dtype.value_or(input.dtype) != input.dtype;
    if (transform.is_identity() && !is_rounded && can_read_in_place(input)) {
      const auto* rows = reinterpret_cast<const float*>(input.row(run.first_row, head));
      return encode_rows(*context.kernels, side, head_in_run, run.tokens,
                         {rows, input.token_stride});
    }
    const int num_tokens = run.tokens.num_tokens;
    float* rows = scratch_floats(int64_t{num_tokens} * side.head_dim);
    for (int t = 0; t < num_tokens; ++t) {
      context.kernels->load_floats(input.dtype, input.row(run.first_row + t, head), side.head_dim,
                                   rows + int64_t{t} * side.head_dim);
    }
    const RowPositions positions = {
        .list = args.positions.empty() ? nullptr : args.positions.data() + run.first_row,
        .block_size = args.cache.block_size};
    apply_transform(*context.kernels, transform, {head, args.cache.num_kv_heads, side.head_dim},
                    positions, rows, num_tokens);
    if (side.spec.is_dual()) round_to_window(rows, int64_t{num_tokens} * side.head_dim);
    return encode_rows(*context.kernels, side, head_in_run, run.tokens, {rows, side.head_dim});
  }

  void round_to_window(float* numbers, int64_t count) const {
    if (!args.window_dtype) return;
    for (int64_t i = 0; i < count; ++i) numbers[i] = rounded_to(*args.window_dtype, numbers[i]);
  }

  // Whether the kernels can read the rows where they lie: aligned floats. Kernels do not support a
  // stride of 0.
  static bool can_read_in_place(const FloatRows& input) {
    return input.dtype == DType::kF32 && input.token_stride != 0 &&
           reinterpret_cast<uintptr_t>(input.data) % alignof(float) == 0;
  }

  // A head's rows lie far apart, each in a page of its own for most shapes, where the processor
  // does not see the next one coming.
  static void prefetch_rows(const SideView& side, int head, const AppendRun& run,
                            const FloatRows& input) {
    if (!side.is_stored()) return;
    constexpr int kLine = 64;
    const int row_bytes = side.head_dim * bytes_of(input.dtype);
    for (int t = 0; t < run.tokens.num_tokens; ++t) {
      const uint8_t* row = input.row(run.first_row + t, head);
      for (int i = 0; i < row_bytes; i += kLine) __builtin_prefetch(row + i, 0, 2);
    }
  }

  // The cache's own type: the bits stay, whatever they are.
  void copy_rows(const SideView& side, int head_in_run, int head, const AppendRun& run,
                 const FloatRows& input) const {
    const int row_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
    for (int t = 0; t < run.tokens.num_tokens; ++t) {
      store_codes(side.codes, input.row(run.first_row + t, head), row_bytes,
                  side.codes.at(run.tokens.block, run.tokens.first_token + t, head_in_run));
    }
  }
};

}  // namespace

Status check_append(const AppendArgs& args) {
  KVX_RETURN_IF_ERROR(check_slots(args));
  KVX_RETURN_IF_ERROR(check_positions(args, args.transform.k));
  KVX_RETURN_IF_ERROR(check_positions(args, args.transform.v));
  if (dual_format_of(args.cache) == nullptr) return {};
  Scratch<std::vector<AppendRun>> runs;
  cut_into_runs(args, *runs);
  return check_whole_blocks(args, *runs);
}

Result<AppendReport> append(const CpuContext& context, const AppendArgs& args) {
  KVX_RETURN_IF_ERROR(check_append(args));
  Scratch<std::vector<AppendRun>> kept_runs;
  std::vector<AppendRun>& runs = *kept_runs;
  const int64_t tokens_written = cut_into_runs(args, runs);
  AppendReport rest;
  if (args.cache.next_segment != nullptr) {
    KVX_ASSIGN_OR_RETURN(rest, append(context, next_segment_of(args)));
  }

  const int64_t num_floats = tokens_written * floats_per_token(args.cache);
  AppendTask task{context, args, runs,
                  cut_into_tasks(args.cache.num_kv_heads, std::ssize(runs), num_floats)};
  run_tasks(*context.executor, task.tasks.count(), num_floats, task);
  return AppendReport{tokens_written, task.nonfinite + rest.nonfinite_inputs};
}

}  // namespace kvx::ops
