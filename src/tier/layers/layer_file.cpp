// Layer files: heads, records, and how they come into a file.
#include "tier/layers/layer_file.hpp"

#include <algorithm>
#include <cstring>

#include "core/checked.hpp"
#include "core/os/os.hpp"
#include "core/random_id.hpp"
#include "tier/whole_file.hpp"
#include "tier/whole_transfer.hpp"

namespace kvx::tier {
namespace {

constexpr uint32_t kOrderMark = 0x01020304;
constexpr uint32_t kOtherOrderMark = 0x04030201;
constexpr size_t kCheckedHeaderBytes = 48;
constexpr size_t kCheckedRecordBytes = 40;
constexpr int64_t kAlignment = 64;
constexpr std::array<uint8_t, 8> kRecordMagic = {'K', 'V', 'X', 'P', 'A', 'G', 'E', 'S'};

template <class T>
void put(std::span<uint8_t> to, size_t at, const T& value) {
  std::memcpy(to.data() + at, &value, sizeof value);
}

template <class T>
T get(std::span<const uint8_t> from, size_t at) {
  T value{};
  std::memcpy(&value, from.data() + at, sizeof value);
  return value;
}

// A file that is open as long as this lives.
class OpenFile {
 public:
  OpenFile(const std::string& path, os::Open how) : descriptor_(os::open_file(path, how)) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (descriptor_ >= 0) os::close_file(descriptor_);
  }
  bool is_open() const { return descriptor_ >= 0; }
  bool write(int64_t offset, std::span<const uint8_t> bytes) const {
    return transfer_all(bytes.size(), [&](size_t done) {
      return os::write_at(descriptor_, bytes.subspan(done), offset + static_cast<int64_t>(done));
    });
  }
  bool grow_to(int64_t bytes) const { return os::resize_file(descriptor_, bytes); }

 private:
  int descriptor_;
};

Status check_places(const LayerHead& head) {
  const LayerHead expected = lay_out_layers(head.index);
  if (expected.file_bytes != head.file_bytes || expected.head_bytes != head.head_bytes) {
    return invalid_argument("its head has {} of {} bytes; expected {} of {}", head.head_bytes,
                            head.file_bytes, expected.head_bytes, expected.file_bytes);
  }
  for (size_t b = 0; b < head.index.blocks.size(); ++b) {
    const std::vector<StoredBlockCopy>& copies = head.index.blocks[b].block_copies;
    for (size_t c = 0; c < copies.size(); ++c) {
      const StoredBlockCopy& other = expected.index.blocks[b].block_copies[c];
      if (copies[c].offset == other.offset && copies[c].stored_bytes == other.stored_bytes &&
          copies[c].codec == Codec::kRaw) {
        continue;
      }
      return invalid_argument("a page of block {} lies at {} with {} bytes; expected {} and {}", b,
                              copies[c].offset, copies[c].stored_bytes, other.offset,
                              other.stored_bytes);
    }
  }
  return {};
}

}  // namespace

LayerHead lay_out_layers(FileIndex index) {
  const auto index_bytes = static_cast<int64_t>(encode_index(index).size());
  LayerHead head;
  head.head_bytes = kHeaderBytes + index_bytes;
  int64_t offset = round_up(head.head_bytes, kAlignment);
  std::vector<std::vector<StoredBlockCopy*>> of_kind(index.kinds.size());
  for (FileBlock& block : index.blocks) {
    for (StoredBlockCopy& copy : block.block_copies) of_kind[copy.kind].push_back(&copy);
  }
  for (size_t kind = 0; kind < of_kind.size(); ++kind) {
    for (StoredBlockCopy* copy : of_kind[kind]) {
      copy->codec = Codec::kRaw;
      copy->offset = offset + kRecordHeaderBytes;
      copy->stored_bytes = index.kinds[kind].bytes;
      copy->checksum = {};
      offset = round_up(copy->offset + copy->stored_bytes, kAlignment);
    }
  }
  head.file_bytes = offset;
  head.index = std::move(index);
  return head;
}

std::vector<uint8_t> encode_layer_head(const LayerHead& head) {
  const std::vector<uint8_t> index = encode_index(head.index);
  std::vector<uint8_t> bytes(static_cast<size_t>(kHeaderBytes));
  put(bytes, 0, kLayerFileMagic);
  put(bytes, 8, kLayerFileVersion);
  put(bytes, 12, kOrderMark);
  put(bytes, 16, static_cast<uint64_t>(index.size()));
  put(bytes, 24, static_cast<uint64_t>(head.file_bytes));
  put(bytes, 32, cache::checksum(index).bytes);
  put(bytes, 48, cache::checksum(std::span(bytes).first(kCheckedHeaderBytes)).bytes);
  bytes.insert(bytes.end(), index.begin(), index.end());
  return bytes;
}

bool is_layer_file(std::span<const uint8_t> first_bytes) {
  return first_bytes.size() >= kLayerFileMagic.size() &&
         std::equal(kLayerFileMagic.begin(), kLayerFileMagic.end(), first_bytes.begin());
}

