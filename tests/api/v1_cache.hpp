// A v1 cache and IO tensors for tests, every byte of them known: memory has canaries around it, and
// the address of an element is computed here a second time, by plain multiplication.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kvx/kvx_abi.h"

namespace kvx::api_test {

inline int bytes_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
      return 4;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
      return 2;
    case KVX_DTYPE_S64:
      return 8;
    default:
      return 1;
  }
}

// Bytes between two canaries of 64 bytes, filled with a pattern that depends on a seed.
class Memory {
 public:
  explicit Memory(int64_t num_bytes = 0, uint32_t seed = 1) : bytes_(num_bytes + 2 * kMargin) {
    uint32_t state = seed * 2654435761u + 12345u;
    for (uint8_t& byte : bytes_) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<uint8_t>(state >> 24);
    }
  }
  uint8_t* data() { return bytes_.data() + kMargin; }
  const uint8_t* data() const { return bytes_.data() + kMargin; }
  std::vector<uint8_t>& bytes() { return bytes_; }  // with the canaries
  friend bool operator==(const Memory&, const Memory&) = default;

 private:
  static constexpr int64_t kMargin = 64;
  std::vector<uint8_t> bytes_;
};

struct Shape {
  uint32_t num_blocks = 5;
  uint32_t block_size = 4;
  uint32_t num_heads = 2;
  uint32_t head_dim = 16;

  int64_t num_slots() const { return int64_t{num_blocks} * block_size; }
  int64_t row_elements() const { return int64_t{num_heads} * head_dim; }
};

// Where dimensions stand in a layout: the extents, and the positions of token, head and dim.
struct Layout {
  std::string name = "NHD";
  kvx_layout_t layout = KVX_LAYOUT_BLOCK_NHD;
  int k_pack = 0;  // 0: four dimensions
  int v_pack = 0;
  int64_t block_gap = 0;  // elements between blocks, as in a view of a fused tensor
  int64_t token_gap = 0;
};

inline std::vector<Layout> all_layouts() {
  return {
      {.name = "NHD"},
      {.name = "NHD, every other block", .block_gap = 4 * 2 * 16},
      {.name = "NHD, gaps between tokens", .token_gap = 16},
      {.name = "HND", .layout = KVX_LAYOUT_BLOCK_HND},
      {.name = "HND, every other block", .layout = KVX_LAYOUT_BLOCK_HND, .block_gap = 128},
      {.name = "HND_PACKED 8", .layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 8},
      {.name = "HND_PACKED 8 and 1",
       .layout = KVX_LAYOUT_BLOCK_HND_PACKED,
       .k_pack = 8,
       .v_pack = 1},
      {.name = "HND_PACKED 16", .layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 16, .v_pack = 2},
      {.name = "CUSTOM 4", .layout = KVX_LAYOUT_BLOCK_CUSTOM},
      {.name = "CUSTOM 5", .layout = KVX_LAYOUT_BLOCK_CUSTOM, .k_pack = 4, .v_pack = 2}};
}

// The tensor of one side; strides are of a dense tensor with the layout's gaps. A CUSTOM tensor of
// four dimensions lies dim by dim before token: [block][head][dim][token].
inline kvx_tensor_desc_t cache_tensor(const Shape& shape, const Layout& layout, int pack,
                                      kvx_dtype_t dtype) {
  kvx_tensor_desc_t tensor{};
  tensor.size = sizeof tensor;
  tensor.dtype = dtype;
  tensor.layout = layout.layout;
  tensor.memory = KVX_MEMORY_HOST;
  const int64_t blocks = shape.num_blocks;
  const int64_t tokens = shape.block_size;
  const int64_t heads = shape.num_heads;
  const int64_t dims = shape.head_dim;
  std::vector<int64_t> extents;
  if (pack > 0) {
    extents = {blocks, heads, dims / pack, tokens, pack};
  } else if (layout.layout == KVX_LAYOUT_BLOCK_HND) {
    extents = {blocks, heads, tokens, dims};
  } else {
    extents = {blocks, tokens, heads, dims};
  }
  tensor.ndim = static_cast<uint32_t>(extents.size());
  int64_t stride = 1;
  for (int i = static_cast<int>(extents.size()) - 1; i >= 0; --i) {
    tensor.shape[i] = extents[i];
    tensor.stride[i] = stride;
    stride *= extents[i];
    if (i == 2 && pack == 0) stride += layout.token_gap;
    if (i == 1) stride += layout.block_gap;
  }
  if (layout.layout == KVX_LAYOUT_BLOCK_CUSTOM && pack == 0) {
    tensor.stride[1] = 1;
    tensor.stride[3] = tokens;
    tensor.stride[2] = tokens * dims;
    tensor.stride[0] = tokens * dims * heads + 3;
  }
  return tensor;
}

inline int64_t elements_of(const kvx_tensor_desc_t& tensor) {
  int64_t last = 0;
  for (uint32_t i = 0; i < tensor.ndim; ++i) last += (tensor.shape[i] - 1) * tensor.stride[i];
  return last + 1;
}

// The element's place, in elements.
inline int64_t place_of(const kvx_tensor_desc_t& tensor, int64_t block, int64_t token, int64_t head,
                        int64_t dim) {
  const int64_t* stride = tensor.stride;
  if (tensor.ndim == 5) {
    const int64_t pack = tensor.shape[4];
    return block * stride[0] + head * stride[1] + dim / pack * stride[2] + token * stride[3] +
           dim % pack * stride[4];
  }
  if (tensor.layout == KVX_LAYOUT_BLOCK_HND) {
    return block * stride[0] + head * stride[1] + token * stride[2] + dim * stride[3];
  }
  return block * stride[0] + token * stride[1] + head * stride[2] + dim * stride[3];
}

