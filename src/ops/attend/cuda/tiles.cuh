// The tensor cores' attention kernel: up to 8 or 16 query rows of a KV head against a split of its
// tokens. Every warp works alone: it copies tiles of 16 tokens into a ring of its own, turns packed
// bytes into mma operands, and keeps its own softmax and sums; the CTA's warps merge at the end.
// A sequence's wide ends are walked over by the same warps after their packed tokens.
//
// The cache is the A operand of both products (keys: tokens x channels; values: channels x tokens)
// and the queries and weights are B, 8 columns: with few queries a KV head nothing is wasted, and
// rows that are not there cost little. With more than 8 rows a decoded operand meets two B's.
#pragma once

#include "ops/attend/cuda/balance.cuh"
#include "ops/attend/cuda/tile_piece.cuh"
#include "ops/cuda/earlier_work.cuh"

namespace kvx::ops::cuda {

// A CTA's piece of the call.
struct PiecePlace {
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
  TokenRange packed;  // of the sequence: the others are wide
};

// What this CTA's index says, but tokens; num_splits is 0 where there is no such piece. num_heads:
// of the CTA; head: of this warp among them.
__device__ inline PiecePlace find_piece(const AttendJob& job, int rows_of_piece, int num_heads,
                                        int head) {
  PiecePlace place = {};
  int row_tile = 0;
  const int heads_of_run = job.packed.num_heads / num_heads;  // in CTAs
  if (job.balanced_pieces > 0) {
    const int cta = static_cast<int>(blockIdx.x);
    place.first_head = cta % heads_of_run * num_heads;
    row_tile = cta / heads_of_run % job.num_row_tiles;
    const int piece = cta / heads_of_run / job.num_row_tiles;
    const auto [sequence, pieces] = sequence_of_piece(job, piece);
    place.sequence = sequence;
    place.split = piece - pieces.first;
    place.num_splits = pieces.num;
    place.partial = balanced_partial(job, piece, place.first_head, row_tile);
    const bool is_first = cta == pieces.first * heads_of_run * job.num_row_tiles;
    if (is_first && pieces.num > 0 && threadIdx.x == 0) job.sequence_pieces[sequence] = pieces;
  } else {
    place.first_head = static_cast<int>(blockIdx.y) % heads_of_run * num_heads;
    row_tile = static_cast<int>(blockIdx.y) / heads_of_run;
    place.sequence = static_cast<int>(blockIdx.z);
    place.split = static_cast<int>(blockIdx.x);
    place.num_splits = job.num_splits;
  }
  if (place.num_splits == 0) return place;
  place.shape = sequence_shape(job, place.sequence);
  place.table =
      job.args.block_table.ids + int64_t{place.sequence} * job.args.block_table.row_stride;
  place.head = place.first_head + head;
  place.kv_head = job.packed.first_head + place.head;
  place.first_row = row_tile * rows_of_piece;
  place.num_rows = min(rows_of_piece, place.shape.q_len * job.q_per_kv - place.first_row);
  return place;
}

// Of its split. A window's sinks, as far as they lie before it, are the first: so no walk has a
// hole.
__device__ inline TokenRange tokens_of_piece(const AttendJob& job, const PiecePlace& place,
                                             int step_tokens) {
  const TokenRange seen = seen_by_rows(job, place.shape, place.first_row, place.num_rows);
  if (job.args.window_sinks == 0) [[likely]] {
    return split_of(seen, place.num_splits, place.split, step_tokens);
  }
  if (place.split == 0) return {0, min(job.args.window_sinks, seen.begin)};
  return split_of(seen, place.num_splits - 1, place.split - 1, step_tokens);
}

__device__ inline TokenRange common_tokens(TokenRange a, TokenRange b) {
  const TokenRange both = {max(a.begin, b.begin), min(a.end, b.end)};
  return both.begin < both.end ? both : TokenRange{};
}

// The piece's wide tokens, after its packed ones, whose sums and softmax lie in rows and become
// those of both; they stay where this warp has no wide ones. A function of its own, for all pairs
// of formats: it runs once, beside loops that have all registers. shared: this warp's ring, in
// which its queries lie.
template <int Dim, int Columns, bool Padded>
__device__ __noinline__ void attend_wide_ends(const AttendJob& job, PiecePlace place,
                                              LaneSoftmax<Columns> softmax, LaneBias<Columns> bias,
                                              uint32_t shared, WarpRows<Dim, Columns>* rows) {
  using Keys = TileKeys<TileBf16, NoScale, Dim, false, Padded>;
  using Values = TileValues<TileBf16, NoScale, Dim, false, Padded>;
  const int first_tile = place.tokens.begin / kTileTokens * kTileTokens;
  const int end_tile = (place.tokens.end + kTileTokens - 1) / kTileTokens * kTileTokens;
  const TokenRange hole = {min(max(place.packed.begin, first_tile), end_tile),
                           min(max(place.packed.end, first_tile), end_tile)};
  const int num_heads = job.heads_of_cta;
  const TileWalk walk = {
      .job = job,
      .table = place.table,
      .seq_len = place.shape.seq_len,
      .head = place.kv_head - job.wide.first_head,
      .warp = static_cast<int>(threadIdx.x / kWarp) / num_heads,
      .num_warps = static_cast<int>(blockDim.x) / kWarp / num_heads,
      .tokens = place.tokens,
      .hole = hole,
  };
  TilePiece<Keys, Values, Dim, Columns, true> piece(walk, place.shape, place.first_row,
                                                    place.num_rows, shared);
  if (piece.is_empty()) return;
  piece.begin_with(shared, bias);
  piece.start_with(*rows, softmax);
  piece.run();
  piece.leave_sums(*rows);
  piece.leave_softmax(*rows);
}

// How a warp's shared memory is used, and how many warps a multiprocessor takes.
//
// [barriers][ring over packed tokens                     ][a column's queries]
// [        ][rows for the merge][ring over wide tokens ]   after it, in the same memory
// [        ][                  ][queries for those]        before both
template <class Keys, class Values, int Dim, int Columns, bool TakesWide>
struct WarpMemory {
  using Packed = TileConfig<Keys, Values, Columns, false>;
  using Rows = WarpRows<Dim, Columns>;
  static constexpr bool kTakesWide = TakesWide;
  static constexpr bool kIsPadded = Packed::kIsPadded;
  static constexpr int kRowsAt = Packed::kBarrierBytes;
  static constexpr int kWideAt = kRowsAt + static_cast<int>(sizeof(Rows));
  static constexpr int kWideEnd = kWideAt + (kTakesWide ? 4 * kTileTokens * Dim : 0);
  // WideQueries::leave says how far they may reach into what it reads.
  static_assert(!kTakesWide ||
                (kWideAt + WideQueries<Dim>::bytes(Columns) <= kWideEnd &&
                 kWideAt + WideQueries<Dim>::bytes(Columns) <= Packed::kQueriesAt + 2 * kWarp * 8));
  static constexpr int kBytes = kWideEnd > Packed::kWarpBytes ? kWideEnd : Packed::kWarpBytes;
  static_assert(kWideAt % 16 == 0 && kBytes % 16 == 0);
  // In CTAs of 1, 2, 4 or 8 warps: as many as shared memory and registers are for.
  static constexpr int kInMemory = kMultiprocessorBytes / (kBytes + kReservedBytes / 4);
  static constexpr int kInRegisters = Dim > 128 ? 8 : Columns == 1 ? 16 : 12;
  static constexpr int kWarpsAtOnce = (kInMemory < kInRegisters ? kInMemory : kInRegisters) / 4 * 4;
};

// Rows of all warps of a head together. Where nothing else is to be merged with, they become the
// output. num_heads: of the CTA.
template <class Memory>
__device__ void merge_warps(const AttendJob& job, const PiecePlace& place, int num_heads,
                            uint8_t* shared) {
  using Rows = typename Memory::Rows;
  const int warps_of_cta = static_cast<int>(blockDim.x) / kWarp;
  const int num_warps = warps_of_cta / num_heads;  // of a head
  const int first_kv_head = job.packed.first_head + place.first_head;
  const auto rows_of = [&](int head, int warp) -> Rows& {
    const int at = warp * num_heads + head;
    return *reinterpret_cast<Rows*>(shared + at * Memory::kBytes + Memory::kRowsAt);
  };
  // The softmax of a head's row r over all its warps; add(warp, weight) for each that saw a token.
  const auto merge = [&](int head, int r, const auto& add) {
    Softmax2 whole = {-INFINITY, 0.0f};
    for (int w = 0; w < num_warps; ++w) {
      whole.max = fmaxf(whole.max, rows_of(head, w).softmax[r].max);
    }
    for (int w = 0; w < num_warps; ++w) {
      const Softmax2& part = rows_of(head, w).softmax[r];
      if (part.sum == 0) continue;
      const float weight = fast_exp2(part.max - whole.max);
      whole.sum += weight * part.sum;
      add(w, weight);
    }
    return whole;
  };
  const bool is_whole = place.num_splits == 1;
  const bool is_undone = is_whole && job.transforms_v;  // V's transform: here
  const int dim = Memory::kIsPadded ? job.packed.v.view.head_dim : Rows::kDim;
  const int quads = dim / 4;
  const int num_rows = num_heads * place.num_rows;
  const auto head_of = [&](int row) { return num_heads == 1 ? 0 : row / place.num_rows; };
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int i = threadIdx.x; i - lane < num_rows * quads; i += warps_of_cta * kWarp) {
    // All lanes go round: they rotate a row together.
    const int row = min(i / quads, num_rows - 1), d = i % quads * 4;
    const int head = head_of(row), r = row - head * place.num_rows;
    const auto quad_of = [&](int w) -> float4& {
      return reinterpret_cast<float4&>(rows_of(head, w).sums[r][d]);
    };
    float4 total = {};
    const Softmax2 whole = merge(head, r, [&](int w, float weight) {
      const float4 x = quad_of(w);
      total.x += weight * x.x;
      total.y += weight * x.y;
      total.z += weight * x.z;
      total.w += weight * x.w;
    });
    const QueryRowAt at = query_row(job, first_kv_head + head, place.first_row + r);
    const int64_t token = place.shape.q_start + at.new_token;
    if constexpr (!Memory::kIsPadded) {
      if (is_undone) total = undo_transform<Rows::kDim>(job, at.q_head, d, whole.sum, total);
    }
    if (i >= num_rows * quads) continue;
    if (Memory::kIsPadded && is_undone) {
      quad_of(0) = total;  // only this thread reads it before
    } else if (is_whole) {
      store_output_quad(job, token, at.q_head, d, whole, total);
    } else {
      const int64_t index = job.balanced_pieces > 0
                                ? place.partial + head * job.rows_of_piece + r
                                : partial_index(job, token, at.q_head, place.split);
      *reinterpret_cast<float4*>(job.partial_out + index * dim + d) = total;
      if (d == 0) job.partial_softmax[index] = whole;
    }
  }
  if (!Memory::kIsPadded || !is_undone) return;
  __syncthreads();
  const int warp = threadIdx.x / kWarp;
  for (int row = warp; row < num_rows; row += warps_of_cta) {
    const int head = head_of(row), r = row - head * place.num_rows;
    const QueryRowAt at = query_row(job, first_kv_head + head, place.first_row + r);
    const Softmax2 whole = merge(head, r, [](int, float) {});
    finish_row(job, place.shape.q_start + at.new_token, at.q_head, whole, rows_of(head, 0).sums[r],
               lane);
  }
}

