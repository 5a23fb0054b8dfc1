// Rows on their way into the tiles of the latent kernel on mma.sync. A lane has one row of a tile
// and, of its columns of 16 bytes, every eighth: a warp's eight rows by four columns read whole
// sectors, and store without bank conflicts.
//
//   begin   at a range of tokens
//   ask     for the next tile, which will lie in this buffer; it is free
//   store   before the tile before it is multiplied with its weights
//   finish  before the barrier behind which all see the tile
#pragma once

#include "ops/attend/cuda/latent/mma_sync/shape.cuh"

namespace kvx::ops::cuda {

// Where the rows of the tiles lie that a lane copies.
class LatentMmaRows {
  using Shape = LatentMmaShape;

 public:
  __device__ LatentMmaRows(const LatentMmaWalk& walk, int head, int64_t num_blocks)
      : walk_(walk), head_(head), num_blocks_(num_blocks) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    row_ = warp % 4 * 8 + lane % 8;
    column_ = warp / 4 * 4 + lane / 8;
  }

  __device__ void begin(TokenRange tokens) {
    token_ = tokens.begin + row_ - Shape::kTokens;
    end_ = tokens.end;
    next_id_ = id_of(tokens.begin + row_);
  }
  // Goes on to the next tile. A block that is not there is counted for each of its tokens.
  __device__ void next(int buffer) {
    token_ += Shape::kTokens;
    id_ = next_id_;
    next_id_ = id_of(token_ + Shape::kTokens);  // asked for before it is needed
    is_there_ = id_ >= 0 && id_ < num_blocks_;
    if (column_ != 0) return;
    const bool is_missing = token_ < end_ && !is_there_;
    if (is_missing) atomicAdd(&walk_.params.counters->out_of_range, 1ull);
    store_shared_bool(walk_.memory.missing(buffer, row_), is_missing);
  }
  // Others become zeros: what lies there may be no numbers.
  __device__ bool is_there() const { return is_there_; }
  // Of the row, where it is there.
  __device__ const uint8_t* at(const TileRegion& region) const {
    return region.at(
        static_cast<uint32_t>(id_),
        head_ * region.head_stride + token_ % walk_.params.block_size * region.token_stride);
  }

  __device__ int column() const { return column_; }  // the lane's first
  __device__ uint32_t slab(int buffer, int slab) const { return walk_.memory.slab(buffer, slab); }
  // Of chunk c of the row, eight numbers, in its slab.
  __device__ uint32_t offset_of_chunk(int c) const { return wgmma_chunk(row_, c); }
  // Copies the lane's chunk of each of so many slabs from number 0 of `from` on.
  template <int Slabs>
  __device__ void copy(const TileRegion& region, int buffer, int first_slab) const {
    const uint8_t* from = region.base;
    if (is_there_) from = at(region) + column_ * 16;
#pragma unroll
    for (int slab = 0; slab < Slabs; ++slab) {
      copy_async_16(walk_.memory.slab(buffer, first_slab + slab) + offset_of_chunk(column_),
                    is_there_ ? from + slab * 128 : from, is_there_ ? 16 : 0);
    }
  }

 private:
  // -1 behind the last token.
  __device__ int id_of(int token) const {
    return token < end_ ? walk_.table[token / walk_.params.block_size] : -1;
  }

  const LatentMmaWalk& walk_;
  const int head_;
  const int64_t num_blocks_;
  int row_;
  int column_;
  int token_ = 0;
  int end_ = 0;
  int id_ = -1;
  int next_id_ = -1;
  bool is_there_ = false;
};

// Rows of 16 bits. order: of the pairs that their numbers shall lie in.
template <class MmaType>
class LatentMmaCopies {
  using Shape = LatentMmaShape;

 public:
  using Mma = MmaType;
  __device__ LatentMmaCopies(const LatentMmaRows& rows, const TileRegion& latent,
                             const TileRegion& rest, PairOrder order)
      : rows_(rows), latent_(latent), rest_(rest), order_(order) {}

  __device__ PairOrder order() const { return order_; }
  __device__ PairOrder order_of_rest() const { return order_; }
  __device__ LatentRest rest() const { return LatentRest::kPacked; }

  __device__ void begin(TokenRange tokens) { rows_.begin(tokens); }
  __device__ void ask(int buffer) {
    rows_.next(buffer);
    rows_.template copy<Shape::kValueSlabs>(latent_, buffer, 0);
    rows_.template copy<1>(rest_, buffer, Shape::kRestSlab);
    commit_copies();
  }
  __device__ void store(int) const {}
  __device__ void finish(int buffer) const {
    wait_for_copies<0>();
    if (order_ == PairOrder::kNeighbours) return;
#pragma unroll 1
    for (int slab = 0; slab < Shape::kSlabs; ++slab) {  // what this lane has copied itself
      const uint32_t at = rows_.slab(buffer, slab) + rows_.offset_of_chunk(rows_.column());
      store_chunk(at, reordered(load_shared_16(at)));
    }
  }

