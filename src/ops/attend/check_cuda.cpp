// What a call of attend on a GPU is refused for before anything is planned by it.
#include <algorithm>
#include <cstdint>

#include "ops/attend/attend_cuda.hpp"
#include "ops/attend/check.hpp"

namespace kvx::ops {

namespace {

// What the reference kernel takes of rows in segments.
Status check_segments(const AttendArgs& args) {
  const LayerView* more = args.packed.next_segment;
  if (more == nullptr) return {};
  if (more->next_segment != nullptr) {
    return unsupported("packed has rows of three segments and more; attend on CUDA takes two");
  }
  const auto is_cut_alike = [](const HeadRun& a, const HeadRun& b) {
    return a.first_head == b.first_head && a.num_heads == b.num_heads;
  };
  if (std::ranges::equal(args.packed.runs, more->runs, is_cut_alike)) return {};
  return unsupported(
      "packed has {} runs of heads in its first segment and {} in the second; attend on CUDA takes "
      "the same heads in both",
      args.packed.runs.size(), more->runs.size());
}

}  // namespace

Status check_attend(const AttendArgs& args, const CudaAttendLimits& limits) {
  KVX_RETURN_IF_ERROR(check_attend_shape(args));
  KVX_RETURN_IF_ERROR(check_segments(args));
  if (args.num_sink_blocks && args.full_precision.runs.size() != 1) {
    return unsupported("full_precision has {} runs of heads; attend on CUDA takes 1",
                       args.full_precision.runs.size());
  }
  if (args.num_sequences > kMaxCudaSequences) {
    return invalid_argument("num_sequences is {}; expected 0 to {}", args.num_sequences,
                            kMaxCudaSequences);
  }
  // Query rows are counted in 32 bits.
  const int most_q_len = INT32_MAX / args.num_q_heads;
  if (limits.max_q_len < 1 || limits.max_q_len > most_q_len || limits.total_q < 0 ||
      limits.total_q > most_q_len) {
    return invalid_argument("max_q_len is {}, total_q {}; expected 1 to {}, and 0 to {}",
                            limits.max_q_len, limits.total_q, most_q_len, most_q_len);
  }
  if (limits.num_decodes < 0 || limits.num_decodes > args.num_sequences) {
    return invalid_argument("num_decodes is {}; expected 0 to num_sequences, {}",
                            limits.num_decodes, args.num_sequences);
  }
  if (args.tree_mask && args.tree_mask_stride < limits.max_q_len) {
    return invalid_argument("tree_mask_stride is {}; expected at least max_q_len, {}",
                            args.tree_mask_stride, limits.max_q_len);
  }
  const void* needed[] = {args.seq_lens, args.q_starts, args.block_table.ids, args.q.data,
                          args.out.data};
  const char* names[] = {"seq_lens", "q_starts", "block_table", "q", "out"};
  for (int i = 0; i < 5 && limits.total_q > 0; ++i) {
    if (!needed[i]) return invalid_argument("{} is null", names[i]);
  }
  return {};
}

}  // namespace kvx::ops
