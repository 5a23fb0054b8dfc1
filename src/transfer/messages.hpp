// What exporter and importer say to each other. The importer asks, the exporter answers; every
// request may be asked again, so a lost message or a new connection costs one request.
//
//   request   [u32 "KVXT"][u32 version][u32 kind][u32 0] and
//     hello   [text: the importer's fingerprint]
//     read    [u64 export][u64 offset][u64 bytes]
//     done    [u64 export][u32 is_taken][u32 0][text: why not]
//     layers  [u64 tag][u32 record][u32 first head][u32 end head][u32 num_heads]
//             [text: files' names, a space between]
//     pages   [u64 export][u32 layer][u32 first head][u32 end head][u32 num_heads]
//             [u64 first page][u64 end page][u32 is_mapped][u32 0]
//   answer    [u32 "KVXT"][u32 version][u32 kind][u32 0] and
//     hello   [u64 export][u64 bytes][u32 number of layers, 0: it is offered as a whole]
//             [u32 length][path, of the same bytes in shared memory, or ""]
//             [u32 length][handle of a GPU's memory, or ""][u32 length][order of codes there]
//             [u64 the exporter's process][text: the exporter's fingerprint]
//     read    [u64 export][u64 offset][bytes]
//     done    [u64 export]
//     layers  [u64 tag][u32 record][u32 number of parts] each: [u64 bytes][bytes]
//     pages   [u64 export][u32 layer][u32 number of pages][u64 first page]
//             [16 bytes of checksum a page][pages]
//     refused [text]
//
// Numbers are little-endian. The bytes are a cache file (docs/cache-file.md), whose header, index
// and every block have checksums of their own. An exporter answers all kinds but `layers`.
//
// A sequence that comes layer by layer answers `read` from 0 with its head (layer_head.hpp), and
// `pages` with a layer's part of some blocks, of heads [first, end) alone where num_heads is not 0:
// no bytes, or no pages, as long as they are not there. Who has mapped the GPU's memory by its
// handle (device/cuda_ipc.hpp) asks with is_mapped, and gets the number of pages alone: they lie
// there one after the other, layer by layer.
//
// A folder's server answers `layers` alone, of layer files (docs/layer-file.md): record 0 is a
// file's head, record 1 + l the record of layer l with its header, of heads [first, end) alone
// where num_heads is not 0. The parts are those of the first names, up to one that is not there
// (yet), and no more than fit into an answer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace kvx::transfer {

enum class Kind : uint32_t {
  kHello = 1,
  kRead = 2,
  kDone = 3,
  kRefused = 4,
  kLayers = 5,
  kPages = 6
};

// KV heads [first, end) of a page that has num_heads; num_heads 0: the whole page.
struct HeadRange {
  uint32_t first = 0;
  uint32_t end = 0;
  uint32_t num_heads = 0;
  friend bool operator==(const HeadRange&, const HeadRange&) = default;
};

struct Request {
  Kind kind = Kind::kHello;
  uint64_t export_id = 0;  // kLayers: a tag that the answer repeats
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t record = 0;  // kPages: the layer
  HeadRange heads;
  uint64_t first_page = 0;
  uint64_t end_page = 0;
  bool is_mapped = false;
  bool is_taken = false;
  std::string text;  // the fingerprint, why it was not taken, or files' names
};

struct Answer {
  Kind kind = Kind::kHello;
  uint64_t export_id = 0;
  uint64_t bytes = 0;      // of all
  uint64_t offset = 0;     // of data
  uint32_t record = 0;     // kPages: the layer
  uint32_t num_parts = 0;  // kPages: pages
  uint64_t first_page = 0;
  uint32_t num_layers = 0;  // of a sequence that comes layer by layer
  std::string path;         // in shared memory
  std::string ipc_handle;
  std::string pool_order;
  uint64_t process = 0;
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
