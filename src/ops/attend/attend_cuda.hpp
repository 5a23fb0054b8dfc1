// attend on a GPU.
#pragma once

#include "ops/attend/attend.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// What the host must know to shape a launch; the lengths themselves stay on the device. A captured
// graph serves every batch within them.
struct CudaAttendLimits {
  int max_q_len = 1;       // of a sequence
  int64_t total_q = 0;     // rows of q and out; q_starts[num_sequences] at most
  int64_t max_tokens = 0;  // of a sequence; 0: max_blocks_per_sequence * block_size
};

// Which kernel runs. kReference takes everything in binary32; kDecodeMma and kPrefill are the
// tensor cores', for few and for many queries a sequence, and take what attend_has_decode_mma and
// attend_has_prefill say. kPrefillMma is kPrefill without wgmma, also where the code has that.
enum class CudaAttendPath : uint8_t { kChoose, kReference, kDecodeMma, kPrefill, kPrefillMma };

// Whether the decode_mma kernel takes this call: head_dims of multiples of 16 up to 256, blocks of
// a multiple of 16 tokens, rows on 16 bytes and scales on 4, full-precision window (if any) in
// bf16, no offsets by block, and a pair of formats that is compiled. docs/cuda/decode.md names
// them.
bool attend_has_decode_mma(const CudaContext& context, const AttendArgs& args);

// Whether a prefill kernel takes this call: as above, with rows in whole copies of 16 bytes,
// without a tree mask or a window's sinks, q and out on 16 bytes, and K and V both bf16, both f16
// (without full-precision window), both of fp8 (one scale a head), nvfp4, mxfp4 and mxfp4_g16, or
// both of fp8, int8, int4 and the affine formats. With bf16 queries those integers become f16
// numbers, rounded, and may stand beside E2M1; with others int8 and int4 have head_dims of up to
// 128. kPrefillMma takes head_dims of up to 128 alone.
bool attend_has_prefill(const CudaContext& context, const AttendArgs& args);

// Whether a pool's run of heads is best kept with its codes in interleaved order
// (format/interleaved.hpp): K and V of one E2M1 format, in blocks that the decode_mma kernel has an
// instance for on this device. run: as it will be stored.
bool attend_takes_interleaved_order(const CudaContext& context, const HeadRun& run, int block_size);

// What can be refused without the lengths, which are on the device. attend asks it itself.
Status check_attend(const AttendArgs& args, const CudaAttendLimits& limits);

// Bytes of device memory that the call needs besides its arguments: what the work tiles of split
// sequences leave for the merge; 0 where none is split. Requires: check_attend.
int64_t attend_workspace_bytes(const CudaContext& context, const AttendArgs& args,
                               const CudaAttendLimits& limits,
                               CudaAttendPath path = CudaAttendPath::kChoose);

// As attend on the CPU, on the context's stream. Nothing is allocated and nothing waits: the call
// can be captured. workspace begins on 256 bytes. What is wrong in lengths and tables is counted in
// *counters: a sequence whose length or queries are out of range gets zeros where its rows are
// known (of more than max_q_len queries in the first alone; the others' outputs are unspecified),
// tokens of a block out of range are not seen. INVALID_ARGUMENT or UNSUPPORTED, nothing
// launched.
Status attend(const CudaContext& context, const AttendArgs& args, const CudaAttendLimits& limits,
              uint8_t* workspace, DeviceCounters* counters,
              CudaAttendPath path = CudaAttendPath::kChoose);

}  // namespace kvx::ops
