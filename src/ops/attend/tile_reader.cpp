// TileReader walks a sequence's block table.
#include "ops/attend/tile_reader.hpp"

#include <algorithm>
#include <limits>

namespace kvx::ops {

TileReader::TileReader(const CpuAttendPlan& plan, int sequence, int kv_head)
    : plan_(plan),
      sequence_(sequence),
      kv_head_(kv_head),
      recent_begin_(std::numeric_limits<int64_t>::max()) {
  const AttendArgs& args = plan.args;
  kinds_[0] = make_kind(args.packed);
  for (const SideView* side : kinds_[0].sides) ends_with_block_ |= side->spec.is_dual();
  if (!args.num_sink_blocks) return;
  kinds_[1] = make_kind(args.full_precision);
  sinks_end_ = int64_t{args.num_sink_blocks[sequence]} * args.packed.block_size;
  recent_begin_ = int64_t{args.first_recent_block[sequence]} * args.packed.block_size;
}

TileReader::Kind TileReader::make_kind(const LayerView& view) const {
  const HeadRun& run = run_of_head(view, kv_head_);
  Kind kind = {.sides = {&run.k, &run.v}, .head_in_run = kv_head_ - run.first_head};
  if (!fits_packed_kernels(plan_.tiling, plan_.key_dim, plan_.value_dim)) return kind;
  for (int i = 0; i < 2; ++i) {
    const SideView& side = *kind.sides[i];
    const cpu::PackedKernels* accurate =
        plan_.math.find_packed(side.spec, side.head_dim, Precision::kAccurate);
    const cpu::PackedKernels* wanted =
        plan_.math.find_packed(side.spec, side.head_dim, plan_.args.precision);
    if (side.spec.facts->element_bits < 16) kind.parts[i] = cpu::MatrixParts::kNotBothLow;
    if (wanted != accurate) kind.parts[i] = cpu::MatrixParts::kHigh;
    if (!side.codes.is_fragmented()) kind.kernels[i] = wanted;
  }
  return kind;
}

int TileReader::tile_length(int first, int end) const {
  int64_t last = std::min<int64_t>(int64_t{first} + plan_.tiling.tokens, end);
  for (const int64_t border : {sinks_end_, recent_begin_}) {
    if (border > first) last = std::min(last, border);
  }
  if (ends_with_block_ && !is_full_precision(first)) {
    const int64_t block_size = plan_.args.packed.block_size;
    last = std::min(last, (first / block_size + 1) * block_size);
  }
  return static_cast<int>(last - first);
}

void TileReader::find(int first, int num_tokens, TileRows& tile) const {
  tile.first_token = first;
  tile.num_tokens = num_tokens;
  find_side(Side::kKey, tile, tile.keys);
  find_side(Side::kValue, tile, tile.values);
}

void TileReader::find_side(Side side, const TileRows& tile, cpu::PackedTile& rows) const {
  rows.num_tokens = 0;
  if (tile.num_tokens == 0 || !kernels(side, tile.first_token)) return;
  const Kind& kind = kinds_[is_full_precision(tile.first_token) ? 1 : 0];
  const SideView& view = *kind.sides[static_cast<int>(side)];
  rows.spec = &view.spec;
  rows.head_dim = view.head_dim;
  rows.tensor_scale = view.tensor_scale(kind.head_in_run);
  rows.num_tokens = tile.num_tokens;
  rows.scale_group_stride = view.scales.group_stride;
  const int block_size = plan_.args.packed.block_size;
  if (view.spec.is_dual()) {
    const int64_t block = plan_.args.block_table.at(sequence_, tile.first_token / block_size);
    rows.channels = view.channels.at(block, kind.head_in_run);
  }
  for (int i = 0; i < tile.num_tokens;) {
    const int token = tile.first_token + i;
    const int offset = token % block_size;
    const int64_t block = plan_.args.block_table.at(sequence_, token / block_size);
    const int count = std::min(block_size - offset, tile.num_tokens - i);
    plan_.math.fill_addresses(view.codes.at(block, offset, kind.head_in_run),
                              view.codes.token_stride, count, rows.codes + i);
    plan_.math.fill_addresses(view.scales.at(block, offset, kind.head_in_run),
                              view.scales.token_stride, count, rows.scales + i);
    i += count;
  }
  for (int i = tile.num_tokens; i < rows.padded_tokens(); ++i) {
    rows.codes[i] = rows.codes[i - 1];
    rows.scales[i] = rows.scales[i - 1];
  }
}

void TileReader::decode(Side side, int first, int num_tokens, float* rows) const {
  const Kind& kind = kinds_[is_full_precision(first) ? 1 : 0];
  decode_side(*kind.sides[static_cast<int>(side)], kind.head_in_run, first, num_tokens, rows);
}

void TileReader::decode_segment(const LayerView& segment, int first, int num_tokens,
                                float* rows) const {
  const HeadRun& run = run_of_head(segment, kv_head_);
  decode_side(run.k, kv_head_ - run.first_head, first, num_tokens, rows);
}

void TileReader::decode_side(const SideView& side, int head_in_run, int first, int num_tokens,
                             float* rows) const {
  const int block_size = plan_.args.packed.block_size;
  for (int token = first; token < first + num_tokens;) {
    const int offset = token % block_size;
    const int count = std::min(block_size - offset, first + num_tokens - token);
    const TokenRun run = {plan_.args.block_table.at(sequence_, token / block_size), offset, count};
    decode_rows(*plan_.context.kernels, side, head_in_run, run, format::DecodeFor::kAttend,
                rows + int64_t{token - first} * side.head_dim);
    token += count;
  }
}

}  // namespace kvx::ops