template <class Memory, class Keys, class Values>
__device__ __forceinline__ void attend_tiles_of(const AttendJob& job) {
  using Rows = typename Memory::Rows;
  extern __shared__ __align__(128) uint8_t shared[];
  int num_heads = 1, head = 0;
  if constexpr (Memory::Packed::kTakesHeads) {
    num_heads = job.heads_of_cta;
    // The shuffle shows the compiler that a warp has but one, which saves registers.
    head = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kWarp % num_heads, 0);
  }
  PiecePlace place = find_piece(job, Rows::kRows, num_heads, head);
  if (place.num_splits == 0) return;
  if (!place.shape.is_valid) {
    const int first_kv_head = job.packed.first_head + place.first_head;
    for (int h = first_kv_head; h < first_kv_head + num_heads; ++h) {
      leave_empty(job, place.shape, h, place.first_row, place.num_rows, place.split,
                  place.num_splits == 1);
    }
    return;
  }
  if (place.num_rows <= 0) return;
  place.tokens = tokens_of_piece(job, place, Memory::Packed::kStepTokens);
  place.packed = packed_tokens(job, place.sequence, place.shape.seq_len);

  uint8_t* own = shared + threadIdx.x / kWarp * Memory::kBytes;
  const auto ring = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  Rows* rows = reinterpret_cast<Rows*>(own + Memory::kRowsAt);
  const TileWalk walk = {
      .job = job,
      .table = place.table,
      .seq_len = place.shape.seq_len,
      .head = place.head,
      .warp = static_cast<int>(threadIdx.x) / kWarp / num_heads,
      .num_warps = static_cast<int>(blockDim.x) / kWarp / num_heads,
      .tokens = common_tokens(place.tokens, place.packed),
      .hole = {},
  };
  TilePiece<Keys, Values, Rows::kDim, Rows::kColumns, false> piece(
      walk, place.shape, place.first_row, place.num_rows, ring);
  piece.begin();
  piece.start_empty();
  piece.run();
  if constexpr (Memory::kTakesWide) {
    if (place.tokens.begin < place.packed.begin || place.tokens.end > place.packed.end) {
      piece.leave_queries(ring + Memory::kWideAt);
    }
  }
  piece.leave_sums(*rows);
  piece.leave_softmax(*rows);  // before the call: across it, it would cost registers
  if constexpr (Memory::kTakesWide) {
    __syncwarp();
    if (place.tokens.begin < place.packed.begin || place.tokens.end > place.packed.end) {
      attend_wide_ends<Rows::kDim, Rows::kColumns, Memory::kIsPadded>(
          job, place, piece.softmax(), piece.bias(), ring + Memory::kWideAt, rows);
    }
  }
  __syncthreads();
  // Before a merge not earlier: its CTAs would crowd on the multiprocessors that are free first.
  let_later_launches_begin();
  merge_warps<Memory>(job, place, num_heads, shared);
}

