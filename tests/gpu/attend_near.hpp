// GpuAttend: attention on the device, held to double precision over the dequantised cache.
#pragma once

#include <string>

#include "tests/gpu/device_scene.hpp"
#include "tests/support/attend_scene.hpp"

namespace kvx::tests {

// The row that is farthest from what it should be, beside its size: of a token and query head.
inline std::string worst_row(const AttendOutput& got, const AttendOutput& expected, int dim,
                             int num_q_heads) {
  size_t worst = 0;
  double most = -1;
  for (size_t row = 0; row < expected.out.size() / dim; ++row) {
    double error = 0;
    for (int d = 0; d < dim; ++d) {
      const double difference = got.out[row * dim + d] - expected.out[row * dim + d];
      error += difference * difference;
    }
    if (error <= most) continue;
    most = error;
    worst = row;
  }
  double size = 0;
  for (int d = 0; d < dim; ++d) size += std::pow(expected.out[worst * dim + d], 2);
  return fmt::format("token {}, query head {}: off by {} of {}; lse {}, expected {}",
                     worst / num_q_heads, worst % num_q_heads, std::sqrt(most), std::sqrt(size),
                     got.lse[worst], expected.lse[worst]);
}

class GpuAttend : public GpuTest {
 protected:
  // is_interleaved: the packed blocks' codes.
  void expect_near(AttendScene& scene, ops::CudaAttendPath path, double tolerance,
                   bool is_interleaved = false) {
    DeviceScene on_device(memory(), context(), scene, is_interleaved);
    expect_near(scene, on_device, path, tolerance);
  }
  static void expect_near(AttendScene& scene, DeviceScene& on_device, ops::CudaAttendPath path,
                          double tolerance) {
    const AttendOutput expected = scene.reference();
    const AttendOutput got = on_device.run(path);
    EXPECT_EQ(rows_not_finite(got.out, scene.options().value_dim), "");
    EXPECT_LE(relative_rms(got.out, expected.out), tolerance)
        << worst_row(got, expected, scene.options().value_dim, scene.num_q_heads());
    for (size_t i = 0; i < expected.lse.size(); ++i) {
      EXPECT_NEAR(got.lse[i], expected.lse[i], 10 * tolerance * (1 + std::abs(expected.lse[i])))
          << "lse[" << i << "]";
    }
    EXPECT_EQ(on_device.counters().read().out_of_range, 0u);
  }
};

// The bounds: f16 queries and f32 output; a bf16 cache or bf16 queries.
inline double tile_tolerance(const std::string& k, const std::string& v, DType q_type) {
  return k == "bf16" || v == "bf16" || q_type == DType::kBF16 ? 3.5e-3 : 3e-4;
}

}  // namespace kvx::tests
