// GpuAttend: attention on the device, held to double precision over the dequantised cache.
#pragma once

#include <string>

#include "tests/gpu/device_scene.hpp"
#include "tests/support/attend_scene.hpp"

namespace kvx::tests {

class GpuAttend : public GpuTest {
 protected:
  // in_cells: the packed blocks' codes.
  void expect_near(AttendScene& scene, ops::CudaAttendPath path, double tolerance,
                   bool in_cells = false) {
    DeviceScene on_device(memory(), context(), scene, in_cells);
    const AttendOutput expected = scene.reference();
    const AttendOutput got = on_device.run(path);
    EXPECT_EQ(rows_not_finite(got.out, scene.options().value_dim), "");
    EXPECT_LE(relative_rms(got.out, expected.out), tolerance);
    for (size_t i = 0; i < expected.lse.size(); ++i) {
      EXPECT_NEAR(got.lse[i], expected.lse[i], 10 * tolerance * (1 + std::abs(expected.lse[i])))
          << "lse[" << i << "]";
    }
    EXPECT_EQ(on_device.findings().read().out_of_range, 0u);
  }
};

// The bounds: f16 queries and f32 output; a bf16 cache or bf16 queries.
inline double tile_tolerance(const std::string& k, const std::string& v, DType q_type) {
  return k == "bf16" || v == "bf16" || q_type == DType::kBF16 ? 3.5e-3 : 3e-4;
}

}  // namespace kvx::tests