class Cache {
 public:
  explicit Cache(Shape shape = {}, const Layout& layout = {}, kvx_dtype_t k = KVX_DTYPE_F16,
                 kvx_dtype_t v = KVX_DTYPE_F16)
      : shape_(shape) {
    desc.size = sizeof desc;
    desc.num_blocks = shape.num_blocks;
    desc.block_size = shape.block_size;
    desc.num_kv_heads = shape.num_heads;
    desc.head_dim = shape.head_dim;
    desc.k = cache_tensor(shape, layout, layout.k_pack, k);
    desc.v = cache_tensor(shape, layout, layout.v_pack, v);
    k_memory = Memory(elements_of(desc.k) * bytes_of(k), 1);
    v_memory = Memory(elements_of(desc.v) * bytes_of(v), 2);
    desc.k.data = k_memory.data();
    desc.v.data = v_memory.data();
  }
  Cache(const Cache&) = delete;

  const Shape& shape() const { return shape_; }

  kvx_cache_desc_t desc{};
  Memory k_memory;
  Memory v_memory;

 private:
  Shape shape_;
};

// [num_tokens, heads, head_dim], or padded [sequences, tokens of each, heads, head_dim].
class Io {
 public:
  Io(const Shape& shape, int64_t num_tokens, kvx_dtype_t k = KVX_DTYPE_F16,
     kvx_dtype_t v = KVX_DTYPE_F16, int64_t num_sequences = 0, int64_t gap = 0)
      : shape_(shape) {
    desc.size = sizeof desc;
    desc.num_tokens = static_cast<uint32_t>(num_tokens);
    desc.num_kv_heads = shape.num_heads;
    desc.head_dim = shape.head_dim;
    k_memory = fill(desc.key, num_tokens, k, num_sequences, gap, 11);
    v_memory = fill(desc.value, num_tokens, v, num_sequences, gap, 12);
    desc.key.data = k_memory.data();
    desc.value.data = v_memory.data();
  }
  Io(const Io&) = delete;

  // In elements, of (token, head 0, dim 0).
  static int64_t token_place(const kvx_tensor_desc_t& tensor, int64_t token) {
    if (tensor.ndim == 3) return token * tensor.stride[0];
    return token / tensor.shape[1] * tensor.stride[0] + token % tensor.shape[1] * tensor.stride[1];
  }

  kvx_kv_io_desc_t desc{};
  Memory k_memory;
  Memory v_memory;

 private:
  Memory fill(kvx_tensor_desc_t& tensor, int64_t num_tokens, kvx_dtype_t dtype,
              int64_t num_sequences, int64_t gap, uint32_t seed) {
    tensor.size = sizeof tensor;
    tensor.dtype = dtype;
    tensor.layout = KVX_LAYOUT_BLOCK_CUSTOM;
    tensor.memory = KVX_MEMORY_HOST;
    const int64_t row = shape_.row_elements();
    if (num_sequences == 0) {
      tensor.ndim = 3;
      const int64_t shape[] = {num_tokens, shape_.num_heads, shape_.head_dim};
      const int64_t stride[] = {row + gap, shape_.head_dim, 1};
      memcpy(tensor.shape, shape, sizeof shape);
      memcpy(tensor.stride, stride, sizeof stride);
    } else {
      tensor.ndim = 4;
      const int64_t each = num_tokens / num_sequences;
      const int64_t shape[] = {num_sequences, each, shape_.num_heads, shape_.head_dim};
      const int64_t stride[] = {each * row + gap, row, shape_.head_dim, 1};
      memcpy(tensor.shape, shape, sizeof shape);
      memcpy(tensor.stride, stride, sizeof stride);
    }
    Memory memory((num_tokens > 0 ? elements_of(tensor) : 0) * bytes_of(dtype), seed);
    make_finite(memory, num_tokens > 0 ? elements_of(tensor) : 0, dtype);
    return memory;
  }

  // Numbers of ordinary size, so that a test may convert them.
  static void make_finite(Memory& memory, int64_t elements, kvx_dtype_t dtype) {
    for (int64_t i = 0; i < elements; ++i) {
      uint8_t* element = memory.data() + i * bytes_of(dtype);
      const float number = static_cast<float>(element[0]) / 64.0f - 2.0f;
      uint32_t bits;
      memcpy(&bits, &number, 4);
      const uint32_t bf16 = bits >> 16;
      const auto f16 = static_cast<uint16_t>(0x3000u + element[0]);
      if (dtype == KVX_DTYPE_F32) memcpy(element, &bits, 4);
      if (dtype == KVX_DTYPE_BF16) memcpy(element, &bf16, 2);
      if (dtype == KVX_DTYPE_F16) memcpy(element, &f16, 2);
    }
  }

  Shape shape_;
};

inline kvx_write_desc_t write_desc(const Io& io, const std::vector<int64_t>& slots) {
  kvx_write_desc_t write{};
  write.size = sizeof write;
  write.io = io.desc;
  write.slots.size = sizeof write.slots;
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.token_count = static_cast<uint32_t>(slots.size());
  write.slots.invalid_slot = -1;
  write.slots.slots = slots.data();
  return write;
}

}  // namespace kvx::api_test
