// Cache files on disk: block copies, compression, and the rename that makes a file whole.
#include "tier/cache_file.hpp"

#include <zstd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/checked.hpp"
#include "core/os/os.hpp"
#include "core/stop.hpp"
#include "tier/behind_links.hpp"
#include "tier/layers/layer_file.hpp"
#include "tier/temporary_file.hpp"
#include "tier/whole_file.hpp"
#include "tier/whole_transfer.hpp"

namespace kvx::tier {
namespace {

constexpr int64_t kBlockCopyAlignment = 64;

// Between two blocks of a long file.
Status go_on() {
  if (!is_stop_wished(stop_wish())) return {};
  return invalid_argument("the call was interrupted");
}

}  // namespace

Status decode_block_copy(const StoredBlockCopy& block_copy, std::span<const uint8_t> stored,
                         std::span<uint8_t> out) {
  if (block_copy.codec == Codec::kRaw) {
    if (stored.size() != out.size()) {
      return invalid_argument("a block copy has {} bytes; expected {}", stored.size(), out.size());
    }
    std::memcpy(out.data(), stored.data(), out.size());
  } else {
    const size_t num_bytes = ZSTD_decompress(out.data(), out.size(), stored.data(), stored.size());
    if (ZSTD_isError(num_bytes) || num_bytes != out.size()) {
      return invalid_argument(
          "a block copy's zstd frame is damaged ({})",
          ZSTD_isError(num_bytes) ? ZSTD_getErrorName(num_bytes) : "another length");
    }
  }
  const cache::ContentHash found = cache::checksum(out);
  if (found == block_copy.checksum) return {};
  return invalid_argument("a block copy's checksum is {}; expected {}", hex(found),
                          hex(block_copy.checksum));
}

// ---- writing

Result<CacheFileWriter> CacheFileWriter::create(const std::string& path, int zstd_level) {
  if (zstd_level < 0 || zstd_level > ZSTD_maxCLevel()) {
    return invalid_argument("zstd level is {}; expected 0 (none) to {}", zstd_level,
                            ZSTD_maxCLevel());
  }
  KVX_RETURN_IF_ERROR(check_place(path));
  std::string place = behind_links(path);
  KVX_ASSIGN_OR_RETURN(TemporaryFile temporary, create_temporary(place));
  CacheFileWriter writer(std::move(place), std::move(temporary.path), temporary.descriptor,
                         zstd_level);
  // Until finish() writes the header, its first bytes show what the file is (temporary_file.cpp).
  KVX_RETURN_IF_ERROR(writer.write_at(0, std::span(kFileMagic)));
  return writer;
}

CacheFileWriter::CacheFileWriter(std::string path, std::string temporary, int descriptor,
                                 int zstd_level)
    : path_(std::move(path)),
      temporary_(std::move(temporary)),
      descriptor_(descriptor),
      zstd_level_(zstd_level) {}

CacheFileWriter::CacheFileWriter(CacheFileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      zstd_level_(other.zstd_level_),
      offset_(other.offset_),
      compressed_(std::move(other.compressed_)) {}

CacheFileWriter::~CacheFileWriter() {
  if (descriptor_ < 0) return;
  os::close_file(descriptor_);
  os::remove_file(temporary_);
}

Status CacheFileWriter::write_at(int64_t offset, std::span<const uint8_t> bytes) {
  const bool is_written = transfer_all(bytes.size(), [&](size_t done) {
    return os::write_at(descriptor_, bytes.subspan(done), offset + static_cast<int64_t>(done));
  });
  return is_written ? Status{} : Status{file_error(path_, "cannot be written")};
}

Result<StoredBlockCopy> CacheFileWriter::add_block_copy(int32_t kind,
                                                        std::span<const uint8_t> block) {
  KVX_RETURN_IF_ERROR(go_on());
  StoredBlockCopy block_copy{kind, Codec::kRaw, offset_, 0, cache::checksum(block)};
  std::span<const uint8_t> stored = block;
  if (zstd_level_ > 0) {
    compressed_.resize(ZSTD_compressBound(block.size()));
    const size_t num_bytes = ZSTD_compress(compressed_.data(), compressed_.size(), block.data(),
                                           block.size(), zstd_level_);
    if (!ZSTD_isError(num_bytes) && num_bytes < block.size()) {  // else it stays raw
      block_copy.codec = Codec::kZstd;
      stored = std::span(compressed_).first(num_bytes);
    }
  }
  block_copy.stored_bytes = static_cast<int64_t>(stored.size());
  KVX_RETURN_IF_ERROR(write_at(offset_, stored));
  offset_ = round_up(offset_ + block_copy.stored_bytes, kBlockCopyAlignment);
  return block_copy;
}

Status CacheFileWriter::finish(const FileIndex& index) {
  const std::vector<uint8_t> bytes = encode_index(index);
  KVX_RETURN_IF_ERROR(write_at(offset_, bytes));
  const FileHeader header{offset_, static_cast<int64_t>(bytes.size()), cache::checksum(bytes)};
  KVX_RETURN_IF_ERROR(write_at(0, encode_header(header)));
  if (!os::sync_file(descriptor_)) return file_error(path_, "cannot be synced");
  if (!os::rename_file(temporary_, path_)) return file_error(path_, "cannot be replaced");
  offset_ += header.index_bytes;
  os::close_file(std::exchange(descriptor_, -1));
  return sync_folder_of(path_);
}

// ---- reading

Result<CacheFileReader> CacheFileReader::open(const std::string& path) {
  const int descriptor = os::open_file(path, os::Open::kRead);
  if (descriptor < 0) return file_error(path, "cannot be read");
  const os::FileFacts facts = os::facts_of(descriptor).value_or(os::FileFacts());
  CacheFileReader reader(descriptor, facts.is_regular ? facts.bytes : 0);
  if (!facts.is_regular) return invalid_argument("'{}' is no regular file", path);
  const auto load = [&reader]() -> Status {
    std::vector<uint8_t> bytes(
        static_cast<size_t>(std::min<int64_t>(reader.file_bytes_, kHeaderBytes)));
    KVX_RETURN_IF_ERROR(reader.read_at(0, bytes));
    if (is_layer_file(bytes)) return reader.load_layers(bytes);
    KVX_ASSIGN_OR_RETURN(const FileHeader header, parse_header(bytes, reader.file_bytes_));
    reader.end_ = header.index_offset + header.index_bytes;
    bytes.resize(static_cast<size_t>(header.index_bytes));
    KVX_RETURN_IF_ERROR(reader.read_at(header.index_offset, bytes));
    KVX_ASSIGN_OR_RETURN(reader.index_, parse_index(bytes, header));
    return {};
  };
  const Status loaded = load();
  if (loaded.ok()) return reader;
  return Error{loaded.error().code, fmt::format("'{}': {}", path, loaded.error().message)};
}

Status CacheFileReader::load_layers(std::span<const uint8_t> header) {
  KVX_ASSIGN_OR_RETURN(const int64_t head_bytes, parse_layer_head_bytes(header));
  std::vector<uint8_t> bytes(static_cast<size_t>(head_bytes));
  KVX_RETURN_IF_ERROR(read_at(0, bytes));
  KVX_ASSIGN_OR_RETURN(LayerHead head, parse_layer_head(bytes));
  end_ = head.file_bytes;
  if (file_bytes_ < end_) {
    return invalid_argument("it is cut short: {} of {} bytes", file_bytes_, end_);
  }
  RecordHeader record;
  for (FileBlock& block : head.index.blocks) {
    for (StoredBlockCopy& copy : block.block_copies) {
      KVX_RETURN_IF_ERROR(read_at(copy.offset - kRecordHeaderBytes, record));
      KVX_ASSIGN_OR_RETURN(const auto checksum, parse_record_header(record, copy));
      if (!checksum) {
        return invalid_argument("its layer {} has not come; expected a file whose writer is done",
                                copy.kind);
      }
      copy.checksum = *checksum;
    }
  }
  index_ = std::move(head.index);
  return {};
}

CacheFileReader::CacheFileReader(CacheFileReader&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      file_bytes_(other.file_bytes_),
      end_(other.end_),
      index_(std::move(other.index_)),
      stored_(std::move(other.stored_)) {}

CacheFileReader::~CacheFileReader() {
  if (descriptor_ >= 0) os::close_file(descriptor_);
}

Status CacheFileReader::read_at(int64_t offset, std::span<uint8_t> bytes) const {
  const bool is_read = transfer_all(bytes.size(), [&](size_t done) {
    return os::read_at(descriptor_, bytes.subspan(done), offset + static_cast<int64_t>(done));
  });
  if (is_read) return {};
  return invalid_argument("{} bytes at {} cannot be read", bytes.size(), offset);
}

Status CacheFileReader::read_block_copy(const StoredBlockCopy& block_copy, std::span<uint8_t> out) {
  KVX_RETURN_IF_ERROR(go_on());
  stored_.resize(static_cast<size_t>(block_copy.stored_bytes));
  KVX_RETURN_IF_ERROR(read_at(block_copy.offset, stored_));
  return decode_block_copy(block_copy, stored_, out);
}

}  // namespace kvx::tier
