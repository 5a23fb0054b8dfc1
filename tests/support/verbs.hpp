// The verbs as tests call them most: dense f32 rows into a TestLayer and back.
#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "ops/append/append.hpp"
#include "ops/gather/gather.hpp"
#include "tests/support/cpu_levels.hpp"
#include "tests/support/test_layer.hpp"

namespace kvx::tests {

// [num_tokens, num_heads, head_dim] of K and of V.
struct KvRows {
  std::vector<float> k;
  std::vector<float> v;
};

inline std::vector<float> normal_floats(size_t n, uint32_t seed, float sigma = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(n);
  for (float& value : values) value = normal(generator);
  return values;
}

inline KvRows normal_rows(const LayerShape& shape, int num_tokens, uint32_t seed) {
  const size_t rows = size_t(num_tokens) * shape.num_heads;
  return {normal_floats(rows * shape.k_dim, seed), normal_floats(rows * shape.v_dim, seed + 1)};
}

// Slots first, first + 1, ...
inline std::vector<int64_t> slots_from(int64_t first, int count) {
  std::vector<int64_t> slots(count);
  std::iota(slots.begin(), slots.end(), first);
  return slots;
}

inline Result<ops::AppendReport> append_rows(const ops::CpuContext& context, TestLayer& layer,
                                             const LayerShape& shape, const KvRows& rows,
                                             const std::vector<int64_t>& slots) {
  ops::AppendArgs args;
  args.cache = layer.view();
  args.k = dense_rows(rows.k.data(), DType::kF32, shape.num_heads, shape.k_dim);
  args.v = dense_rows(rows.v.data(), DType::kF32, shape.num_heads, shape.v_dim);
  args.slot_mapping = slots;
  return ops::append(context, args);
}

// The first num_tokens slots of the cache, as if its blocks were one sequence.
inline KvRows gather_slots(const ops::CpuContext& context, TestLayer& layer,
                           const LayerShape& shape, int num_tokens) {
  KvRows rows = {std::vector<float>(size_t(num_tokens) * shape.num_heads * shape.k_dim),
                 std::vector<float>(size_t(num_tokens) * shape.num_heads * shape.v_dim)};
  std::vector<int32_t> ids(shape.num_blocks);
  std::iota(ids.begin(), ids.end(), 0);
  const ops::GatherRange range = {.num_tokens = num_tokens};
  ops::GatherArgs args;
  args.cache = layer.view();
  args.block_table = {ids.data(), shape.num_blocks};
  args.max_blocks_per_sequence = shape.num_blocks;
  args.num_sequences = 1;
  args.ranges = {&range, 1};
  args.k = dense_rows(rows.k.data(), DType::kF32, shape.num_heads, shape.k_dim);
  args.v = dense_rows(rows.v.data(), DType::kF32, shape.num_heads, shape.v_dim);
  const Status status = ops::gather(context, args);
  EXPECT_TRUE(status.ok());
  return rows;
}

inline format::FormatSpec spec_named(std::string_view name,
                                     const format::SpecOptions& options = {}) {
  auto spec = format::make_spec(format::format_named(name).value(), options);
  EXPECT_TRUE(spec.ok()) << spec.error().message;
  return spec.value();
}

// The format with scales computed at append, whatever its default is.
inline format::FormatSpec computed_spec(const format::Facts& facts) {
  return format::make_spec(facts, {.scale_source = format::ScaleSource::kComputed}).value();
}

// The same, or the format's only one where it has no scale.
inline format::FormatSpec computed_or_only(const format::Facts& facts) {
  const bool computes = facts.scale_sources.allows(format::ScaleSource::kComputed);
  return computes ? computed_spec(facts) : format::make_spec(facts).value();
}

}  // namespace kvx::tests
