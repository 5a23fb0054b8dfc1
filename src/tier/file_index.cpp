// The cache file's header and index: to bytes and back. What comes back was checked.
//
//   index   [text fingerprint][u32 block_size]
//           [u32 num_scopes]    each: [text adapter][text image][text tenant]
//           [u32 num_kinds]     each: [u32 group][u32 is_full_precision][u64 bytes]
//           [u32 num_blocks]    each: [i32 parent][u32 num_tokens][i32 token x num_tokens]
//                                     [u32 num_block_copies] each: [u32 kind][u32 codec][u64
//                                     offset]
//                                                            [u64 stored_bytes][16 bytes checksum]
//           [u32 num_sequences] each: [i32 last_block]
//   text    [u32 bytes][bytes]
#include <bit>
#include <cstring>

#include "cache/block_layout.hpp"
#include "tier/cache_file.hpp"

namespace kvx::tier {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie");

const std::string_view kMagic(reinterpret_cast<const char*>(kFileMagic.data()), kFileMagic.size());
constexpr uint32_t kOrderMark = 0x01020304;
constexpr uint32_t kOtherOrderMark = 0x04030201;
constexpr size_t kCheckedHeaderBytes = 48;
constexpr int64_t kBlockCopyAlignment = 64;

class Encoder {
 public:
  template <class T>
  void number(T value) {
    raw(&value, sizeof value);
  }
  void count(size_t value) { number(static_cast<uint32_t>(value)); }
  void text(std::string_view value) {
    count(value.size());
    raw(value.data(), value.size());
  }
  void hash(const cache::ContentHash& value) { raw(value.bytes.data(), value.bytes.size()); }
  void raw(const void* from, size_t num_bytes) {
    const auto* first = static_cast<const uint8_t*>(from);
    bytes.insert(bytes.end(), first, first + num_bytes);
  }
  std::vector<uint8_t> bytes;
};

// Reads until something does not fit; then all further reads give zeros and ok() says no.
class Decoder {
 public:
  explicit Decoder(std::span<const uint8_t> bytes) : left_(bytes) {}

  bool ok() const { return ok_; }
  size_t num_left() const { return left_.size(); }

  template <class T>
  T number() {
    T value{};
    raw(&value, sizeof value);
    return value;
  }
  // A number of things that take at least item_bytes each: no more than can still come.
  size_t count(size_t item_bytes) {
    const auto value = number<uint32_t>();
    if (value > left_.size() / item_bytes) ok_ = false;
    return ok_ ? value : 0;
  }
  std::string text() {
    std::string value(count(1), '\0');
    raw(value.data(), value.size());
    return value;
  }
  cache::ContentHash hash() {
    cache::ContentHash value;
    raw(value.bytes.data(), value.bytes.size());
    return value;
  }
  void raw(void* to, size_t num_bytes) {
    if (num_bytes > left_.size()) ok_ = false;
    if (!ok_ || num_bytes == 0) return;
    std::memcpy(to, left_.data(), num_bytes);
    left_ = left_.subspan(num_bytes);
  }

