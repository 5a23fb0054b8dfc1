// The attention kernels as the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include "format/facts.hpp"

namespace kvx::ops {
struct CudaContext;
}

namespace kvx::ops::cuda {

struct ReferenceParams;
struct DecodeMmaParams;
struct PrefillParams;
struct MergeParams;
struct KeyOffsetParams;

// Of CTAs, as dim3.
struct LaunchGrid {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

inline constexpr int kReferenceRows = 16;  // query rows of a work tile of the reference kernel
inline constexpr int kNTileRows = 8;       // of a column of the tensor cores' kernel

inline constexpr int kTileTokens = 16;
// Of a warp's step, where keys and values of one are stages of their own: rows of four bits.
inline constexpr int kSideStageTiles = 4;

// Hopper's shared memory of a multiprocessor, which instances are laid out for, and the system's
// part of it for each CTA. Where there is less, fewer warps run at once.
inline constexpr int kMultiprocessorBytes = 227 << 10;
inline constexpr int kReservedBytes = 1 << 10;

// An instance of the tensor cores' kernel. Its CTAs may have any number of warps.
struct DecodeMmaKernel {
  const void* function = nullptr;  // null: there is none
  int rows = 0;                    // query rows of a work tile
  int warps_at_once = 0;           // of a multiprocessor, at most
  int warp_shared_bytes = 0;
  int step_tokens = 0;                  // that a warp takes at a time
  int tiles_at_once = 0;                // of a warp
  bool accepts_full_precision = false;  // ends in bf16
  bool accepts_heads = false;           // several KV heads in a CTA
  bool shares_scales = false;           // fp8 under one scale a head, which the params holds
  int overhead_tokens = 40;             // of a warp: what its beginning and end cost, as measured
};

// What an instance is made for, beside the pair of formats (groups of 64 for int8 and int4).
struct TileTraits {
  int key_dim = 0;
  int value_dim = 0;
  bool has_dense_rows = false;     // a head's rows in a block follow each other; bulk copies
  bool has_shared_scales = false;  // fp8: one given scale a head, for K and for V
  bool has_word_scales = false;    // fp4_row and int4_row: K and V (has_word_scale)
  bool has_many_rows = false;      // more than 8 query rows a sequence and KV head
  bool has_full_precision_window = false;  // in bf16
  bool is_interleaved = false;             // K and V (format/interleaved.hpp)
};

// Whether instances are made for these head_dims. All others take those for longer rows, and so do
// full-precision window beside packed rows that those instances do not take with them.
constexpr bool has_exact_tiles(int key_dim, int value_dim) {
  return key_dim == value_dim && (key_dim == 64 || key_dim == 128);
}
// Whether longer rows' instances take them: multiples of 16.
constexpr bool fits_padded_tiles(int key_dim, int value_dim) {
  constexpr int kMost = 256;
  return key_dim % 16 == 0 && value_dim % 16 == 0 && 0 < key_dim && key_dim <= kMost &&
         0 < value_dim && value_dim <= kMost;
}

DecodeMmaKernel find_decode_mma_kernel(format::FormatId k, format::FormatId v,
                                       const TileTraits& traits);

// How the reference kernel uses the shared memory of a CTA.
struct ReferenceLaunch {
  int tile_tokens = 0;  // 0: rows are too long for the device's shared memory
  int shared_bytes = 0;
  int most_shared_bytes = 0;  // that any launch on the device asks for
};
ReferenceLaunch plan_reference_launch(int key_dim, int value_dim, bool has_block_offset,
                                      int shared_bytes_per_cta);
// Shared memory that the reference kernel cannot do without.
int least_reference_shared_bytes(int key_dim, int value_dim, bool has_block_offset);
// Requires: plan.tile_tokens > 0.
cudaError_t launch_attend_reference(const ReferenceLaunch& plan, const LaunchGrid& grid,
                                    const ReferenceParams& params, cudaStream_t stream);
cudaError_t launch_attend_decode_mma(const CudaContext& context, const DecodeMmaKernel& kernel,
                                     const LaunchGrid& grid, int warps_of_cta,
                                     const DecodeMmaParams& params);
// How many clusters of so many CTAs the device runs at once; 0 where it has no clusters.
int clusters_at_once(const CudaContext& context, const DecodeMmaKernel& kernel, int warps_of_cta,
                     int ctas);
// Before the kernel that reads its table.
cudaError_t launch_score_offsets(const KeyOffsetParams& params, cudaStream_t stream);
// Sets params.warps_of_row.
cudaError_t launch_merge_splits(const CudaContext& context, MergeParams& params);

}  // namespace kvx::ops::cuda
