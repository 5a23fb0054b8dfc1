// LatentScene: a scene of rows that are keys and values (MLA), of 576 numbers, the first 512 of
// which are V, in one segment or in two.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {

// A scene whose V is K's prefix.
class LatentScene {
 public:
  explicit LatentScene(const SceneOptions& options) : scene_(options) { alias_values(); }
  AttendScene& scene() { return scene_; }

  // Again after a change of K's addresses.
  void alias_values() {
    scene_.args().packed.runs = aliased(scene_.packed(), runs_);
    if (SceneCache* window = scene_.full_precision()) {
      scene_.args().full_precision.runs = aliased(*window, window_runs_);
    }
  }

 private:
  const std::vector<ops::HeadRun>& aliased(const SceneCache& cache,
                                           std::vector<ops::HeadRun>& runs) const {
    runs.assign(cache.view().runs.begin(), cache.view().runs.end());
    for (ops::HeadRun& run : runs) {
      run.v = run.k;
      run.v.head_dim = scene_.options().value_dim;
      run.v.is_alias = true;
    }
    return runs;
  }

  AttendScene scene_;
  std::vector<ops::HeadRun> runs_, window_runs_;
};

// The kernel copies codes 16 bytes at a time, so the scales of packed rows lie apart.
inline SceneOptions latent_options(int num_heads, std::vector<int> seq_lens,
                                   std::vector<int> q_lens, const char* format = "bf16") {
  SceneOptions options;
  options.order = RowOrder::kHnd;
  options.scales_apart = true;
  options.runs = {{1, format, format}};
  options.key_dim = 576;
  options.value_dim = 512;
  options.q_per_kv = num_heads;
  options.block_size = 64;
  options.q_type = DType::kBF16;
  options.softmax_scale = 0.05f;
  options.seq_lens = std::move(seq_lens);
  options.q_lens = std::move(q_lens);
  return options;
}

// 16-bit queries and weights in bf16.
inline constexpr double kLatentTolerance = 3.5e-3;

// Integers under their scales are rounded to f16, all other packed rows are not.
inline double packed_tolerance(DType q_type) {
  return q_type == DType::kBF16 ? kLatentTolerance : 5e-4;
}

// Cases for both kernels, each forced.
class GpuAttendLatent : public GpuAttend, public testing::WithParamInterface<ops::CudaAttendPath> {
 protected:
  void SetUp() override {
    GpuAttend::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    const bool has_wgmma = device::cuda_code_version(context().device) == 90;
    if (path() == ops::CudaAttendPath::kLatent && !has_wgmma) {
      GTEST_SKIP() << "the code that runs here has no wgmma";
    }
  }
  static ops::CudaAttendPath path() { return GetParam(); }
  void expect_latent_near(const SceneOptions& options, double tolerance = kLatentTolerance) {
    LatentScene latent(options);
    DeviceScene on_device(memory(), context(), latent.scene());
    ASSERT_TRUE(on_device.has_latent());
    expect_near(latent.scene(), on_device, path(), tolerance);
  }
};

inline std::string name_of_latent_path(const testing::TestParamInfo<ops::CudaAttendPath>& test) {
  return test.param == ops::CudaAttendPath::kLatent ? "Wgmma" : "MmaSync";
}
#define KVX_FOR_BOTH_LATENT_KERNELS(Suite)                                            \
  INSTANTIATE_TEST_SUITE_P(                                                           \
      BothKernels, Suite,                                                             \
      testing::Values(ops::CudaAttendPath::kLatent, ops::CudaAttendPath::kLatentMma), \
      name_of_latent_path)

}  // namespace kvx::tests
