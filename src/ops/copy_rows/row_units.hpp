// RowUnits divides a token's rows for a GPU into units: elements that are adjacent both in the
// cache and in the caller's tensor, as many as a thread can copy at once.
#pragma once

#include "ops/copy_rows/views.hpp"

namespace kvx::ops::copy_rows {

struct RowUnits {
  int elements = 1;          // in a unit
  bool converts = false;     // elements are converted through f32; otherwise bytes are copied
  bool is_by_token = false;  // adjacent threads copy adjacent tokens, not units
  int64_t num_units = 0;     // in a token: K, or V, of all heads
  int64_t num_heads = 1;     // 1 where all heads are contiguous
  RowShape row;

  int bytes(Element element) const { return elements * bytes_of(element); }
};

// alignment: every address where a block of a pool may begin is a multiple of it; 16 without pools.
RowUnits units_of(const CacheView& cache, const CacheSide& side, const IoSide& io,
                  int64_t alignment);

// Where a unit of a token lies, in bytes from the token's first byte.
struct Unit {
  int64_t head = 0;
  int64_t cache_offset = 0;
  int64_t io_offset = 0;
};

KVX_INLINE Unit unit_at(const RowUnits& units, const CacheSide& cache, const IoSide& io,
                        uint32_t number) {
  const auto units_of_run = static_cast<uint32_t>(units.row.run_length / units.elements);
  const auto num_runs = static_cast<uint32_t>(units.row.num_runs);
  const uint32_t run_number = number / units_of_run;  // of all heads
  const int64_t first = int64_t{number % units_of_run} * units.elements;
  const int64_t head = run_number / num_runs;
  const int64_t run = run_number % num_runs;
  return {head,
          head * cache.head_stride + run * units.row.run_stride + first * units.row.element_stride,
          head * io.head_stride + (run * units.row.run_length + first) * bytes_of(io.element)};
}

}  // namespace kvx::ops::copy_rows
