// BlockLayout: sections are laid one after the other, with checked sums.
#include "cache/block_layout.hpp"

#include <limits>

#include "core/checked.hpp"

namespace kvx::cache {
namespace {

// Where an error lies.
struct Where {
  size_t layer;
  size_t run;
  std::string_view side;
};

Status check_not_negative(int64_t value, std::string_view field, const Where& where) {
  if (value >= 0) return {};
  return invalid_argument("{} of layer {}, run {}, {} is {}; expected 0 or more", field,
                          where.layer, where.run, where.side, value);
}

Status check_side(const SideBytes& side, const Where& where) {
  KVX_RETURN_IF_ERROR(check_not_negative(side.row_code_bytes, "row_code_bytes", where));
  KVX_RETURN_IF_ERROR(check_not_negative(side.row_scale_bytes, "row_scale_bytes", where));
  KVX_RETURN_IF_ERROR(check_not_negative(side.page_scale_bytes, "page_scale_bytes", where));
  KVX_RETURN_IF_ERROR(check_not_negative(side.channel_bytes, "channel_bytes", where));
  if (side.row_scale_bytes > 0 && side.page_scale_bytes > 0) {
    return invalid_argument(
        "layer {}, run {}, {} has row_scale_bytes {} and page_scale_bytes {}; expected one of them "
        "to be 0",
        where.layer, where.run, where.side, side.row_scale_bytes, side.page_scale_bytes);
  }
  const bool has_scales =
      side.row_scale_bytes > 0 || side.page_scale_bytes > 0 || side.channel_bytes > 0;
  if (side.row_code_bytes == 0 && has_scales) {
    return invalid_argument(
        "row_code_bytes of layer {}, run {}, {} is 0 with scales; expected codes", where.layer,
        where.run, where.side);
  }
  return {};
}

Status check_run(const HeadRunBytes& run, size_t layer, size_t index) {
  if (run.num_heads < 1) {
    return invalid_argument("num_heads of layer {}, run {} is {}; expected 1 or more", layer, index,
                            run.num_heads);
  }
  KVX_RETURN_IF_ERROR(check_side(run.k, {layer, index, "k"}));
  KVX_RETURN_IF_ERROR(check_side(run.v, {layer, index, "v"}));
  KVX_RETURN_IF_ERROR(check_side(run.k_more, {layer, index, "k_more"}));
  if (run.k.row_code_bytes == 0 && run.v.row_code_bytes == 0) {
    return invalid_argument(
        "row_code_bytes of layer {}, run {} is 0 for both k and v; expected one to be stored",
        layer, index);
  }
  return {};
}

Status check_group(const GroupBytes& group, int64_t most_tokens) {
  if (group.block_size < 1 || group.block_size > most_tokens) {
    return invalid_argument("block_size is {}; expected 1 to {}", group.block_size, most_tokens);
  }
  if (group.layers.empty()) return invalid_argument("num_layers is 0; expected 1 or more");
  for (size_t layer = 0; layer < group.layers.size(); ++layer) {
    const auto& runs = group.layers[layer].runs;
    if (runs.empty()) {
      return invalid_argument("layer {} has 0 runs of heads; expected 1 or more", layer);
    }
    int64_t num_heads = 0;
    for (size_t run = 0; run < runs.size(); ++run) {
      KVX_RETURN_IF_ERROR(check_run(runs[run], layer, run));
      num_heads += runs[run].num_heads;
    }
    if (num_heads > std::numeric_limits<int>::max()) {
      return invalid_argument("num_heads of layer {} is {}; expected at most 2^31 - 1", layer,
                              num_heads);
    }
  }
  return {};
}

// A growing offset that stops at the first overflow.
class Cursor {
 public:
  // Returns where a section of `bytes` begins.
  int64_t place(CheckedSize bytes, int64_t alignment) {
    align(alignment);
    const int64_t begin = at_;
    move_to(CheckedSize(at_) + bytes);
    return begin;
  }
  void align(int64_t alignment) {
    const int64_t past = at_ % alignment;
    if (past != 0) move_to(CheckedSize(at_) + (alignment - past));
  }
  int64_t at() const { return at_; }
  bool overflowed() const { return overflowed_; }

 private:
  void move_to(CheckedSize next) {
    if (auto value = next.get()) {
      at_ = *value;
    } else {
      overflowed_ = true;
    }
  }

