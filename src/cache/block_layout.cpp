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

Result<BlockLayout> layout_checked(const GroupBytes& group, int64_t most_tokens) {
  KVX_RETURN_IF_ERROR(check_group(group, most_tokens));
  BlockLayout layout;
  layout.block_size = group.block_size;
  Cursor cursor;
  for (const LayerBytes& layer : group.layers) {
    layout.layers.push_back(place_layer(layer, group.block_size, cursor));
  }
  cursor.align(kBlockAlignment);
  if (cursor.overflowed()) {
    return invalid_argument(
        "block_bytes of {} layers with block_size {} does not fit in 63 bits; expected smaller "
        "rows",
        group.layers.size(), group.block_size);
  }
  layout.block_bytes = cursor.at();
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
