// The tensor cores' attention kernel: up to 8 or 16 query rows of a KV head against a split of its
// tokens. Every warp works alone: it copies tiles of 16 tokens into a ring of its own, turns packed
// bytes into mma operands, and keeps its own softmax and sums; the CTA's warps merge at the end.
// A sequence's full-precision window are walked over by the same warps after their packed tokens.
//
// The cache is the A operand of both products (keys: tokens x channels; values: channels x tokens)
// and the queries and weights are B, 8 columns: with few queries a KV head nothing is wasted, and
// rows that are not there cost little. With more than 8 rows a decoded operand meets two B's.
#pragma once

#include "ops/attend/cuda/common/balance.cuh"
#include "ops/attend/cuda/decode_mma/work_tile.cuh"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/earlier_work.cuh"

namespace kvx::ops::cuda {

__device__ inline int64_t indptr_at(const TableInPlace& table, int sequence) {
  return table.indptr_words == 2 ? reinterpret_cast<const int64_t*>(table.indptr)[sequence]
                                 : table.indptr[sequence];
}

// The first entry of the sequence, which may lie anywhere where indptr is wrong.
__device__ inline const int32_t* table_of(const DecodeMmaParams& params, int sequence) {
  const int64_t first = int64_t{sequence} * params.block_table.row_stride;
  if (params.has_plain_entries) [[likely]]
    return params.block_table.ids + first;
  const TableInPlace& table = params.in_place;
  return params.block_table.ids +
         (table.indptr ? indptr_at(table, sequence) : first) * table.entry_words;
}

// How many entries of a sequence's table a work tile reads. One without tokens may begin behind its
// sequence's pages.
__device__ inline int num_entries_read(const DecodeMmaParams& params, TokenRange tokens) {
  return tokens.begin < tokens.end ? (tokens.end + params.block_size - 1) / params.block_size : 0;
}

// Whether the entries that a work tile reads lie in the table: a list of pages may say anything.
__device__ inline bool has_entries(const DecodeMmaParams& params, int sequence, TokenRange tokens) {
  const TableInPlace& table = params.in_place;
  if (table.indptr == nullptr) return true;
  const int64_t first = indptr_at(table, sequence), last = indptr_at(table, sequence + 1);
  return first >= 0 && last <= table.num_entries &&
         num_entries_read(params, tokens) <= last - first;
}

// By a CTA: whether the walk has read an entry of these tokens as what it is not. It reads the
// lower 32 bits, and for V no entry of its own. A function of its own, so that the walk has all
// registers; behind the walk, which has brought the entries near: before it, it would wait for
// them.
static __device__ __noinline__ bool has_unusable_entry(const DecodeMmaParams& params,
                                                       const int32_t* row, TokenRange tokens) {
  const TableInPlace& table = params.in_place;
  const int words = table.entry_words;
  const int end = num_entries_read(params, tokens);
  bool is_unusable = false;
  int block = tokens.begin / params.block_size + static_cast<int>(threadIdx.x);
  for (; block < end && !is_unusable; block += static_cast<int>(blockDim.x)) {
    const int32_t* entry = row + int64_t{block} * words;
    const int32_t* of_v = entry + table.v_entries_at * words;
    is_unusable = words == 2 && (entry[1] != 0 || of_v[1] != 0);
    is_unusable = is_unusable || (table.v_entries_at != 0 && of_v[0] != entry[0] + 1);
  }
  return __syncthreads_or(is_unusable) != 0;
}

// A CTA's work tile of the call.
struct WorkTilePlace {
  int sequence;
  SequenceShape shape;
  const int32_t* table;  // of the sequence
  int first_head;        // of the CTA's, of the run
  int head;              // of this warp
  int kv_head;           // the same head, of the layer
  int first_row;
  int num_rows;
  int split;
  int num_splits;
  int64_t partial;  // balanced: of the first head's row 0
  TokenRange tokens;
  TokenRange packed;  // of the sequence: the others are full-precision

