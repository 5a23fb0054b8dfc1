// TileReader finds the stored rows of one sequence and one KV head, and decodes them.
#pragma once

#include "ops/attend/cpu/work_tile.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops {

enum class Side { kKey, kValue };

class TileReader {
 public:
  TileReader(const CpuAttendPlan& plan, int sequence, int kv_head);

  // How many tokens the tile that begins at `first` takes: at most the tiling's, before `end`, in
  // blocks of one kind (full-precision or packed); in one block where that has its own channels.
  int tile_length(int first, int end) const;

  // The tile's rows of the sides that have packed kernels; the other's num_tokens is 0.
  void find(int first, int num_tokens, TileRows& tile) const;

  // What reads the rows of the tile that begins at `token`; null: decode them.
  const cpu::PackedKernels* kernels(Side side, int token) const {
    return kinds_[is_full_precision(token) ? 1 : 0].kernels[static_cast<int>(side)];
  }

  // Whether tiles of packed blocks are decoded for so many rows, K's or V's.
  bool decodes(int num_rows) const {
    for (const cpu::PackedKernels* kernels : kinds_[0].kernels) {
      if (kernels == nullptr || num_rows > kernels->most_rows) return true;
    }
    return false;
  }
  // What the caller's precision asks of a matrix unit for the side's rows.
  cpu::MatrixParts matrix_parts(Side side, int token) const {
    return kinds_[is_full_precision(token) ? 1 : 0].parts[static_cast<int>(side)];
  }

  // rows: [num_tokens, head_dim], from the blocks in which the tokens lie.
  void decode(Side side, int first, int num_tokens, float* rows) const;

  // The segments of the tile's rows of K behind the first one, which decode() takes as keys.
  const LayerView* more_segments(int token) const {
    return (is_full_precision(token) ? plan_.args.full_precision : plan_.args.packed).next_segment;
  }
  // Numbers of K in the first segment.
  int first_segment_dim() const { return kinds_[0].sides[0]->head_dim; }
  // rows: [num_tokens, the segment's head_dim].
  void decode_segment(const LayerView& segment, int first, int num_tokens, float* rows) const;

 private:
  // One KV head in packed or in full-precision blocks.
  struct Kind {
    const SideView* sides[2] = {};
    const cpu::PackedKernels* kernels[2] = {};
    cpu::MatrixParts parts[2] = {cpu::MatrixParts::kAll, cpu::MatrixParts::kAll};
    int head_in_run = 0;
  };

  Kind make_kind(const LayerView& view) const;
  bool is_full_precision(int token) const { return token < sinks_end_ || token >= recent_begin_; }
  void decode_side(const SideView& side, int head_in_run, int first, int num_tokens,
                   float* rows) const;
  void find_side(Side side, const TileRows& tile, cpu::PackedTile& rows) const;

  const CpuAttendPlan& plan_;
  int sequence_;
  int kv_head_;
  int64_t sinks_end_ = 0;         // tokens before it lie in full-precision blocks, and those from
  int64_t recent_begin_;          // this one on
  Kind kinds_[2];                 // packed, full-precision
  bool ends_with_block_ = false;  // tiles of packed blocks
};

}  // namespace kvx::ops
