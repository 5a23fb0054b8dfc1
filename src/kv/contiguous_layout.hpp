// What a contiguous cache is made of, and how many bytes that takes.
#pragma once

#include <vector>

#include "format/spec.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::kv {

inline constexpr int kMaxContiguousTokens = 1 << 20;  // of one sequence, held at once

// What happens when a sequence would pass max_seq_len.
enum class Overflow : uint8_t {
  kError,  // OUT_OF_RANGE, nothing written
  kEvict,  // the oldest tokens leave and the others move to the front
};

// How one layer stores K and V. Scales: kv_cache.hpp.
struct ContiguousFormats {
  format::FormatSpec k;
  format::FormatSpec v;
  StaticScales k_scales;
  StaticScales v_scales;
};

struct ContiguousConfig {
  int num_layers = 0;
  int batch_size = 0;
  int num_q_heads = 0;  // a multiple of num_kv_heads
  int num_kv_heads = 0;
  int k_head_dim = 0;
  int v_head_dim = 0;
  int max_seq_len = 0;
  std::vector<ContiguousFormats> formats;  // one for all layers, or one a layer
  Overflow overflow = Overflow::kError;

  // A ring: each query sees its own and the window - 1 tokens before, and older tokens are
  // overwritten. 0: everything is kept.
  int window = 0;
  // Queries of one attend that a full ring must serve. They see up to window + max_append - 1
  // tokens between them, so that many are kept; 1 keeps just the window. Not for the plain cache.
  int max_append = 1;

  // Tokens of a sequence that memory is there for. The token at position p has slot p % capacity.
  // Requires: check_contiguous(*this).ok().
  int capacity() const;
  const ContiguousFormats& formats_of(int layer) const {
    return formats[formats.size() == 1 ? 0 : static_cast<size_t>(layer)];
  }
};

// INVALID_ARGUMENT names the field; OUT_OF_RANGE: more than kMaxContiguousTokens, or 2^63 bytes.
Status check_contiguous(const ContiguousConfig& config);

// Bytes of a token's K or V in one head: its codes, and the scales that are stored beside them.
struct RowBytes {
  int64_t codes = 0;
  int64_t scales = 0;
};
RowBytes row_bytes(const format::FormatSpec& spec, int head_dim);

// Bytes of K and V of one token of every sequence of the batch, in all layers; given scales, which
// are per head and not per token, are not counted. Requires: check_contiguous(config).ok().
int64_t bytes_per_position(const ContiguousConfig& config);

// Bytes that a cache allocates for K and V, without allocating it. Errors as check_contiguous.
Result<int64_t> contiguous_bytes(const ContiguousConfig& config);

}  // namespace kvx::kv