  // A window's, before tokens and a gap. Found again behind the walk, which has no registers for
  // what is needed there.
  __device__ bool has_sinks(const DecodeMmaParams& params) const {
    return params.window_sinks > 0 && !params.splits_off_sinks && split == 0 && tokens.begin > 0;
  }
  __device__ bool has_full_precision(const DecodeMmaParams& params) const {
    const int begin = has_sinks(params) ? 0 : tokens.begin;
    return begin < packed.begin || tokens.end > packed.end;
  }
};

// What this CTA's index says, but its tokens; num_splits is 0 where there is no such work_tile.
// num_heads: of the CTA; head: of this warp among them.
__device__ inline WorkTilePlace find_work_tile(const DecodeMmaParams& params, int rows_of_work_tile,
                                               int num_heads, int head) {
  WorkTilePlace place = {};
  int row_tile = 0;
  if (params.balance.most_work_tiles > 0) {
    const int cta = static_cast<int>(blockIdx.x);
    const int work_tile_and_tile = cta / params.ctas_of_heads;
    place.first_head = cta % params.ctas_of_heads * num_heads;
    row_tile = work_tile_and_tile % params.balance.num_row_tiles;
    const int work_tile = work_tile_and_tile / params.balance.num_row_tiles;
    const auto [sequence, work_tiles] = sequence_of_work_tile(params, work_tile);
    place.sequence = sequence;
    place.split = work_tile - work_tiles.first;
    place.num_splits = work_tiles.num;
    place.partial =
        balanced_partial(params.balance, params.num_heads, work_tile, place.first_head, row_tile);
    const bool is_first =
        cta == work_tiles.first * params.balance.num_row_tiles * params.ctas_of_heads;
    if (is_first && work_tiles.num > 0 && threadIdx.x == 0)
      params.balance.of_sequences[sequence] = work_tiles;
  } else {
    const int heads_and_tile = static_cast<int>(blockIdx.x);
    place.first_head = heads_and_tile % params.ctas_of_heads * num_heads;
    row_tile = heads_and_tile / params.ctas_of_heads;
    place.sequence = static_cast<int>(blockIdx.z);
    place.split = static_cast<int>(blockIdx.y);
    place.num_splits = params.num_splits;
  }
  if (place.num_splits == 0) return place;
  place.shape = sequence_shape(params, place.sequence);
  place.table = table_of(params, place.sequence);
  place.head = place.first_head + head;
  place.kv_head = params.first_head + place.head;
  place.first_row = row_tile * rows_of_work_tile;
  place.num_rows = min(rows_of_work_tile, place.shape.q_len * params.q_per_kv - place.first_row);
  return place;
}

// Counts a table that a work tile cannot read, once for all heads and rows.
__device__ inline void count_unusable_table(const DecodeMmaParams& params,
                                            const WorkTilePlace& place) {
  const bool counts = place.first_head == 0 && place.first_row == 0 && threadIdx.x == 0;
  if (counts) atomicAdd(&params.counters->out_of_range, 1ull);
}

// By a warp: its rows, as after a walk over no tokens.
template <class Rows>
__device__ inline void store_empty(Rows& rows) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll 1
  for (int r = 0; r < Rows::kRows; ++r) {
    for (int i = lane; i < Rows::kDim; i += kWarp) rows.sums[r][i] = 0;
    if (lane == 0) rows.softmax[r] = {-1e30f, 0};
  }
}

// Tokens of the work tile's split. A few sinks of a window are the first split's too, many are a
// split of their own (plan_work_tiles.hpp). Where no whole tile lies between them and the window,
// all is one range; where one does, its block may be gone already. is_apart: from sinks, which
// another split sees.
__device__ inline TokenRange tokens_of_work_tile(const DecodeMmaParams& params,
                                                 const WorkTilePlace& place, int step_tokens,
                                                 bool& is_apart) {
  const TokenRange seen = seen_by_rows(params, place.shape, place.first_row, place.num_rows);
  if (params.balance.most_work_tiles > 0) {
    return split_of(seen, place.num_splits, place.split, step_tokens);
  }
  if (params.window_sinks == 0) [[likely]] {
    return split_of(seen, params.num_splits, place.split, step_tokens);
  }
  const int sink_tiles = (params.window_sinks - 1) / kTileTokens + 1;
  const bool has_gap = sink_tiles < seen.begin / kTileTokens;
  const int own_splits = params.splits_off_sinks ? 1 : 0;
  if (place.split < own_splits) return {0, has_gap ? params.window_sinks : 0};
  is_apart = has_gap && params.splits_off_sinks;
  const TokenRange range = {has_gap ? seen.begin : 0, seen.end};
  return split_of(range, place.num_splits - own_splits, place.split - own_splits, step_tokens);
}

__device__ inline TokenRange common_tokens(TokenRange a, TokenRange b) {
  const TokenRange both = {max(a.begin, b.begin), min(a.end, b.end)};
  return both.begin < both.end ? both : TokenRange{};
}

