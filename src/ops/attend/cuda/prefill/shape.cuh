// The shape of the prefill kernels' CTAs, and what their warps share: 128 query rows of a KV head
// against a split of its tokens. With wgmma one warpgroup fills a ring of K tiles, one a ring of
// V's, two multiply, 64 query rows each (one has nothing to do where rows are few); with mma.sync
// four warps do both, 2 x 16 rows each.
//
// shared memory, from 1024 bytes on:
//   [queries: 2 x 64 rows][K: kStages tiles][V: kStages tiles][token scales: kScaleStages]
//   [packed rows: 2 x kRawUnits][row facts][tile facts: kStages][tops: kScaleStages]
//   [group tables: 8][packed tokens][barriers]
// Tiles and queries are 16-bit numbers in wgmma's order (wgmma.cuh), 64 channels after another;
// ldmatrix reads that order without conflicts.
#pragma once

#include <type_traits>

#include "core/checked.hpp"
#include "ops/attend/cuda/common/decode_codes.cuh"
#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/common/tile_scales.cuh"
#include "ops/attend/cuda/common/wgmma.cuh"
#include "ops/attend/cuda/formats.cuh"
#include "ops/attend/cuda/prefill/launch.hpp"

namespace kvx::ops::cuda {

inline constexpr int kConsumers = 2;
inline constexpr int kConsumerRows = kPrefillRows / kConsumers;
inline constexpr int kFillingWarps = kWarpgroup / kWarp;  // of a side

template <PrefillEngine Engine, class MmaType, int KeyDim, int ValueDim, PrefillScales Where>
struct PrefillShape {
  using Mma = MmaType;
  static constexpr bool kIsWgmma = Engine == PrefillEngine::kWgmma;
  static constexpr int kThreads = kIsWgmma ? (2 + kConsumers) * kWarpgroup : kWarpgroup;
  static constexpr int kCtas = kIsWgmma ? 1 : 2;  // of a multiprocessor: what registers allow
  static constexpr int kKeyDim = KeyDim;
  static constexpr int kValueDim = ValueDim;
  static_assert(kKeyDim >= kValueDim);
  static constexpr bool kDecodes = Where != PrefillScales::kNone;
  static constexpr bool kScalesScores =
      Where == PrefillScales::kOnScores || Where == PrefillScales::kOnParts;
  // Beside packed tokens, a sequence's ends may be bf16; those tokens always have scales.
  static constexpr bool kAcceptsFullPrecision =
      kScalesScores || Where == PrefillScales::kOnOperandBesideFullPrecision;
  // The same beside bf16: those tokens are copied as the others are.
  static constexpr bool kCopiesFullPrecision = !kDecodes && std::is_same_v<MmaType, MmaBf16>;
  // Parts of a row with scales of their own: a sum of scores, and weights, for each.
  static constexpr int kParts = Where == PrefillScales::kOnParts ? kKeyDim / 64 : 1;
  static constexpr bool kIsLong = kKeyDim > 128;
  static constexpr bool kHasLongSums = kValueDim > 128;
  // Of a tile: what registers allow, or, beside packed rows on their way, shared memory.
  static constexpr int kTokens =
      kIsWgmma && kParts == 1 && !kHasLongSums && !(kDecodes && kIsLong) ? 128 : 64;
  static constexpr int kKeyBlocks = kKeyDim / 64;  // of 64 channels
  static constexpr int kValueBlocks = kValueDim / 64;
  // That lanes beside each other fill, of K as of V.
  static constexpr int kBlocksAtOnce = kKeyBlocks % 2 == 0 && kValueBlocks % 2 == 0 ? 2 : 1;

