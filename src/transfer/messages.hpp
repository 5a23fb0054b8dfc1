// What exporter and importer say to each other. The importer asks, the exporter answers; every
// request may be asked again, so a lost message or a new connection costs one request.
//
//   request   [u32 "KVXT"][u32 version][u32 kind][u32 0] and
//     hello   [text: the importer's fingerprint]
//     read    [u64 export][u64 offset][u64 bytes]
//     done    [u64 export][u32 is_taken][u32 0][text: why not]
//     file    [u64 offset][text: the file's name]
//   answer    [u32 "KVXT"][u32 version][u32 kind][u32 0] and
//     hello   [u64 export][u64 bytes][u32 length][path, of the same bytes in shared memory, or ""]
//             [text: the exporter's fingerprint]
//     read    [u64 export][u64 offset][bytes]
//     done    [u64 export]
//     file    [u64 offset][u64 bytes of the whole file, 0: it is not there][u32 length][name]
//             [bytes from the offset on]
//     refused [text]
//
// Numbers are little-endian. The bytes are a cache file (docs/cache-file.md), whose header, index
// and every block have checksums of their own. An exporter answers all kinds but `file`, a folder's
// server answers `file` alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::transfer {

enum class Kind : uint32_t { kHello = 1, kRead = 2, kDone = 3, kRefused = 4, kFile = 5 };

struct Request {
  Kind kind = Kind::kHello;
  uint64_t export_id = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  bool is_taken = false;
  std::string text;  // the fingerprint, why it was not taken, or a file's name
};

struct Answer {
  Kind kind = Kind::kHello;
  uint64_t export_id = 0;
  uint64_t bytes = 0;             // of all
  uint64_t offset = 0;            // of data
  std::string path;               // in shared memory, or a file's name
  std::string text;               // the fingerprint, or why it is refused
  std::span<const uint8_t> data;  // of the message that was parsed
};

std::vector<uint8_t> encode(const Request& request);
// Without `data`, which follows.
std::vector<uint8_t> encode(const Answer& answer);

// INVALID_ARGUMENT: no message of this kind, cut short, or too long; INCOMPATIBLE: another version.
Result<Request> parse_request(std::span<const uint8_t> bytes);
Result<Answer> parse_answer(std::span<const uint8_t> bytes);

}  // namespace kvx::transfer