// The work tile's full-precision tokens, after its packed ones, whose sums and softmax lie in rows
// and become those of both; they stay where this warp has no full-precision ones. A function of its
// own, for all pairs of formats: it runs once, beside loops that have all registers. shared: this
// warp's ring, in which its queries lie.
template <int Dim, int NTiles, bool Padded>
__device__ __noinline__ void attend_full_precision_window(const DecodeMmaParams& params,
                                                          WorkTilePlace place,
                                                          LaneSoftmax<NTiles> softmax,
                                                          LaneBias<NTiles> bias, uint32_t shared,
                                                          WarpRows<Dim, NTiles>* rows) {
  using Keys = TileKeys<TileBf16, NoScale, Dim, false, Padded>;
  using Values = TileValues<TileBf16, NoScale, Dim, false, Padded>;
  const int first_tile = place.tokens.begin / kTileTokens * kTileTokens;
  const int end_tile = (place.tokens.end + kTileTokens - 1) / kTileTokens * kTileTokens;
  const TokenRange packed_range = {min(max(place.packed.begin, first_tile), end_tile),
                                   min(max(place.packed.end, first_tile), end_tile)};
  const int num_heads = params.heads_of_cta;
  const int sink_steps = place.has_sinks(params) ? steps_over_sinks(params, kTileTokens) : 0;
  const TileWalk walk = {
      .params = params,
      .table = place.table,
      .seq_len = place.shape.seq_len,
      .head = place.kv_head - params.full_precision_first_head,
      .warp = static_cast<int>(threadIdx.x / kWarp) / num_heads,
      .tokens = place.tokens,
      .packed_range = packed_range,
      .sink_steps = sink_steps,
      .sinks_end = end_of_sinks(params, place.tokens.begin, sink_steps, kTileTokens),
      .packed = place.packed,
  };
  TileWorkTile<Keys, Values, Dim, NTiles, true> work_tile(walk, place.shape, place.first_row,
                                                          place.num_rows, shared);
  if (work_tile.is_empty()) return;
  work_tile.begin_with(shared, bias);
  work_tile.start_with(*rows, softmax);
  work_tile.run();
  work_tile.store_sums(*rows);
  work_tile.store_softmax(*rows);
}

// How a warp's shared memory is used, and how many warps a multiprocessor takes.
//
// [barriers][queries of an n-tile][ring over packed tokens]
// [        ][rows for the merge][ring over full-precision tokens  ]   after it, in the same memory
// [        ][                  ][queries for those      ]   before both
template <class Keys, class Values, int Dim, int NTiles, bool AcceptsFullPrecision>
struct WarpMemory {
  using Packed = TileConfig<Keys, Values, NTiles, false>;
  using Rows = WarpRows<Dim, NTiles>;
  static constexpr bool kAcceptsFullPrecision = AcceptsFullPrecision;
  static constexpr bool kIsPadded = Packed::kIsPadded;
  // V's transform of a row is undone where it lies, as a quad a lane holds no more than 128
  // numbers.
  static constexpr bool kFinishesInPlace = kIsPadded || Dim > 128;
  static constexpr int kRowsAt = Packed::kBarrierBytes;
  static constexpr int kFullPrecisionAt = kRowsAt + static_cast<int>(sizeof(Rows));
  static constexpr int kFullPrecisionWindow =
      kFullPrecisionAt + (kAcceptsFullPrecision ? 4 * kTileTokens * Dim : 0);
  static_assert(!kAcceptsFullPrecision ||
                (kFullPrecisionAt + FullPrecisionQueries<Dim>::bytes(NTiles) <=
                     kFullPrecisionWindow &&
                 Packed::kRingAt <= kFullPrecisionAt));
  static constexpr int kBytes =
      kFullPrecisionWindow > Packed::kWarpBytes ? kFullPrecisionWindow : Packed::kWarpBytes;
  static_assert(kFullPrecisionAt % 16 == 0 && kBytes % 16 == 0);
  // In CTAs of 1, 2, 4 or 8 warps: as many as shared memory and registers are for.
  static constexpr int kInMemory = kMultiprocessorBytes / (kBytes + kReservedBytes / 4);
  static constexpr bool kHasManySums = Packed::kHasChannels && NTiles > 1 && Dim > 64;
  static constexpr int kInRegisters = Dim > 128 || kHasManySums ? 8 : NTiles == 1 ? 16 : 12;
  static constexpr int kWarpsAtOnce = (kInMemory < kInRegisters ? kInMemory : kInRegisters) / 4 * 4;
  // Beside stages of so few bytes, a beginning and an end are long.
  static constexpr int kOverheadTokens = Packed::kHasChannels ? 256 : 40;
};