template <class Memory, class Keys, class Values>
__global__ void __launch_bounds__(Memory::kWarpsAtOnce* kWarp)
    attend_tiles(const __grid_constant__ AttendJob job) {
  if constexpr (Keys::kIsBulk && !kHasBulkCopies) {
    __trap();  // the host knows (cuda_code_version) and chooses the instance without them
  } else {
    if (job.num_splits == 1 && job.balanced_pieces == 0) let_later_launches_begin();
    wait_for_earlier_work();
    attend_tiles_of<Memory, Keys, Values>(job);
  }
}

// What an instance tells the host.
template <class Keys, class Values, int Dim, int Columns, bool TakesWide>
TileKernel tile_kernel() {
  using Memory = WarpMemory<Keys, Values, Dim, Columns, TakesWide>;
  return {
      .function = reinterpret_cast<const void*>(&attend_tiles<Memory, Keys, Values>),
      .rows = Memory::Rows::kRows,
      .warps_at_once = Memory::kWarpsAtOnce,
      .warp_shared_bytes = Memory::kBytes,
      .step_tokens = Memory::Packed::kStepTokens,
      .tiles_at_once = Memory::Packed::kTilesAtOnce,
      .takes_wide = Memory::kTakesWide,
      .takes_heads = Memory::Packed::kTakesHeads,
  };
}

}  // namespace kvx::ops::cuda
