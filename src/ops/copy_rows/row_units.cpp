// Divides a token's rows into units for a GPU.
#include "ops/copy_rows/row_units.hpp"

#include <cstdlib>
#include <numeric>

namespace kvx::ops::copy_rows {
namespace {

constexpr int64_t kWidest = 16;  // bytes that a thread copies at once

int64_t alignment_of(const uint8_t* data) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kWidest);
}

int64_t gcd_of(std::initializer_list<int64_t> numbers) {
  int64_t divisor = kWidest;
  for (const int64_t number : numbers) divisor = std::gcd(divisor, std::abs(number));
  return divisor;
}

}  // namespace

RowUnits units_of(const CacheView& cache, const CacheSide& side, const IoSide& io,
                  int64_t alignment) {
  RowUnits units;
  units.converts = side.element != io.element;
  units.num_heads = cache.num_heads;
  units.row = side.row;
  const int64_t cache_bytes = bytes_of(side.element);
  const int64_t io_bytes = bytes_of(io.element);
  const bool is_dense = side.row.element_stride == cache_bytes;
  // Bytes are copied without scales, so contiguous rows of all heads are treated as one row.
  if (!units.converts && is_dense && side.row.num_runs == 1 &&
      side.head_stride == side.row.run_length * cache_bytes && io.head_stride == side.head_stride) {
    units.num_heads = 1;
    units.row.run_length *= cache.num_heads;
  }
  if (is_dense) {
    const bool has_heads = units.num_heads > 1;
    const int64_t head_stride = has_heads ? side.head_stride : 0;
    const int64_t io_head_stride = has_heads ? io.head_stride : 0;
    const int64_t at =
        gcd_of({alignment, alignment_of(side.data), side.block_stride, side.token_stride,
                head_stride, side.row.run_stride, units.row.run_length * cache_bytes});
    const int64_t io_at = gcd_of({alignment_of(io.data), io.fragment_stride, io.token_stride,
                                  io_head_stride, units.row.run_length * io_bytes});
    constexpr int64_t kConverted = 4;  // elements that a thread converts at once
    const int64_t fits = std::min(at / cache_bytes, io_at / io_bytes);
    units.elements =
        static_cast<int>(units.converts ? (fits >= kConverted ? kConverted : 1) : fits);
  }
  units.num_units = units.num_heads * units.row.num_runs * (units.row.run_length / units.elements);
  units.is_by_token = cache.block_size > 1 && side.token_stride <= kWidest;
  return units;
}

}  // namespace kvx::ops::copy_rows
