// RowMover copies rows between a caller's tensors and a cache of any layout: as bytes where both
// have the same element type, through f32 otherwise.
#pragma once

#include <vector>

#include "ops/copy_rows/stream_copy.hpp"
#include "ops/copy_rows/views.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops::copy_rows {

// Where a run of tokens of one block lies. The tokens have one stride in the cache and one in IO.
struct RunAddresses {
  uint8_t* cache = nullptr;  // head 0 of the first token
  uint8_t* io = nullptr;     // head 0 of the first token
  int64_t num_tokens = 0;
  int64_t block = 0;  // selects the scales
};

class RowMover {
 public:
  // num_tokens: all tokens of the call. Allocates what conversion needs, so that copying cannot
  // fail.
  RowMover(const cpu::KernelTable& kernels, const CacheView& cache, const CacheSide& side,
           const IoSide& io, int64_t num_tokens);
  ~RowMover();
  RowMover(const RowMover&) = delete;

  void write(const RunAddresses& run, const ScaleView& scale);
  void gather(const RunAddresses& run);

 private:
  void encode_row(const uint8_t* io_row, uint8_t* cache_row, float step);
  void decode_row(const uint8_t* cache_row, uint8_t* io_row);

  const cpu::KernelTable& kernels_;
  const CacheSide& side_;
  const IoSide& io_;
  int64_t num_heads_;
  int64_t head_dim_;
  format::FormatSpec spec_;            // of the cache's elements
  std::vector<uint8_t> codes_;         // one row of the cache's elements, contiguous
  StreamCopy stream_ = nullptr;        // null where plain copies are faster
  static constexpr int kAtOnce = 512;  // numbers that are converted at once
};

// Whether rows of these types can be copied. 8-bit floats are decoded by kvx_gather only.
bool can_write(Element io, Element cache);
bool can_gather(Element cache, Element io);

}  // namespace kvx::ops::copy_rows
