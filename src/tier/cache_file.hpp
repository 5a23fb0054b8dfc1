// The cache file: blocks of a cache with their tokens, format version 1 (docs/cache-file.md).
//
//   header  64 bytes
//            0  "KVXCACHE"
//            8  u32 version
//           12  u32 0x01020304, to see the byte order
//           16  u64 index_offset
//           24  u64 index_bytes
//           32  16 bytes: XXH3-128 of the index
//           48  16 bytes: XXH3-128 of bytes 0 to 47
//   block copies  each begins on 64 bytes; zeros between
//   index   what the block copies are (encode_index)
//
// All numbers are little-endian. A block copy is one block of one layer group in one kind, packed
// or full-precision, as it lies in the pool, raw or as one zstd frame.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/prefix/content_hash.hpp"
#include "core/result.hpp"

namespace kvx::tier {

inline constexpr uint32_t kFileVersion = 1;
inline constexpr int64_t kHeaderBytes = 64;
inline constexpr std::array<uint8_t, 8> kFileMagic = {'K', 'V', 'X', 'C', 'A', 'C', 'H', 'E'};

// What block copies there are: equal for all blocks of a file.
struct StoredBlockKind {
  int32_t group = 0;
  bool is_full_precision = false;
  int64_t bytes = 0;  // of the block in memory

  friend bool operator==(const StoredBlockKind&, const StoredBlockKind&) = default;
};

enum class Codec : uint32_t { kRaw, kZstd };

struct StoredBlockCopy {
  int32_t kind = 0;  // index of FileIndex::kinds
  Codec codec = Codec::kRaw;
  int64_t offset = 0;
  int64_t stored_bytes = 0;
  cache::ContentHash checksum;  // of the block in memory, not of what is stored
};

// parent: a block with a lower index, or -1 - scope for the first block of a scope.
struct FileBlock {
  int32_t parent = 0;
  std::vector<int32_t> tokens;  // block_size; 1 to block_size in a sequence's last block
  std::vector<StoredBlockCopy> block_copies;
};

struct FileIndex {
  std::string fingerprint;
  int32_t block_size = 0;
  std::vector<cache::PrefixKeys> scopes;
  std::vector<StoredBlockKind> kinds;
  std::vector<FileBlock> blocks;
  std::vector<int32_t> sequences;  // each sequence's last block
};

struct FileHeader {
  int64_t index_offset = 0;
  int64_t index_bytes = 0;
  cache::ContentHash index_checksum;
};

std::vector<uint8_t> encode_header(const FileHeader& header);
std::vector<uint8_t> encode_index(const FileIndex& index);

// INVALID_ARGUMENT: no cache file, cut short, or a damaged header; INCOMPATIBLE: a newer version or
// the other byte order. bytes: the file's first kHeaderBytes, or all it has.
Result<FileHeader> parse_header(std::span<const uint8_t> bytes, int64_t file_bytes);

// INVALID_ARGUMENT names what is wrong: the checksum, a count or an offset that leads out of the
// file, a block before its parent, a block of the wrong length.
Result<FileIndex> parse_index(std::span<const uint8_t> bytes, const FileHeader& header);

// The block in memory from what is stored. INVALID_ARGUMENT: a damaged frame, or another checksum.
// out is unspecified then. Requires: out.size() is the kind's bytes.
Status decode_block_copy(const StoredBlockCopy& block_copy, std::span<const uint8_t> stored,
                         std::span<uint8_t> out);

// Writes a temporary file beside `path` (tier/temporary_file.hpp); finish() makes it whole:
// written, synced, renamed, the folder synced. Until then, and when anything fails, what was at
// `path` before stays there whole.
class CacheFileWriter {
 public:
  // zstd_level 0: raw. INVALID_ARGUMENT: the file cannot be made.
  static Result<CacheFileWriter> create(const std::string& path, int zstd_level);
  CacheFileWriter(CacheFileWriter&& other) noexcept;
  CacheFileWriter& operator=(CacheFileWriter&&) = delete;
  ~CacheFileWriter();

  // INVALID_ARGUMENT: the disk is full, say.
  Result<StoredBlockCopy> add_block_copy(int32_t kind, std::span<const uint8_t> block);
  Status finish(const FileIndex& index);
  int64_t bytes_written() const { return offset_; }

 private:
  CacheFileWriter(std::string path, std::string temporary, int descriptor, int zstd_level);
  Status write_at(int64_t offset, std::span<const uint8_t> bytes);

  std::string path_;
  std::string temporary_;
  int descriptor_;
  int zstd_level_;
  int64_t offset_ = kHeaderBytes;
  std::vector<uint8_t> compressed_;
};

class CacheFileReader {
 public:
  // Reads header and index, of a layer file (tier/layers/layer_file.hpp) as well, once its records
  // are all there. INVALID_ARGUMENT or INCOMPATIBLE, with the file's name.
  static Result<CacheFileReader> open(const std::string& path);
  CacheFileReader(CacheFileReader&& other) noexcept;
  CacheFileReader& operator=(CacheFileReader&&) = delete;
  ~CacheFileReader();

  const FileIndex& index() const { return index_; }
  int64_t file_bytes() const { return file_bytes_; }
  // Bytes after the index, which ends a file as it was written.
  int64_t trailing_bytes() const { return file_bytes_ - end_; }
  // Reads, decodes and checks. Errors as decode_block_copy; out is unspecified then.
  Status read_block_copy(const StoredBlockCopy& block_copy, std::span<uint8_t> out);

 private:
  CacheFileReader(int descriptor, int64_t file_bytes)
      : descriptor_(descriptor), file_bytes_(file_bytes) {}
  Status read_at(int64_t offset, std::span<uint8_t> bytes) const;
  Status load_layers(std::span<const uint8_t> header);

  int descriptor_;
  int64_t file_bytes_;
  int64_t end_ = 0;  // of the index
  FileIndex index_;
  std::vector<uint8_t> stored_;
};

}  // namespace kvx::tier
