// Moves rows between a caller's tensors and a cache of any layout: as bytes where both hold the
// same element type, through f32 where not.
#pragma once

#include <vector>

#include "api/v1/views.hpp"
#include "ops/copy_rows/stream_copy.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::boundary {

// Tokens of one block that lie at one stride on both sides.
struct TokenRun {
  uint8_t* cache = nullptr;  // head 0 of the first token
  uint8_t* io = nullptr;     // likewise
  int64_t num_tokens = 0;
  int64_t block = 0;  // for the scales
};

class RowMover {
 public:
  // num_tokens: of the whole call. Allocates what conversion needs; nothing later fails.
  RowMover(const ops::cpu::KernelTable& kernels, const CacheView& cache, const CacheSide& side,
           const IoSide& io, int64_t num_tokens);
  ~RowMover();
  RowMover(const RowMover&) = delete;

  void write(const TokenRun& run, const ScaleView& scale);
  void gather(const TokenRun& run);

 private:
  void encode_row(const uint8_t* io_row, uint8_t* cache_row, float step);
  void decode_row(const uint8_t* cache_row, uint8_t* io_row);

  const ops::cpu::KernelTable& kernels_;
  const CacheSide& side_;
  const IoSide& io_;
  int64_t num_heads_;
  int64_t head_dim_;
  format::FormatSpec spec_;            // of the cache's elements
  std::vector<uint8_t> codes_;         // one row of the cache's elements, contiguous
  StreamCopy stream_ = nullptr;        // set when the call is worth it
  static constexpr int kAtOnce = 512;  // numbers that are converted at once
};

// Whether rows of these types can be moved; a cache of 8-bit floats decodes through kvx_gather
// only.
bool can_write(Element io, Element cache);
bool can_gather(Element cache, Element io);

}  // namespace kvx::boundary
