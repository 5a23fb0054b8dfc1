// GpuPrefill: GpuAttend's scenes through the prefill kernels, and what the tests of them share.
#pragma once

#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {

using ops::CudaAttendPath;

class GpuPrefill : public GpuAttend, public testing::WithParamInterface<CudaAttendPath> {
 protected:
  void SetUp() override {
    GpuAttend::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (path() == CudaAttendPath::kPrefill && device::cuda_code_version(context().device) != 90) {
      GTEST_SKIP() << "the code that runs here has no wgmma";
    }
  }
  static CudaAttendPath path() { return GetParam(); }

  // The bounds: f16 queries and f32 output; a bf16 cache or bf16 queries. Queries are
  // rotated before they go to 16 bits; means and factors make these scenes' stored numbers larger
  // than their outputs, and their errors with them.
  static double tolerance_of(const SceneOptions& options) {
    const bool is_bf16 = options.runs.front().k_format == "bf16" || options.q_type == DType::kBF16;
    if (is_bf16) return 3.5e-3;
    if (options.k_mean || options.v_mean || options.k_factor || options.v_factor) return 1.2e-3;
    return options.k_hadamard || options.v_hadamard ? 4e-4 : 3e-4;
  }

  // is_interleaved: the packed blocks' codes.
  void expect_near(const SceneOptions& options, double rounding_of_output = 0,
                   bool is_interleaved = false) {
    expect_within(options, tolerance_of(options) + rounding_of_output, is_interleaved);
  }
  void expect_within(const SceneOptions& options, double tolerance, bool is_interleaved = false) {
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene, is_interleaved);
    ASSERT_TRUE(ops::attend_has_prefill(context(), on_device.args()));
    GpuAttend::expect_near(scene, on_device, path(), tolerance);
  }
};

inline const std::pair<const char*, const char*> kPrefillPairs[] = {
    {"bf16", "bf16"},
    {"f16", "f16"},
    {"fp8_e4m3", "fp8_e4m3"},
    {"fp8_e5m2", "fp8_e5m2"},
    {"nvfp4", "nvfp4"},
    {"mxfp4", "mxfp4"},
    {"mxfp4_g16", "mxfp4_g16"},
    {"fp8_e4m3", "nvfp4"},
    {"fp8_e4m3@row", "fp8_e4m3@row"},
    {"fp8_e5m2@row", "fp8_e5m2@row"},
    {"int8", "int8"},
    {"int4", "int4"},
    {"int8_affine", "int8_affine"},
    {"int4_affine", "int4_affine"},
    {"int8", "int4"},
    {"fp8_e4m3", "int8_affine"},
};

// Integers beside each other and beside what else becomes f16 numbers in a tile: all under bf16
// queries, whose digits f16 has, so that keys, weights and values are rounded, to 11 digits each.
inline const std::pair<const char*, const char*> kRoundedPairs[] = {
    {"int8", "int8"},
    {"int4", "int4"},
    {"int8_affine", "int8_affine"},
    {"int4_affine", "int4_affine"},
    {"int8", "int4"},
    {"int4_affine", "int8"},
    {"int8", "nvfp4"},
    {"mxfp4", "int4_affine"},
    {"fp8_e4m3", "int8_affine"},
};
inline constexpr double kRoundedTolerance = 7e-4;

inline SceneOptions prefill_options(const std::string& k, const std::string& v, int head_dim) {
  SceneOptions options;
  options.runs = {{2, k, v}};
  options.key_dim = options.value_dim = head_dim;
  options.q_per_kv = 4;
  options.block_size = 32;
  options.order = RowOrder::kRecord;
  options.q_type = DType::kF16;
  return options;
}

inline bool has_4_bits(const std::string& name) {
  return name.find("int4") == 0 || name.find("fp4") != std::string::npos;
}

}  // namespace kvx::tests
