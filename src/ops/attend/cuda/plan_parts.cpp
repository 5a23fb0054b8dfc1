// How a call is cut into parts, and what each part's limits are.
#include "ops/attend/cuda/plan_parts.hpp"

namespace kvx::ops::cuda {
namespace {

const int32_t* behind(const int32_t* numbers, int count) {
  return numbers != nullptr ? numbers + count : nullptr;
}

// Row q_starts[first_sequence] is first_row at most. Rows that no sequence of the part can have
// are padding, for which neither workspace nor CTAs are needed.
SequencePart part_of(const CudaAttendLimits& limits, int first_sequence, int num_sequences,
                     int max_q_len, int64_t first_row) {
  SequencePart part;
  part.first_sequence = first_sequence;
  part.num_sequences = num_sequences;
  part.limits = limits;
  part.limits.num_decodes = 0;
  part.limits.max_q_len = max_q_len;
  part.limits.total_q = std::min(limits.total_q, first_row + int64_t{num_sequences} * max_q_len);
  return part;
}

}  // namespace

AttendArgs args_of_sequences(const AttendArgs& args, int first, int num) {
  AttendArgs part = args;
  part.num_sequences = num;
  const TableInPlace& table = args.in_place;
  if (args.block_table.ids && table.indptr == nullptr)
    part.block_table.ids += first * args.block_table.row_stride * table.entry_words;
  part.in_place.indptr = behind(table.indptr, first * table.indptr_words);
  part.seq_lens = behind(args.seq_lens, first * table.length_words);
  part.q_starts = behind(args.q_starts, first);
  part.num_sink_blocks = behind(args.num_sink_blocks, first);
  part.first_recent_block = behind(args.first_recent_block, first);
  return part;
}

bool plan_parts(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
                CudaAttendPath path, PartsPlan& plan) {
  const int num_decodes = limits.num_decodes;
  plan.num_parts = 0;
  const auto add_part = [&](int first, int num, int max_q_len) {
    SequencePart& part = plan.parts[plan.num_parts];
    CallPlan kept = std::move(part.plan);  // for its memory
    part = part_of(limits, first, num, max_q_len, /*first_row=*/first);
    part.plan = std::move(kept);
    ++plan.num_parts;
    return plan_attend(context, args_of_sequences(args, first, num), part.limits, path, part.plan);
  };
  // Decodes of one launch with sequences of one query would gain nothing by a launch of their own.
  if (num_decodes == 0 || limits.max_q_len == 1) {
    return add_part(0, args.num_sequences, limits.max_q_len);
  }
  if (!add_part(0, num_decodes, 1)) return false;
  return num_decodes == args.num_sequences ||
         add_part(num_decodes, args.num_sequences - num_decodes, limits.max_q_len);
}

}  // namespace kvx::ops::cuda
