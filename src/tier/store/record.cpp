// Records: bytes in their places, checksums, and AES-GCM by OpenSSL.
#include "tier/store/record.hpp"

#include <openssl/evp.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "core/checked.hpp"

namespace kvx::tier {
namespace {

constexpr std::array<uint8_t, 8> kMagic = {'K', 'V', 'X', 'B', 'L', 'O', 'C', 'K'};
constexpr uint32_t kByteOrder = 0x01020304;
constexpr uint32_t kNoCipher = 0;
constexpr uint32_t kAesGcm = 1;
constexpr size_t kHeaderBytes = 96;
constexpr size_t kAuthenticatedBytes = 64;  // of the header
constexpr size_t kFactsBytes = 72;
constexpr int64_t kPayloadAlignment = 64;

// Offsets in the header.
constexpr size_t kBodyBytesAt = 16;
constexpr size_t kCipherAt = 24;
constexpr size_t kKeyIdAt = 32;
constexpr size_t kNonceAt = 48;
constexpr size_t kNonceBytes = 12;
constexpr size_t kTagAt = 64;
constexpr size_t kTagBytes = 16;
constexpr size_t kHeaderChecksumAt = 80;

template <class T>
void write_at(std::span<uint8_t> bytes, size_t at, const T& value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

template <class T>
T read_at(std::span<const uint8_t> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

cache::ContentHash header_checksum(std::span<const uint8_t> record) {
  return cache::checksum(record.first(kHeaderChecksumAt));
}

struct FreeCipher {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};
using Cipher = std::unique_ptr<EVP_CIPHER_CTX, FreeCipher>;

// Enciphers or deciphers the body in place. OpenSSL counts bytes in int, so it goes in parts.
bool run_cipher(EVP_CIPHER_CTX* context, std::span<uint8_t> body) {
  constexpr size_t kPartBytes = size_t{1} << 30;
  for (size_t at = 0; at < body.size(); at += kPartBytes) {
    const auto count = static_cast<int>(std::min(kPartBytes, body.size() - at));
    int done = 0;
    if (EVP_CipherUpdate(context, body.data() + at, &done, body.data() + at, count) != 1) {
      return false;
    }
  }
  return true;
}

Cipher begin_cipher(const RecordKey& key, std::span<const uint8_t> record, bool enciphers) {
  Cipher context(EVP_CIPHER_CTX_new());
  int done = 0;
  const bool has_begun =
      context != nullptr &&
      EVP_CipherInit_ex(context.get(), EVP_aes_256_gcm(), nullptr, key.secret.data(),
                        record.data() + kNonceAt, enciphers ? 1 : 0) == 1 &&
      EVP_CipherUpdate(context.get(), nullptr, &done, record.data(), kAuthenticatedBytes) == 1;
  return has_begun ? std::move(context) : nullptr;
}

Status encipher(const RecordKey& key, std::span<uint8_t> record) {
  const std::span<uint8_t> body = record.subspan(kHeaderBytes);
  const Cipher context = begin_cipher(key, record, true);
  int done = 0;
  uint8_t rest[16];
  if (context != nullptr && run_cipher(context.get(), body) &&
      EVP_CipherFinal_ex(context.get(), rest, &done) == 1 &&
      EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, record.data() + kTagAt) ==
          1) {
    return {};
  }
  return internal_error("a record could not be enciphered");
}

bool decipher(const RecordKey& key, std::span<uint8_t> record) {
  const std::span<uint8_t> body = record.subspan(kHeaderBytes);
  const Cipher context = begin_cipher(key, record, false);
  int done = 0;
  uint8_t rest[16];
  return context != nullptr && run_cipher(context.get(), body) &&
         EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_SET_TAG, kTagBytes,
                             record.data() + kTagAt) == 1 &&
         EVP_CipherFinal_ex(context.get(), rest, &done) == 1;
}

void write_facts(const RecordFacts& facts, std::span<uint8_t> record) {
  const std::span<uint8_t> body = record.subspan(kHeaderBytes);
  write_at(body, 0, facts.scope.bytes);
  write_at(body, 16, facts.parent.bytes);
  write_at(body, 32, facts.hash.bytes);
  write_at(body, 48, static_cast<uint32_t>(facts.group));
  write_at(body, 52, static_cast<uint32_t>(facts.kind == cache::BlockKind::kFullPrecision));
  write_at(body, 56, static_cast<uint64_t>(facts.payload_bytes));
  write_at(body, 64, static_cast<uint32_t>(facts.tokens.size()));
  write_at(body, 68, uint32_t{0});
  std::memcpy(body.data() + kFactsBytes, facts.tokens.data(), facts.tokens.size_bytes());
  const size_t tokens_end = kHeaderBytes + kFactsBytes + facts.tokens.size_bytes();
  const auto payload = static_cast<size_t>(record_payload_offset(std::ssize(facts.tokens)));
  std::fill(record.begin() + static_cast<int64_t>(tokens_end),
            record.begin() + static_cast<int64_t>(payload), uint8_t{0});
}

// What the header says, before anything else is believed.
Status check_header(std::span<const uint8_t> record) {
  if (record.size() < kHeaderBytes + kFactsBytes) {
    return invalid_argument("a record has {} bytes; expected {} at least", record.size(),
                            kHeaderBytes + kFactsBytes);
  }
  if (!std::equal(kMagic.begin(), kMagic.end(), record.begin())) {
    return invalid_argument("a record does not begin with KVXBLOCK");
  }
  const auto version = read_at<uint32_t>(record, 8);
  if (read_at<uint32_t>(record, 12) != kByteOrder || version != kRecordVersion) {
    return Error{ErrorCode::kIncompatible,
                 fmt::format("a record has version {} or another byte order; this library reads {}",
                             version, kRecordVersion)};
  }
  if (read_at<cache::ContentHash>(record, kHeaderChecksumAt) != header_checksum(record)) {
    return invalid_argument("a record's header is damaged");
  }
  const auto body_bytes = read_at<uint64_t>(record, kBodyBytesAt);
  if (body_bytes == record.size() - kHeaderBytes) return {};
  return invalid_argument("a record has {} bytes; its header says {}", record.size() - kHeaderBytes,
                          body_bytes);
}

// Makes the body plain; what it says is then what was written.
Status check_body(const RecordKey* key, std::span<uint8_t> record) {
  const auto cipher = read_at<uint32_t>(record, kCipherAt);
  if (cipher != (key != nullptr ? kAesGcm : kNoCipher)) {
    return invalid_argument("a record has cipher {}; expected {}", cipher,
                            key != nullptr ? kAesGcm : kNoCipher);
  }
  if (key == nullptr) {
    const cache::ContentHash found = cache::checksum(record.subspan(kHeaderBytes));
    if (found == read_at<cache::ContentHash>(record, kTagAt)) return {};
    return invalid_argument("a record's body is damaged");
  }
  if (!std::equal(key->id.begin(), key->id.end(), record.begin() + kKeyIdAt)) {
    return invalid_argument("a record was enciphered with another key");
  }
  if (decipher(*key, record)) return {};
  return invalid_argument("a record's body is damaged, or was enciphered with another key");
}

Status check_facts(const RecordFacts& expected, std::span<const uint8_t> record) {
  const std::span<const uint8_t> body = record.subspan(kHeaderBytes);
  const bool is_full_precision = expected.kind == cache::BlockKind::kFullPrecision;
  if (read_at<cache::ContentHash>(body, 0) != expected.scope ||
      read_at<cache::ContentHash>(body, 16) != expected.parent ||
      read_at<cache::ContentHash>(body, 32) != expected.hash ||
      read_at<uint32_t>(body, 48) != static_cast<uint32_t>(expected.group) ||
      read_at<uint32_t>(body, 52) != static_cast<uint32_t>(is_full_precision) ||
      read_at<uint64_t>(body, 56) != static_cast<uint64_t>(expected.payload_bytes) ||
      read_at<uint32_t>(body, 64) != expected.tokens.size() ||
      std::ssize(record) != record_bytes(std::ssize(expected.tokens), expected.payload_bytes) ||
      std::memcmp(body.data() + kFactsBytes, expected.tokens.data(),
                  expected.tokens.size_bytes()) != 0) {
    return invalid_argument("a record is another block's");
  }
  return {};
}

}  // namespace

Result<RecordKey> parse_record_key(std::string_view digits) {
  RecordKey key;
  if (digits.size() != 2 * key.secret.size()) {
    return invalid_argument("a key has {} characters; expected 64 hexadecimal digits",
                            digits.size());
  }
  for (size_t i = 0; i < key.secret.size(); ++i) {
    const char* const first = digits.data() + 2 * i;
    const auto [end, error] = std::from_chars(first, first + 2, key.secret[i], 16);
    if (error != std::errc() || end != first + 2) {
      return invalid_argument("a key has a character that is no hexadecimal digit; expected 64");
    }
  }
  constexpr std::string_view kPurpose = "kvx record key";
  std::array<uint8_t, kPurpose.size() + 32> text;
  std::copy(kPurpose.begin(), kPurpose.end(), text.begin());
  std::copy(key.secret.begin(), key.secret.end(), text.begin() + kPurpose.size());
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(text.data(), text.size(), digest.data());
  std::copy_n(digest.begin(), key.id.size(), key.id.begin());
  return key;
}

int64_t record_payload_offset(int64_t num_tokens) {
  return round_up(static_cast<int64_t>(kHeaderBytes + kFactsBytes) + 4 * num_tokens,
                  kPayloadAlignment);
}

int64_t record_bytes(int64_t num_tokens, int64_t payload_bytes) {
  return record_payload_offset(num_tokens) + payload_bytes;
}

Status seal_record(const RecordFacts& facts, const RecordKey* key, std::span<uint8_t> record) {
  std::fill_n(record.begin(), kHeaderBytes, uint8_t{0});
  write_at(record, 0, kMagic);
  write_at(record, 8, kRecordVersion);
  write_at(record, 12, kByteOrder);
  write_at(record, kBodyBytesAt, static_cast<uint64_t>(record.size() - kHeaderBytes));
  write_facts(facts, record);
  if (key == nullptr) {
    write_at(record, kTagAt, cache::checksum(record.subspan(kHeaderBytes)));
  } else {
    write_at(record, kCipherAt, kAesGcm);
    write_at(record, kKeyIdAt, key->id);
    if (RAND_bytes(record.data() + kNonceAt, kNonceBytes) != 1) {
      return internal_error("no random nonce for a record");
    }
    KVX_RETURN_IF_ERROR(encipher(*key, record));
  }
  write_at(record, kHeaderChecksumAt, header_checksum(record));
  return {};
}

Result<std::span<const uint8_t>> open_record(const RecordFacts& expected, const RecordKey* key,
                                             std::span<uint8_t> record) {
  KVX_RETURN_IF_ERROR(check_header(record));
  KVX_RETURN_IF_ERROR(check_body(key, record));
  KVX_RETURN_IF_ERROR(check_facts(expected, record));
  const auto at = static_cast<size_t>(record_payload_offset(std::ssize(expected.tokens)));
  return std::span<const uint8_t>(record.subspan(at));
}

}  // namespace kvx::tier