// Of lanes 0 to num - 1, in every lane; the others give what changes nothing.
template <class Combine>
__device__ float over_parts(float x, int num, const Combine& combine) {
  for (int offset = 1; offset < num; offset *= 2) {
    x = combine(x, __shfl_xor_sync(kWholeWarp, x, offset));
  }
  return __shfl_sync(kWholeWarp, x, 0);
}

// A row's parts, of warps or of CTAs: at most as many as a warp has lanes. Lane w knows part w's
// softmax.
struct MergedSoftmax {
  Softmax2 whole;
  float weight;  // of this lane's part
};
__device__ inline MergedSoftmax merge_parts(const Softmax2& part, int num) {
  const float max = over_parts(part.max, num, [](float a, float b) { return fmaxf(a, b); });
  const float weight = part.sum == 0 ? 0.0f : fast_exp2(part.max - max);
  const float sum = over_parts(weight * part.sum, num, [](float a, float b) { return a + b; });
  return {{max, sum}, weight};
}

// By a warp: numbers d to d + 3 of a row's merged sums, of which each lane asks for others.
// sums_of(w): part w's; is_there: whether the row has the lane's numbers.
template <class SumsOf>
__device__ float4 merged_quad(float weight, int num_parts, int d, bool is_there,
                              const SumsOf& sums_of) {
  float4 total = {};
#pragma unroll 4
  for (int w = 0; w < num_parts; ++w) {
    const float by = __shfl_sync(kWholeWarp, weight, w);
    if (by == 0 || !is_there) continue;
    const float4 x = *reinterpret_cast<const float4*>(sums_of(w) + d);
    total.x += by * x.x;
    total.y += by * x.y;
    total.z += by * x.z;
    total.w += by * x.w;
  }
  return total;
}

// Rows of all warps of a head together, a row by a warp: they become the output, or where other
// CTAs have parts too, one part of them. num_heads: of the CTA.
template <class Memory>
__device__ void merge_warps(const DecodeMmaParams& params, const WorkTilePlace& place,
                            int num_heads, uint8_t* shared) {
  using Rows = typename Memory::Rows;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int first_kv_head = params.first_head + place.first_head;
  const auto rows_of = [&](int head, int warp) -> Rows& {
    const int at = warp * num_heads + head;
    return *reinterpret_cast<Rows*>(shared + at * Memory::kBytes + Memory::kRowsAt);
  };
  const bool is_whole = place.num_splits == 1;
  const bool is_undone = is_whole && params.transforms_v;  // V's transform: here
  const int dim = Memory::kIsPadded ? params.value_dim : Rows::kDim;
  const int num_rows = num_heads * place.num_rows;
  const int num_parts = params.warps_of_head;
  for (int row = threadIdx.x / kWarp; row < num_rows; row += num_warps) {
    const int head = num_heads == 1 ? 0 : row / place.num_rows, r = row - head * place.num_rows;
    Softmax2 part = {-INFINITY, 0.0f};
    if (lane < num_parts) part = rows_of(head, lane).softmax[r];
    const MergedSoftmax merged = merge_parts(part, num_parts);
    const QueryRowAt at = query_row(params, first_kv_head + head, place.first_row + r);
    const int64_t token = place.shape.q_start + at.new_token;
    float* own = rows_of(head, 0).sums[r];  // no other warp reads it
    const int64_t index = params.balance.most_work_tiles > 0
                              ? place.partial + head * params.balance.rows_of_work_tile + r
                              : partial_index(params, token, at.q_head, place.split);
    for (int first = 0; first < dim; first += 4 * kWarp) {
      const int d = first + lane * 4;
      float4 quad = merged_quad(merged.weight, num_parts, d, d < dim,
                                [&](int w) { return rows_of(head, w).sums[r]; });
      if constexpr (!Memory::kFinishesInPlace) {
        if (is_undone)
          quad = undo_transform<Rows::kDim>(params, at.q_head, d, merged.whole.sum, quad);
      }
      if (d >= dim) continue;
      if (is_whole && !(Memory::kFinishesInPlace && is_undone)) {
        store_output_quad(params, token, at.q_head, d, merged.whole, quad);
      } else {
        const bool stays = is_whole || params.merges_in_cluster;
        float* to = stays ? own : params.partial_out + index * dim;
        *reinterpret_cast<float4*>(to + d) = quad;
      }
    }
    if (!is_whole && lane == 0) {
      Softmax2* to =
          params.merges_in_cluster ? &rows_of(head, 0).softmax[r] : params.partial_softmax + index;
      *to = merged.whole;
    }
    if (!Memory::kFinishesInPlace || !is_undone) continue;
    __syncwarp();
    finish_row(params, token, at.q_head, merged.whole, own, lane);
  }
}

