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
  int granule = 0;        // tokens that a CTA takes at a time
  int tiles_at_once = 0;  // of a warp
};

// What an instance is made for, beside the pair of formats (groups of 64 for int8 and int4).
struct TileTraits {
  int head_dim = 0;
  bool has_dense_rows = false;     // rows follow each other inside a head's part of a block
  bool has_shared_scales = false;  // fp8: one given scale a head, for K and for V
};

TileKernel find_tile_kernel(format::FormatId k, format::FormatId v, const TileTraits& traits);

cudaError_t launch_attend_plain(const AttendJob& job, cudaStream_t stream);
cudaError_t launch_attend_tiles(const TileKernel& kernel, const AttendJob& job,
                                cudaStream_t stream);
cudaError_t launch_merge_splits(const AttendJob& job, cudaStream_t stream);

}  // namespace kvx::ops::cuda
