// The checksum that a block carries from tier to tier: of a part of up to 256 KiB its XXH3-128; of
// a larger one that of its pieces' checksums, so that threads can share a part. A block's is that
// of its parts' checksums. Every copier computes this one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/prefix/content_hash.hpp"
#include "tier/block_copier.hpp"

namespace kvx::tier {

inline constexpr int64_t kChecksumPieceBytes = 256 << 10;

// Requires: at least one piece.
inline cache::ContentHash join_checksums(std::span<const cache::ContentHash> pieces) {
  static_assert(sizeof(cache::ContentHash) == sizeof(cache::ContentHash::bytes));
  if (pieces.size() == 1) return pieces.front();
  return cache::checksum({pieces.front().bytes.data(), pieces.size_bytes()});
}

// The checksum of each piece, by checksum_of(first byte, number of bytes), joined.
template <class ChecksumOf>
cache::ContentHash checksum_by_pieces(size_t bytes, const ChecksumOf& checksum_of) {
  std::vector<cache::ContentHash> pieces;
  for (size_t at = 0; at < bytes; at += kChecksumPieceBytes) {
    pieces.push_back(checksum_of(at, std::min<size_t>(kChecksumPieceBytes, bytes - at)));
  }
  return join_checksums(pieces);
}

inline cache::ContentHash block_checksum(std::span<const uint8_t> block) {
  return checksum_by_pieces(block.size(), [block](size_t at, size_t count) {
    return cache::checksum(block.subspan(at, count));
  });
}

// Each part of a transfer in turn, by visit(first byte, number of bytes).
template <class Visit>
void for_each_part(const BlockTransfer& transfer, const Visit& visit) {
  int64_t begin = 0;
  const auto visit_to = [&](int64_t end) {
    visit(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    begin = end;
  };
  if (transfer.part_ends.empty()) return visit_to(transfer.bytes);
  for (const int64_t end : transfer.part_ends) visit_to(end);
}

// The checksums of a transfer's parts, by checksum_of(first byte, number of bytes), joined; each
// goes where the transfer says.
template <class ChecksumOf>
cache::ContentHash checksum_by_parts(const BlockTransfer& transfer, const ChecksumOf& checksum_of) {
  std::vector<cache::ContentHash> parts;
  for_each_part(transfer,
                [&](size_t begin, size_t bytes) { parts.push_back(checksum_of(begin, bytes)); });
  if (transfer.checksums != nullptr) std::ranges::copy(parts, transfer.checksums);
  return join_checksums(parts);
}

// Copies, and returns the checksum of what was copied. Requires: as many bytes on both sides.
inline cache::ContentHash copy_with_block_checksum(std::span<uint8_t> to,
                                                   std::span<const uint8_t> from) {
  return checksum_by_pieces(from.size(), [to, from](size_t at, size_t count) {
    return cache::copy_with_checksum(to.subspan(at, count), from.subspan(at, count));
  });
}

}  // namespace kvx::tier
