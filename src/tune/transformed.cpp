// Transforms work on the rows of one head: they are gathered, transformed and put back.
#include "tune/transformed.hpp"

#include <algorithm>
#include <utility>

namespace kvx::tune {
namespace {

// [num_rows, num_heads, head_dim], as they came.
std::vector<float> transformed(const ops::CpuContext& context, const ops::SideTransform& transform,
                               const ops::RowPositions& positions, int num_heads, int head_dim,
                               int num_rows, const float* rows) {
  const int64_t row_size = int64_t{num_heads} * head_dim;
  std::vector<float> result(static_cast<size_t>(num_rows * row_size));
  context.executor->parallel_for(num_heads, [&](int head) {
    const int64_t first = int64_t{head} * head_dim;
    std::vector<float> of_head(static_cast<size_t>(num_rows) * head_dim);
    for (int64_t r = 0; r < num_rows; ++r) {
      std::copy_n(rows + r * row_size + first, head_dim, of_head.begin() + r * head_dim);
    }
    ops::apply_transform(*context.kernels, transform, {head, num_heads, head_dim}, positions,
                         of_head.data(), num_rows);
    for (int64_t r = 0; r < num_rows; ++r) {
      std::copy_n(of_head.begin() + r * head_dim, head_dim, result.begin() + r * row_size + first);
    }
  });
  return result;
}

}  // namespace

Result<std::vector<kv::LayerTables>> transforms_of(const kv::CacheGeometry& geometry,
                                                   std::span<const kv::LayerPlan> plans,
                                                   std::span<const kv::LayerCalibration> tables,
                                                   int block_size, int64_t num_tokens) {
  std::vector<kv::LayerTables> of_layers;
  for (size_t i = 0; i < plans.size(); ++i) {
    kv::LayerPlan without_scales = plans[i];
    without_scales.runs.clear();  // runs that read given scales would miss them
    const int layer = static_cast<int>(i);
    KVX_ASSIGN_OR_RETURN(
        const kv::LayerCalibration expanded,
        kv::with_block_offsets(geometry, layer, block_size, num_tokens, tables[i]));
    KVX_ASSIGN_OR_RETURN(kv::LayerTables of_layer,
                         kv::LayerTables::create(geometry, layer, without_scales, expanded));
    of_layers.push_back(std::move(of_layer));
  }
  return of_layers;
}

Status feed_transformed(Statistics& statistics, const ops::CpuContext& context,
                        const ops::LayerTransform& transform, int block_size, int layer,
                        int64_t first_position, int num_rows, const float* k, const float* v) {
  const StatisticsConfig& shape = statistics.config();
  const ops::RowPositions positions{nullptr, first_position, block_size};
  const std::vector<float> k_rows = transformed(context, transform.k, positions, shape.num_kv_heads,
                                                shape.k_head_dim, num_rows, k);
  const std::vector<float> v_rows = transformed(context, transform.v, positions, shape.num_kv_heads,
                                                shape.v_head_dim, num_rows, v);
  return statistics.feed(layer, first_position, num_rows, k_rows.data(), v_rows.data(),
                         *context.executor);
}

}  // namespace kvx::tune
