// Cache and IO tensors of every kind.
#include "tools/conformance/tensors.hpp"

#include <fmt/format.h>

#include <cstring>

#include "tools/conformance/check.hpp"
#include "tools/conformance/numbers.hpp"

namespace kvx::conformance {
namespace {

using View = Arrangement::View;

// Extents in layout order, with the strides of a dense tensor.
void set_dense(kvx_tensor_desc_t& tensor, const std::vector<int64_t>& extents) {
  tensor.ndim = static_cast<uint32_t>(extents.size());
  int64_t stride = 1;
  for (size_t i = extents.size(); i-- > 0;) {
    tensor.shape[i] = extents[i];
    tensor.stride[i] = stride;
    stride *= extents[i];
  }
}

int64_t elements_of(const kvx_tensor_desc_t& tensor) {
  int64_t last = 0;
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return 0;
    last += (tensor.shape[i] - 1) * tensor.stride[i];
  }
  return last + 1;
}

kvx_tensor_desc_t host_tensor(kvx_dtype_t dtype, kvx_layout_t layout) {
  kvx_tensor_desc_t tensor{};
  tensor.size = sizeof tensor;
  tensor.dtype = dtype;
  tensor.layout = layout;
  tensor.memory = KVX_MEMORY_HOST;
  return tensor;
}

void apply_view(kvx_tensor_desc_t& tensor, const Geometry& g, View view) {
  const int64_t tokens = g.block_size, heads = g.num_heads, dims = g.head_dim;
  int64_t* stride = tensor.stride;
  switch (view) {
    case View::kDense:
      return;
    case View::kFused:
      stride[0] *= 2;
      return;
    case View::kPermuted:
      stride[1] = dims;
      stride[2] = tokens * dims;
      return;
    case View::kGaps:
      stride[1] += 16;
      stride[0] = tokens * stride[1];
      return;
    case View::kDimsFirst:
      stride[1] = 1;
      stride[3] = tokens;
      stride[2] = tokens * dims;
      stride[0] = heads * tokens * dims + 3;
      return;
  }
}

kvx_tensor_desc_t cache_tensor(const Geometry& g, const Arrangement& arrangement, int pack,
                               kvx_dtype_t dtype) {
  kvx_tensor_desc_t tensor = host_tensor(dtype, arrangement.layout);
  const int64_t blocks = g.num_blocks, tokens = g.block_size, heads = g.num_heads;
  const int64_t dims = g.head_dim;
  if (pack > 0) {
    set_dense(tensor, {blocks, heads, dims / pack, tokens, pack});
  } else if (arrangement.layout == KVX_LAYOUT_BLOCK_HND) {
    set_dense(tensor, {blocks, heads, tokens, dims});
  } else {
    set_dense(tensor, {blocks, tokens, heads, dims});
  }
  apply_view(tensor, g, arrangement.view);
  return tensor;
}

kvx_tensor_desc_t io_tensor(const Geometry& g, kvx_dtype_t dtype, int64_t num_tokens,
                            int64_t num_sequences, int64_t gap) {
  kvx_tensor_desc_t tensor = host_tensor(dtype, KVX_LAYOUT_BLOCK_CUSTOM);
  if (num_sequences == 0) {
    set_dense(tensor, {num_tokens, g.num_heads, g.head_dim});
  } else {
    set_dense(tensor, {num_sequences, num_tokens / num_sequences, g.num_heads, g.head_dim});
  }
  tensor.stride[0] += gap;
  return tensor;
}

// "block 1, token 0, head 1, dim 2" of the element that an address belongs to.
std::string cache_element_at(const kvx_cache_desc_t& cache, const kvx_tensor_desc_t& tensor,
                             const uint8_t* address) {
  const int64_t bytes = bytes_of(tensor.dtype);
  const auto distance = address - static_cast<const uint8_t*>(tensor.data);
  for (int64_t b = 0; b < cache.num_blocks; ++b) {
    for (int64_t t = 0; t < cache.block_size; ++t) {
      for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
        for (int64_t d = 0; d < cache.head_dim; ++d) {
          const int64_t place = place_in_cache(tensor, b, t, h, d) * bytes;
          if (distance < place || distance >= place + bytes) continue;
          return fmt::format(" (block {}, token {}, head {}, dim {})", b, t, h, d);
        }
      }
    }
  }
  return "";
}

std::string io_element_at(const kvx_kv_io_desc_t& io, const kvx_tensor_desc_t& tensor,
                          const uint8_t* address) {
  const int64_t bytes = bytes_of(tensor.dtype);
  for (int64_t t = 0; t < io.num_tokens; ++t) {
    for (int64_t h = 0; h < io.num_kv_heads; ++h) {
      for (int64_t d = 0; d < io.head_dim; ++d) {
        const uint8_t* element = io_element(tensor, t, h, d);
        if (address < element || address >= element + bytes) continue;
        return fmt::format(" (token {}, head {}, dim {})", t, h, d);
      }
    }
  }
  return "";
}

}  // namespace

Features Arrangement::needs() const {
  Features needs;
  needs.add(kLayouts, layout).add(kMemoryTypes, KVX_MEMORY_HOST);
  const bool is_strided = view == View::kFused || view == View::kPermuted || view == View::kGaps;
  if (is_strided) needs.add_flags(kTraits, KVX_TRAIT_STRIDED_CACHE);
  return needs;
}

