// Rows as a cache quantises them: after its transforms, where scales are fitted.
#pragma once

#include <span>
#include <vector>

#include "kv/plan/layer_tables.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "tune/statistics.hpp"

namespace kvx::tune {

// The transforms of a cache that is calibrated with `tables`, whose scales are not there yet.
// num_tokens: positions that block offsets reach. The tables are copied.
Result<std::vector<kv::LayerTables>> transforms_of(const kv::CacheGeometry& geometry,
                                                   std::span<const kv::LayerPlan> plans,
                                                   std::span<const kv::LayerCalibration> tables,
                                                   int block_size, int64_t num_tokens);

// Statistics::feed() of the rows after the transform.
Status feed_transformed(Statistics& statistics, const ops::CpuContext& context,
                        const ops::LayerTransform& transform, int block_size, int layer,
                        int64_t first_position, int num_rows, const float* k, const float* v);

}  // namespace kvx::tune
