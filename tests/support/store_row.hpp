// store_row puts one row through a level's kernels and shows its bytes and what comes back.
#pragma once

#include <vector>

#include "tests/support/cpu_levels.hpp"
#include "tests/support/test_layer.hpp"

namespace kvx::tests {

struct StoredRow {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  std::vector<float> back;  // as gather returns it
  int64_t nonfinite = 0;
};

// given: the scale bits of every group, for specs that do not compute them.
inline StoredRow store_row(device::CpuLevel level, const format::FormatSpec& spec,
                           const std::vector<float>& x, float tensor_scale = 1.0f,
                           format::StoredScale given = {0}) {
  const int head_dim = static_cast<int>(x.size());
  TestSide side(spec, head_dim, 1, 1, 1, Order::kNhd);
  side.fill_scales(given);
  StoredRow row;
  row.back.resize(x.size());
  const auto& kernels = ops::cpu::kernel_table(level).of(spec);
  row.nonfinite =
      kernels.encode_rows({&spec, head_dim, tensor_scale, x.data(), 0, 1, side.codes.data(), 0,
                           side.scales.data(), 0, side.view.scales.group_stride});
  kernels.decode_rows({&spec, head_dim, tensor_scale, format::DecodeFor::kGather, row.back.data(),
                       0, 1, side.codes.data(), 0, side.scales.data(), 0,
                       side.view.scales.group_stride});
  row.codes = side.codes;
  row.scales = side.scales;
  return row;
}

inline StoredRow store_row(const format::FormatSpec& spec, const std::vector<float>& x,
                           float tensor_scale = 1.0f, format::StoredScale given = {0}) {
  return store_row(cpu_levels_here().back(), spec, x, tensor_scale, given);
}

}  // namespace kvx::tests
