// SceneCache: the blocks of one layer in a test's own memory, in any format and row order, and its
// stored rows read back in double precision.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "core/float16.hpp"
#include "format/list.hpp"
#include "format/packing.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/side_rows.hpp"
#include "ops/transform.hpp"

namespace kvx::tests {

using Row = std::vector<double>;

struct RunOptions {
  int num_heads = 2;
  std::string k_format = "f32";
  std::string v_format = "f32";
};

// Where rows of a block lie: [token][head], [head][token], [token][head] with a row's K, V and
// scales side by side, or as a pool's records: [head][K codes, K scales, V codes, V scales], each
// with its channels behind it, where the format has them. kFragments, without scales: [head][piece
// of 16 bytes][token] of K, [head][number of 16 bits][token] of V.
enum class RowOrder { kNhd, kHnd, kFused, kRecord, kFragments };

struct SceneOptions {
  std::vector<RunOptions> runs = {RunOptions{}};
  int key_dim = 64;
  int value_dim = 64;
  std::string rest_format;  // of K's last rest_dim numbers, a second segment; empty: there is one
  int rest_dim = 0;
  int q_per_kv = 2;
  int block_size = 16;
  std::vector<int> seq_lens = {37};
  std::vector<int> q_lens = {1};
  RowOrder order = RowOrder::kNhd;
  bool scales_apart = false;  // in a region of their own, in the rows' order (kNhd and kHnd)
  unsigned table_seed = 1;    // which physical blocks; the numbers do not depend on it
  DType q_type = DType::kF32;
  DType out_type = DType::kF32;
  float softmax_scale = 0.15f;
  float softcap = 0.0f;
  int window = 0;
  int window_sinks = 0;
  bool sinks = false;
  bool k_mean = false, k_factor = false, k_offset = false, k_hadamard = false;
  bool v_mean = false, v_factor = false, v_hadamard = false;
  std::string full_precision_format;  // empty: no full-precision window
  int num_sink_blocks = 1;            // blocks
  int first_recent_block = 2;         // blocks
};

// "fp8_e4m3@row" is the format with scales computed for each row, "fp8_e4m3@g128" for each 128
// numbers, "fp8_e4m3@page" with scales that a block's tokens share, "fp4_row@f32" with scales of 32
// bits.
inline format::FormatSpec scene_spec(const std::string& name) {
  const size_t at = name.find('@');
  format::SpecOptions options;
  if (name.ends_with("@row")) options.scale_source = format::ScaleSource::kComputed;
  if (name.ends_with("@g128")) {
    options.scale_source = format::ScaleSource::kComputed;
    options.group_size = 128;
  }
  if (name.ends_with("@f32")) options.scale_type = format::ScaleType::kF32;
  if (name.ends_with("@page")) options.scale_source = format::ScaleSource::kPageShared;
  return format::make_spec(format::format_named(name.substr(0, at)).value(), options).value();
}

// The blocks of one layer. Every byte starts as 0xFF, which is NaN in all that can say it.
class SceneCache {
 public:
  SceneCache(const SceneOptions& options, const std::vector<RunOptions>& formats, int num_blocks)
      : options_(options) {
    int first_head = 0;
    for (const RunOptions& run : formats) {
      add_run(first_head, run, num_blocks);
      if (!options.rest_format.empty()) add_segment(first_head, run.num_heads, num_blocks);
      first_head += run.num_heads;
    }
    view_ = {num_blocks, options.block_size, first_head, runs_};
    if (segments_.empty()) return;
    next_segment_ = {num_blocks, options.block_size, first_head, segments_};
    view_.next_segment = &next_segment_;
  }
  SceneCache(const SceneCache&) = delete;

  const ops::LayerView& view() const { return view_; }
  ops::HeadRun& run(int i) { return runs_[i]; }
  ops::HeadRun& segment(int i) { return segments_[i]; }  // the second one of the run's K
  // All that the view points to.
  std::deque<std::vector<uint8_t>>& memory() { return memory_; }

