// SequenceHead: written and read field by field; the index is tier's.
#include "transfer/layer_head.hpp"

#include <cstring>

#include "core/checked.hpp"
#include "transfer/fields.hpp"

namespace kvx::transfer {
namespace {

constexpr int64_t kAlignment = 64;
constexpr size_t kChecksumBytes = 16;
constexpr uint32_t kMostLayers = 1 << 16;
constexpr size_t kFixedBytes = 24;
constexpr size_t kLayerBytes = 40;

void write_place(FieldWriter& writer, const kv::PagePlace& place) {
  writer.u64(static_cast<uint64_t>(place.offset));
  writer.u64(static_cast<uint64_t>(place.bytes));
}

Result<kv::PagePlace> read_place(FieldReader& reader) {
  constexpr uint64_t kMost = uint64_t{1} << 32;
  const uint64_t offset = reader.u64();
  const uint64_t bytes = reader.u64();
  if (offset > kMost || bytes > kMost) {
    return invalid_argument("a page has {} bytes from {}; expected at most {}", bytes, offset,
                            kMost);
  }
  return kv::PagePlace{static_cast<int64_t>(offset), static_cast<int64_t>(bytes)};
}

Status check_places(const SequenceHead& head) {
  for (size_t layer = 0; layer < head.layers.size(); ++layer) {
    bool has_kind = false;
    for (const tier::StoredBlockKind& kind : head.index.kinds) {
      if (kind.group != head.layers[layer].group) continue;
      has_kind = true;
      const kv::PagePlace& place = head.layers[layer].of(kind);
      if (place.bytes >= 1 && place.offset + place.bytes <= kind.bytes) continue;
      return invalid_argument("layer {} has {} bytes from {} in blocks of {}", layer, place.bytes,
                              place.offset, kind.bytes);
    }
    if (!has_kind) {
      return invalid_argument("layer {} is of group {}, of which there are no blocks", layer,
                              head.layers[layer].group);
    }
  }
  return {};
}

}  // namespace

int64_t lay_out_block_copies(tier::FileIndex& index) {
  int64_t offset = tier::kHeaderBytes;
  for (tier::FileBlock& block : index.blocks) {
    for (tier::StoredBlockCopy& copy : block.block_copies) {
      copy.codec = tier::Codec::kRaw;
      copy.offset = offset;
      copy.stored_bytes = index.kinds[copy.kind].bytes;
      offset = round_up(offset + copy.stored_bytes, kAlignment);
    }
  }
  return offset;
}

std::vector<uint8_t> encode_head(SequenceHead head) {
  const int64_t index_offset = lay_out_block_copies(head.index);
  const std::vector<uint8_t> index = tier::encode_index(head.index);
  FieldWriter writer;
  writer.u32(static_cast<uint32_t>(head.layers.size()));
  writer.u32(0);
  writer.u64(index.size());
  writer.u64(static_cast<uint64_t>(index_offset));
  writer.data(index);
  for (const kv::LayerPlaces& layer : head.layers) {
    writer.u32(static_cast<uint32_t>(layer.group));
    writer.u32(0);
    write_place(writer, layer.packed);
    write_place(writer, layer.full_precision);
  }
  writer.data(cache::checksum(writer.so_far()).bytes);
  return writer.take();
}

Result<SequenceHead> parse_head(std::span<const uint8_t> bytes) {
  if (bytes.size() < kFixedBytes + kChecksumBytes) {
    return invalid_argument("the sequence's head is cut short: {} bytes", bytes.size());
  }
  const auto checked = bytes.first(bytes.size() - kChecksumBytes);
  if (std::memcmp(cache::checksum(checked).bytes.data(), bytes.data() + checked.size(),
                  kChecksumBytes) != 0) {
    return invalid_argument("the sequence's head is damaged");
  }
  FieldReader reader(checked);
  const uint32_t num_layers = reader.u32();
  reader.u32();
  const uint64_t index_bytes = reader.u64();
  const uint64_t index_offset = reader.u64();
  if (num_layers < 1 || num_layers > kMostLayers || index_offset > uint64_t{1} << 48 ||
      index_bytes > reader.num_left() ||
      reader.num_left() - index_bytes != num_layers * kLayerBytes) {
    return invalid_argument("the sequence's head has {} bytes, {} layers and an index of {} bytes",
                            bytes.size(), num_layers, index_bytes);
  }
  const auto index = reader.data(index_bytes);
  SequenceHead head;
  const tier::FileHeader header{static_cast<int64_t>(index_offset),
                                static_cast<int64_t>(index_bytes), cache::checksum(index)};
  KVX_ASSIGN_OR_RETURN(head.index, tier::parse_index(index, header));
  for (uint32_t layer = 0; layer < num_layers; ++layer) {
    kv::LayerPlaces& places = head.layers.emplace_back();
    places.group = static_cast<int32_t>(reader.u32());
    reader.u32();
    KVX_ASSIGN_OR_RETURN(places.packed, read_place(reader));
    KVX_ASSIGN_OR_RETURN(places.full_precision, read_place(reader));
  }
  KVX_RETURN_IF_ERROR(check_places(head));
  return head;
}

std::vector<PageOfLayer> pages_of(const SequenceHead& head, int layer) {
  const kv::LayerPlaces& places = head.layers[static_cast<size_t>(layer)];
  std::vector<PageOfLayer> pages;
  for (const tier::FileBlock& block : head.index.blocks) {
    for (const tier::StoredBlockCopy& copy : block.block_copies) {
      const tier::StoredBlockKind& kind = head.index.kinds[copy.kind];
      if (kind.group == places.group) pages.push_back({&copy, places.of(kind)});
    }
  }
  return pages;
}

}  // namespace kvx::transfer