// The splits of a work tile are the cluster's CTAs, each of which has a part of every row, where
// merge_warps left it. The rows are shared out among the warps of all of them.
template <class Memory>
__device__ void merge_cluster(const DecodeMmaParams& params, const WorkTilePlace& place,
                              int num_heads, uint8_t* shared) {
  using Rows = typename Memory::Rows;
  const int num_splits = params.num_splits;
  const int warps_of_cta = static_cast<int>(blockDim.x) / kWarp;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int dim = Memory::kIsPadded ? params.value_dim : Rows::kDim;
  const int num_rows = num_heads * place.num_rows;
  sync_cluster();
  for (int row = warp * num_splits + place.split; row < num_rows;
       row += warps_of_cta * num_splits) {
    const int head = num_heads == 1 ? 0 : row / place.num_rows, r = row - head * place.num_rows;
    Rows& rows = *reinterpret_cast<Rows*>(shared + head * Memory::kBytes + Memory::kRowsAt);
    Softmax2 part = {-INFINITY, 0.0f};
    if (lane < num_splits) part = *in_cta(&rows.softmax[r], lane);
    const MergedSoftmax merged = merge_parts(part, num_splits);
    const int kv_head = params.first_head + place.first_head + head;
    const QueryRowAt at = query_row(params, kv_head, place.first_row + r);
    const int64_t token = place.shape.q_start + at.new_token;
    float* own = rows.sums[r];
    for (int first = 0; first < dim; first += 4 * kWarp) {
      const int d = first + lane * 4;
      float4 quad = merged_quad(merged.weight, num_splits, d, d < dim,
                                [&](int cta) { return in_cta(own, cta); });
      if constexpr (!Memory::kFinishesInPlace) {
        if (params.transforms_v) {
          quad = undo_transform<Rows::kDim>(params, at.q_head, d, merged.whole.sum, quad);
        }
      }
      if (d >= dim) continue;
      if (Memory::kFinishesInPlace && params.transforms_v) {
        *reinterpret_cast<float4*>(own + d) = quad;
      } else {
        store_output_quad(params, token, at.q_head, d, merged.whole, quad);
      }
    }
    if (!Memory::kFinishesInPlace || !params.transforms_v) continue;
    __syncwarp();
    finish_row(params, token, at.q_head, merged.whole, own, lane);
  }
  sync_cluster();  // no CTA's memory goes before all have read it
}

