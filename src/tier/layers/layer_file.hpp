// The layer file: blocks of a cache whose layers come one after the other, each in a record that is
// whole by itself (docs/layer-file.md). Where every record lies is known before the first comes.
//
//   header  64 bytes
//            0  "KVXLAYER"
//            8  u32 version, 1
//           12  u32 0x01020304
//           16  u64 index_bytes
//           24  u64 file_bytes
//           32  16 bytes: XXH3-128 of the index
//           48  16 bytes: XXH3-128 of bytes 0 to 47
//   index   as a cache file's (tier/cache_file.hpp): a kind a layer, block copies raw, their
//           checksums zeros
//   records layer by layer, and block by block in a layer; each begins on 64 bytes
//            0  "KVXPAGES"
//            8  u64 offset of the page in the file
//           16  u64 bytes of the page
//           24  16 bytes: XXH3-128 of the page
//           40  16 bytes: XXH3-128 of bytes 0 to 39
//           56  zeros
//           64  the page
//
// A record is written page first, so one with a header is whole; until then there are zeros.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tier/cache_file.hpp"

namespace kvx::tier {

inline constexpr std::array<uint8_t, 8> kLayerFileMagic = {'K', 'V', 'X', 'L', 'A', 'Y', 'E', 'R'};
inline constexpr uint32_t kLayerFileVersion = 1;
inline constexpr int64_t kRecordHeaderBytes = 64;
inline constexpr int64_t kMostLayerHeadBytes = int64_t{16} << 20;

// Header and index.
struct LayerHead {
  FileIndex index;  // with the places of all pages
  int64_t head_bytes = 0;
  int64_t file_bytes = 0;
};

// Where the pages of these kinds and blocks lie. Requires: the kinds' bytes, and the blocks'
// copies with their kinds, are set.
LayerHead lay_out_layers(FileIndex index);
std::vector<uint8_t> encode_layer_head(const LayerHead& head);

bool is_layer_file(std::span<const uint8_t> first_bytes);
// Of the header alone: the bytes of header and index. Errors as parse_layer_head.
Result<int64_t> parse_layer_head_bytes(std::span<const uint8_t> header);
// bytes: header and index. INVALID_ARGUMENT: damaged, or places that are not those of
// lay_out_layers(); INCOMPATIBLE: a newer version or the other byte order.
Result<LayerHead> parse_layer_head(std::span<const uint8_t> bytes);

using RecordHeader = std::array<uint8_t, kRecordHeaderBytes>;
// checksum: of the page.
RecordHeader encode_record_header(const StoredBlockCopy& place, const cache::ContentHash& checksum);
// The page's checksum; none: the record has not come yet. INVALID_ARGUMENT: damaged, or of another
// place.
Result<std::optional<cache::ContentHash>> parse_record_header(std::span<const uint8_t> bytes,
                                                              const StoredBlockCopy& place);

// Makes the file with its head and no record. What was at `path` is replaced. INVALID_ARGUMENT: it
// cannot be written.
Status create_layer_file(const std::string& path, const LayerHead& head);
// Writes a record of it. Requires: as many bytes as the place has. INVALID_ARGUMENT: it cannot be
// written, or the file is gone.
Status write_record(const std::string& path, const StoredBlockCopy& place,
                    std::span<const uint8_t> page);

}  // namespace kvx::tier
