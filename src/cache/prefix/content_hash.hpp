// ContentHash: what a block holds, as 128 bits. A prefix's hash is a chain: each block's hash is
// made of its parent's and its own tokens, so that equal hashes mean equal tokens from the first.
//
//   root   hash(scope)                            scope: the cache's fingerprint and the extra keys
//   block  hash([parent's 16 bytes][token ids: block_size x 4 bytes, little-endian])
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace kvx::cache {

// In the canonical byte order of the algorithm: the same on every machine.
struct ContentHash {
  std::array<uint8_t, 16> bytes{};

  friend auto operator<=>(const ContentHash&, const ContentHash&) = default;
};

std::string hex(const ContentHash& hash);  // 32 digits

// kSha256 keeps the first 128 of its 256 bits. Who can choose tokens can make collisions of XXH3:
// where tenants share a cache only kSha256 is taken. No collision serves wrong data, whatever the
// algorithm: a match compares scopes and token ids themselves (PrefixIndex).
enum class HashAlgorithm : uint8_t { kXxh3, kSha256 };

std::string_view name_of(HashAlgorithm algorithm);
std::optional<HashAlgorithm> hash_named(std::string_view name);

// The checksum of stored bytes: XXH3-128, seed 0.
ContentHash checksum(std::span<const uint8_t> bytes);

// Copies, and returns the checksum of what was copied: one pass over memory, not two. Requires: as
// many bytes on both sides, which do not overlap.
ContentHash copy_with_checksum(std::span<uint8_t> to, std::span<const uint8_t> from);

// Requires: tokens.size() <= kMaxBlockSize.
ContentHash hash_block(HashAlgorithm algorithm, const ContentHash& parent,
                       std::span<const int32_t> tokens);

ContentHash hash_scope(HashAlgorithm algorithm, std::string_view scope);

// What sets blocks of equal tokens apart. All empty: the text alone.
struct PrefixKeys {
  std::string adapter;  // a LoRA's name, say
  std::string image;    // hashes of what stands behind placeholder tokens
  std::string tenant;   // a salt: blocks are never shared across tenants

  friend bool operator==(const PrefixKeys&, const PrefixKeys&) = default;
};

// One string of all keys; different keys never give the same string.
std::string scope_of(std::string_view fingerprint, const PrefixKeys& keys);

}  // namespace kvx::cache
