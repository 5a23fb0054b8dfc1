// What gather and attend read from TurboMind blocks is what append wrote, with its own scales.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/attend/attend.hpp"
#include "ops/gather/gather.hpp"
#include "tests/engines/turbomind_pool.hpp"

namespace kvx::engines::turbomind {
namespace {

struct Rows {
  std::vector<float> k, v;  // [tokens, heads, head_dim]
};

Rows gather_blocks(TestPool& pool, int layer, const std::vector<int32_t>& ids,
                   const GlobalScales& global) {
  const Geometry& geometry = pool.layout.geometry;
  const int64_t num_tokens = static_cast<int64_t>(ids.size()) * geometry.block_len;
  Rows rows;
  rows.k.resize(num_tokens * geometry.num_kv_heads * geometry.head_dim);
  rows.v.resize(rows.k.size());
  const auto blocks = layer_blocks(pool.layout, pool.pools, layer, global);
  const ops::GatherRange ranges[] = {{.sequence = 0, .num_tokens = num_tokens}};
  const Status status = ops::gather(
      scalar_context(),
      {.cache = blocks.value().view(),
       .transform = {},
       .block_table = {ids.data(), static_cast<int64_t>(ids.size())},
       .max_blocks_per_sequence = static_cast<int64_t>(ids.size()),
       .num_sequences = 1,
       .ranges = ranges,
       .k = dense_rows(rows.k.data(), DType::kF32, geometry.num_kv_heads, geometry.head_dim),
       .v = dense_rows(rows.v.data(), DType::kF32, geometry.num_kv_heads, geometry.head_dim)});
  EXPECT_TRUE(status.ok()) << status.error().message;
  return rows;
}

// Rows whose size changes from token to token and from head to head, so that a scale that is taken
// from a neighbour, or not at all, shows.
Rows uneven_rows(const Geometry& geometry, int num_tokens) {
  Rows rows;
  for (int token = 0; token < num_tokens; ++token) {
    for (int head = 0; head < geometry.num_kv_heads; ++head) {
      const float size = std::ldexp(1.0f, (token * 5 + head * 3) % 7 - 3);
      for (int d = 0; d < geometry.head_dim; ++d) {
        const float phase = static_cast<float>(token * 31 + head * 17 + d * 7);
        rows.k.push_back(size * std::sin(phase));
        rows.v.push_back(size * std::cos(phase));
      }
    }
  }
  return rows;
}

// Attention over whole blocks by the textbook, in double.
std::vector<double> reference_attention(const Geometry& geometry, const std::vector<float>& q,
                                        const Rows& rows, int num_tokens, float softmax_scale) {
  const int num_heads = geometry.num_kv_heads, head_dim = geometry.head_dim;
  std::vector<double> out(q.size());
  for (int head = 0; head < num_heads; ++head) {
    const auto at = [&](int token, int d) {
      return (static_cast<size_t>(token) * num_heads + head) * head_dim + d;
    };
    double sum = 0;
    for (int token = 0; token < num_tokens; ++token) {
      double score = 0;
      for (int d = 0; d < head_dim; ++d) score += double{q[at(0, d)]} * rows.k[at(token, d)];
      const double weight = std::exp(score * softmax_scale);
      sum += weight;
      for (int d = 0; d < head_dim; ++d) out[at(0, d)] += weight * rows.v[at(token, d)];
    }
    for (int d = 0; d < head_dim; ++d) out[at(0, d)] /= sum;
  }
  return out;
}

class TurboMindModes : public ::testing::TestWithParam<KvCacheMode> {};

// The fork's decode never applies the scales, and its flatten builds converters before it loads the
// parameters: both would read other numbers than were written.
TEST_P(TurboMindModes, AttendAndGatherReadWhatAppendWroteWithItsScales) {
  const Geometry geometry = {GetParam(), DType::kF16, 2, 2, 64, 8};
  const auto layout = make_pool_layout(geometry);
  ASSERT_TRUE(layout.ok());
  const float global_scales[] = {1, 1, 0.5f, 2};  // layer 1 is tested
  const GlobalScales global = GetParam() == KvCacheMode::kFp4Nv
                                  ? GlobalScales{global_scales, global_scales}
                                  : GlobalScales{};
  TestPool pool(layout.value(), 5);
  const std::vector<int32_t> ids = {4, 2};
  const Rows written = uneven_rows(geometry, 16);
  for (int b = 0; b < 2; ++b) {
    const size_t first = static_cast<size_t>(b) * 8 * 2 * 64;
    append_block(pool, 1, ids[b], input_rows(written.k.data() + first, 2, 64),
                 input_rows(written.v.data() + first, 2, 64), global);
  }

  const Rows read = gather_blocks(pool, 1, ids, global);
  for (size_t i = 0; i < written.k.size(); ++i) {
    // No format here is off by more than a sixth of its row's largest magnitude (E2M1 between 4 and
    // 6), which the power-of-two rule may double.
    const float row_amax =
        std::ldexp(1.0f, static_cast<int>((i / 128) * 5 + (i / 64 % 2) * 3) % 7 - 3);
    ASSERT_NEAR(read.k[i], written.k[i], row_amax / 3) << i;
    ASSERT_NEAR(read.v[i], written.v[i], row_amax / 3) << i;
  }

  std::vector<float> q(2 * 64), out(2 * 64);
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i * 3));
  const auto blocks = layer_blocks(layout.value(), pool.pools, 1, global);
  const int32_t seq_len = 16;
  const int32_t q_starts[] = {0, 1};
  ops::AttendArgs args;
  args.packed = blocks.value().view();
  args.num_sequences = 1;
  args.block_table = {ids.data(), 2};
  args.max_blocks_per_sequence = 2;
  args.seq_lens = &seq_len;
  args.q_starts = q_starts;
  args.num_q_heads = 2;
  args.q = input_rows(q.data(), 2, 64);
  args.out = dense_rows(static_cast<void*>(out.data()), DType::kF32, 2, 64);
  args.softmax_scale = 0.125f;
  const Status status = ops::attend(scalar_context(), args);
  ASSERT_TRUE(status.ok()) << status.error().message;
  const auto expected = reference_attention(geometry, q, read, 16, 0.125f);
  // Gather rounds affine rows to T (11 bits), attention reads them in binary32.
  const bool is_affine = GetParam() == KvCacheMode::kInt4 || GetParam() == KvCacheMode::kInt8;
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(out[i], expected[i], is_affine ? 1e-2 : 1e-4) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TurboMindModes,
                         ::testing::Values(KvCacheMode::kNone, KvCacheMode::kInt4,
                                           KvCacheMode::kInt8, KvCacheMode::kFp4Mx,
                                           KvCacheMode::kFp4Nv));

}  // namespace
}  // namespace kvx::engines::turbomind
