// attend's tensor core kernels with K's block offsets, which they add to scores from a table.
#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

SceneOptions offset_options(const char* k, const char* v) {
  SceneOptions options;
  options.runs = {{2, k, v}};
  options.key_dim = options.value_dim = 128;
  options.order = RowOrder::kRecord;
  options.block_size = 64;
  options.q_type = DType::kF16;
  options.k_offset = true;
  return options;
}

TEST_F(GpuAttend, DecodeAddsTheBlockOffsetsOfKeys) {
  for (const char* name : {"bf16", "int8", "int4", "nvfp4"}) {
    for (const int q_per_kv : {1, 4, 12}) {
      SCOPED_TRACE(fmt::format("{}, {} query heads a KV head", name, q_per_kv));
      SceneOptions options = offset_options(name, name);
      options.q_per_kv = q_per_kv;
      options.seq_lens = {1500, 700, 33, 64};
      options.q_lens = {1, 1, 1, 1};
      AttendScene scene(options);
      EXPECT_TRUE(DeviceScene(memory(), context(), scene).has_decode_mma());
      const double tolerance = tile_tolerance(name, name, options.q_type);
      expect_near(scene, CudaAttendPath::kDecodeMma, tolerance);
      expect_near(scene, CudaAttendPath::kChoose, tolerance);
    }
  }
}

TEST_F(GpuAttend, PrefillAddsTheBlockOffsetsOfKeys) {
  for (const char* name : {"bf16", "int8", "int4", "nvfp4"}) {
    for (const CudaAttendPath path : {CudaAttendPath::kPrefill, CudaAttendPath::kPrefillMma}) {
      SCOPED_TRACE(name);
      SceneOptions options = offset_options(name, name);
      options.seq_lens = {300, 129, 90};
      options.q_lens = {300, 40, 1};
      AttendScene scene(options);
      expect_near(scene, path, tile_tolerance(name, name, options.q_type));
    }
  }
}

// With everything else that changes scores: other transforms, a cap, windows, sinks.
TEST_F(GpuAttend, BlockOffsetsGoWithOtherTransformsCapsAndWindows) {
  for (const bool is_prefill : {false, true}) {
    for (const float softcap : {0.0f, 2.0f}) {
      for (const int window : {0, 70}) {
        SCOPED_TRACE(fmt::format("prefill {}, softcap {}, window {}", is_prefill, softcap, window));
        SceneOptions options = offset_options("int8", "int8");
        options.seq_lens = {300, 129, 400};
        options.q_lens = is_prefill ? std::vector{100, 40, 33} : std::vector{2, 1, 3};
        options.softcap = softcap;
        options.window = window;
        options.sinks = true;
        options.k_hadamard = options.k_mean = options.k_factor = options.v_hadamard = true;
        AttendScene scene(options);
        const CudaAttendPath path =
            is_prefill ? CudaAttendPath::kPrefill : CudaAttendPath::kDecodeMma;
        expect_near(scene, path, 1.5e-3);  // of means and factors in 16 bits
      }
    }
  }
}

TEST_F(GpuAttend, BlockOffsetsGoWithAFullPrecisionWindow) {
  for (const bool is_prefill : {false, true}) {
    SCOPED_TRACE(is_prefill);
    SceneOptions options = offset_options("nvfp4", "nvfp4");
    options.seq_lens = {300, 129, 400};
    options.q_lens = is_prefill ? std::vector{100, 40, 33} : std::vector{1, 1, 1};
    options.full_precision_format = "bf16";
    AttendScene scene(options);
    const CudaAttendPath path = is_prefill ? CudaAttendPath::kPrefill : CudaAttendPath::kDecodeMma;
    expect_near(scene, path, 3.5e-3);
  }
}

// Shorter blocks than a tile of the prefill kernels has tokens, and two runs of heads.
TEST_F(GpuAttend, BlockOffsetsOfShortBlocksAndSeveralRuns) {
  SceneOptions options = offset_options("int8", "int8");
  options.runs.push_back({1, "nvfp4", "int8"});
  options.block_size = 16;
  options.seq_lens = {300, 129};
  options.q_lens = {300, 40};
  AttendScene scene(options);
  expect_near(scene, CudaAttendPath::kChoose, 3e-4);
  options.q_lens = {1, 2};
  AttendScene decodes(options);
  expect_near(decodes, CudaAttendPath::kChoose, 3e-4);  // no decode_mma for nvfp4 beside int8
}

TEST_F(GpuAttend, SequencesLongerThanTheOffsetsAreCounted) {
  SceneOptions options = offset_options("int8", "int8");
  options.seq_lens = {300, 60};
  options.q_lens = {1, 1};
  AttendScene scene(options);
  scene.args().transform.k.num_offset_blocks = 2;
  DeviceScene on_device(memory(), context(), scene);
  const AttendOutput out = on_device.run(CudaAttendPath::kDecodeMma);
  EXPECT_EQ(rows_not_finite(out.out, options.value_dim), "");
  EXPECT_EQ(on_device.counters().read().out_of_range, 1u);
}

}  // namespace
}  // namespace kvx::tests
