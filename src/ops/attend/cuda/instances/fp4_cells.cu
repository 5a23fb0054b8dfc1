// Instances of the tensor cores' kernel: nvfp4 and mxfp4 in cells.
#include "ops/attend/cuda/tile_formats.cuh"
#include "ops/attend/cuda/tile_pairs.hpp"

namespace kvx::ops::cuda {

KVX_CELL_TILE_INSTANCES(kNvfp4)
KVX_CELL_TILE_INSTANCES(kMxfp4)
KVX_CELL_TILE_INSTANCES(kMxfp4G16)

}  // namespace kvx::ops::cuda
