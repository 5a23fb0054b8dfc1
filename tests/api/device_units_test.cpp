// How a token's rows are cut for a GPU: every element once, as wide as addresses allow.
#include "ops/copy_rows/row_units.hpp"

#include <gtest/gtest.h>

#include <set>

#include "api/checks/check_cache.hpp"
#include "tests/api/v1_cache.hpp"

namespace kvx::api_test {
namespace {

using ops::copy_rows::RowUnits;

struct Sides {
  ops::copy_rows::CacheView cache;
  ops::copy_rows::IoView io;
};

// The views that the API boundary makes of a test's descriptors.
Sides sides_of(const Cache& cache, const Io& io) {
  boundary::DeferredErrors deferred_errors;
  Sides sides;
  sides.cache = boundary::check_cache(&cache.desc, deferred_errors).value();
  sides.io = boundary::check_io(io.desc, 0, sides.cache, deferred_errors).value();
  EXPECT_TRUE(deferred_errors.status().ok());
  // Where a test's vectors happen to lie says nothing.
  alignas(16) static uint8_t somewhere[32];
  sides.cache.k.data = sides.io.k.data = somewhere;
  return sides;
}

// The offsets of all units: each element of the token once, on both sides.
void expect_all_elements(const Sides& sides, const RowUnits& units) {
  const int64_t bytes = bytes_of(KVX_DTYPE_F16);
  std::set<int64_t> cache_offsets;
  std::set<int64_t> io_offsets;
  for (uint32_t u = 0; u < units.num_units; ++u) {
    const ops::copy_rows::Unit unit = ops::copy_rows::unit_at(units, sides.cache.k, sides.io.k, u);
    EXPECT_EQ(unit.cache_offset % (units.elements * bytes), 0);
    EXPECT_EQ(unit.io_offset % (units.elements * bytes), 0);
    for (int e = 0; e < units.elements; ++e) {
      cache_offsets.insert(unit.cache_offset + e * units.row.element_stride);
      io_offsets.insert(unit.io_offset + e * bytes);
    }
  }
  const ops::copy_rows::CacheSide& k = sides.cache.k;
  std::set<int64_t> expected;
  std::set<int64_t> expected_io;
  for (int64_t h = 0; h < sides.cache.num_heads; ++h) {
    for (int64_t d = 0; d < sides.cache.head_dim; ++d) {
      expected.insert(h * k.head_stride + d / k.row.run_length * k.row.run_stride +
                      d % k.row.run_length * k.row.element_stride);
      expected_io.insert((h * sides.cache.head_dim + d) * bytes);
    }
  }
  EXPECT_EQ(cache_offsets, expected);
  EXPECT_EQ(io_offsets, expected_io);
}

RowUnits units_for(const Shape& shape, const Layout& layout, int64_t alignment = 16) {
  const Cache cache(shape, layout);
  const Io io(shape, 3);
  const Sides sides = sides_of(cache, io);
  const RowUnits units =
      ops::copy_rows::units_of(sides.cache, sides.cache.k, sides.io.k, alignment);
  expect_all_elements(sides, units);
  return units;
}

TEST(DeviceUnits, TakeSixteenBytesAcrossAllHeadsOfACanonicalToken) {
  const RowUnits units = units_for({.num_heads = 8, .head_dim = 80}, {});
  EXPECT_EQ(units.num_heads, 1);
  EXPECT_EQ(units.elements, 8);
  EXPECT_EQ(units.num_units, 80);
  EXPECT_FALSE(units.is_by_token);
}

TEST(DeviceUnits, CoverEveryElementOnceInEveryLayout) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(layout.name);
    units_for({}, layout);
  }
}

TEST(DeviceUnits, AreAsNarrowAsRowsAreOdd) {
  EXPECT_EQ(units_for({.num_heads = 3, .head_dim = 5}, {}).elements, 1);
  EXPECT_EQ(units_for({.num_heads = 3, .head_dim = 20}, {}).elements, 4);
  EXPECT_EQ(units_for({.num_heads = 3, .head_dim = 20}, {.layout = KVX_LAYOUT_BLOCK_HND}).elements,
            4);
}

TEST(DeviceUnits, AreAsNarrowAsThePoolsBlocksBegin) {
  EXPECT_EQ(units_for({}, {}, 4).elements, 2);
}

TEST(DeviceUnits, PutNeighbouringTokensInNeighbouringThreadsWhereTheCacheDoes) {
  const Layout packed = {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 8};
  EXPECT_TRUE(units_for({}, packed).is_by_token);
  EXPECT_EQ(units_for({}, packed).elements, 8);
  const Layout turned = {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 1, .v_pack = 1};
  EXPECT_TRUE(units_for({}, turned).is_by_token);
  EXPECT_EQ(units_for({}, turned).elements, 1);
}

TEST(DeviceUnits, KeepHeadsApartWhereNumbersAreConverted) {
  const Shape shape = {.num_heads = 2, .head_dim = 16};
  const Cache cache(shape, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E4M3);
  const Io io(shape, 3);
  Sides sides = sides_of(cache, io);
  RowUnits units = ops::copy_rows::units_of(sides.cache, sides.cache.k, sides.io.k, 16);
  EXPECT_TRUE(units.converts);
  EXPECT_EQ(units.num_heads, 2);
  EXPECT_EQ(units.elements, 4);
  sides.io.k.data += 2;
  units = ops::copy_rows::units_of(sides.cache, sides.cache.k, sides.io.k, 16);
  EXPECT_EQ(units.elements, 1);
}

}  // namespace
}  // namespace kvx::api_test