const std::vector<Arrangement>& arrangements() {
  static const std::vector<Arrangement> all = {
      {},
      {.name = "HND", .layout = KVX_LAYOUT_BLOCK_HND},
      {.name = "HND_PACKED 8", .layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 8},
      {.name = "HND_PACKED, K by 4 and V by 1",
       .layout = KVX_LAYOUT_BLOCK_HND_PACKED,
       .k_pack = 4,
       .v_pack = 1},
      {.name = "NHD, halves of a fused tensor", .view = View::kFused},
      {.name = "NHD, permuted HND", .view = View::kPermuted},
      {.name = "NHD, gaps between tokens", .view = View::kGaps},
      {.name = "HND, every other block", .layout = KVX_LAYOUT_BLOCK_HND, .view = View::kFused},
      {.name = "CUSTOM of 4 dimensions",
       .layout = KVX_LAYOUT_BLOCK_CUSTOM,
       .view = View::kDimsFirst},
      {.name = "CUSTOM of 5 dimensions",
       .layout = KVX_LAYOUT_BLOCK_CUSTOM,
       .k_pack = 4,
       .v_pack = 2}};
  return all;
}

std::string name_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F16:
      return "F16";
    case KVX_DTYPE_BF16:
      return "BF16";
    case KVX_DTYPE_F32:
      return "F32";
    case KVX_DTYPE_F8_E4M3:
      return "F8_E4M3";
    case KVX_DTYPE_F8_E5M2:
      return "F8_E5M2";
    case KVX_DTYPE_S32:
      return "S32";
    case KVX_DTYPE_S64:
      return "S64";
    default:
      return fmt::format("dtype {}", static_cast<int>(dtype));
  }
}

kvx_cache_desc_t make_cache(Memory& memory, const Geometry& geometry,
                            const Arrangement& arrangement, kvx_dtype_t k, kvx_dtype_t v) {
  kvx_cache_desc_t cache{};
  cache.size = sizeof cache;
  cache.num_blocks = geometry.num_blocks;
  cache.block_size = geometry.block_size;
  cache.num_kv_heads = geometry.num_heads;
  cache.head_dim = geometry.head_dim;
  cache.k = cache_tensor(geometry, arrangement, arrangement.k_pack, k);
  cache.v = cache_tensor(geometry, arrangement, arrangement.v_pack, v);
  const int64_t k_bytes = elements_of(cache.k) * bytes_of(k);
  if (arrangement.view == View::kFused && k == v) {
    const int64_t half = cache.k.stride[0] / 2 * bytes_of(k);
    uint8_t* both = memory.add("cache.k and cache.v", k_bytes + half).data();
    cache.k.data = both;
    cache.v.data = both + half;
    return cache;
  }
  cache.k.data = memory.add("cache.k", k_bytes).data();
  cache.v.data = memory.add("cache.v", elements_of(cache.v) * bytes_of(v)).data();
  return cache;
}

kvx_kv_io_desc_t make_io(Memory& memory, const Geometry& geometry, kvx_dtype_t key,
                         kvx_dtype_t value, int64_t num_tokens, int64_t num_sequences,
                         int64_t gap) {
  kvx_kv_io_desc_t io{};
  io.size = sizeof io;
  io.num_tokens = static_cast<uint32_t>(num_tokens);
  io.num_kv_heads = geometry.num_heads;
  io.head_dim = geometry.head_dim;
  io.key = io_tensor(geometry, key, num_tokens, num_sequences, gap);
  io.value = io_tensor(geometry, value, num_tokens, num_sequences, gap);
  io.key.data = memory.add("io.key", elements_of(io.key) * bytes_of(key)).data();
  io.value.data = memory.add("io.value", elements_of(io.value) * bytes_of(value)).data();
  return io;
}

int64_t place_in_cache(const kvx_tensor_desc_t& tensor, int64_t block, int64_t token, int64_t head,
                       int64_t dim) {
  const int64_t* stride = tensor.stride;
  if (tensor.ndim == 5) {
    const int64_t pack = tensor.shape[4];
    return block * stride[0] + head * stride[1] + dim / pack * stride[2] + token * stride[3] +
           dim % pack * stride[4];
  }
  const int token_axis = tensor.layout == KVX_LAYOUT_BLOCK_HND ? 2 : 1;
  return block * stride[0] + token * stride[token_axis] + head * stride[3 - token_axis] +
         dim * stride[3];
}

uint8_t* io_element(const kvx_tensor_desc_t& tensor, int64_t token, int64_t head, int64_t dim) {
  const int64_t* stride = tensor.stride;
  int64_t place = 0;
  if (tensor.ndim == 4) {
    const int64_t each = tensor.shape[1];
    place = token / each * stride[0] + token % each * stride[1];
  } else {
    place = token * stride[0];
  }
  const int head_axis = static_cast<int>(tensor.ndim) - 2;
  place += head * stride[head_axis] + dim * stride[head_axis + 1];
  return static_cast<uint8_t*>(tensor.data) + place * bytes_of(tensor.dtype);
}

const void* add_indices(Memory& memory, const std::string& name, const std::vector<int64_t>& list,
                        kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_S64) return memory.add_list(name, list);
  std::vector<int32_t> narrow;
  for (const int64_t entry : list) narrow.push_back(static_cast<int32_t>(entry));
  return memory.add_list(name, narrow);
}

void require_picture(const Memory& memory, const kvx_cache_desc_t& cache,
                     const kvx_kv_io_desc_t& io, const std::string& call) {
  const auto difference = memory.first_difference();
  if (!difference) return;
  std::string element;
  if (difference->buffer.starts_with("cache")) {
    element = cache_element_at(cache, cache.k, difference->address);
    if (element.empty()) element = cache_element_at(cache, cache.v, difference->address);
  } else if (difference->buffer.starts_with("io")) {
    element =
        io_element_at(io, difference->buffer == "io.key" ? io.key : io.value, difference->address);
  }
  fail("{}: byte {} of {}{} is {:#04x}, expected {:#04x}", call, difference->offset,
       difference->buffer, element, difference->found, difference->expected);
}

}  // namespace kvx::conformance
