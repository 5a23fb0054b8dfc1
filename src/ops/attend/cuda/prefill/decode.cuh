// Packed rows on their way into the prefill kernels' tiles: decoded to f16, once for 128 query
// rows. A unit is some tokens of a side. Its rows go by cp.async to where the thread that asked for
// them reads them again: no other has to wait for it.
#pragma once

#include <algorithm>

#include "ops/attend/cuda/prefill/load.cuh"
#include "ops/attend/cuda/prefill/scales.cuh"

namespace kvx::ops::cuda {

// How a side's packed rows are shared out among the producing threads. A chunk of codes is two or
// four chunks of the tile; eight lanes take chunks of 64 channels in two or four rows, so that what
// they store at once lies in all banks.
template <class Shape, int Bits>
struct PackedRows {
  static_assert(Bits == 4 || Bits == 8);
  static constexpr int kTileChunks = 16 / Bits;    // of a chunk of 16 bytes
  static constexpr int kChunks = 8 / kTileChunks;  // of 64 channels
  static constexpr int kRowsOfEight = 8 / kChunks;
  static constexpr int kEights = kWarpgroup / 8;  // of lanes
  // Of 64 channels: as many as leave no lane without a row.
  static constexpr int kBlocksAtOnce =
      std::max(Shape::kBlocksAtOnce, kEights* kRowsOfEight / Shape::kUnitTokens);
  static constexpr int kRowsAtOnce = kEights / kBlocksAtOnce * kRowsOfEight;
  static constexpr int kRowPasses = Shape::kUnitTokens / kRowsAtOnce;
  static constexpr int kBlockPasses = Shape::kKeyBlocks / kBlocksAtOnce;
  static constexpr int kPasses = kBlockPasses * kRowPasses;
  static constexpr int kChunksAtOnce = kBlocksAtOnce * kChunks;  // of a row
  static_assert(kPasses * kWarpgroup * 16 <= Shape::kRawCodeBytes && kRowsAtOnce % 8 == 0);
  // Whether a side's rows end before such a pass.
  __device__ static bool is_behind(int block_pass, int side) {
    return Shape::kValueBlocks < Shape::kKeyBlocks &&
           block_pass * kBlocksAtOnce >= Shape::kValueBlocks && side != 0;
  }
  // thread: of the side's warpgroup.
  __device__ static int chunk(unsigned thread) {
    return columns(thread) * kChunks + thread % kChunks;
  }
  __device__ static int row(unsigned thread) {  // of the first pass
    return thread / 8 / kBlocksAtOnce * kRowsOfEight + thread / kChunks % kRowsOfEight;
  }
  // Where it begins to store; its next chunk i lies at the same place ^ 16 i.
  __device__ static uint32_t in_tile(unsigned thread) {
    return columns(thread) * Shape::kBlockBytes +
           wgmma_chunk(row(thread), thread % kChunks * kTileChunks);
  }