 private:
  // Eight neighbours in the order of pairs.
  __device__ Four reordered(const uint4& x) const {
    if (order_ == PairOrder::kBytes) {
      return {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
              __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632)};
    }
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
            __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
  }

  LatentMmaRows rows_;
  const TileRegion& latent_;
  const TileRegion& rest_;
  const PairOrder order_;
};

// Packed rows: codes wait in registers, beside the products with the tile before them.
template <int Bits>
class LatentMmaDecoder {
  using Shape = LatentMmaShape;
  static constexpr int kColumns = kLatentValueDim * Bits / 128;
  static constexpr int kChunks = kColumns / 8;  // of a lane
  static constexpr int kEights = 16 / Bits;     // chunks of the tile that a chunk of codes becomes
  static constexpr int kRestColumns = kLatentRestDim * Bits / 128;

 public:
  using Mma = MmaF16;
  __device__ LatentMmaDecoder(const LatentMmaRows& rows, const LatentParams& params)
      : rows_(rows),
        params_(params),
        lane_offset_(rows.column() * kEights / 8 * Shape::kSlabBytes +
                     rows.offset_of_chunk(rows.column() * kEights % 8)) {}

  __device__ PairOrder order() const { return params_.tile_k.format.pair_order; }
  __device__ PairOrder order_of_rest() const {
    return rest() == LatentRest::kPacked ? order() : PairOrder::kNeighbours;
  }
  __device__ LatentRest rest() const { return params_.rest_rows; }

  __device__ void begin(TokenRange tokens) { rows_.begin(tokens); }
  __device__ void ask(int buffer) {
    rows_.next(buffer);
    if (rest() != LatentRest::kPacked) {
      rows_.template copy<1>(params_.rest, buffer, Shape::kRestSlab);
      commit_copies();
    }
    // Rows that are not there are zeros, and so are their scales.
#pragma unroll
    for (int i = 0; i <= kChunks; ++i) {
      codes_[i] = {};
      scales_[i] = 0;
    }
    if (!rows_.is_there()) return;
    const uint8_t* codes = rows_.at(params_.tile_k.codes);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) codes_[i] = load_global_16(codes + column(i) * 16);
    if (has_rest()) codes_[kChunks] = load_global_16(codes + column(kChunks) * 16);
    visit_latent_decoder<Bits>(params_, [this]<class Decoder>(Decoder) { ask_scales<Decoder>(); });
  }
  __device__ void store(int buffer) const {
    visit_latent_decoder<Bits>(params_, [this, buffer]<class Decoder>(Decoder) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) store_numbers<Decoder>(buffer, i);
      if (has_rest()) store_numbers<Decoder>(buffer, kChunks);
    });
  }
  __device__ void finish(int) const {
    wait_for_copies<0>();
  }

 private:
  // Of the lane's chunk i; the last is of the row's last 64 numbers.
  __device__ int column(int i) const {
    return i * 8 + rows_.column();
  }
  __device__ bool has_rest() const {
    return rest() == LatentRest::kPacked && rows_.column() < kRestColumns;
  }

  template <class Decoder>
  __device__ __forceinline__ void ask_scales() {
    using Scales = typename Decoder::Scales;
    if constexpr (kHasChunkScales<Decoder>) {
      const uint8_t* scales = rows_.at(params_.tile_k.scales);
#pragma unroll
      for (int i = 0; i <= kChunks; ++i) {
        if (i == kChunks && !has_rest()) continue;
        scales_[i] = load_chunk_scales<Scales>(
            params_.tile_k, scales + first_scale_byte<Scales>(params_, column(i)));
      }
    }
  }
  // What differs from lane to lane is one offset for all chunks.
  template <class Decoder>
  __device__ __forceinline__ void store_numbers(int buffer, int i) const {
    const uint32_t to = rows_.slab(buffer, i * kEights);
    decode_chunk<Decoder>(params_.tile_k, codes_[i], scales_[i], [&](int j, const Four& x) {
      store_chunk(to + (lane_offset_ ^ (j << 4)), x);  // chunk j of kEights, which is swizzled
    });
  }

  LatentMmaRows rows_;
  const LatentParams& params_;
  const uint32_t lane_offset_;  // from a slab to the chunk of the tile that chunk 0 begins at
  uint4 codes_[kChunks + 1];
  uint32_t scales_[kChunks + 1];
};

}  // namespace kvx::ops::cuda