  static constexpr int kQueryBlockBytes = kConsumerRows * 128;  // 64 channels of a warpgroup
  static constexpr int kQueryBytes = kQueryBlockBytes * kKeyBlocks;
  static constexpr int kBlockBytes = kTokens * 128;  // 64 channels of a tile
  static constexpr int kKeyTileBytes = kBlockBytes * kKeyBlocks;
  static constexpr int kValueTileBytes = kBlockBytes * kValueBlocks;
  static constexpr int kStages = !kIsWgmma ? 1 : kKeyTileBytes > (16 << 10) ? 2 : 4;
  // Numbers a token: K's scales of each part, K's zero, and V's. The scores of a tile are scaled
  // after its keys are done with, so that these stay for longer.
  static constexpr int kZeros = kScalesScores ? 1 : 0;
  static constexpr int kTokenScales = kAcceptsFullPrecision ? 2 * (kParts + kZeros) : 0;
  static constexpr int kScaleBytes = kTokenScales * kTokens * 4;
  static constexpr int kScaleStages = kIsWgmma ? 2 * kStages : 1;
  // Packed rows on their way to the decoding threads, a unit of tokens of a side at a time: 16
  // bytes of codes a thread, a few times, and its tokens' scales; or, a word a thread, K's and V's.
  static constexpr int kRawUnits = !kDecodes ? 0 : kIsWgmma ? 3 : 1;
  static constexpr int kUnitTokens = kHasLongSums ? 16 : 64;
  static constexpr int kRawCodeBytes = kIsLong ? kUnitTokens * kKeyDim : 4 * kWarpgroup * 16;
  static constexpr int kRawScaleBytes = kScalesScores ? kWarpgroup * 4 : kUnitTokens * kKeyDim / 16;
  static constexpr int kRawUnitBytes = kRawCodeBytes + kRawScaleBytes;
  static constexpr int kTops = kTokens / kWarp;  // V's largest scales, of 32 tokens each
  // Where groups of 16 tokens lie, for each filling warp, where there is room.
  static constexpr bool kHasGroupTables = kIsWgmma && kDecodes && !kScalesScores;
  static constexpr int kGroupTableBytes = kHasGroupTables ? kWarp * 16 : 0;
  static constexpr int kFactsOfRow = kScalesScores ? 3 : 2;  // prefill_queries.cuh

  static constexpr int kKeys = kConsumers * kQueryBytes;
  static constexpr int kValues = kKeys + kStages * kKeyTileBytes;
  static constexpr int kTokenScalesAt = kValues + kStages * kValueTileBytes;
  static constexpr int kRaw = kTokenScalesAt + kScaleStages * kScaleBytes;
  static constexpr int kRowFacts = kRaw + 2 * kRawUnits * kRawUnitBytes;
  static constexpr int kTileFacts = kRowFacts + kFactsOfRow * kConsumers * kConsumerRows * 4;
  static constexpr int kTopsAt = round_up(kTileFacts + kStages * 4, 16);
  static constexpr int kGroupTables = kTopsAt + round_up(kScaleStages * kTops * 4, 16);
  static constexpr int kPackedTokens = kGroupTables + 2 * kFillingWarps * kGroupTableBytes;
  static constexpr int kBarriers = kPackedTokens + 8;
  static constexpr int kBytes = kBarriers + (kIsWgmma ? 4 * kStages * 8 : 0);
  static constexpr int kAlignment = 1024;
  static_assert(kBarriers % 8 == 0);
  static_assert(kCtas * (kBytes + kAlignment + kReservedBytes) <=
                kMultiprocessorBytes + kReservedBytes);

