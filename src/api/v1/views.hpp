// What the v1 calls work on: descriptors that were checked, turned into addresses and strides in
// bytes that cannot be wrong. Where an index leads is computed here once, for the host and the GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "core/dtype.hpp"
#include "core/float16.hpp"
#include "core/host_device.hpp"

namespace kvx::boundary {

// The element types of cache and IO tensors.
enum class Element : uint8_t { kF16, kBF16, kF32, kE4M3, kE5M2 };

constexpr int bytes_of(Element element) {
  switch (element) {
    case Element::kF32:
      return 4;
    case Element::kF16:
    case Element::kBF16:
      return 2;
    case Element::kE4M3:
    case Element::kE5M2:
      return 1;
  }
  return 0;
}

// The float type that needs no scale; empty for the 8-bit floats.
constexpr std::optional<DType> float_type(Element element) {
  switch (element) {
    case Element::kF32:
      return DType::kF32;
    case Element::kF16:
      return DType::kF16;
    case Element::kBF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

// What a descriptor says about its memory. The calls run on the host, or on the GPU for both
// others.
enum class MemoryKind : uint8_t { kHost, kDevice, kUnified };

// Where the head_dim elements of one row lie: num_runs runs of run_length elements. One run of
// head_dim in NHD and HND, head_dim / pack runs of pack elements in HND_PACKED.
struct RowShape {
  int64_t num_runs = 1;
  int64_t run_length = 0;
  int64_t run_stride = 0;      // bytes
  int64_t element_stride = 0;  // bytes, within a run
};

// K or V of a cache: row (block, token, head) begins at data + the sum of index * stride.
struct CacheSide {
  uint8_t* data = nullptr;
  MemoryKind memory = MemoryKind::kHost;
  Element element = Element::kF32;
  int64_t block_stride = 0;  // bytes, as all strides here
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  RowShape row;
  int64_t block_bytes = 0;  // from a block's first byte to its last
  int64_t total_bytes = 0;  // likewise of the whole tensor
};

struct CacheView {
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  CacheSide k;
  CacheSide v;

  // A product beyond int64 is every slot there is.
  int64_t num_slots() const {
    int64_t slots = 0;
    return __builtin_mul_overflow(num_blocks, block_size, &slots) ? INT64_MAX : slots;
  }
};

// key or value of a call: tokens of a padded tensor lie in pieces of tokens_per_fragment; a dense
// one is one piece. Rows are contiguous.
struct IoSide {
  uint8_t* data = nullptr;
  MemoryKind memory = MemoryKind::kHost;
  Element element = Element::kF32;
  int64_t tokens_per_fragment = 1;
  int64_t fragment_stride = 0;  // bytes
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t total_bytes = 0;

  KVX_INLINE uint8_t* token(int64_t t) const {
    return data + t / tokens_per_fragment * fragment_stride +
           t % tokens_per_fragment * token_stride;
  }
  int64_t tokens_left_in_fragment(int64_t t) const {
    return tokens_per_fragment - t % tokens_per_fragment;
  }
};

struct IoView {
  int64_t num_tokens = 0;
  IoSide k;
  IoSide v;

  // Tokens from t on that lie at one stride in key and in value.
  int64_t tokens_in_a_row(int64_t t) const {
    return std::min(k.tokens_left_in_fragment(t), v.tokens_left_in_fragment(t));
  }
};

// Slots, block ids, prefix sums or lengths in 32 or 64 bits.
struct IndexArray {
  const void* data = nullptr;
  bool is_64_bit = false;

  KVX_INLINE int64_t at(int64_t i) const {
    return is_64_bit ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct SlotView {
  IndexArray slots;
  int64_t num_tokens = 0;
  int64_t invalid_slot = -1;

  // Negative when the token is not to be written.
  KVX_INLINE int64_t at(int64_t token) const {
    const int64_t slot = slots.at(token);
    return slot == invalid_slot ? -1 : slot;
  }
};

// A rectangle [rows, width] of block ids, or a list of them with prefix sums.
struct TableView {
  enum class Kind : uint8_t { kPacked, kRaggedTokens, kRaggedPages, kKvOffsets };
  Kind kind = Kind::kPacked;
  int64_t num_sequences = 0;
  int64_t num_beams = 1;
  int64_t max_blocks = 0;
  IndexArray indices;
  int64_t num_indices = 0;
  IndexArray indptr;  // [num_sequences + 1]; ragged only
  MemoryKind pool_memory = MemoryKind::kHost;
  uint8_t* primary = nullptr;
  uint8_t* secondary = nullptr;
  int64_t bytes_per_block = 0;

  int64_t num_rows() const { return num_sequences * num_beams; }
};

// The scale of (block, head): value = code * scale. A stride of 0 shares it.
struct ScaleView {
  const uint8_t* data = nullptr;  // null: 1
  DType dtype = DType::kF32;
  int64_t block_stride = 0;  // bytes
  int64_t head_stride = 0;

  KVX_INLINE float at(int64_t block, int64_t head) const {
    if (data == nullptr) return 1.0f;
    const uint8_t* source = data + block * block_stride + head * head_stride;
    uint32_t bits = 0;
    memcpy(&bits, source, kvx::bytes_of(dtype));
    const auto half = static_cast<uint16_t>(bits);
    return dtype == DType::kF32   ? std::bit_cast<float>(bits)
           : dtype == DType::kF16 ? f16_to_f32(half)
                                  : bf16_to_f32(half);
  }
};

}  // namespace kvx::boundary
