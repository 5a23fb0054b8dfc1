// The products of a work tile with many rows on a CPU's matrix unit, a tile of tokens at a time.
#pragma once

#include <algorithm>

#include "ops/attend/cpu/matrix/kernels.hpp"
#include "ops/attend/cpu/prefetcher.hpp"
#include "ops/attend/tile_reader.hpp"

namespace kvx::ops {

class MatrixTiles {
 public:
  // Of a work tile's memory. It holds the right operand, and kTokenStep decoded rows.
  struct Memory {
    float* query_parts;  // [num_rows padded, key_dim]
    float* tiles;        // [2, kMaxTileTokens, the larger head_dim]: of keys and of values
    float* rows;         // [kTokenStep, the larger head_dim]
  };

  MatrixTiles(const CpuAttendPlan& plan, const TileReader& reader, int num_rows,
              const Memory& memory, cpu::Prefetcher& prefetcher)
      : plan_(plan),
        reader_(reader),
        num_rows_(num_rows),
        memory_(memory),
        prefetcher_(prefetcher) {}

  // Whether score and add_values may be called: the plan is for a matrix unit, there are rows
  // enough, and the queries ([num_rows, first segment's numbers]) can be taken apart.
  bool begin(const float* queries) {
    is_used_ = plan_.on_matrix_unit && num_rows_ >= fewest_rows() &&
               plan_.math.matrix->split_rows(queries, num_rows_, reader_.first_segment_dim(),
                                             memory_.query_parts);
    return is_used_;
  }
  bool is_used() const { return is_used_; }

  // A tile that every row sees whole, of packed blocks or of full-precision ones. False, and
  // nothing is written: it has rows that are to be decoded, or numbers without two parts.
  bool attend_tile(const TileRows& tile, QueryRow* rows, float softmax_scale, float* scores,
                   float* sums) {
    if (tile.keys.num_tokens != cpu::kMaxTileTokens) return false;
    if (tile.values.num_tokens != cpu::kMaxTileTokens) return false;
    const cpu::MatrixKernels& matrix = *plan_.math.matrix;
    const cpu::MatrixParts key_parts = reader_.matrix_parts(Side::kKey, tile.first_token);
    const cpu::MatrixParts value_parts = reader_.matrix_parts(Side::kValue, tile.first_token);
    const auto packers = [&](const cpu::PackedTile& side, cpu::MatrixParts parts) {
      return matrix.find_packers(*side.spec, side.head_dim, parts != cpu::MatrixParts::kHigh);
    };
    const cpu::MatrixPackers* of_keys = packers(tile.keys, key_parts);
    const cpu::MatrixPackers* of_values = packers(tile.values, value_parts);
    if (of_keys == nullptr || of_values == nullptr) return false;
    cpu::MatrixTile keys = empty_tile(Side::kKey, tile.keys.head_dim);
    cpu::MatrixTile values = empty_tile(Side::kValue, plan_.value_dim);
    const int strips = (num_rows_ + cpu::kStripRows - 1) / cpu::kStripRows;
    prefetcher_.pace(100, 2 * kSteps + strips * cpu::kStepsAStrip);
    if (!of_keys->pack_keys(tile.keys, prefetcher_, keys)) return false;
    if (!of_values->pack_values(tile.values, prefetcher_, values)) return false;
    matrix.attend_tile({.queries = memory_.query_parts,
                        .num_rows = num_rows_,
                        .keys = keys,
                        .values = values,
                        .key_parts = key_parts,
                        .value_parts = value_parts,
                        .rows = rows,
                        .softmax_scale = softmax_scale,
                        .scores = scores,
                        .sums = sums,
                        .prefetcher = prefetcher_});
    return true;
  }

  // scores [num_rows, kMaxTileTokens] = q . k. False, and nothing is written: a key has no two
  // parts.
  bool score(int first, int num_tokens, float* scores) {
    const int dim = reader_.first_segment_dim();
    prefetcher_.pace(cpu::PhaseShares::kUnpackKeys + cpu::PhaseShares::kScore, kSteps);
    cpu::MatrixTile tile = empty_tile(Side::kKey, dim);
    if (!pack(Side::kKey, plan_.math.matrix->pack_keys, first, num_tokens, tile)) return false;
    plan_.math.matrix->score({.rows = memory_.query_parts,
                              .stride = dim,
                              .num_rows = num_rows_,
                              .tile = &tile,
                              .target = scores,
                              .target_stride = cpu::kMaxTileTokens,
                              .parts = reader_.matrix_parts(Side::kKey, first)});
    return true;
  }

  // sums [num_rows, value_dim] += p . v. Spends the probabilities. False, and nothing is written: a
  // value has no two parts.
  bool add_values(int first, int num_tokens, float* probabilities, float* sums) {
    prefetcher_.pace(cpu::PhaseShares::kUnpackValues + cpu::PhaseShares::kAddValues, kSteps);
    cpu::MatrixTile tile = empty_tile(Side::kKey, plan_.value_dim);
    if (!pack(Side::kValue, plan_.math.matrix->pack_values, first, num_tokens, tile)) return false;
    plan_.math.matrix->split_probabilities(probabilities, num_rows_, num_tokens);
    plan_.math.matrix->add_values({.rows = probabilities,
                                   .stride = cpu::kMaxTileTokens,
                                   .num_rows = num_rows_,
                                   .tile = &tile,
                                   .target = sums,
                                   .target_stride = plan_.value_dim,
                                   .parts = reader_.matrix_parts(Side::kValue, first)});
    return true;
  }

 private:
  static constexpr int kSteps = cpu::kMaxTileTokens / cpu::kTokenStep;

  int fewest_rows() const {
    const cpu::MatrixKernels& kernels = *plan_.math.matrix;
    return reader_.decodes(num_rows_) ? kernels.fewest_rows : kernels.fewest_packed_rows;
  }

  // side: whose memory.
  cpu::MatrixTile empty_tile(Side side, int head_dim) const {
    const int side_of_two = side == Side::kKey ? 0 : 1;
    const int larger_dim = std::max(plan_.key_dim, plan_.value_dim);
    auto* high =
        reinterpret_cast<uint16_t*>(memory_.tiles + side_of_two * cpu::kMaxTileTokens * larger_dim);
    return {.high = high,
            .low = high + cpu::kMaxTileTokens * head_dim,
            .head_dim = head_dim,
            .is_exact = true,
            .steps = nullptr,
            .scratch = memory_.rows + side_of_two * cpu::kTokenStep / 2 * larger_dim};
  }

  bool pack(Side side, bool (*pack_rows)(float*, int, int, cpu::MatrixTile&), int first,
            int num_tokens, cpu::MatrixTile& tile) {
    for (int i = 0; i < cpu::kMaxTileTokens; i += cpu::kTokenStep) {
      const int count = std::clamp(num_tokens - i, 0, cpu::kTokenStep);
      if (count > 0) reader_.decode(side, first + i, count, memory_.rows);
      prefetcher_.step();
      if (!pack_rows(memory_.rows, i, count, tile)) return false;
    }
    return true;
  }

  const CpuAttendPlan& plan_;
  const TileReader& reader_;
  int num_rows_;
  Memory memory_;
  cpu::Prefetcher& prefetcher_;
  bool is_used_ = false;
};

}  // namespace kvx::ops