  // wgmma's 65536 registers: 256 threads that fill and 256 that multiply.
  static constexpr int kFillingRegisters = kDecodes && !kHasLongSums ? 56 : 40;
  static constexpr int kMultiplyingRegisters = 256 - kFillingRegisters;
};

// Numbers of pair j of eight.
__device__ inline int first_of_pair(PairOrder order, int j) {
  if (order == PairOrder::kNeighbours) return 2 * j;
  return order == PairOrder::kBytes ? j / 2 * 4 + j % 2 : j;
}
__device__ inline int second_of_pair(PairOrder order, int j) {
  if (order == PairOrder::kNeighbours) return 2 * j + 1;
  return order == PairOrder::kBytes ? j / 2 * 4 + j % 2 + 2 : j + 4;
}
// A number is what is decoded times this, where scales go into the tile.
__device__ inline float unit_of(const TileSide& side) {
  using format::FormatId;
  constexpr float kInterleaved = TileE2M1Interleaved::kUnit;
  switch (side.id) {
    case FormatId::kNvfp4:
      return side.is_interleaved ? kInterleaved * FromE4M3Raised::kUnit : TileE2M1::kUnit;
    case FormatId::kMxfp4:
    case FormatId::kMxfp4G16:
      return side.is_interleaved ? kInterleaved * FromE8M0Raised<6>::kUnit
                                 : TileE2M1::kUnit * FromE8M0::kUnit;
    default:
      return 1.0f;  // no other format's scales go into f16 operands
  }
}
static_assert(
    [] {
      bool is_exhaustive = true;
#define KVX_CHECK_UNIT(Format)                                                            \
  is_exhaustive =                                                                         \
      is_exhaustive &&                                                                    \
      (tensor_core_format(format::Format::kFacts.id).scale_path != ScalePath::kOperand || \
       format::Format::kFacts.id == format::FormatId::kNvfp4 ||                           \
       prefill_decoder(format::Format::kFacts.id) == format::FormatId::kMxfp4);
      KVX_FOR_EACH_FORMAT(KVX_CHECK_UNIT)
#undef KVX_CHECK_UNIT
      return is_exhaustive;
    }(),
    "unit_of has no case for a format whose scales multiply operands");

// What a CTA reads.
struct PrefillWalk {
  const PrefillParams& params;
  const int32_t* ids;  // of the sequence's blocks
  TokenRange tokens;
  int head;  // of the run
  int first_token;
  int num_tiles;
};

// What a CTA has to do.
struct PrefillWorkTile {
  SequenceShape shape;
  PrefillWalk walk;
  int split;
  int first_row;  // of the sequence's rows
  int num_rows;   // 0: nothing is left to do

  // That have rows.
  __device__ int num_consumers() const { return num_rows > kConsumerRows ? kConsumers : 1; }
};

// blockIdx: tile of query rows (the last come first: they see most), head and split, sequence.
template <class Shape>
__device__ inline PrefillWorkTile prefill_work_tile(const PrefillParams& params) {
  const int head = static_cast<int>(blockIdx.y) % params.num_heads;
  const int split = static_cast<int>(blockIdx.y) / params.num_heads;
  const int first_row = (params.num_row_tiles - 1 - static_cast<int>(blockIdx.x)) * kPrefillRows;
  const SequenceShape shape = sequence_shape(params, blockIdx.z);
  int num_rows = max(min(kPrefillRows, shape.q_len * params.q_per_kv - first_row), 0);
  if (!shape.is_valid) {
    store_empty_rows(params, shape, params.first_head + head, first_row, num_rows, split,
                     params.num_splits == 1);
    num_rows = 0;
  }
  TokenRange tokens = {0, 0};
  if (num_rows > 0) {
    tokens = split_of(seen_by_rows(params, shape, first_row, num_rows), params.num_splits, split,
                      Shape::kTokens);
  }
  const int first_token = tokens.begin / Shape::kTokens * Shape::kTokens;
  const int num_tiles = tokens.begin < tokens.end
                            ? (tokens.end - first_token + Shape::kTokens - 1) / Shape::kTokens
                            : 0;
  const int32_t* ids = params.block_table.ids + int64_t{blockIdx.z} * params.block_table.row_stride;
  return {shape, {params, ids, tokens, head, first_token, num_tiles}, split, first_row, num_rows};
}

// What is said of a tile beside its numbers: which of its groups of 16 tokens, eight at most, are
// read but not there, and whether tokens that are full-precision have scales where packed ones have
// none.
inline constexpr uint32_t kMissingGroups = 0xFF;
inline constexpr uint32_t kHasFullPrecisionScales = 0x100;

// Second-level and given scales of a head, of K or of V. Beside full-precision tokens, which are
// stored in multiples of it, 0 becomes a number that is nothing next to theirs.
__device__ inline float scale_of_head(const PrefillParams& params, const TileSide& side, int head) {
  const float shared =
      side.shared_scale ? side.shared_scale[head * side.shared_scale_stride] : 1.0f;
  const float scale = shared * side.tensor_scale(head) * unit_of(side);
  return scale == 0 && params.num_sink_blocks ? 0x1p-40f : scale;
}
__device__ inline float key_scale_of_head(const PrefillParams& params, int head) {
  return scale_of_head(params, params.tile_k, head);
}
__device__ inline float value_scale_of_head(const PrefillParams& params, int head) {
  return scale_of_head(params, params.tile_v, head);
}

// A shape's kernel, as the host calls it.
template <class Shape>
PrefillKernel prefill_kernel(void (*kernel)(PrefillParams)) {
  return {.function = reinterpret_cast<const void*>(kernel),
          .threads = Shape::kThreads,
          .ctas_at_once = Shape::kCtas,
          .shared_bytes = Shape::kBytes + Shape::kAlignment,
          .step_tokens = Shape::kTokens,
          .shares_scales = Shape::kDecodes && !Shape::kScalesScores};
}

// The instance for head_dims, rows of 64 numbers or of 128: shorter ones end in zeros there.
// kernel_of(shape) gives its kernel.
template <PrefillEngine Engine, class Mma, PrefillScales Scales, class KernelOf>
PrefillKernel prefill_instance(const PrefillDims& dims, const KernelOf& kernel_of) {
  if constexpr (Scales != PrefillScales::kOnParts) {
    using Shape = PrefillShape<Engine, Mma, 64, 64, Scales>;
    if (dims.fit(64, 64)) return prefill_kernel<Shape>(kernel_of(Shape()));
  }
  using Shape = PrefillShape<Engine, Mma, 128, 128, Scales>;
  return dims.fit(128, 128) ? prefill_kernel<Shape>(kernel_of(Shape())) : PrefillKernel{};
}
// The same for longer rows: K's of 192 numbers and V's of 128, or both of 256.
template <PrefillEngine Engine, class Mma, PrefillScales Scales, class KernelOf>
PrefillKernel long_prefill_instance(const PrefillDims& dims, const KernelOf& kernel_of) {
  using Mixed = PrefillShape<Engine, Mma, 192, 128, Scales>;
  using Long = PrefillShape<Engine, Mma, 256, 256, Scales>;
  if (dims.fit(192, 128)) return prefill_kernel<Mixed>(kernel_of(Mixed()));
  return dims.fit(256, 256) ? prefill_kernel<Long>(kernel_of(Long())) : PrefillKernel{};
}

// Eight neighbours of a row, times `scale`, as a chunk of a tile in that order.
template <class Mma>
__device__ inline Four chunk_of(PairOrder order, const float (&x)[8], float scale) {
  Four pairs;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int a = first_of_pair(order, j), b = second_of_pair(order, j);
    float low = 0, high = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      low = c == a ? x[c] : low;
      high = c == b ? x[c] : high;
    }
    pairs.r[j] = Mma::pack(low * scale, high * scale);
  }
  return pairs;
}

