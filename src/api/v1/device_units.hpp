// How a token's rows are cut for a GPU: units of elements that follow each other on both sides, as
// full-precision as a thread can move at once.
#pragma once

#include "api/v1/views.hpp"

namespace kvx::boundary {

struct RowUnits {
  int elements = 1;          // of a unit
  bool converts = false;     // through f32; otherwise as bytes
  bool is_by_token = false;  // neighbouring threads take neighbouring tokens, not units
  int64_t num_units = 0;     // of a token: K, or V, of all heads
  int64_t num_heads = 1;     // 1 also where all heads follow each other without a gap
  RowShape row;

  int bytes(Element element) const { return elements * bytes_of(element); }
};

// alignment: a number that all the addresses where blocks may begin are multiples of, besides the
// side's own data and strides; 16 where there are none.
RowUnits units_of(const CacheView& cache, const CacheSide& side, const IoSide& io,
                  int64_t alignment);

// Where a unit of a token lies, in bytes from the token's first.
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

}  // namespace kvx::boundary