 private:
  __device__ static int columns(unsigned thread) {  // which 64
    return thread / 8 % kBlocksAtOnce;
  }
};

// What multiplies a token's codes, by parts of the row, and what is added then.
struct TokenScales {
  float scale[2];
  float zero;
};

// Calls visit(Element{}, Scales{}) with the decoder of a format's codes and what decodes those of
// its scales that go into the tile, or NoScale. Formats that share a decoder share a case
// (prefill_decoder); formats.cuh checks that every format has one. The last case is the default:
// as a range check of its own it would cost the kernels registers.
template <class Shape, class Visit>
__device__ inline void visit_packed(const TileSide& side, Visit&& visit) {
  using format::FormatId;
  constexpr bool kHasInterleaved = !Shape::kIsLong;  // the plan: longer rows are not interleaved
  constexpr bool kHasGroups = !Shape::kIsLong;       // of 64: find_prefill_kernel
  const auto visit_scores = [&]<FormatId Id>() {
    visit(typename FormatTraits<Id>::Element{}, NoScale{});
  };
  const auto visit_operand = [&]<FormatId Id>() {
    visit(typename TileDecoder<Id>::Element{}, typename TileDecoder<Id>::Scales{});
  };
  const auto visit_e2m1 = [&]<FormatId Id>() {
    if constexpr (kHasInterleaved) {
      if (side.is_interleaved)
        return visit(TileE2M1Interleaved{}, typename TileDecoder<Id>::InterleavedScales{});
    }
    visit(typename TileDecoder<Id>::Element{}, typename TileDecoder<Id>::Scales{});
  };
  if constexpr (Shape::kScalesScores) {
    switch (side.id) {
      case FormatId::kFp8E4M3:
        return visit_scores.template operator()<FormatId::kFp8E4M3>();
      case FormatId::kFp8E5M2:
        return visit_scores.template operator()<FormatId::kFp8E5M2>();
      case FormatId::kInt8:
        if constexpr (kHasGroups) visit_scores.template operator()<FormatId::kInt8>();
        return;
      case FormatId::kInt8Affine:
        return visit_scores.template operator()<FormatId::kInt8Affine>();
      case FormatId::kInt4:
        if constexpr (kHasGroups) visit_scores.template operator()<FormatId::kInt4>();
        return;
      case FormatId::kInt4Affine:
      default:
        return visit_scores.template operator()<FormatId::kInt4Affine>();
    }
  } else {
    switch (side.id) {
      case FormatId::kFp8E4M3:
        return visit_operand.template operator()<FormatId::kFp8E4M3>();
      case FormatId::kFp8E5M2:
        return visit_operand.template operator()<FormatId::kFp8E5M2>();
      case FormatId::kInt8:
        return visit_operand.template operator()<FormatId::kInt8>();
      case FormatId::kInt8Affine:
        return visit_operand.template operator()<FormatId::kInt8Affine>();
      case FormatId::kInt4:
        return visit_operand.template operator()<FormatId::kInt4>();
      case FormatId::kInt4Affine:
        return visit_operand.template operator()<FormatId::kInt4Affine>();
      case FormatId::kNvfp4:
        return visit_e2m1.template operator()<FormatId::kNvfp4>();
      case FormatId::kMxfp4:
      default:
        return visit_e2m1.template operator()<FormatId::kMxfp4>();
    }
  }
}

// As visit_packed, for copies: of formats that are copied alike only one is visited.
template <class Shape, class Visit>
__device__ inline void visit_copied(const TileSide& side, Visit&& visit) {
  using format::FormatId;
  if constexpr (Shape::kScalesScores) {
    const bool is_byte = tensor_core_format(side.id).bits == 8;
    return is_byte ? visit(TileInt8{}, NoScale{}) : visit(TileInt4{}, NoScale{});
  } else {
    switch (side.id) {
      case FormatId::kFp8E4M3:
      case FormatId::kFp8E5M2:
        return visit(TileE4M3{}, NoScale{});
      case FormatId::kInt8:
      case FormatId::kInt8Affine:
        return visit(TileInt8{}, ScaleOf64<8>{});
      case FormatId::kInt4:
      case FormatId::kInt4Affine:
        return visit(TileInt4{}, ScaleOf64<4>{});
      case FormatId::kNvfp4:
      case FormatId::kMxfp4:
      default:
        return visit(TileE2M1{}, ScalesOfGroups<FromE8M0>{});
    }
  }
}

// Where the group of a lane lies: its codes, and the scales that come with them.
struct GroupRows {
  const uint8_t* codes;
  const uint8_t* scales;
};

// Keeps what follows from it inside of a loop over units: in front of the walk over all of them,
// where it is the same, the compiler would compute it for every format, and spill it.
__device__ inline unsigned unknown(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Units of a side on their way. finder: of the tile whose rows are asked for.
template <class Shape>
class PackedUnits {
 public:
  __device__ PackedUnits(const PrefillSideWalk<Shape>& side, const GroupFinder<Shape>& finder)
      : side_(side), ring_(side.ring), finder_(finder), thread_(unknown(side.thread())) {}

  // Of this lane's group; the same until the finder has others.
  __device__ GroupRows own_rows() const {
    const TileRegion& scales = Shape::kScalesScores ? token_scale_region() : side_.rows().scales;
    const int head = side_.walk.head;
    return {finder_.own_rows(side_.rows().codes, head), finder_.own_rows(scales, head)};
  }
  // Starts the copies of a unit of the finder's tile.
  template <class Element, class Scales>
  __device__ void copy(int unit, uint32_t raw, const GroupRows& own) const {
    using Rows = PackedRows<Shape, Element::kBits>;
    copy_rows<Rows>(unit, raw, own.codes);
    if constexpr (kHasRowScales<Scales>) copy_row_scales<Rows, Scales>(unit, raw, own.scales);
    if constexpr (Shape::kScalesScores) {
      if (side_.side == 0 && begins_scales(unit)) copy_token_scales(unit, raw, own.scales);
    }
  }
  // What this thread has copied goes into the tile, by all lanes of a warp after they waited.
  template <class Element, class Scales>
  __device__ void decode(uint32_t raw, int tile, int unit) const {
    if constexpr (kHasRowScales<Scales>) __syncwarp();  // other lanes' copies
    decode_rows<Element, Scales>(raw,
                                 ring_.tile(side_.side, tile) + unit * Shape::kUnitTokens * 128);
    if constexpr (Shape::kScalesScores) {
      if (side_.side == 0 && begins_scales(unit)) store_token_scales(raw, tile, unit);
    }
  }

  // slot: of the side's kRawUnits.
  __device__ uint32_t raw_unit(int slot) const {
    return ring_.shared + Shape::kRaw +
           (side_.side * Shape::kRawUnits + slot) * Shape::kRawUnitBytes;
  }

 private:
  // This thread's part of a unit.
  __device__ uint32_t raw_codes(uint32_t raw, int pass) const {
    return raw + pass * kWarpgroup * 16 + thread_ * 16;
  }
  template <class Rows>
  __device__ void copy_rows(int unit, uint32_t raw, const uint8_t* own) const {
    const TileRegion& codes = side_.rows().codes;
    // A thread's rows of all passes are the same one of their groups, and a warp's are of one.
    static_assert(Rows::kRowsAtOnce % kTileTokens == 0);
    const int in_group = Rows::row(thread_) % kTileTokens;
    const int first_group =
        unit * (Shape::kUnitTokens / kTileTokens) + Rows::row(thread_) / kTileTokens;
    // All are looked up before the first copy: between the two ptxas waits.
    TileGroup groups[Rows::kRowPasses];
#pragma unroll
    for (int r = 0; r < Rows::kRowPasses; ++r) {
      groups[r] = finder_.group(first_group + r * (Rows::kRowsAtOnce / kTileTokens), own);
    }
#pragma unroll
    for (int b = 0; b < Rows::kBlockPasses; ++b) {
      if (Rows::is_behind(b, side_.side)) break;
      const int chunk = Rows::chunk(thread_) + b * Rows::kChunksAtOnce;
      const int mine = in_group * codes.token_stride + chunk * 16;
      // Which of a group's tokens it needs: behind the end of shorter rows none are there.
      const int wanted = chunk * 16 < side_.facts().row_bytes ? in_group : kTileTokens;
#pragma unroll
      for (int r = 0; r < Rows::kRowPasses; ++r) {
        copy_async_16(raw_codes(raw, b * Rows::kRowPasses + r), groups[r].rows + mine,
                      wanted < groups[r].num_tokens ? 16 : 0);
      }
    }
  }

  // Scales that go into the tile: a warp copies those of its rows, of which many lanes have parts.
  // In a pass it has rows beside each other.
  template <class Scales>
  static constexpr bool kHasRowScales = !std::is_same_v<Scales, NoScale>;
  static constexpr int kWarpRows = Shape::kUnitTokens / kFillingWarps;  // in all passes
  template <class Rows>
  static constexpr int kRowsOfPass = Rows::kRowsAtOnce / kFillingWarps;
  // Words that a row's scales may lie in: a row begins on any byte.
  template <class Scales>
  static constexpr int kRowWords = (Scales::bytes_of_row(Shape::kKeyDim) + 3) / 4;
  __device__ int warp() const {
    return thread_ / kWarp;
  }
  template <class Scales>
  __device__ uint32_t raw_scales(uint32_t raw, int row_of_warp) const {
    static_assert(kFillingWarps * kWarpRows * kRowWords<Scales> * 4 <= Shape::kRawScaleBytes);
    return raw + Shape::kRawCodeBytes + (warp() * kWarpRows + row_of_warp) * kRowWords<Scales> * 4;
  }
  template <class Rows, class Scales>
  __device__ void copy_row_scales(int unit, uint32_t raw, const uint8_t* own) const {
    constexpr unsigned kWords = kRowWords<Scales>;
    constexpr unsigned kRowsAtOnce = kRowsOfPass<Rows>;
    const TileSide& rows = side_.rows();
    __syncwarp();  // behind other lanes' reads of what was there
#pragma unroll
    for (int first = 0; first < kWarpRows * kWords; first += kWarp) {
      const unsigned i = first + thread_ % kWarp;  // of the warp's words
      const unsigned row = i / kWords, word = i % kWords;
      const unsigned token = row / kRowsAtOnce * Rows::kRowsAtOnce + warp() * kRowsAtOnce +
                             row % kRowsAtOnce;  // of the unit
      const int group = unit * (Shape::kUnitTokens / kTileTokens) + token / kTileTokens;
      const int in_group = token % kTileTokens;
      const int at = in_group * rows.scales.token_stride;
      const uint8_t* from = finder_.rows_of(group, own) + (at & ~3) + 4 * word;
      const bool is_there = in_group < finder_.num_tokens(group) &&
                            (kWords == 1 || 4 * word < (at & 3) + rows.scale_row_bytes);
      copy_async_4_if(i < kWarpRows * kWords, raw_scales<Scales>(raw, row) + 4 * word, from,
                      is_there ? 4 : 0);
    }
  }

  // With K's rows, of 64 tokens: threads 0 to 63 have K's scales of a token each, the others V's.
  static constexpr int kScaleTokens = kWarpgroup / 2;
  static_assert(kScaleTokens % Shape::kUnitTokens == 0 && Shape::kTokens % kScaleTokens == 0);
  __device__ static bool begins_scales(int unit) {
    return unit % (kScaleTokens / Shape::kUnitTokens) == 0;
  }
  __device__ int token_scale_row() const {
    return thread_ % kScaleTokens;
  }
  __device__ bool has_value_scales() const {
    return thread_ >= kScaleTokens;  // the same in a warp
  }
  __device__ const TileRegion& token_scale_region() const {
    return has_value_scales() ? side_.walk.params.tile_v.scales : side_.walk.params.tile_k.scales;
  }
  __device__ uint32_t token_scale_word(uint32_t raw) const {
    return raw + Shape::kRawCodeBytes + thread_ * 4;
  }
  __device__ void copy_token_scales(int unit, uint32_t raw, const uint8_t* own) const {
    const int row = token_scale_row();
    const int group =
        (unit * Shape::kUnitTokens + row) / kTileTokens;  // a lane's own, of the tile's
    const bool is_there = row % kTileTokens < finder_.num_tokens(group);
    const int in_rows = row % kTileTokens * token_scale_region().token_stride;
    copy_async_4(token_scale_word(raw), finder_.rows_of(group, own) + (in_rows & ~3),
                 is_there ? 4 : 0);
  }
  // Rows of two bytes share a word.
  __device__ uint32_t token_scale_bits(uint32_t raw) const {
    const int in_rows = token_scale_row() % kTileTokens * token_scale_region().token_stride;
    return load_shared_4(token_scale_word(raw)) >> (in_rows % 4 * 8);
  }

  __device__ static TokenScales of_affine(const float2& affine) {
    return {{affine.x, affine.x}, affine.y};
  }
  __device__ static TokenScales token_scales_of(const TileSide& side, uint32_t bits) {
    using format::FormatId;
    const float2 halves = __half22float2(reinterpret_cast<const __half2&>(bits));
    switch (side.id) {
      case FormatId::kFp8E4M3:
      case FormatId::kFp8E5M2:
        return {{__uint_as_float(bits), __uint_as_float(bits)}, 0.0f};
      case FormatId::kInt8Affine:
        return of_affine(affine_params(side, bits, TileUInt8::kMiddle));
      case FormatId::kInt4Affine:
        return of_affine(affine_params(side, bits, TileUInt4::kMiddle));
      case FormatId::kInt8:
      case FormatId::kInt4:
      default:  // rows of 64 numbers and less have one
        return {{halves.x, side.head_dim > 64 ? halves.y : 0.0f}, 0.0f};
    }
  }

  template <class Scales>
  __device__ static uint32_t load_scales(uint32_t row, int byte) {
    if constexpr (Scales::kBytes == 4) return load_shared_4(row);
    if constexpr (Scales::kBytes == 2) return load_shared_2(row + byte);
    return load_shared_4(row + (byte & ~3)) >> (byte % 4 * 8);
  }
  template <class Element, class Scales>
  __device__ void decode_rows(uint32_t raw, uint32_t to) const {
    using Rows = PackedRows<Shape, Element::kBits>;
    to += Rows::in_tile(thread_);  // a tile lies on 1024 bytes
#pragma unroll
    for (int b = 0; b < Rows::kBlockPasses; ++b) {
      if (Rows::is_behind(b, side_.side)) break;
      decode_blocks<Element, Scales>(raw, to + b * Rows::kBlocksAtOnce * Shape::kBlockBytes, b);
    }
  }
  template <class Element, class Scales>
  __device__ void decode_blocks(uint32_t raw, uint32_t to, int block_pass) const {
    using Rows = PackedRows<Shape, Element::kBits>;
    const int first_pass = block_pass * Rows::kRowPasses;
    [[maybe_unused]] int scales_at = 0;  // the byte, of the row's words: the same in all rows
    if constexpr (kHasRowScales<Scales>) {
      const int chunk = Rows::chunk(thread_) + block_pass * Rows::kChunksAtOnce;
      const int in_word = Rows::row(thread_) % kTileTokens * side_.rows().scales.token_stride & 3;
      // Zeros behind the end of a shorter row meet its first scale: others are not its own.
      const bool is_in_row = chunk * 16 < side_.facts().row_bytes;
      scales_at = in_word + (is_in_row ? Scales::first_byte(side_.facts(), chunk) : 0);
    }
    uint4 codes[Rows::kRowPasses];  // all are asked for before the first is used
    [[maybe_unused]] uint32_t group_scales[Rows::kRowPasses];
#pragma unroll
    for (int p = 0; p < Rows::kRowPasses; ++p) {
      codes[p] = load_shared_16(raw_codes(raw, first_pass + p));
      if constexpr (kHasRowScales<Scales>) {
        const int row = Rows::row(thread_) % kRowsOfPass<Rows> + p * kRowsOfPass<Rows>;
        group_scales[p] = load_scales<Scales>(raw_scales<Scales>(raw, row), scales_at);
      }
    }
#pragma unroll
    for (int p = 0; p < Rows::kRowPasses; ++p) {
      const uint32_t words[4] = {codes[p].x, codes[p].y, codes[p].z, codes[p].w};
      [[maybe_unused]] ChunkScales scales = {};
      if constexpr (kHasRowScales<Scales>) scales = Scales::of(side_.facts(), group_scales[p]);
#pragma unroll
      for (int i = 0; i < Rows::kTileChunks; ++i) {
        Four x;
        if constexpr (Element::kBits == 8) {
          const Two low = Element::for_values(words[2 * i]);
          const Two high = Element::for_values(words[2 * i + 1]);
          x = {low.a, low.b, high.a, high.b};
        } else {
          static_assert(Element::kBits == 4);
          x = Element::for_values(words[i]);
        }
        if constexpr (kHasRowScales<Scales>) {
#pragma unroll
          for (int j = 0; j < 4; ++j) x.r[j] = Scales::apply(scales, i, x.r[j]);
        }
        store_chunk((to ^ (16 * i)) + p * Rows::kRowsAtOnce * 128, x);
      }
    }
  }

  __device__ void store_token_scales(uint32_t raw, int tile, int unit) const {
    using Ring = PrefillRing<Shape>;
    const PrefillParams& params = side_.walk.params;
    const int row = token_scale_row();
    const int token = unit * Shape::kUnitTokens + row;
    const TileSide& facts = has_value_scales() ? params.tile_v : params.tile_k;
    const TokenScales scales = token_scales_of(facts, token_scale_bits(raw));
    const int zero = has_value_scales() ? Ring::kValueZero : Ring::kKeyZero;
    store_shared(ring_.token_scales(tile, zero) + place_of_token(token), scales.zero);
    if (!has_value_scales()) {
      store_key_scales(ring_, tile, token, scales.scale[0], scales.scale[1]);
      return;
    }
    float largest = 0;
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) {
      store_shared(ring_.token_scales(tile, Ring::kValueScale + i) + place_of_token(token),
                   scales.scale[i]);
      largest = fmaxf(largest, fabsf(scales.scale[i]));
    }
    // Numbers that are not negative have the order of their bits.
    const uint32_t top = __reduce_max_sync(kWholeWarp, __float_as_uint(largest));
    if (row % kWarp == 0) {
      store_shared(ring_.tops(tile) + 4 * (unit * Shape::kUnitTokens / kWarp + row / kWarp),
                   __uint_as_float(top));
    }
  }

  const PrefillSideWalk<Shape>& side_;
  const PrefillRing<Shape>& ring_;
  const GroupFinder<Shape>& finder_;
  const unsigned thread_;  // of the side's warpgroup
};

}  // namespace kvx::ops::cuda