// Rings of tiles, as both sides see them.
template <class Shape>
struct PrefillRing {
  uint32_t shared;

  __device__ explicit PrefillRing(const uint8_t* dynamic_shared)
      : shared((static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared)) +
                Shape::kAlignment - 1) &
               ~static_cast<uint32_t>(Shape::kAlignment - 1)) {}

  __device__ uint32_t queries(int consumer) const { return shared + consumer * Shape::kQueryBytes; }
  // side: 0 for K, 1 for V.
  __device__ uint32_t tile(int side, int tile) const {
    if constexpr (Shape::kKeyTileBytes == Shape::kValueTileBytes) {
      return shared + Shape::kKeys + (side * Shape::kStages + stage(tile)) * Shape::kKeyTileBytes;
    }
    return side == 0 ? shared + Shape::kKeys + stage(tile) * Shape::kKeyTileBytes
                     : shared + Shape::kValues + stage(tile) * Shape::kValueTileBytes;
  }
  __device__ uint32_t tile_facts(int tile) const {
    return shared + Shape::kTileFacts + 4 * stage(tile);
  }
  __device__ uint32_t tops(int tile) const {
    return shared + Shape::kTopsAt + 4 * Shape::kTops * scale_stage(tile);
  }
  __device__ uint32_t group_table(int filling_warp) const {
    return shared + Shape::kGroupTables + filling_warp * Shape::kGroupTableBytes;
  }
  // Number `which` of the tile's tokens: [kTokens], in place_of_token's order. They are filled with
  // K's tile.
  __device__ uint32_t token_scales(int tile, int which) const {
    return shared + Shape::kTokenScalesAt + scale_stage(tile) * Shape::kScaleBytes +
           which * Shape::kTokens * 4;
  }
  static constexpr int kKeyScale = 0;
  static constexpr int kKeyZero = Shape::kParts;
  static constexpr int kValueScale = Shape::kParts + Shape::kZeros;
  static constexpr int kValueZero = kValueScale + Shape::kParts;

  // Of a sequence's tokens: the others are full precision. Kept here, and read each time: the
  // filling loop has no registers for what it hardly needs.
  __device__ TokenRange packed_tokens() const {
    const uint2 range = load_shared_8(shared + Shape::kPackedTokens);
    return {static_cast<int>(range.x), static_cast<int>(range.y)};
  }

  // By one thread. Only wgmma's warpgroups have barriers here.
  __device__ void begin(const PrefillWorkTile& work_tile) const {
    const TokenRange packed =
        cuda::packed_tokens(work_tile.walk.params, blockIdx.z, work_tile.shape.seq_len);
    store_shared_8(shared + Shape::kPackedTokens,
                   {static_cast<uint32_t>(packed.begin), static_cast<uint32_t>(packed.end)});
    if constexpr (Shape::kIsWgmma) {
      for (int i = 0; i < 2 * Shape::kStages; ++i) {
        init_barrier(barrier(0) + 8 * i, kFillingWarps);
        init_barrier(barrier(2 * Shape::kStages) + 8 * i,
                     work_tile.num_consumers() * kWarpgroup / kWarp);
      }
    }
  }
  __device__ void wait_filled(int side, int tile) const {
    wait_for_arrivals(filled(side, tile), round(tile) & 1);
  }
  __device__ void wait_free(int side, int tile) const {
    // A fresh barrier's phase before the first counts as over.
    wait_for_arrivals(freed(side, tile), (round(tile) + 1) & 1);
  }
  // By all lanes of a warp that are done with their writes, or reads.
  __device__ void fill(int side, int tile) const {
    fence_bulk_copies();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(filled(side, tile));
  }
  __device__ void free(int side, int tile) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(freed(side, tile));
  }

 private:
  // Unsigned: a shift or a mask each.
  __device__ static unsigned round(unsigned tile) { return tile / Shape::kStages; }
  __device__ static unsigned stage(unsigned tile) { return tile % Shape::kStages; }
  __device__ static unsigned scale_stage(unsigned tile) { return tile % Shape::kScaleStages; }
  __device__ uint32_t barrier(int i) const { return shared + Shape::kBarriers + 8 * i; }
  __device__ uint32_t filled(int side, int tile) const {
    return barrier(side * Shape::kStages + stage(tile));
  }
  __device__ uint32_t freed(int side, int tile) const {
    return barrier((2 + side) * Shape::kStages + stage(tile));
  }
};

