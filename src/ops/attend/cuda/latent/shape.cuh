// The shape of the latent kernel's CTA and what its warpgroups share: 64 query rows against a split
// of the tokens. Two buffers take a tile of 64 tokens each; a step is one of each. Warpgroup c
// multiplies buffer c's keys, and columns 256 c to 256 c + 255 of both buffers' values: the same
// bytes, read as keys (tokens x numbers) and as values (numbers x tokens).
//
// shared memory, from 1024 bytes on; a slab is 64 rows of 64 numbers, 128 bytes each (wgmma.cuh):
//   [queries: 9 slabs][buffer 0: 9 slabs][buffer 1: 9 slabs]
//   [score scales: 64][maxima after buffer 0's tile: 64][after buffer 1's: 64][sums: 2 x 64]
//   [missing groups: 2][barriers: filled 2 x 3, free 2 x 3]
//   [queries' last 64 numbers, what bf16 left of them: 1 slab]  of packed rows beside bf16
// A buffer's last slab has no values. Once its scores are there, it holds their weights.
#pragma once

#include "ops/attend/cuda/common/decode_codes.cuh"
#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/common/wgmma.cuh"
#include "ops/attend/cuda/latent/launch.hpp"
#include "ops/attend/cuda/latent/params.hpp"
#include "ops/attend/cuda/latent/shared_numbers.cuh"

namespace kvx::ops::cuda {

// Parts of a buffer, which are filled and freed apart: each warpgroup's values, and the rest.
enum LatentPart { kLeft, kRight, kRest, kLatentParts };

struct LatentShape {
  static constexpr int kConsumers = 2;
  // Of a CTA: one warpgroup copies, or decodes 4 bits, and two decode 8 bits.
  static constexpr int producer_warps(int bits) { return bits == 8 ? 8 : 4; }
  static constexpr int threads(int bits) {
    return producer_warps(bits) * kWarp + kConsumers * kWarpgroup;
  }
  // Of a thread; 168 of all threads together, or 128. With fewer than 208 for consumers ptxas waits
  // behind every wgmma.
  static constexpr int producer_registers(LatentRows rows) {
    return rows.bits == 16 ? 40 : rows.bits == 8 ? 48 : 88;
  }
  static constexpr int consumer_registers(LatentRows rows) { return rows.bits == 16 ? 232 : 208; }

  static constexpr int kKeySlabs = kLatentKeyDim / 64;
  static constexpr int kPartSlabs = kLatentValueDim / 64 / kConsumers;
  static constexpr int kRestSlab = kLatentValueDim / 64;
  static_assert(kKeySlabs == kRestSlab + 1, "the weights take the place of one slab");
  static constexpr int kSlabBytes = 64 * 128;
  static constexpr int kBufferBytes = kKeySlabs * kSlabBytes;

  static constexpr int kBuffers = kBufferBytes;  // behind the queries
  static constexpr int kScoreScales = kBuffers + 2 * kBufferBytes;
  static constexpr int kMaxima = kScoreScales + kLatentRows * 4;
  static constexpr int kSums = kMaxima + 2 * kLatentRows * 4;
  static constexpr int kMissing = kSums + 2 * kLatentRows * 4;
  static constexpr int kBarriers = kMissing + 8;
  static constexpr int kAlignment = 1024;
  static constexpr int kBytes = kBarriers + 2 * 2 * kLatentParts * 8;
  static constexpr int kLowQueries = (kBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int bytes(LatentRows rows) {
    return rows.rest == LatentRest::kBf16 ? kLowQueries + kSlabBytes : kBytes;
  }
  static_assert(kLatentRows * (kLatentValueDim + 8) * 4 <= 2 * kBufferBytes, "the output's place");
  static_assert(kBarriers % 8 == 0 &&
                kLowQueries + kSlabBytes + kAlignment <= kMultiprocessorBytes);
};

// What the producer's warps and the consumers see of a CTA's work tile.
struct LatentWalk {
  const LatentParams& params;
  const int32_t* table;  // of the sequence
  int head;              // KV head, of the run
  TokenRange tokens;
  int num_steps;
};

struct LatentRing {
  using Shape = LatentShape;
  uint32_t shared;