 private:
  void add_run(int first_head, const RunOptions& run, int num_blocks) {
    ops::HeadRun view;
    view.first_head = first_head;
    view.num_heads = run.num_heads;
    ops::SideView* sides[] = {&view.k, &view.v};
    int64_t codes_bytes[2], row_bytes[2], total = 0, channels_total = 0;
    for (int i = 0; i < 2; ++i) {
      sides[i]->spec = scene_spec(i == 0 ? run.k_format : run.v_format);
      sides[i]->head_dim = i == 0 ? options_.key_dim - options_.rest_dim : options_.value_dim;
      codes_bytes[i] = format::code_bytes_per_row(sides[i]->spec, sides[i]->head_dim);
      row_bytes[i] =
          codes_bytes[i] + format::scale_bytes_per_row(sides[i]->spec, sides[i]->head_dim);
      total += row_bytes[i];
      channels_total += format::channel_bytes_per_block(sides[i]->spec, sides[i]->head_dim);
    }
    const int64_t rows = int64_t{num_blocks} * options_.block_size * run.num_heads;
    std::vector<uint8_t>& bytes = memory_.emplace_back(
        rows * total + int64_t{num_blocks} * run.num_heads * channels_total, uint8_t{0xFF});
    const int64_t bytes_of_head = options_.block_size * total + channels_total;
    int64_t offset = 0;
    uint8_t* channels = bytes.data() + rows * total;  // [K, V][num_blocks, heads of the run]
    for (int i = 0; i < 2; ++i) {
      const int64_t stride = options_.order == RowOrder::kFused ? total
                             : options_.scales_apart            ? codes_bytes[i]
                                                                : row_bytes[i];
      ops::SideView& side = *sides[i];
      place_rows(side.codes, bytes.data() + offset, run.num_heads, stride);
      if (options_.order == RowOrder::kFragments) lay_in_fragments(side.codes, i == 0 ? 16 : 2);
      if (side.spec.has_scale() && options_.scales_apart) {
        place_rows(side.scales, bytes.data() + offset + rows * stride, run.num_heads,
                   row_bytes[i] - codes_bytes[i]);
        side.scales.group_stride = format::scale_bytes_per_group(side.spec);
      } else if (side.spec.has_scale()) {
        side.scales = {side.codes.base + codes_bytes[i], side.codes.block_stride,
                       side.codes.token_stride, side.codes.head_stride,
                       format::scale_bytes_per_group(side.spec)};
      }
      if (side.spec.scale_source == format::ScaleSource::kGiven) give_scales(side, run.num_heads);
      if (side.spec.scale_source == format::ScaleSource::kPageShared) {
        share_scales(side, num_blocks, run.num_heads, row_bytes[i] - codes_bytes[i]);
      }
      const int64_t channel_bytes = format::channel_bytes_per_block(side.spec, side.head_dim);
      if (channel_bytes > 0) {
        side.channels = {channels, run.num_heads * channel_bytes, channel_bytes};
        channels += int64_t{num_blocks} * run.num_heads * channel_bytes;
      }
      if (options_.order == RowOrder::kRecord) {
        place_in_record(side, bytes.data(), run.num_heads, codes_bytes[i], row_bytes[i],
                        bytes_of_head);
      }
      offset += options_.order == RowOrder::kFused ? row_bytes[i] : rows * row_bytes[i];
    }
    runs_.push_back(view);
  }

  // Of a format without scales, in a region of its own.
  void add_segment(int first_head, int num_heads, int num_blocks) {
    ops::HeadRun segment;
    segment.first_head = first_head;
    segment.num_heads = num_heads;
    segment.k.spec = scene_spec(options_.rest_format);
    segment.k.head_dim = options_.rest_dim;
    const int64_t row_bytes = format::code_bytes_per_row(segment.k.spec, options_.rest_dim);
    const int64_t rows = int64_t{num_blocks} * options_.block_size * num_heads;
    std::vector<uint8_t>& bytes = memory_.emplace_back(rows * row_bytes, uint8_t{0xFF});
    place_rows(segment.k.codes, bytes.data(), num_heads, row_bytes);
    segments_.push_back(segment);
  }

  // Codes or scales whose rows of all tokens and heads follow each other.
  template <class Address>
  void place_rows(Address& at, uint8_t* base, int num_heads, int64_t row_bytes) const {
    const bool by_head = options_.order == RowOrder::kHnd || options_.order == RowOrder::kFragments;
    at.base = base;
    at.block_stride = options_.block_size * num_heads * row_bytes;
    at.token_stride = by_head ? row_bytes : num_heads * row_bytes;
    at.head_stride = by_head ? options_.block_size * row_bytes : row_bytes;
  }

  void lay_in_fragments(ops::CodeAddress& codes, int bytes) const {
    codes.fragment_bytes = bytes;
    codes.fragment_stride = int64_t{bytes} * options_.block_size;
    codes.token_stride = bytes;
  }

