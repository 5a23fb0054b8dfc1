// The latent kernel as the host calls it: rows that are both keys and values (MLA).
#pragma once

#include "ops/attend/cuda/common/launch.hpp"

namespace kvx::ops::cuda {

inline constexpr int kLatentRows = 64;         // query rows of a work tile
inline constexpr int kLatentTileTokens = 64;   // of a tile: a buffer in shared memory
inline constexpr int kLatentStepTokens = 128;  // that a CTA takes at a time: a tile a warpgroup
inline constexpr int kLatentKeyDim = 576;      // numbers of a row
inline constexpr int kLatentValueDim = 512;    // of them, those that are the value too
inline constexpr int kLatentRestDim = kLatentKeyDim - kLatentValueDim;

struct LatentParams;

// The rows that an instance reads.
enum class LatentRows {
  kBits16,            // copied as they are; the last 64 numbers may lie apart
  kPacked,            // of one format
  kPackedBesideBf16,  // the first 512 numbers; the others are a segment in bf16
  kPackedBesideF16,
};
constexpr bool decodes(LatentRows rows) {
  return rows != LatentRows::kBits16;
}
// Whether the last 64 numbers are a segment of their own, in 16 bits beside packed ones.
constexpr bool is_beside(LatentRows rows) {
  return rows == LatentRows::kPackedBesideBf16 || rows == LatentRows::kPackedBesideF16;
}

// An instance of the latent kernel.
struct LatentKernel {
  const void* function = nullptr;  // null: there is none
  int threads = 0;
  int shared_bytes = 0;
};

// Formats of a row, of its first 512 numbers and of the others, and whether those are a segment.
struct LatentFormats {
  format::FormatId id;
  format::FormatId rest;
  bool has_segments;
};

LatentKernel find_latent_kernel(const LatentFormats& formats);

cudaError_t launch_attend_latent(const CudaContext& context, const LatentKernel& kernel,
                                 const LaunchGrid& grid, const LatentParams& params);

}  // namespace kvx::ops::cuda
