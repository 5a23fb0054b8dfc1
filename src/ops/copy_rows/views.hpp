// Views of the v1 calls' arguments: the addresses and byte strides of descriptors that the API
// boundary has checked. The CPU's and the GPU's code compute addresses with the functions here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "core/dtype.hpp"
#include "core/float16.hpp"
#include "core/host_device.hpp"

namespace kvx::ops::copy_rows {

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

// The kind of memory in a descriptor. A call runs on the host for kHost and on the GPU otherwise.
enum class MemoryType : uint8_t { kHost, kDevice, kUnified };

// Where the head_dim elements of one row lie: num_runs runs of run_length elements. NHD and HND
// have one run of head_dim elements, HND_PACKED has head_dim / pack runs of pack elements.
struct RowShape {
  int64_t num_runs = 1;
  int64_t run_length = 0;
  int64_t run_stride = 0;      // bytes
  int64_t element_stride = 0;  // bytes, within a run
};

// K or V of a cache: row (block, token, head) begins at data + the sum of index * stride.
struct CacheSide {
  uint8_t* data = nullptr;
  MemoryType memory = MemoryType::kHost;
  Element element = Element::kF32;
  int64_t block_stride = 0;  // bytes, as all strides here
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  RowShape row;
  int64_t block_bytes = 0;  // from a block's first byte to its last
  int64_t total_bytes = 0;  // from the tensor's first byte to its last
};

struct CacheView {
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  CacheSide k;
  CacheSide v;

  // INT64_MAX where the product overflows: then every slot is in range.
  int64_t num_slots() const {
    int64_t slots = 0;
    return __builtin_mul_overflow(num_blocks, block_size, &slots) ? INT64_MAX : slots;
  }
};

// key or value of a call. The tokens of a padded tensor [sequences, tokens, heads, head_dim] lie in
// fragments of tokens_per_fragment tokens; a dense tensor is one fragment. Rows are contiguous.
struct IoSide {
  uint8_t* data = nullptr;
  MemoryType memory = MemoryType::kHost;
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

  // How many tokens from t on have one stride between them in key and in value.
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

// The block that an entry of a table names; -1 where no cache can have it.
KVX_INLINE int32_t block_id_of(int64_t entry) {
  return entry < 0 || entry > INT32_MAX ? -1 : static_cast<int32_t>(entry);
}

struct SlotView {
  IndexArray slots;
  int64_t num_tokens = 0;
  int64_t invalid_slot = -1;

  // Negative: the token is not written.
  KVX_INLINE int64_t at(int64_t token) const {
    const int64_t slot = slots.at(token);
    return slot == invalid_slot ? -1 : slot;
  }
};

// A block table: a rectangle [num_rows(), max_blocks] of block ids, or a list with prefix sums.
struct TableView {
  enum class Kind : uint8_t { kPacked, kRaggedTokens, kRaggedPages, kKvOffsets };
  Kind kind = Kind::kPacked;
  int64_t num_sequences = 0;
  int64_t num_beams = 1;
  int64_t max_blocks = 0;
  IndexArray indices;
  int64_t num_indices = 0;
  IndexArray indptr;  // [num_sequences + 1]; ragged only
  MemoryType pool_memory = MemoryType::kHost;
  uint8_t* primary = nullptr;
  uint8_t* secondary = nullptr;
  int64_t bytes_per_block = 0;

  int64_t num_rows() const { return num_sequences * num_beams; }
};

// The scale of (block, head): value = code * scale. Blocks or heads share a scale where their
// stride is 0.
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

}  // namespace kvx::ops::copy_rows