  // V's part of a head begins where K's ends.
  void place_in_record(ops::SideView& side, uint8_t* base, int num_heads, int64_t code_bytes,
                       int64_t row_bytes, int64_t head_stride) const {
    const int64_t tokens = options_.block_size;
    const int64_t channel_bytes = format::channel_bytes_per_block(side.spec, side.head_dim);
    const bool is_key = side.codes.base == base;
    uint8_t* codes = is_key ? base : base + head_stride - tokens * row_bytes - channel_bytes;
    if (channel_bytes > 0) {
      side.channels = {codes + tokens * row_bytes, num_heads * head_stride, head_stride};
    }
    side.codes = {codes, num_heads * head_stride, code_bytes, head_stride};
    if (!side.spec.has_scale() || side.spec.scale_source != format::ScaleSource::kComputed) return;
    side.scales = {codes + tokens * code_bytes, num_heads * head_stride, row_bytes - code_bytes,
                   head_stride, side.scales.group_stride};
  }

  // One f32 scale a head, elsewhere, shared by all blocks and tokens.
  void give_scales(ops::SideView& side, int num_heads) {
    std::vector<uint8_t>& bytes = memory_.emplace_back(num_heads * 4);
    for (int h = 0; h < num_heads; ++h) {
      const float scale = 0.01f * static_cast<float>(h + 1);
      memcpy(bytes.data() + 4 * h, &scale, 4);
    }
    side.scales = {bytes.data(), 0, 0, 4, 0};
  }

  // A row of scales a block and head, elsewhere: [num_blocks, num_heads].
  void share_scales(ops::SideView& side, int num_blocks, int num_heads, int64_t row_bytes) {
    std::vector<uint8_t>& bytes =
        memory_.emplace_back(num_blocks * num_heads * row_bytes, uint8_t{0xFF});
    side.scales = {bytes.data(), num_heads * row_bytes, 0, row_bytes,
                   format::scale_bytes_per_group(side.spec)};
  }

  SceneOptions options_;
  std::deque<std::vector<uint8_t>> memory_;
  std::vector<ops::HeadRun> runs_, segments_;
  ops::LayerView view_, next_segment_;
};

// An affine row exactly as code * scale + zero; any other as the scalar level decodes it (which
// golden vectors check).
inline Row decoded_row(const ops::SideView& side, int head_in_run, int64_t block, int token) {
  const int dim = side.head_dim;
  if (!side.spec.is_affine()) {
    std::vector<float> row(dim);
    ops::decode_rows(ops::cpu::kernel_table(device::CpuLevel::kScalar), side, head_in_run,
                     {block, token, 1}, format::DecodeFor::kGather, row.data());
    return Row(row.begin(), row.end());
  }
  const uint8_t* bytes = side.codes.at(block, token, head_in_run);
  std::vector<uint8_t> codes(dim);
  if (side.spec.facts->packing == format::Packing::kTurboMind) {
    format::unpack<format::Packing::kTurboMind>(bytes, 0, dim, codes.data());
  } else {
    format::unpack<format::Packing::kBytes>(bytes, 0, dim, codes.data());
  }
  uint16_t params[2];
  memcpy(params, side.scales.at(block, token, head_in_run), sizeof params);
  const bool is_f16 = side.spec.scale_type == format::ScaleType::kF16;
  const double scale = is_f16 ? f16_to_f32(params[0]) : bf16_to_f32(params[0]);
  const double zero = is_f16 ? f16_to_f32(params[1]) : bf16_to_f32(params[1]);
  Row row(dim);
  for (int d = 0; d < dim; ++d) row[d] = codes[d] * scale + zero;
  return row;
}

// x of docs/numbers.md, section 6, from y: the Hadamard matrix written out, all in double.
inline Row untransformed(const Row& y, const ops::SideTransform& transform, int kv_head,
                         int num_kv_heads, int64_t position_block) {
  const int dim = static_cast<int>(y.size());
  Row x = y;
  if (transform.hadamard) {
    const int n = ops::hadamard_block(dim);
    for (int d = 0; d < dim; ++d) {
      x[d] = 0;
      for (int e = 0; e < n; ++e) {
        const double sign = std::popcount(static_cast<unsigned>(d % n & e)) % 2 == 0 ? 1 : -1;
        x[d] += sign * y[d / n * n + e];
      }
      x[d] /= std::sqrt(n);
    }
  }
  for (int d = 0; d < dim; ++d) {
    if (transform.factor) x[d] /= transform.factor[kv_head * dim + d];
    if (transform.block_offset) {
      x[d] += transform.block_offset[(position_block * num_kv_heads + kv_head) * dim + d];
    }
    if (transform.mean) x[d] += transform.mean[kv_head * dim + d];
  }
  return x;
}

}  // namespace kvx::tests
