// The latent kernel as the host calls it: rows that are both keys and values (MLA).
#pragma once

#include "ops/attend/cuda/common/launch.hpp"

namespace kvx::ops::cuda {

inline constexpr int kLatentKeyDim = 576;    // numbers of a row
inline constexpr int kLatentValueDim = 512;  // of them, those that are the value too
inline constexpr int kLatentRestDim = kLatentKeyDim - kLatentValueDim;

// What the kernel with wgmma takes at once.
inline constexpr int kLatentRows = 64;         // query rows of a work tile
inline constexpr int kLatentTileTokens = 64;   // of a tile: a buffer in shared memory
inline constexpr int kLatentStepTokens = 128;  // that a CTA takes at a time: a tile a warpgroup

struct LatentParams;

// Where the last 64 numbers of packed rows lie.
enum class LatentRest {
  kPacked,  // with the first 512, in their format
  kBf16,    // in a segment of their own
  kF16,
};

// The rows that an instance reads. Those of 16 bits are copied as they are, and their last 64
// numbers may lie apart.
struct LatentRows {
  int bits;  // of a code
  LatentRest rest = LatentRest::kPacked;
};
constexpr bool decodes(LatentRows rows) {
  return rows.bits < 16;
}
// Whether the last 64 numbers are a segment of their own, in 16 bits beside packed ones.
constexpr bool is_beside(LatentRows rows) {
  return rows.rest != LatentRest::kPacked;
}

// An instance of the latent kernel.
struct LatentKernel {
  const void* function = nullptr;  // null: there is none
  int rows = 0;                    // query rows of a work tile
  int step_tokens = 0;             // that a CTA takes at a time
  int threads = 0;
  int shared_bytes = 0;
};

// Formats of a row, of its first 512 numbers and of the others, and whether those are a segment.
struct LatentFormats {
  format::FormatId id;
  format::FormatId rest;
  bool has_segments;
};

// With wgmma, and with mma.sync, which every device has.
LatentKernel find_latent_kernel(const LatentFormats& formats);
LatentKernel find_latent_mma_kernel(const LatentFormats& formats);

cudaError_t launch_attend_latent(const CudaContext& context, const LatentKernel& kernel,
                                 const LaunchGrid& grid, const LatentParams& params);

}  // namespace kvx::ops::cuda