Result<int64_t> parse_layer_head_bytes(std::span<const uint8_t> header) {
  if (!is_layer_file(header)) return invalid_argument("it is no layer file");
  if (header.size() < static_cast<size_t>(kHeaderBytes)) {
    return invalid_argument("it is cut short: {} bytes; the header has {}", header.size(),
                            kHeaderBytes);
  }
  const auto version = get<uint32_t>(header, 8);
  const auto order = get<uint32_t>(header, 12);
  if (order == kOtherOrderMark) {
    return Error{ErrorCode::kIncompatible, "its numbers are big-endian; expected little-endian"};
  }
  if (version > kLayerFileVersion) {
    return Error{
        ErrorCode::kIncompatible,
        fmt::format("it is a layer file of version {}; expected {}", version, kLayerFileVersion)};
  }
  const auto expected = get<std::array<uint8_t, 16>>(header, 48);
  if (cache::checksum(header.first(kCheckedHeaderBytes)).bytes != expected ||
      version != kLayerFileVersion || order != kOrderMark) {
    return invalid_argument("its header is damaged");
  }
  const auto index_bytes = get<uint64_t>(header, 16);
  if (index_bytes > static_cast<uint64_t>(kMostLayerHeadBytes)) {
    return invalid_argument("its index has {} bytes; expected at most {}", index_bytes,
                            kMostLayerHeadBytes);
  }
  return kHeaderBytes + static_cast<int64_t>(index_bytes);
}

Result<LayerHead> parse_layer_head(std::span<const uint8_t> bytes) {
  KVX_ASSIGN_OR_RETURN(const int64_t head_bytes, parse_layer_head_bytes(bytes));
  if (std::ssize(bytes) != head_bytes) {
    return invalid_argument("its head has {} bytes; expected {}", bytes.size(), head_bytes);
  }
  LayerHead head;
  head.head_bytes = head_bytes;
  const auto file_bytes = get<uint64_t>(bytes, 24);
  if (file_bytes > uint64_t{1} << 48) {
    return invalid_argument("it has {} bytes; expected at most 2^48", file_bytes);
  }
  head.file_bytes = static_cast<int64_t>(file_bytes);
  // An index that ends the file, as parse_index() knows them.
  const FileHeader header{
      head.file_bytes, head_bytes - kHeaderBytes, {get<std::array<uint8_t, 16>>(bytes, 32)}};
  KVX_ASSIGN_OR_RETURN(head.index,
                       parse_index(bytes.subspan(static_cast<size_t>(kHeaderBytes)), header));
  KVX_RETURN_IF_ERROR(check_places(head));
  return head;
}

RecordHeader encode_record_header(const StoredBlockCopy& place,
                                  const cache::ContentHash& checksum) {
  RecordHeader header{};
  put(header, 0, kRecordMagic);
  put(header, 8, static_cast<uint64_t>(place.offset));
  put(header, 16, static_cast<uint64_t>(place.stored_bytes));
  put(header, 24, checksum.bytes);
  put(header, 40, cache::checksum(std::span(header).first(kCheckedRecordBytes)).bytes);
  return header;
}

Result<std::optional<cache::ContentHash>> parse_record_header(std::span<const uint8_t> bytes,
                                                              const StoredBlockCopy& place) {
  if (bytes.size() != static_cast<size_t>(kRecordHeaderBytes)) {
    return invalid_argument("a record's header has {} bytes; expected {}", bytes.size(),
                            kRecordHeaderBytes);
  }
  if (std::ranges::all_of(bytes, [](uint8_t byte) { return byte == 0; })) {
    return std::optional<cache::ContentHash>();
  }
  const auto expected = get<std::array<uint8_t, 16>>(bytes, 40);
  if (get<std::array<uint8_t, 8>>(bytes, 0) != kRecordMagic ||
      cache::checksum(bytes.first(kCheckedRecordBytes)).bytes != expected) {
    return invalid_argument("a record's header is damaged");
  }
  const auto offset = get<uint64_t>(bytes, 8);
  const auto page_bytes = get<uint64_t>(bytes, 16);
  if (offset != static_cast<uint64_t>(place.offset) ||
      page_bytes != static_cast<uint64_t>(place.stored_bytes)) {
    return invalid_argument("a record is of the page at {} with {} bytes; expected {} and {}",
                            offset, page_bytes, place.offset, place.stored_bytes);
  }
  return std::optional(cache::ContentHash{get<std::array<uint8_t, 16>>(bytes, 24)});
}

Status create_layer_file(const std::string& path, const LayerHead& head) {
  const std::string temporary = fmt::format("{}.{:016x}.new", path, random_id());
  {
    const OpenFile file(temporary, os::Open::kNew);
    if (!file.is_open()) return file_error(path, "cannot be written");
    if (!file.grow_to(head.file_bytes) || !file.write(0, encode_layer_head(head))) {
      const Error error = file_error(path, "cannot be written");
      os::remove_file(temporary);
      return error;
    }
  }
  if (os::rename_file(temporary, path)) return {};
  const Error error = file_error(path, "cannot be replaced");
  os::remove_file(temporary);
  return error;
}

Status write_record(const std::string& path, const StoredBlockCopy& place,
                    std::span<const uint8_t> page) {
  const OpenFile file(path, os::Open::kWrite);
  if (!file.is_open()) return file_error(path, "cannot be written");
  const RecordHeader header = encode_record_header(place, cache::checksum(page));
  if (file.write(place.offset, page) && file.write(place.offset - kRecordHeaderBytes, header)) {
    return {};
  }
  return file_error(path, "cannot be written");
}

}  // namespace kvx::tier