template <class Memory, class Keys, class Values>
__device__ __forceinline__ void attend_decode_mma_of(const DecodeMmaParams& params) {
  using Rows = typename Memory::Rows;
  extern __shared__ __align__(128) uint8_t shared[];
  // The shuffle shows the compiler that all lanes have the same: what follows from it then is
  // computed once a warp, in registers of the warp.
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kWarp, 0);
  int num_heads = 1, head = 0;
  if constexpr (Memory::Packed::kAcceptsHeads) {
    num_heads = params.heads_of_cta;
    head = warp % num_heads;
  }
  WorkTilePlace place = find_work_tile(params, Rows::kRows, num_heads, head);
  if (place.num_splits == 0) return;
  if (!place.shape.is_valid) {
    if (params.merges_in_cluster && place.split > 0) return;
    const int first_kv_head = params.first_head + place.first_head;
    for (int h = first_kv_head; h < first_kv_head + num_heads; ++h) {
      store_empty_rows(params, place.shape, h, place.first_row, place.num_rows, place.split,
                       place.num_splits == 1 || params.merges_in_cluster);
    }
    return;
  }
  if (place.num_rows <= 0) return;
  constexpr int kStepTokens = Memory::Packed::kStepTokens;
  bool is_apart = false;
  place.tokens = tokens_of_work_tile(params, place, kStepTokens, is_apart);
  if (!params.has_plain_entries && !has_entries(params, place.sequence, place.tokens))
      [[unlikely]] {
    count_unusable_table(params, place);
    place.tokens = {};  // none is seen
  }
  place.packed = packed_tokens(params, place.sequence, place.shape.seq_len);
  TokenRange tokens = common_tokens(place.tokens, place.packed);
  int sink_steps = 0;
  if (place.has_sinks(params) && place.packed.begin < params.window_sinks) [[unlikely]] {
    const int begin = place.tokens.begin / kStepTokens * kStepTokens;
    if (tokens.begin == tokens.end) tokens = {begin, begin};
    sink_steps = steps_over_sinks(params, kStepTokens);
  }

  uint8_t* own = shared + warp * Memory::kBytes;
  const auto ring = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  Rows* rows = reinterpret_cast<Rows*>(own + Memory::kRowsAt);
  const TileWalk walk = {
      .params = params,
      .table = place.table,
      .seq_len = place.shape.seq_len,
      .head = place.head,
      .warp = warp / num_heads,
      .tokens = tokens,
      .packed_range = {},
      .sink_steps = sink_steps,
      .sinks_end = is_apart ? 0 : end_of_sinks(params, tokens.begin, sink_steps, kStepTokens),
      .packed = place.packed,
  };
  TileWorkTile<Keys, Values, Rows::kDim, Rows::kNTiles, false> work_tile(
      walk, place.shape, place.first_row, place.num_rows, ring);
  work_tile.begin();
  work_tile.start_empty();
  work_tile.run();
  if constexpr (Memory::kAcceptsFullPrecision) {
    if (place.has_full_precision(params)) {
      work_tile.store_queries(ring + Memory::kFullPrecisionAt);
    }
  }
  work_tile.store_sums(*rows);
  work_tile.store_softmax(*rows);  // before the calls: across them, it would cost registers
  bool is_usable = true;
  if (!params.has_plain_entries && has_unusable_entry(params, place.table, place.tokens))
      [[unlikely]] {
    count_unusable_table(params, place);
    store_empty(*rows);
    is_usable = false;
  }
  if constexpr (Memory::kAcceptsFullPrecision) {
    __syncwarp();
    if (is_usable && place.has_full_precision(params)) {
      attend_full_precision_window<Rows::kDim, Rows::kNTiles, Memory::kIsPadded>(
          params, place, work_tile.softmax(), work_tile.bias(), ring + Memory::kFullPrecisionAt,
          rows);
    }
  }
  __syncthreads();
  // Before a merge not earlier: its CTAs would crowd on the multiprocessors that are free first.
  let_later_launches_begin();
  merge_warps<Memory>(params, place, num_heads, shared);
  if (params.merges_in_cluster) merge_cluster<Memory>(params, place, num_heads, shared);
}

template <class Memory, class Keys, class Values>
__global__ void __launch_bounds__(Memory::kWarpsAtOnce* kWarp)
    attend_decode_mma(const __grid_constant__ DecodeMmaParams params) {
  if constexpr (Keys::kIsBulk && !kHasBulkCopies) {
    __trap();  // the host knows (cuda_code_version) and chooses the instance without them
  } else {
    const bool is_merged = params.num_splits > 1 && !params.merges_in_cluster;
    if (!is_merged && params.balance.most_work_tiles == 0) let_later_launches_begin();
    wait_for_earlier_work();
    attend_decode_mma_of<Memory, Keys, Values>(params);
  }
}

// What an instance tells the host.
template <class Keys, class Values, int Dim, int NTiles, bool AcceptsFullPrecision>
DecodeMmaKernel decode_mma_kernel() {
  using Memory = WarpMemory<Keys, Values, Dim, NTiles, AcceptsFullPrecision>;
  return {
      .function = reinterpret_cast<const void*>(&attend_decode_mma<Memory, Keys, Values>),
      .rows = Memory::Rows::kRows,
      .warps_at_once = Memory::kWarpsAtOnce,
      .warp_shared_bytes = Memory::kBytes,
      .step_tokens = Memory::Packed::kStepTokens,
      .tiles_at_once = Memory::Packed::kTilesAtOnce,
      .accepts_full_precision = Memory::kAcceptsFullPrecision,
      .accepts_heads = Memory::Packed::kAcceptsHeads,
      .overhead_tokens = Memory::kOverheadTokens,
  };
}

}  // namespace kvx::ops::cuda