  int64_t at_ = 0;
  bool overflowed_ = false;
};

SidePlace place_side(const SideBytes& side, int64_t block_size, Cursor& cursor) {
  SidePlace place;
  if (side.row_code_bytes == 0) return place;
  place.is_stored = true;
  place.code_token_stride = side.row_code_bytes;
  place.codes_offset =
      cursor.place(CheckedSize(block_size) * side.row_code_bytes, kSectionAlignment);
  place.has_scales = side.row_scale_bytes > 0 || side.page_scale_bytes > 0;
  if (place.has_scales) {
    place.scale_token_stride = side.row_scale_bytes;
    place.scales_offset = cursor.place(
        CheckedSize(block_size) * side.row_scale_bytes + side.page_scale_bytes, kSectionAlignment);
  }
  if (side.channel_bytes > 0) {
    place.channels_offset = cursor.place(side.channel_bytes, kSectionAlignment);
  }
  return place;
}

// The run's first head is placed; the others follow at head_stride.
RunPlace place_run(const HeadRunBytes& run, int first_head, int64_t block_size, Cursor& cursor) {
  cursor.align(kSectionAlignment);
  const int64_t begin = cursor.at();
  RunPlace place;
  place.first_head = first_head;
  place.num_heads = run.num_heads;
  place.k = place_side(run.k, block_size, cursor);
  place.k_more = place_side(run.k_more, block_size, cursor);
  place.v = place_side(run.v, block_size, cursor);
  cursor.align(kSectionAlignment);
  place.head_stride = cursor.at() - begin;
  for (SidePlace* side : {&place.k, &place.v, &place.k_more}) {
    side->scale_head_stride = place.head_stride;
  }
  cursor.place(CheckedSize(place.head_stride) * (run.num_heads - 1), kSectionAlignment);
  return place;
}

LayerPlace place_layer(const LayerBytes& layer, int64_t block_size, Cursor& cursor) {
  LayerPlace place;
  place.offset = cursor.at();
  for (const HeadRunBytes& run : layer.runs) {
    place.runs.push_back(place_run(run, place.num_heads, block_size, cursor));
    place.num_heads += run.num_heads;
  }
  place.bytes = cursor.at() - place.offset;
  return place;
}

// Requires: the record's size fits, hence every part of it.
void count_bytes(const GroupBytes& group, BlockLayout& layout) {
  for (const LayerBytes& layer : group.layers) {
    for (const HeadRunBytes& run : layer.runs) {
      for (const SideBytes* side : {&run.k, &run.k_more, &run.v}) {
        layout.token_code_bytes += run.num_heads * side->row_code_bytes;
        layout.token_scale_bytes += run.num_heads * side->row_scale_bytes;
        layout.page_scale_bytes += run.num_heads * (side->page_scale_bytes + side->channel_bytes);
      }
    }
  }
}

// ---- TurboMind's order

Status check_turbomind_side(const SideBytes& side, int64_t block_size, const Where& where) {
  if (side.channel_bytes > 0) {
    return invalid_argument(
        "channel_bytes of layer {}, run {}, {} is {}; order=turbomind has no place for numbers of "
        "channels",
        where.layer, where.run, where.side, side.channel_bytes);
  }
  if (side.page_scale_bytes > 0) {
    return invalid_argument(
        "page_scale_bytes of layer {}, run {}, {} is {}; order=turbomind has no place for scales "
        "of a page",
        where.layer, where.run, where.side, side.page_scale_bytes);
  }
  const CheckedSize bytes = CheckedSize(block_size) * side.row_code_bytes;
  if (bytes.get().value_or(0) % kSectionAlignment == 0) return {};
  return invalid_argument(
      "row_code_bytes of layer {}, run {}, {} is {}; order=turbomind needs rows that take a "
      "multiple of {} bytes in a block of {} tokens",
      where.layer, where.run, where.side, side.row_code_bytes, kSectionAlignment, block_size);
}

Status check_turbomind_group(const GroupBytes& group) {
  for (size_t layer = 0; layer < group.layers.size(); ++layer) {
    const auto& runs = group.layers[layer].runs;
    if (runs.size() > 1) {
      return invalid_argument(
          "layer {} has {} runs of heads; order=turbomind stores all heads of a layer alike", layer,
          runs.size());
    }
    if (runs.front().k_more.row_code_bytes > 0) {
      return invalid_argument(
          "layer {} has rows of K in two segments; order=turbomind has rows of one", layer);
    }
    KVX_RETURN_IF_ERROR(check_turbomind_side(runs.front().k, group.block_size, {layer, 0, "k"}));
    KVX_RETURN_IF_ERROR(check_turbomind_side(runs.front().v, group.block_size, {layer, 0, "v"}));
  }
  return {};
}

// Sections of all heads of a layer, K before V in each head. Returns where they begin; head_bytes
// receives the distance from head to head.
int64_t place_heads(CheckedSize k, CheckedSize v, int num_heads, Cursor& cursor,
                    int64_t& head_bytes) {
  const CheckedSize head = k + v;
  head_bytes = head.get().value_or(0);
  return cursor.place(head * num_heads, 1);
}

void place_codes(const SideBytes& side, int64_t offset, SidePlace& place) {
  place.is_stored = side.row_code_bytes > 0;
  if (!place.is_stored) return;
  place.codes_offset = offset;
  place.code_token_stride = side.row_code_bytes;
}

int64_t zeros_bytes(const SideBytes& side) {
  return side.has_zeros ? side.row_scale_bytes : 0;
}
int64_t apart_bytes(const SideBytes& side) {
  return side.has_zeros ? 0 : side.row_scale_bytes;
}

void place_scales(int64_t offset, int64_t token_stride, int64_t head_stride, SidePlace& place) {
  place.has_scales = true;
  place.scales_offset = offset;
  place.scale_token_stride = token_stride;
  place.scale_head_stride = head_stride;
}

// scales: counts from the scale block's beginning, and so do the offsets of scales without zeros.
LayerPlace place_turbomind_layer(const HeadRunBytes& run, int64_t block_size, Cursor& data,
                                 Cursor& scales) {
  LayerPlace layer;
  layer.offset = data.at();
  layer.num_heads = run.num_heads;
  RunPlace place;
  place.num_heads = run.num_heads;
  const CheckedSize tokens(block_size);
  const int64_t codes = place_heads(tokens * run.k.row_code_bytes, tokens * run.v.row_code_bytes,
                                    run.num_heads, data, place.head_stride);
  int64_t zeros_stride = 0;
  const int64_t zeros = place_heads(tokens * zeros_bytes(run.k), tokens * zeros_bytes(run.v),
                                    run.num_heads, data, zeros_stride);
  int64_t scale_stride = 0;
  const int64_t apart = place_heads(tokens * apart_bytes(run.k), tokens * apart_bytes(run.v),
                                    run.num_heads, scales, scale_stride);
  if (data.overflowed() || scales.overflowed()) return layer;
  const int64_t token_scales = apart_bytes(run.k) + apart_bytes(run.v);
  place_codes(run.k, codes, place.k);
  place_codes(run.v, codes + block_size * run.k.row_code_bytes, place.v);
  for (const bool is_v : {false, true}) {
    const SideBytes& side = is_v ? run.v : run.k;
    SidePlace& at = is_v ? place.v : place.k;
    if (zeros_bytes(side) > 0) {
      place_scales(zeros + (is_v ? block_size * zeros_bytes(run.k) : 0), zeros_bytes(side),
                   zeros_stride, at);
    } else if (apart_bytes(side) > 0) {
      place_scales(apart + (is_v ? apart_bytes(run.k) : 0), token_scales, scale_stride, at);
    }
  }
  layer.bytes = data.at() - layer.offset;
  layer.runs.push_back(place);
  return layer;
}

// Adds the scale block's offset to the scales that lie there.
void move_scales(const GroupBytes& group, BlockLayout& layout) {
  for (size_t layer = 0; layer < group.layers.size(); ++layer) {
    const HeadRunBytes& run = group.layers[layer].runs.front();
    RunPlace& place = layout.layers[layer].runs.front();
    if (apart_bytes(run.k) > 0) place.k.scales_offset += layout.scale_block_offset;
    if (apart_bytes(run.v) > 0) place.v.scales_offset += layout.scale_block_offset;
  }
}

// False: a size overflows.
bool place_turbomind_group(const GroupBytes& group, BlockLayout& layout) {
  Cursor data;
  Cursor scales;
  for (const LayerBytes& layer : group.layers) {
    layout.layers.push_back(
        place_turbomind_layer(layer.runs.front(), group.block_size, data, scales));
  }
  layout.scale_block_bytes = scales.at();
  data.align(kBlockAlignment);
  layout.scale_block_offset = data.place(CheckedSize(scales.at()), kBlockAlignment);
  data.align(kBlockAlignment);
  if (data.overflowed() || scales.overflowed()) return false;
  layout.block_bytes = data.at();
  move_scales(group, layout);
  return true;
}

bool place_group_by_heads(const GroupBytes& group, BlockLayout& layout) {
  Cursor cursor;
  for (const LayerBytes& layer : group.layers) {
    layout.layers.push_back(place_layer(layer, group.block_size, cursor));
  }
  cursor.align(kBlockAlignment);
  layout.block_bytes = cursor.at();
  return !cursor.overflowed();
}

Result<BlockLayout> layout_checked(const GroupBytes& group, int64_t most_tokens) {
  KVX_RETURN_IF_ERROR(check_group(group, most_tokens));
  const bool is_turbomind = group.order == BlockOrder::kTurbomind;
  if (is_turbomind) KVX_RETURN_IF_ERROR(check_turbomind_group(group));
  BlockLayout layout;
  layout.order = group.order;
  layout.block_size = group.block_size;
  const bool fits =
      is_turbomind ? place_turbomind_group(group, layout) : place_group_by_heads(group, layout);
  if (!fits) {
    return invalid_argument(
        "block_bytes of {} layers with block_size {} does not fit in 63 bits; expected smaller "
        "rows",
        group.layers.size(), group.block_size);
  }
  count_bytes(group, layout);
  return layout;
}

}  // namespace

Result<BlockLayout> layout_block(const GroupBytes& group) {
  return layout_checked(group, kMaxBlockSize);
}

Result<BlockLayout> layout_whole_sequence(const GroupBytes& group) {
  return layout_checked(group, std::numeric_limits<int>::max());
}

}  // namespace kvx::cache
