// The attention kernels as the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include "format/facts.hpp"

namespace kvx::ops::cuda {

struct AttendJob;

inline constexpr int kPlainRows = 16;  // query rows of a piece of the plain kernel
inline constexpr int kTileRows = 8;    // and of the tensor cores'

// An instance of the tensor cores' kernel.
struct TileKernel {
  const void* function = nullptr;  // null: there is none
  int threads = 0;
  int shared_bytes = 0;
  int ctas_per_multiprocessor = 0;
  int granule = 0;  // tokens that a warp takes at a time
};

// The instance for K and V of these formats (groups of 64 for int8 and int4) and this head_dim.
TileKernel find_tile_kernel(format::FormatId k, format::FormatId v, int head_dim);

cudaError_t launch_attend_plain(const AttendJob& job, cudaStream_t stream);
cudaError_t launch_attend_tiles(const TileKernel& kernel, const AttendJob& job,
                                cudaStream_t stream);
cudaError_t launch_merge_splits(const AttendJob& job, cudaStream_t stream);

}  // namespace kvx::ops::cuda
