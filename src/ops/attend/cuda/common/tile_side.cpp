// Strides, alignments and gaps of rows, as the tiles' copies need them.
#include "ops/attend/cuda/common/tile_side.hpp"

#include <cstdlib>

#include "ops/attend/cuda/common/launch.hpp"

namespace kvx::ops::cuda {
namespace {

bool divides(int64_t value, int64_t by) {
  return value % by == 0;
}

// Whether strides are what a tile's copies compute with: a block's in 32 bits, the rest of a block
// in 31.
template <class Address>
bool fits_in_32_bits(const Address& a, int block_size, int num_heads) {
  const int64_t inside =
      std::abs(a.token_stride) * block_size + std::abs(a.head_stride) * num_heads;
  return a.block_stride >= 0 && a.block_stride <= UINT32_MAX && inside < INT32_MAX / 2 &&
         std::abs(a.token_stride) < INT32_MAX / 2 && std::abs(a.head_stride) < INT32_MAX / 2;
}

// Whether all rows lie on so many bytes.
template <class Address>
bool lies_on(const Address& a, int bytes) {
  return divides(reinterpret_cast<intptr_t>(a.base), bytes) && divides(a.block_stride, bytes) &&
         divides(a.token_stride, bytes) && divides(a.head_stride, bytes);
}

// By what padded tiles' copies take codes: no unit reaches past a row's end.
int copy_bytes_of(const SideView& side) {
  const bool is_in_16s = divides(format::code_bytes_per_row(side.spec, side.head_dim), 16);
  return is_in_16s && lies_on(side.codes, 16) ? 16 : 8;
}

template <class Address>
TileRegion tile_region(const Address& a) {
  return {a.base, static_cast<uint32_t>(a.block_stride), static_cast<int>(a.token_stride),
          static_cast<int>(a.head_stride)};
}

}  // namespace

bool has_word_scale(const SideView& side) {
  if (tensor_core_format(side.spec.facts->id).scale_path != ScalePath::kRowF16) return false;
  return side.spec.scale_type == format::ScaleType::kF32 || side.scales.token_stride != 2;
}

bool can_copy(const SideView& side, int block_size, int num_heads, bool is_padded) {
  const CodeAddress& c = side.codes;
  if (c.is_fragmented()) return false;
  const int copy_bytes = is_padded && side.spec.facts->element_bits == 4 ? 8 : 16;
  const bool codes_fit = lies_on(c, copy_bytes) && fits_in_32_bits(c, block_size, num_heads);
  if (!codes_fit || !side.spec.has_scale()) return codes_fit;
  const ScaleAddress& s = side.scales;
  const int group_bytes = format::scale_bytes_per_group(side.spec);
  const int row_bytes = format::scale_bytes_per_row(side.spec, side.head_dim);
  // A row's scales lie together; rows that are not copied in fours follow each other.
  const bool goes_in_fours = divides(row_bytes, 4) || has_word_scale(side);
  const bool row_fits = (row_bytes == group_bytes || s.group_stride == group_bytes) &&
                        (goes_in_fours ? divides(s.token_stride, 4) : s.token_stride == row_bytes);
  const bool shares_words = has_word_scale(side) && group_bytes == 2;
  const bool heads_fit =
      shares_words ? s.head_stride == 2 && divides(num_heads, 2) : divides(s.head_stride, 4);
  return row_fits && divides(reinterpret_cast<intptr_t>(s.base), 4) && divides(s.block_stride, 4) &&
         heads_fit && fits_in_32_bits(s, block_size, num_heads);
}

bool is_dense(const SideView& side) {
  const int code_bytes = format::code_bytes_per_row(side.spec, side.head_dim);
  if (side.codes.token_stride != code_bytes) return false;
  if (!side.spec.has_scale()) return true;
  const ScaleAddress& s = side.scales;
  return s.token_stride == format::scale_bytes_per_row(side.spec, side.head_dim) &&
         divides(reinterpret_cast<intptr_t>(s.base), 16) && divides(s.block_stride, 16) &&
         divides(s.head_stride, 16);
}

bool can_copy_blocks(const SideView& side, int block_size, int num_heads) {
  const CodeAddress& c = side.codes;
  const ChannelAddress& n = side.channels;
  const auto on_16 = [](int64_t bytes) { return divides(bytes, 16); };
  return side.spec.is_dual() && is_dense(side) && on_16(reinterpret_cast<intptr_t>(c.base)) &&
         on_16(c.block_stride) && on_16(c.head_stride) &&
         on_16(reinterpret_cast<intptr_t>(n.base)) && on_16(n.block_stride) &&
         on_16(n.head_stride) && n.block_stride >= 0 && n.block_stride <= UINT32_MAX &&
         std::abs(n.head_stride) * num_heads < INT32_MAX / 2 &&
         fits_in_32_bits(c, block_size, num_heads) &&
         fits_in_32_bits(side.scales, block_size, num_heads);
}

bool is_nhd(const SideView& side) {
  return std::abs(side.codes.head_stride) < std::abs(side.codes.token_stride);
}

bool has_shared_scale(const SideView& side) {
  return side.spec.has_scale() && side.scales.block_stride == 0 && side.scales.token_stride == 0 &&
         divides(side.scales.head_stride, 4);
}

TileSide tile_side(const SideView& side, int block_size, int tiles_at_once) {
  const CodeAddress& c = side.codes;
  const ScaleAddress& s = side.scales;
  const int64_t code_bytes = int64_t{block_size} * c.token_stride;
  const int scale_row_bytes = has_word_scale(side) ? 4
                              : side.spec.has_scale()
                                  ? format::scale_bytes_per_row(side.spec, side.head_dim)
                                  : 0;
  const bool has_scales_behind = s.base == c.base + code_bytes &&
                                 s.block_stride == c.block_stride && s.head_stride == c.head_stride;
  const ChannelAddress& n = side.channels;
  const bool has_channels_behind =
      !side.spec.is_dual() || (n.base == s.base + int64_t{block_size} * s.token_stride &&
                               n.block_stride == c.block_stride && n.head_stride == c.head_stride);
  return {.codes = tile_region(c),
          .scales = tile_region(s),
          .channels = {n.base, static_cast<uint32_t>(n.block_stride), 0,
                       static_cast<int>(n.head_stride)},
          .is_stage =
              block_size == tiles_at_once * kTileTokens && has_scales_behind && has_channels_behind,
          .has_scales_on_8 = lies_on(s, 8),
          .row_bytes = format::code_bytes_per_row(side.spec, side.head_dim),
          .scale_row_bytes = scale_row_bytes,
          .copy_bytes = copy_bytes_of(side),
          .head_dim = side.head_dim,
          .id = side.spec.facts->id,
          .format = tensor_core_format(side.spec.facts->id),
          .scale_type = side.spec.scale_type,
          .is_interleaved = side.is_interleaved,
          .tensor_scales = side.tensor_scales,
          .shared_scale = nullptr,
          .shared_scale_stride = 0};
}

}  // namespace kvx::ops::cuda
