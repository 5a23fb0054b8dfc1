// A block's record in a store, version 1 (docs/store-record.md). All numbers are little-endian.
//
//   header  96 bytes
//            0  "KVXBLOCK"
//            8  u32 version, 1
//           12  u32 0x01020304
//           16  u64 body_bytes
//           24  u32 cipher: 0 none, 1 AES-256-GCM
//           28  u32 0
//           32  16 bytes: the key's id; zeros without a cipher
//           48  12 bytes: nonce; zeros without a cipher
//           60  u32 0
//           64  16 bytes: XXH3-128 of the body, or the cipher's tag over body and bytes 0 to 63
//           80  16 bytes: XXH3-128 of bytes 0 to 79
//   body    from here on enciphered, if a cipher is named
//            0  16 bytes: scope    what the block belongs to: cache, keys, order
//           16  16 bytes: parent   hash of the chain before the block
//           32  16 bytes: hash     of the chain with the block
//           48  u32 layer group
//           52  u32 is_full_precision
//           56  u64 payload_bytes
//           64  u32 num_tokens
//           68  u32 0
//           72  i32 token x num_tokens; zeros up to the payload, which begins on 64 bytes of the
//           record
//   payload the block as it lies in the pool
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "cache/prefix/content_hash.hpp"
#include "cache/prefix/match_parts.hpp"
#include "core/result.hpp"

namespace kvx::tier {

inline constexpr uint32_t kRecordVersion = 1;

// What a record holds, and what its reader expects of it.
struct RecordFacts {
  cache::ContentHash scope;
  cache::ContentHash parent;
  cache::ContentHash hash;
  int group = 0;
  cache::BlockKind kind = cache::BlockKind::kPacked;
  std::span<const int32_t> tokens;
  int64_t payload_bytes = 0;
};

// A key of AES-256-GCM and the name by which records refer to it: part of its SHA-256.
struct RecordKey {
  std::array<uint8_t, 32> secret{};
  std::array<uint8_t, 16> id{};
};

// INVALID_ARGUMENT: not 64 hexadecimal digits. The text is not repeated in the message.
Result<RecordKey> parse_record_key(std::string_view digits);

// Where the payload of a record with this many tokens begins, and how long the record is; bytes.
int64_t record_payload_offset(int64_t num_tokens);
int64_t record_bytes(int64_t num_tokens, int64_t payload_bytes);

// Writes all around the payload, which is there already, and enciphers it under a key.
// INTERNAL_ERROR: OpenSSL's. Requires: record.size() is record_bytes().
Status seal_record(const RecordFacts& facts, const RecordKey* key, std::span<uint8_t> record);

// The payload, deciphered in place. INVALID_ARGUMENT or INCOMPATIBLE names what is wrong: no
// record, cut short, damaged, a newer version, another key, or another block than expected. With a
// key only enciphered records are taken.
Result<std::span<const uint8_t>> open_record(const RecordFacts& expected, const RecordKey* key,
                                             std::span<uint8_t> record);

}  // namespace kvx::tier
