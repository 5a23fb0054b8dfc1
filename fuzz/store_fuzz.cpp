// Any bytes as a store's record, and any bytes as a Redis server's answers, are refused or read,
// never out of bounds. A record's checksums are corrected first, so that mutations reach the code
// behind them. The first byte chooses.
#include <algorithm>
#include <cstring>
#include <vector>

#include "tier/store/record.hpp"
#include "tier/store/redis_replies.hpp"

namespace {

using kvx::cache::ContentHash;

constexpr size_t kHeaderBytes = 96;

// The facts that the record claims, where they fit: then only the header and the sizes stand
// between the bytes and the payload.
void read_record(std::span<const uint8_t> bytes, bool repairs_checksums,
                 const kvx::tier::RecordKey* key) {
  std::vector<uint8_t> record(bytes.begin(), bytes.end());
  std::vector<int32_t> tokens(4);
  kvx::tier::RecordFacts facts;
  facts.tokens = tokens;
  facts.payload_bytes = static_cast<int64_t>(record.size()) - kvx::tier::record_payload_offset(4);
  if (record.size() > kHeaderBytes + 72 + 16) {
    const std::span<const uint8_t> body = std::span(record).subspan(kHeaderBytes);
    std::memcpy(facts.scope.bytes.data(), body.data(), 16);
    std::memcpy(facts.parent.bytes.data(), body.data() + 16, 16);
    std::memcpy(facts.hash.bytes.data(), body.data() + 32, 16);
    std::memcpy(tokens.data(), body.data() + 72, 16);
  }
  if (repairs_checksums && record.size() >= kHeaderBytes) {
    const ContentHash body = kvx::cache::checksum(std::span(record).subspan(kHeaderBytes));
    std::memcpy(record.data() + 64, body.bytes.data(), 16);
    const ContentHash header = kvx::cache::checksum(std::span(record).first(80));
    std::memcpy(record.data() + 80, header.bytes.data(), 16);
  }
  const auto payload = kvx::tier::open_record(facts, key, record);
  if (payload.ok() && static_cast<int64_t>(payload.value().size()) != facts.payload_bytes) {
    __builtin_trap();
  }
}

// A text's head, and replies in two parts.
void read_replies(std::span<const uint8_t> bytes) {
  const auto head = kvx::tier::read_text_head(bytes);
  if (head && (head->text_bytes < 0 || head->head_bytes > bytes.size())) __builtin_trap();
  kvx::tier::RedisReplies replies(1 << 12);
  const size_t half = bytes.size() / 2;
  for (const auto part : {bytes.first(half), bytes.subspan(half)}) {
    if (!replies.feed(part).ok()) return;
    while (true) {
      const auto reply = replies.next();
      if (!reply.ok()) return;
      if (!reply.value()) break;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const kvx::tier::RecordKey key = kvx::tier::parse_record_key(std::string(64, 'a')).value();
  if (size == 0) return 0;
  const std::span<const uint8_t> bytes(data + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      read_record(bytes, false, nullptr);
      break;
    case 1:
      read_record(bytes, true, nullptr);
      break;
    case 2:
      read_record(bytes, true, &key);
      break;
    default:
      read_replies(bytes);
  }
  return 0;
}
