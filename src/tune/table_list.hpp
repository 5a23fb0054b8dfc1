// table_list: the tables of a layer that a tune file holds, with their names and shapes. A new
// table of LayerCalibration is one more line here.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "kv/plan/layer_tables.hpp"

namespace kvx::tune {

struct TableField {
  std::string_view name;  // "k.mean"; a file's tensor is "layers.3.k.mean"
  std::vector<float>& (*of)(kv::LayerCalibration& layer);
  // The shape of a table of `count` numbers; its product is another number where count is wrong.
  std::vector<int64_t> (*shape)(const kv::CacheGeometry& geometry, int64_t count);

  const std::vector<float>& in(const kv::LayerCalibration& layer) const {
    return of(const_cast<kv::LayerCalibration&>(layer));  // which `of` does not change
  }
};

std::span<const TableField> table_fields();

}  // namespace kvx::tune
