// Cache and IO tensors of every kind that a provider may claim, and where their elements lie.
#pragma once

#include <kvx/kvx_abi.h>

#include <string>
#include <vector>

#include "tools/conformance/features.hpp"
#include "tools/conformance/memory.hpp"

namespace kvx::conformance {

struct Geometry {
  uint32_t num_blocks = 5;
  uint32_t block_size = 4;
  uint32_t num_heads = 2;
  uint32_t head_dim = 16;

  int64_t num_slots() const { return int64_t{num_blocks} * block_size; }
};

// How the elements of a cache lie in memory.
struct Arrangement {
  enum class View {
    kDense,
    kFused,      // K and V are halves of one tensor's blocks, as vLLM's
    kPermuted,   // NHD's dimensions over HND's memory
    kGaps,       // 16 elements between tokens
    kDimsFirst,  // CUSTOM: [block][head][dim][token], and 3 elements between blocks
  };
  std::string name = "NHD";
  kvx_layout_t layout = KVX_LAYOUT_BLOCK_NHD;
  int k_pack = 0;  // 0: four dimensions
  int v_pack = 0;
  View view = View::kDense;

  Features needs() const;
};

const std::vector<Arrangement>& arrangements();
inline const Arrangement& nhd() {
  return arrangements()[0];
}
inline const Arrangement& hnd() {
  return arrangements()[1];
}

constexpr kvx_dtype_t kFloatTypes[] = {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32,
                                       KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2};
constexpr kvx_dtype_t kIndexTypes[] = {KVX_DTYPE_S32, KVX_DTYPE_S64};
std::string name_of(kvx_dtype_t dtype);

kvx_cache_desc_t make_cache(Memory& memory, const Geometry& geometry,
                            const Arrangement& arrangement, kvx_dtype_t k, kvx_dtype_t v);

// Dense [num_tokens, heads, head_dim] when num_sequences is 0, else padded [num_sequences, tokens
// of each, ...]; `gap` elements lie between a dense tensor's tokens or a padded one's sequences.
kvx_kv_io_desc_t make_io(Memory& memory, const Geometry& geometry, kvx_dtype_t key,
                         kvx_dtype_t value, int64_t num_tokens, int64_t num_sequences, int64_t gap);

// In elements from the tensor's data.
int64_t place_in_cache(const kvx_tensor_desc_t& tensor, int64_t block, int64_t token, int64_t head,
                       int64_t dim);
uint8_t* io_element(const kvx_tensor_desc_t& tensor, int64_t token, int64_t head, int64_t dim);

// A list in 32 or 64 bits, in a buffer of its own.
const void* add_indices(Memory& memory, const std::string& name, const std::vector<int64_t>& list,
                        kvx_dtype_t dtype);

// Throws Failed with the first byte that differs from its expected value and the element that it
// belongs to.
void require_picture(const Memory& memory, const kvx_cache_desc_t& cache,
                     const kvx_kv_io_desc_t& io, const std::string& call);

}  // namespace kvx::conformance
