// Parameters of the latent kernel: those of decode_mma, and where the 64 numbers of a row lie that
// are no value.
#pragma once

#include "ops/attend/cuda/common/params.hpp"
#include "ops/attend/cuda/latent/launch.hpp"

namespace kvx::ops::cuda {

struct LatentParams : DecodeMmaParams {
  // The last 64 numbers of rows whose instance copies them: a segment of its own, or the end of
  // rows of 16 bits.
  TileRegion rest;
  // Likewise of rows in the full-precision window. It and the next are mma_sync's kernel's alone.
  TileRegion full_precision_rest;
  LatentRest rest_rows;
  // fp8 with scales that go into the tile: number d of a row has scale d >> scale_shift.
  int scale_shift;
};

}  // namespace kvx::ops::cuda
