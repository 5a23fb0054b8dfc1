// attend: attention of a ragged batch of queries over a paged cache, decode and prefill in one
// verb, straight from the packed bytes.
//
//   score = softcap(softmax_scale * q . k)      softcap(x) = c * tanh(x / c), c > 0
//   out   = sum_t softmax(scores, sink)_t * v_t
#pragma once

#include "ops/attend/args.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops {

// A query that sees nothing gets zeros and lse = -infinity (with a sink: lse = the sink).
// Same bits for any number of threads. Scratch is at most 176 KiB a thread, whatever the length;
// the partial results of long sequences lie in memory that the calling thread keeps, so that a call
// allocates nothing once one of its size has run. INVALID_ARGUMENT or OUT_OF_RANGE, nothing
// written: lengths, head counts, block ids or pointers that do not fit.
Status attend(const CpuContext& context, const AttendArgs& args);

}  // namespace kvx::ops