 private:
  std::span<const uint8_t> left_;
  bool ok_ = true;
};

FileBlock decode_block(Decoder& from) {
  FileBlock block;
  block.parent = from.number<int32_t>();
  block.tokens.resize(from.count(sizeof(int32_t)));
  from.raw(block.tokens.data(), block.tokens.size() * sizeof(int32_t));
  block.block_copies.resize(from.count(40));
  for (BlockCopy& block_copy : block.block_copies) {
    block_copy.kind = from.number<int32_t>();
    block_copy.codec = static_cast<Codec>(from.number<uint32_t>());
    block_copy.offset = from.number<int64_t>();
    block_copy.stored_bytes = from.number<int64_t>();
    block_copy.checksum = from.hash();
  }
  return block;
}

FileIndex decode_index(Decoder& from) {
  FileIndex index;
  index.fingerprint = from.text();
  index.block_size = from.number<int32_t>();
  index.scopes.resize(from.count(12));
  for (cache::PrefixKeys& keys : index.scopes) {
    keys.adapter = from.text();
    keys.image = from.text();
    keys.tenant = from.text();
  }
  index.kinds.resize(from.count(16));
  for (BlockCopyKind& kind : index.kinds) {
    kind.group = from.number<int32_t>();
    kind.is_full_precision = from.number<uint32_t>() != 0;
    kind.bytes = from.number<int64_t>();
  }
  const size_t num_blocks = from.count(12);
  for (size_t i = 0; i < num_blocks && from.ok(); ++i) index.blocks.push_back(decode_block(from));
  index.sequences.resize(from.count(4));
  for (int32_t& last_block : index.sequences) last_block = from.number<int32_t>();
  return index;
}

Status check_block_copy(const BlockCopy& block_copy, const FileIndex& index,
                        const FileHeader& header) {
  if (block_copy.kind < 0 || block_copy.kind >= static_cast<int32_t>(index.kinds.size())) {
    return invalid_argument("a block copy's kind is {}; the file has {}", block_copy.kind,
                            index.kinds.size());
  }
  if (block_copy.codec != Codec::kRaw && block_copy.codec != Codec::kZstd) {
    return invalid_argument("a block copy's codec is {}; expected 0 or 1",
                            static_cast<uint32_t>(block_copy.codec));
  }
  const bool is_inside = block_copy.offset >= kHeaderBytes &&
                         block_copy.offset % kBlockCopyAlignment == 0 &&
                         block_copy.offset <= header.index_offset && block_copy.stored_bytes >= 1 &&
                         block_copy.stored_bytes <= header.index_offset - block_copy.offset;
  if (!is_inside) {
    return invalid_argument("a block copy lies at {} with {} bytes; the block copies end at {}",
                            block_copy.offset, block_copy.stored_bytes, header.index_offset);
  }
  const int64_t bytes = index.kinds[block_copy.kind].bytes;
  if (block_copy.codec == Codec::kRaw && block_copy.stored_bytes != bytes) {
    return invalid_argument("a raw block_copy has {} bytes; its kind has {}",
                            block_copy.stored_bytes, bytes);
  }
  return {};
}

Status check_block(size_t number, const FileIndex& index, const FileHeader& header) {
  const FileBlock& block = index.blocks[number];
  const auto num_scopes = static_cast<int64_t>(index.scopes.size());
  const auto this_block = static_cast<int64_t>(number);
  if (block.parent >= this_block || block.parent < -num_scopes) {
    return invalid_argument("block {} has the parent {}; expected {} to {}", number, block.parent,
                            -num_scopes, this_block - 1);
  }
  const auto num_tokens = static_cast<int64_t>(block.tokens.size());
  if (num_tokens < 1 || num_tokens > index.block_size) {
    return invalid_argument("block {} has {} tokens; expected 1 to {}", number, num_tokens,
                            index.block_size);
  }
  const bool parent_is_full =
      block.parent < 0 ||
      static_cast<int64_t>(index.blocks[block.parent].tokens.size()) == index.block_size;
  if (!parent_is_full) {
    return invalid_argument("block {} follows block {}, which is not full", number, block.parent);
  }
  for (const BlockCopy& block_copy : block.block_copies) {
    KVX_RETURN_IF_ERROR(check_block_copy(block_copy, index, header));
  }
  return {};
}

Status check_index(const FileIndex& index, const FileHeader& header) {
  if (index.block_size < 1 || index.block_size > cache::kMaxBlockSize) {
    return invalid_argument("block_size is {}; expected 1 to {}", index.block_size,
                            cache::kMaxBlockSize);
  }
  constexpr int64_t kMostBytes = int64_t{1} << 32;
  for (const BlockCopyKind& kind : index.kinds) {
    if (kind.bytes < 1 || kind.bytes > kMostBytes) {
      return invalid_argument("a kind of block copies has {} bytes; expected 1 to {}", kind.bytes,
                              kMostBytes);
    }
  }
  for (size_t i = 0; i < index.blocks.size(); ++i) {
    KVX_RETURN_IF_ERROR(check_block(i, index, header));
  }
  for (int32_t last_block : index.sequences) {
    if (last_block >= 0 && last_block < static_cast<int64_t>(index.blocks.size())) continue;
    return invalid_argument("a sequence ends with block {}; the file has {}", last_block,
                            index.blocks.size());
  }
  return {};
}

}  // namespace