__device__ inline void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
// Where a token's number lies among its tile's: what a thread multiplies of 16 tokens, columns 2 t,
// 2 t + 1, 2 t + 8 and 2 t + 9 of a sum, follows each other.
__device__ inline uint32_t place_of_token(int token) {
  return static_cast<uint32_t>((token & ~15) | (token & 6) << 1 | (token & 8) >> 2 | (token & 1)) *
         4;
}
// K's scales of a token, of the row's parts, as those that multiply take them.
// With mma.sync the sums of a part go on in the registers of the part before it, times the first
// scale over the second; the second multiplies both. One so small beside the first that its codes
// do not count may be larger.
template <class Shape>
__device__ inline void store_key_scales(const PrefillRing<Shape>& ring, int tile, int token,
                                        float first, float second) {
  using Ring = PrefillRing<Shape>;
  const uint32_t at = ring.token_scales(tile, Ring::kKeyScale) + place_of_token(token);
  if constexpr (Shape::kParts == 1) {
    store_shared(at, first);
  } else {
    const uint32_t second_at = ring.token_scales(tile, Ring::kKeyScale + 1) + place_of_token(token);
    if constexpr (!Shape::kIsWgmma) {
      const float least = fabsf(first) * 0x1p-40f;
      if (fabsf(second) < least) second = least;
      first = first == second ? 1.0f : first / second;
    }
    store_shared(at, first);
    store_shared(second_at, second);
  }
}

}  // namespace kvx::ops::cuda