  __device__ explicit LatentRing(const uint8_t* dynamic_shared)
      : shared((static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared)) +
                Shape::kAlignment - 1) &
               ~static_cast<uint32_t>(Shape::kAlignment - 1)) {}

  __device__ uint32_t queries() const { return shared; }
  __device__ uint32_t low_queries() const { return shared + Shape::kLowQueries; }
  __device__ uint32_t slab(int buffer, int slab) const {
    return shared + Shape::kBuffers + buffer * Shape::kBufferBytes + slab * Shape::kSlabBytes;
  }
  __device__ uint32_t weights(int buffer) const { return slab(buffer, Shape::kRestSlab); }
  __device__ uint32_t score_scale(int row) const { return shared + Shape::kScoreScales + 4 * row; }
  // The rows' maxima, as the weights of this buffer's tile were computed with them.
  __device__ uint32_t maximum(int buffer, int row) const {
    return shared + Shape::kMaxima + 4 * (buffer * kLatentRows + row);
  }
  __device__ uint32_t sum(int consumer, int row) const {
    return shared + Shape::kSums + 4 * (consumer * kLatentRows + row);
  }
  // Number d of a row's sums, where the buffers were. Rows are 8 numbers longer than they need to
  // be, so that threads of a row each find its sums in other banks.
  __device__ uint32_t output(int row, int d) const {
    return shared + Shape::kBuffers + 4 * (row * (kLatentValueDim + 8) + d);
  }
  // Four bytes: which of the tile's groups of 16 tokens are in no block.
  __device__ uint32_t missing(int buffer) const { return shared + Shape::kMissing + 4 * buffer; }

  __device__ void store_missing(int buffer, int warp, bool is_missing) const {
    store_shared_bool(missing(buffer) + warp, is_missing);
  }

  // By one thread.
  __device__ void begin(LatentRows rows) const {
    for (int buffer = 0; buffer < 2; ++buffer) {
      for (int part = 0; part < kLatentParts; ++part) {
        // A lane of each warp arrives. Copies arrive for each thread, and with the first of a
        // buffer a lane of each warp, which has stored what is missing.
        const bool is_copied = !decodes(rows) || (is_beside(rows) && part == kRest);
        const bool has_lanes = !is_copied || part == kLeft;
        const int warps = Shape::producer_warps(rows.bits);
        init_barrier(filled(buffer, part),
                     (is_copied ? warps * kWarp : 0) + (has_lanes ? warps : 0));
        init_barrier(freed(buffer, part), kWarpgroup / kWarp);
      }
    }
  }
  __device__ void wait_filled(int buffer, int part, int step) const {
    wait_for_arrivals(filled(buffer, part), step & 1);
    // Copies and decoded numbers are ordinary writes, and wgmma reads. Behind the writes, a fence
    // would wait for all that its thread has asked for as well.
    fence_bulk_copies();
  }
  __device__ void wait_free(int buffer, int part, int step) const {
    // A fresh barrier's phase before the first counts as over.
    wait_for_arrivals(freed(buffer, part), (step + 1) & 1);
  }
  // Arrives when the copies that this thread has asked for are there.
  __device__ void fill_by_copies(int buffer, int part) const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(filled(buffer, part))
                 : "memory");
  }
  __device__ void fill(int buffer, LatentPart part) const { arrive(filled(buffer, part)); }
  // By all lanes of a warp of the warpgroup that reads this part last.
  __device__ void free(int buffer, int part) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(freed(buffer, part));
  }

 private:
  __device__ uint32_t filled(int buffer, int part) const {
    return shared + Shape::kBarriers + 8 * (buffer * kLatentParts + part);
  }
  __device__ uint32_t freed(int buffer, int part) const {
    return filled(buffer, part) + 8 * 2 * kLatentParts;
  }
};

}  // namespace kvx::ops::cuda