std::vector<uint8_t> encode_header(const FileHeader& header) {
  Encoder to;
  to.raw(kMagic.data(), kMagic.size());
  to.number(kFileVersion);
  to.number(kOrderMark);
  to.number(header.index_offset);
  to.number(header.index_bytes);
  to.hash(header.index_checksum);
  to.hash(cache::checksum(to.bytes));
  return to.bytes;
}

std::vector<uint8_t> encode_index(const FileIndex& index) {
  Encoder to;
  to.text(index.fingerprint);
  to.number(index.block_size);
  to.count(index.scopes.size());
  for (const cache::PrefixKeys& keys : index.scopes) {
    to.text(keys.adapter);
    to.text(keys.image);
    to.text(keys.tenant);
  }
  to.count(index.kinds.size());
  for (const BlockCopyKind& kind : index.kinds) {
    to.number(kind.group);
    to.number(uint32_t{kind.is_full_precision});
    to.number(kind.bytes);
  }
  to.count(index.blocks.size());
  for (const FileBlock& block : index.blocks) {
    to.number(block.parent);
    to.count(block.tokens.size());
    to.raw(block.tokens.data(), block.tokens.size() * sizeof(int32_t));
    to.count(block.block_copies.size());
    for (const BlockCopy& block_copy : block.block_copies) {
      to.number(block_copy.kind);
      to.number(static_cast<uint32_t>(block_copy.codec));
      to.number(block_copy.offset);
      to.number(block_copy.stored_bytes);
      to.hash(block_copy.checksum);
    }
  }
  to.count(index.sequences.size());
  for (int32_t last_block : index.sequences) to.number(last_block);
  return to.bytes;
}

Result<FileHeader> parse_header(std::span<const uint8_t> bytes, int64_t file_bytes) {
  if (bytes.size() < kMagic.size() ||
      std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return invalid_argument("it is no cache file: it does not begin with {}", kMagic);
  }
  Decoder from(bytes.subspan(kMagic.size()));
  const auto version = from.number<uint32_t>();
  const auto order = from.number<uint32_t>();
  if (from.ok() && order == kOtherOrderMark) {
    return Error{ErrorCode::kIncompatible, "it was written in the other byte order"};
  }
  if (from.ok() && version > kFileVersion) {
    return Error{ErrorCode::kIncompatible,
                 fmt::format("its version is {}; this kvx reads up to {}", version, kFileVersion)};
  }
  FileHeader header;
  header.index_offset = from.number<int64_t>();
  header.index_bytes = from.number<int64_t>();
  header.index_checksum = from.hash();
  const cache::ContentHash expected = from.hash();
  if (!from.ok()) {
    return invalid_argument("it is cut short: {} bytes; the header has {}", file_bytes,
                            kHeaderBytes);
  }
  if (cache::checksum(bytes.first(kCheckedHeaderBytes)) != expected || version != kFileVersion ||
      order != kOrderMark) {
    return invalid_argument("its header is damaged");
  }
  const bool fits = header.index_offset >= kHeaderBytes && header.index_bytes >= 0 &&
                    header.index_offset <= file_bytes &&
                    header.index_bytes <= file_bytes - header.index_offset;
  if (fits) return header;
  return invalid_argument("it is cut short: {} bytes; the index lies at {} with {}", file_bytes,
                          header.index_offset, header.index_bytes);
}

Result<FileIndex> parse_index(std::span<const uint8_t> bytes, const FileHeader& header) {
  if (cache::checksum(bytes) != header.index_checksum) {
    return invalid_argument("its index is damaged");
  }
  Decoder from(bytes);
  FileIndex index = decode_index(from);
  if (!from.ok() || from.num_left() != 0) {
    return invalid_argument("its index is {}", from.ok() ? "too long" : "too short");
  }
  KVX_RETURN_IF_ERROR(check_index(index, header));
  return index;
}

}  // namespace kvx::tier
