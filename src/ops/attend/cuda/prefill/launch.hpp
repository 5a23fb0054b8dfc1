// The prefill kernel as the host calls it. It has few instances, since formats are told apart while
// it runs; each is in a file of wgmma/instances/ or mma_sync/instances/, a missing one is a link
// error.
#pragma once

#include "ops/attend/cuda/common/launch.hpp"

namespace kvx::ops::cuda {

inline constexpr int kPrefillRows = 128;  // query rows of a work tile

// What multiplies. wgmma's instances have bodies in code for 9.0 alone, mma.sync's in all.
enum class PrefillEngine { kWgmma, kMmaSync };

// An instance of the prefill kernel.
struct PrefillKernel {
  const void* function = nullptr;  // null: there is none
  int threads = 0;
  int ctas_at_once = 0;  // of a multiprocessor, at most
  int shared_bytes = 0;
  int step_tokens = 0;         // that a CTA takes at a time
  bool shares_scales = false;  // one scale a head multiplies scores and sums outside the loop
};

// What K or V is to the prefill kernel. has_shared_scale: one given scale a head.
struct PrefillSide {
  format::FormatId id;
  bool has_shared_scale;
};

// Numbers of K's and V's rows.
struct PrefillDims {
  int key;
  int value;

  bool fit(int most_of_key, int most_of_value) const {
    return key <= most_of_key && value <= most_of_value;
  }
};

// What a call asks of an instance. has_full_precision_window: some tokens may be full precision.
// may_round: integers may become f16 numbers under their scales, since the queries have fewer
// digits.
struct PrefillCall {
  PrefillSide k;
  PrefillSide v;
  PrefillDims dims;
  bool has_full_precision_window;
  bool may_round;
};
PrefillKernel find_prefill_kernel(PrefillEngine engine, const PrefillCall& call);

cudaError_t launch_attend_prefill(const PrefillKernel& kernel, const LaunchGrid& grid,
                                  const PrefillParams& params, cudaStream_t stream);

struct MmaF16;
struct MmaBf16;

// Where a format's scales go.
enum class PrefillScales {
  kNone,       // 16-bit formats: tiles are copies of the rows
  kOnOperand,  // into the tiles: one scale a head, E2M1 under group scales (products are exact),
               // and integers, rounded to f16
  kOnOperandBesideFullPrecision,  // the same; tokens of a sequence's full-precision window have
                                  // scales on scores
  kOnScores,                      // tiles are codes; the scale of a row goes to scores and weights
  kOnParts,  // the same with groups of 64 in rows of 128: two sums of scores, two sets of weights
};

// What an engine has for rows of up to 64 or 128 numbers; more than 64 for kOnParts.
template <class Mma, PrefillScales Scales>
PrefillKernel wgmma_instance(const PrefillDims& dims);
template <class Mma, PrefillScales Scales>
PrefillKernel mma_sync_instance(const PrefillDims& dims);
// For longer ones, up to 192 of K and 128 of V, or 256 of both.
template <class Mma, PrefillScales Scales>
PrefillKernel long_wgmma_instance(const PrefillDims& dims);

}  // namespace kvx::ops::cuda
