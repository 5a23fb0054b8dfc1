// The latent kernel as the host calls it: rows that are both keys and values (MLA).
#pragma once

#include "ops/attend/cuda/common/launch.hpp"

namespace kvx::ops::cuda {

inline constexpr int kLatentRows = 64;         // query rows of a work tile
inline constexpr int kLatentTileTokens = 64;   // of a tile: a buffer in shared memory
inline constexpr int kLatentStepTokens = 128;  // that a CTA takes at a time: a tile a warpgroup
inline constexpr int kLatentKeyDim = 576;      // numbers of a row
inline constexpr int kLatentValueDim = 512;    // of them, those that are the value too

// An instance of the latent kernel.
struct LatentKernel {
  const void* function = nullptr;  // null: there is none
  int threads = 0;
  int shared_bytes = 0;
};

// id: of the rows. There are instances for rows of 576 numbers whose first 512 are the value.
LatentKernel find_latent_kernel(format::FormatId id, int key_dim, int value_dim);

cudaError_t launch_attend_latent(const CudaContext& context, const LatentKernel& kernel,
                                 const LaunchGrid& grid, const DecodeMmaParams& params);

}  // namespace kvx::ops::cuda
