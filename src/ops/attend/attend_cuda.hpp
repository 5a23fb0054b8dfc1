// attend on a GPU.
#pragma once

#include <memory>

#include "ops/attend/attend.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

inline constexpr int kMaxCudaSequences = 65535;          // a GPU's limit for a dimension of a grid
inline constexpr int64_t kCudaWorkspaceAlignment = 256;  // bytes

// What the host must know to shape a launch; the lengths themselves stay on the device. A captured
// graph serves every batch within them.
//
// total_q may exceed the queries that there are: rows from q_starts[num_sequences] on are padding,
// which is neither read nor written. q_starts[0] is 0. A sequence without queries is padding, too.
struct CudaAttendLimits {
  int max_q_len = 1;       // of a sequence
  int64_t total_q = 0;     // rows of q and out; q_starts[num_sequences] or more
  int64_t max_tokens = 0;  // of a sequence; 0: max_blocks_per_sequence * block_size
  // The first num_decodes sequences have one query each, or none. They and the others are planned
  // and launched apart, so that a prompt's max_q_len does not shape the launch of decodes. 0: it
  // is not known, and one launch serves all.
  int num_decodes = 0;

  friend bool operator==(const CudaAttendLimits&, const CudaAttendLimits&) = default;
};

// Which kernel runs. kReference takes everything in binary32; kDecodeMma and kPrefill are the
// tensor cores', for few and for many queries a sequence, and take what attend_has_decode_mma and
// attend_has_prefill say; kLatent is theirs for rows that are keys and values (attend_has_latent).
// kPrefillMma and kLatentMma are without wgmma, also where the code has that.
enum class CudaAttendPath : uint8_t {
  kChoose,
  kReference,
  kDecodeMma,
  kLatent,
  kLatentMma,
  kPrefill,
  kPrefillMma
};

// Whether the decode_mma kernel takes this call: head_dims of multiples of 16 up to 256, blocks of
// a multiple of 16 tokens, rows on 16 bytes and scales on 4, full-precision window (if any) in
// bf16, no sinks of a window beside K's block offsets, and a pair of formats that is compiled.
// docs/cuda/decode.md names them.
bool attend_has_decode_mma(const CudaContext& context, const AttendArgs& args);

// Whether a latent kernel takes this call: rows of 576 numbers on 16 bytes, whose first 512 are V,
// in bf16, f16, nvfp4, mxfp4, mxfp4_g16, int8 or int4 (groups of 64, f16 scales), an affine format,
// or fp8; the last 64 may be a segment in bf16 or f16; full-precision window (if any) in bf16; no
// window's sinks, interleaved order or block offsets of K. With wgmma, in code for compute
// capability 9.0 alone: blocks of a multiple of 16 tokens, no full-precision window or transform.
bool attend_has_latent(const CudaContext& context, const AttendArgs& args);

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

// What can be refused without the lengths, which are on the device. attend checks it itself.
Status check_attend(const AttendArgs& args, const CudaAttendLimits& limits);

// Bytes of device memory that the call needs besides its arguments: what the work tiles of split
// sequences leave for the merge; 0 where none is split. Requires: check_attend.
int64_t attend_workspace_bytes(const CudaContext& context, const AttendArgs& args,
                               const CudaAttendLimits& limits,
                               CudaAttendPath path = CudaAttendPath::kChoose);

// Limits of a range of calls, each of which is within all of them.
struct CudaAttendBounds {
  int max_sequences = 0;
  int64_t max_total_q = 0;
  int max_q_len = 1;
  int64_t max_tokens = 0;  // of a sequence; 0: max_blocks_per_sequence * block_size
};

// At least attend_workspace_bytes of every call with these layers, heads and options whose
// num_sequences and limits are within the bounds, with any num_decodes and any alignment of q and
// out. A plan takes at most 64 MiB, unless the call has so many query rows that their partial
// results need more where no row is split: the reference kernel's, and those of a window with more
// than 16 sinks. args: its num_sequences and its pointers to arrays of the batch do not matter.
int64_t attend_workspace_bytes_up_to(const CudaContext& context, const AttendArgs& args,
                                     const CudaAttendBounds& bounds,
                                     CudaAttendPath path = CudaAttendPath::kChoose);

// How a call runs, chosen once and launched for every layer that is stored alike. Made once a step,
// it spares each layer the host time of planning.
class AttendPlan {
 public:
  // A plan for calls of these shapes: args' layers, heads, options, num_sequences and table width.
  // Addresses do not belong to it, except whether they are on 16 bytes. INVALID_ARGUMENT or
  // UNSUPPORTED as attend; nothing is launched.
  static Result<AttendPlan> make(const CudaContext& context, const AttendArgs& args,
                                 const CudaAttendLimits& limits,
                                 CudaAttendPath path = CudaAttendPath::kChoose);
  // One of the last eight plans that this function made in this thread, if it serves the call;
  // otherwise a new one. It lives until the thread's next call of this function. What make returns
  // otherwise.
  static Result<const AttendPlan*> of_thread(const CudaContext& context, const AttendArgs& args,
                                             const CudaAttendLimits& limits);
  AttendPlan(AttendPlan&& other) noexcept;
  AttendPlan& operator=(AttendPlan&& other) noexcept;
  ~AttendPlan();

  // Device memory that a launch of this plan needs, on 256 bytes; 0 where no row is split.
  int64_t workspace_bytes() const;
  const CudaAttendLimits& limits() const;
  // Whether the planned kernels take a table that is not plain (AttendArgs::in_place): decode_mma
  // alone, without a window's sinks, a full-precision window or K's block offsets. A work tile that
  // meets an entry that names no block of 31 bits, or a V's that is not the block after its K, sees
  // none of its tokens, and is counted.
  bool reads_in_place() const;

  struct Choices;
  const Choices& choices() const { return *choices_; }

 private:
  explicit AttendPlan(std::unique_ptr<Choices> choices);
  std::unique_ptr<Choices> choices_;
};

// As the attend below, by a plan: nothing is planned, allocated or waited for.
// Of args, everything may differ from what the plan was made with that is an address, a number of
// the softmax (scale, softcap) or a transform that has a block_offset where the plan's had one.
// INVALID_ARGUMENT names what
// differs and must not: shapes, formats, strides, options, the order of a layer's bytes, addresses
// of a cache that are aligned otherwise, q and out off 16 bytes where the planned kernel needs
// them there. Nothing is launched then.
Status attend(const CudaContext& context, const AttendArgs& args, const AttendPlan& plan,
              uint8_t* workspace, DeviceCounters* counters);

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
