// Hashes: XXH3 by xxHash, with the widest instructions that the machine has, and SHA-256 by
// OpenSSL.
#include "cache/prefix/content_hash.hpp"

#include <fmt/ranges.h>
#include <openssl/sha.h>
#include <xxhash.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#include <xxh_x86dispatch.h>  // after xxhash.h: chooses at run time, XXH3_128bits() stays the name
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

#include "cache/block_layout.hpp"

namespace kvx::cache {
namespace {

constexpr std::array<std::string_view, 2> kNames = {"xxh3", "sha256"};

ContentHash canonical_hash(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  ContentHash result;
  static_assert(sizeof canonical.digest == sizeof result.bytes);
  std::memcpy(result.bytes.data(), canonical.digest, result.bytes.size());
  return result;
}

ContentHash xxh3(const void* bytes, size_t num_bytes) {
  return canonical_hash(XXH3_128bits(bytes, num_bytes));
}

// Stores that do not read the target's cache lines first: half again as fast as memcpy for blocks
// that nobody reads soon.
void copy_past_caches(uint8_t* to, const uint8_t* from, size_t count) {
#if defined(__x86_64__)
  constexpr size_t kLineBytes = 64;
  if (reinterpret_cast<uintptr_t>(to) % kLineBytes == 0) {
    for (; count >= kLineBytes; to += kLineBytes, from += kLineBytes, count -= kLineBytes) {
      for (size_t at = 0; at < kLineBytes; at += sizeof(__m128i)) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
      }
    }
  }
#endif
  std::memcpy(to, from, count);
}

// Before another thread learns of the bytes.
void finish_copies_past_caches() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

ContentHash hash_bytes(HashAlgorithm algorithm, const void* bytes, size_t num_bytes) {
  if (algorithm == HashAlgorithm::kXxh3) return xxh3(bytes, num_bytes);
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(static_cast<const uint8_t*>(bytes), num_bytes, digest.data());
  ContentHash hash;
  std::memcpy(hash.bytes.data(), digest.data(), hash.bytes.size());
  return hash;
}

}  // namespace

std::string hex(const ContentHash& hash) {
  return fmt::format("{:02x}", fmt::join(hash.bytes, ""));
}

std::string_view name_of(HashAlgorithm algorithm) {
  return kNames[static_cast<size_t>(algorithm)];
}

std::optional<HashAlgorithm> hash_named(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<HashAlgorithm>(i);
  }
  return std::nullopt;
}

ContentHash checksum(std::span<const uint8_t> bytes) {
  return xxh3(bytes.data(), bytes.size());
}

ContentHash copy_with_checksum(std::span<uint8_t> to, std::span<const uint8_t> from) {
  constexpr size_t kPieceBytes = 8 << 10;  // stays in the first cache between hash and copy
  struct FreeState {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  const std::unique_ptr<XXH3_state_t, FreeState> state(XXH3_createState());
  XXH3_128bits_reset(state.get());
  for (size_t at = 0; at < from.size(); at += kPieceBytes) {
    const size_t count = std::min(kPieceBytes, from.size() - at);
    XXH3_128bits_update(state.get(), from.data() + at, count);
    copy_past_caches(to.data() + at, from.data() + at, count);
  }
  finish_copies_past_caches();
  return canonical_hash(XXH3_128bits_digest(state.get()));
}

ContentHash hash_block(HashAlgorithm algorithm, const ContentHash& parent,
                       std::span<const int32_t> tokens) {
  static_assert(std::endian::native == std::endian::little, "token ids are hashed as they lie");
  uint8_t bytes[sizeof parent.bytes + kMaxBlockSize * sizeof(int32_t)];
  std::memcpy(bytes, parent.bytes.data(), parent.bytes.size());
  std::memcpy(bytes + parent.bytes.size(), tokens.data(), tokens.size_bytes());
  return hash_bytes(algorithm, bytes, parent.bytes.size() + tokens.size_bytes());
}

ContentHash hash_scope(HashAlgorithm algorithm, std::string_view scope) {
  return hash_bytes(algorithm, scope.data(), scope.size());
}

std::string scope_of(std::string_view fingerprint, const PrefixKeys& keys) {
  std::string scope;
  for (std::string_view part : {fingerprint, std::string_view(keys.adapter),
                                std::string_view(keys.image), std::string_view(keys.tenant)}) {
    scope += fmt::format("{}:{}\n", part.size(), part);
  }
  return scope;
}

}  // namespace kvx::cache
