// attend over E2M1 codes in interleaved order (format/interleaved.hpp), as a GPU's pool keeps them.
#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

const char* const kCellFormats[] = {"nvfp4", "mxfp4", "mxfp4_g16"};

SceneOptions options_interleaved(const char* name, int head_dim) {
  SceneOptions options;
  options.runs = {{2, name, name}};
  options.key_dim = options.value_dim = head_dim;
  options.q_per_kv = 4;
  options.block_size = 64;
  options.order = RowOrder::kRecord;
  options.q_type = DType::kF16;
  return options;
}

TEST_F(GpuAttend, TilesTakeInterleaved) {
  if (device::cuda_code_version(context().device) != 90) {
    GTEST_SKIP() << "the code that runs here has no instances for interleaved";
  }
  for (const char* name : kCellFormats) {
    for (const int head_dim : {64, 128}) {
      for (int feature = 0; feature < 6; ++feature) {
        SceneOptions options = options_interleaved(name, head_dim);
        options.block_size = feature % 2 == 0 ? 64 : 128;
        options.q_per_kv = feature == 0 ? 1 : feature == 1 ? 16 : 4;
        options.q_type = feature == 2 ? DType::kBF16 : DType::kF16;
        options.out_type = feature == 3 ? DType::kF16 : DType::kF32;
        options.window = feature == 4 ? 77 : 0;
        options.window_sinks = feature == 4 ? 70 : 0;
        options.softcap = feature == 5 ? 2.0f : 0.0f;
        options.sinks = feature >= 3;
        options.seq_lens = {0, 1, 37, 300, 1000, 130, 16};
        options.q_lens = {0, 1, 1, 1, 2, 7, 1};
        SCOPED_TRACE(fmt::format("{} {} feature {}", name, head_dim, feature));
        AttendScene scene(options);
        EXPECT_TRUE(DeviceScene(memory(), context(), scene, true).has_decode_mma());
        expect_near(scene, CudaAttendPath::kDecodeMma,
                    tile_tolerance(name, name, options.q_type) + (feature == 3 ? 1e-4 : 0.0), true);
      }
    }
  }
}

TEST_F(GpuAttend, TilesWalkOverFullPrecisionWindowBesideInterleaved) {
  if (device::cuda_code_version(context().device) != 90) {
    GTEST_SKIP() << "the code that runs here has no instances for interleaved";
  }
  for (const char* name : kCellFormats) {
    for (int shape = 0; shape < 6; ++shape) {
      SceneOptions options = options_interleaved(name, shape == 1 ? 64 : 128);
      options.q_per_kv = shape == 2 ? 12 : 4;
      set_full_precision_window(options, shape);
      options.seq_lens = {0, 1, 37, 300, 900, 130, 16, 2100};
      options.q_lens = {0, 1, 1, 1, 2, 7, 1, 1};
      SCOPED_TRACE(fmt::format("{} shape {}", name, shape));
      AttendScene scene(options);
      expect_near(scene, CudaAttendPath::kDecodeMma, 3.5e-3, true);
    }
  }
}

TEST_F(GpuAttend, ReferenceKernelTakesInterleavedOrder) {
  for (const char* name : kCellFormats) {
    SceneOptions options = options_interleaved(name, 128);
    options.block_size = 16;
    options.seq_lens = {0, 1, 37, 300};
    options.q_lens = {0, 1, 1, 5};
    SCOPED_TRACE(name);
    AttendScene scene(options);
    expect_near(scene, CudaAttendPath::kReference, 3e-4, true);
  }
}

// A caller may ask for them in rows for which a pool would not.
TEST_F(GpuAttend, OtherRowsInInterleavedGoToKernelsThatReadThem) {
  for (const char* name : kCellFormats) {
    for (const int head_dim : {96, 256}) {
      SceneOptions options = options_interleaved(name, head_dim);
      options.seq_lens = {300, 64};
      options.q_lens = {70, 64};
      SCOPED_TRACE(fmt::format("{} {}", name, head_dim));
      AttendScene scene(options);
      expect_near(scene, CudaAttendPath::kChoose, 3e-4, true);
    }
  }
}

// A pool's choice.
TEST_F(GpuAttend, InterleavedAreForWholeStepsOfOneFormat) {
  const auto takes = [&](const char* k, const char* v, int head_dim, int block_size) {
    SceneOptions options = options_interleaved(k, head_dim);
    options.runs = {{2, k, v}};
    options.block_size = block_size;
    options.seq_lens = {1};
    options.q_lens = {1};
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene);
    return ops::attend_takes_interleaved_order(context(), on_device.args().packed.runs.front(),
                                               block_size);
  };
  const bool has_instances = device::cuda_code_version(context().device) == 90;
  for (const char* name : kCellFormats) {
    for (const int head_dim : {64, 128}) {
      EXPECT_EQ(takes(name, name, head_dim, 64), has_instances) << name << " " << head_dim;
    }
    EXPECT_FALSE(takes(name, name, 96, 64)) << name;
    EXPECT_FALSE(takes(name, name, 128, 16)) << name;
  }
  EXPECT_FALSE(takes("nvfp4", "mxfp4", 128, 64));
  EXPECT_FALSE(takes("fp8_e4m3", "nvfp4", 128, 64));
  EXPECT_FALSE(takes("int4", "int4", 128, 64));
  EXPECT_FALSE(takes("mxfp4@page", "mxfp4@page", 128, 64));
}

}  // namespace
}  // namespace kvx::tests
