// attend's latent kernels: rows that are keys and values (MLA), of 576 numbers, the first 512 of
// which are V.
#include "tests/gpu/latent_scene.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

TEST_P(GpuAttendLatent, HasAnyNumberOfHeads) {
  for (const int heads : {1, 16, 64, 100, 128}) {
    SCOPED_TRACE(heads);
    expect_latent_near(latent_options(heads, {300, 1, 0, 128, 65}, {1, 1, 0, 1, 1}));
  }
}

TEST_P(GpuAttendLatent, HasDraftsOfSeveralTokens) {
  for (const int heads : {1, 16, 100, 128}) {
    SCOPED_TRACE(heads);
    expect_latent_near(latent_options(heads, {130, 4, 2, 65}, {4, 4, 2, 1}));
  }
}

TEST_P(GpuAttendLatent, HasBlocksOfAnySixteens) {
  for (const int block_size : {16, 48, 64, 128}) {
    SCOPED_TRACE(block_size);
    SceneOptions options = latent_options(16, {0, 1, 400, 47, 128}, {0, 1, 2, 1, 1});
    options.block_size = block_size;
    expect_latent_near(options);
  }
}

TEST_P(GpuAttendLatent, HasQueriesAndOutputsOfEveryType) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(static_cast<int>(type));
    SceneOptions options = latent_options(32, {200, 77}, {1, 2});
    options.q_type = options.out_type = type;
    expect_latent_near(options, 4e-3);
  }
}

TEST_P(GpuAttendLatent, HasRowsInF16) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(static_cast<int>(type));
    SceneOptions options = latent_options(32, {200, 77}, {1, 2}, "f16");
    options.q_type = type;
    expect_latent_near(options, 4e-4);
  }
}

const char* const kPackedFormats[] = {"fp8_e4m3", "fp8_e5m2",    "fp8_e4m3@row", "int8",
                                      "int4",     "int8_affine", "int4_affine",  "nvfp4",
                                      "mxfp4",    "mxfp4_g16"};

TEST_P(GpuAttendLatent, HasPackedRows) {
  for (const char* format : kPackedFormats) {
    for (const int heads : {16, 100}) {
      SCOPED_TRACE(fmt::format("{}, {} heads", format, heads));
      SceneOptions options = latent_options(heads, {300, 1, 0, 130, 65}, {1, 1, 0, 2, 1}, format);
      options.order = heads == 16 ? RowOrder::kRecord : RowOrder::kHnd;
      options.scales_apart = heads == 100;
      options.block_size = heads == 16 ? 16 : 48;
      options.q_type = heads == 16 ? DType::kF16 : DType::kBF16;
      expect_latent_near(options, packed_tolerance(options.q_type));
    }
  }
}

TEST_P(GpuAttendLatent, MergesSplitsOfPackedRows) {
  for (const char* format : {"fp8_e4m3", "int8", "nvfp4"}) {
    SCOPED_TRACE(format);
    SceneOptions options = latent_options(32, {6000, 70, 0, 640}, {1, 1, 0, 2}, format);
    options.q_type = DType::kF16;
    expect_latent_near(options, packed_tolerance(options.q_type));
  }
}

TEST_P(GpuAttendLatent, SkipsPackedBlocksThatAreNotThere) {
  LatentScene latent(latent_options(16, {400, 300}, {1, 1}, "nvfp4"));
  latent.scene().table()[2] = -1;
  DeviceScene on_device(memory(), context(), latent.scene());
  const AttendOutput got = on_device.run(path());
  EXPECT_EQ(rows_not_finite(got.out, 512), "");
  EXPECT_GT(on_device.counters().read().out_of_range, 0u);
  EXPECT_LE(relative_rms(got.out, on_device.run(CudaAttendPath::kReference).out), kLatentTolerance);
}

TEST_P(GpuAttendLatent, HasSoftcapSinksAndWindows) {
  for (int which = 0; which < 4; ++which) {
    SCOPED_TRACE(which);
    SceneOptions options = latent_options(48, {500, 33, 130}, {2, 1, 1});
    options.softcap = which == 0 || which == 3 ? 3.0f : 0.0f;
    options.sinks = which == 1 || which == 3;
    options.window = which >= 2 ? 100 : 0;
    expect_latent_near(options);
  }
}

TEST_P(GpuAttendLatent, HasANegativeScaleAndNone) {
  for (const float scale : {-0.05f, 0.0f}) {
    SCOPED_TRACE(scale);
    SceneOptions options = latent_options(16, {150}, {1});
    options.softmax_scale = scale;
    expect_latent_near(options);
  }
}

// One long sequence is cut into splits for all multiprocessors, several by their lengths.
TEST_P(GpuAttendLatent, MergesSplits) {
  expect_latent_near(latent_options(16, {20000}, {1}));
  expect_latent_near(latent_options(128, {3000, 1, 0, 700}, {1, 1, 0, 1}));
  expect_latent_near(latent_options(16, {17000, 70, 0, 640}, {1, 1, 0, 2}));
}

// Scores that keep rising: each tile raises the rows' maximum, and the sums follow.
TEST_P(GpuAttendLatent, FollowsMaximaThatRise) {
  const SceneOptions options = latent_options(32, {700}, {1});
  LatentScene latent(options);
  AttendScene& scene = latent.scene();
  for (int t = 0; t < 700; ++t) {
    for (int d = 0; d < 576; ++d)
      scene.keys()[t * 576 + d] *= 0.1f + 0.004f * static_cast<float>(t);
  }
  scene.fill();
  DeviceScene on_device(memory(), context(), scene);
  expect_near(scene, on_device, path(), kLatentTolerance);
}

TEST_P(GpuAttendLatent, HidesWhatATreeMaskHides) {
  LatentScene latent(latent_options(16, {140, 9}, {4, 3}));
  AttendScene& scene = latent.scene();
  std::vector<uint8_t> mask(7 * 4, 0);
  for (int row = 0; row < 7; ++row) {
    const int own = row < 4 ? row : row - 4;
    mask[row * 4] = mask[row * 4 + own] = 1;
  }
  scene.args().tree_mask = mask.data();
  scene.args().tree_mask_stride = 4;
  DeviceScene on_device(memory(), context(), scene);
  expect_near(scene, on_device, path(), kLatentTolerance);
}

TEST_P(GpuAttendLatent, IsCapturedAndReplayedForOtherLengths) {
  LatentScene latent(latent_options(128, {900, 400}, {1, 1}, "f16"));
  DeviceScene on_device(memory(), context(), latent.scene());
  const std::vector<int32_t> lens[] = {{900, 400}, {17, 1}, {128, 129}};
  on_device.expect_replays(path(), lens);
}

TEST_P(GpuAttendLatent, SkipsAndCountsBlocksThatAreNotThere) {
  LatentScene latent(latent_options(16, {400, 300}, {1, 1}));
  AttendScene& scene = latent.scene();
  const int32_t block = scene.table()[2];
  for (const int32_t bad : {-1, 1000000}) {
    scene.table()[2] = bad;
    DeviceScene on_device(memory(), context(), scene);
    const AttendOutput got = on_device.run(path());
    EXPECT_EQ(rows_not_finite(got.out, 512), "");
    EXPECT_GT(on_device.counters().read().out_of_range, 0u);
    // The reference kernel skips the same tokens.
    const AttendOutput expected = on_device.run(CudaAttendPath::kReference);
    EXPECT_LE(relative_rms(got.out, expected.out), kLatentTolerance);
  }
  scene.table()[2] = block;
}

TEST_P(GpuAttendLatent, GivesZerosToASequenceThatIsNotValid) {
  LatentScene latent(latent_options(16, {40, 40, 40}, {1, 1, 1}));
  AttendScene& scene = latent.scene();
  DeviceScene on_device(memory(), context(), scene);
  const std::vector<int32_t> lens = {40, 1 << 30, 40};
  ASSERT_TRUE(
      device::cuda_copy(const_cast<int32_t*>(on_device.args().seq_lens), lens.data(), 12).ok());
  const AttendOutput got = on_device.run(path());
  EXPECT_EQ(on_device.counters().read().out_of_range, 1u);
  const std::vector<double> expected = scene.reference().out;
  const int row = scene.num_q_heads() * 512;
  for (int i = 0; i < 3 * row; ++i) {
    EXPECT_NEAR(got.out[i], i / row == 1 ? 0.0 : expected[i], 2e-2) << i;
  }
}

KVX_FOR_BOTH_LATENT_KERNELS(GpuAttendLatent);

// What mma.sync's kernel takes and wgmma's does not.
class GpuAttendLatentMma : public GpuAttend {};

TEST_F(GpuAttendLatentMma, HasBlocksOfAnySize) {
  for (const char* format : {"bf16", "int8", "nvfp4"}) {
    for (const int block_size : {1, 5, 24, 100}) {
      SCOPED_TRACE(fmt::format("{}, blocks of {}", format, block_size));
      SceneOptions options = latent_options(16, {0, 1, 200, 47, 128}, {0, 1, 2, 1, 1}, format);
      options.block_size = block_size;
      LatentScene latent(options);
      DeviceScene on_device(memory(), context(), latent.scene());
      ASSERT_TRUE(on_device.has_latent());
      expect_near(latent.scene(), on_device, CudaAttendPath::kChoose, kLatentTolerance);
    }
  }
}

// Rotations, means and factors, of rows in one segment and in two, of whole rows and of splits.
TEST_F(GpuAttendLatentMma, UndoesTransforms) {
  for (int which = 0; which < 4; ++which) {
    for (const char* format : {"bf16", "fp8_e4m3@row", "int4"}) {
      for (const char* rest : {"", "bf16"}) {
        SCOPED_TRACE(fmt::format("case {}, {} + {}", which, format, rest));
        SceneOptions options = latent_options(20, {70, 1, 0, 200}, {1, 1, 0, 3}, format);
        options.rest_format = rest;
        options.rest_dim = options.rest_format.empty() ? 0 : 64;
        set_transforms(options, which);
        LatentScene latent(options);
        DeviceScene on_device(memory(), context(), latent.scene());
        ASSERT_TRUE(on_device.has_latent());
        expect_near(latent.scene(), on_device, CudaAttendPath::kChoose, 4e-3);
      }
    }
  }
}

TEST_F(GpuAttendLatentMma, IsWgmmasToTheRoundingOfQueriesAndWeights) {
  if (device::cuda_code_version(context().device) != 90) {
    GTEST_SKIP() << "the code that runs here has no wgmma";
  }
  SceneOptions options = latent_options(100, {700, 65}, {1, 2}, "int8");
  options.q_type = DType::kF16;
  LatentScene latent(options);
  DeviceScene on_device(memory(), context(), latent.scene());
  const AttendOutput wgmma = on_device.run(CudaAttendPath::kLatent);
  EXPECT_LE(relative_rms(on_device.run(CudaAttendPath::kLatentMma).out, wgmma.out), 5e-4);
}

class GpuAttendLatentChoice : public GpuAttend {};

TEST_F(GpuAttendLatentChoice, IsChosenForLatentRowsAlone) {
  LatentScene latent(latent_options(16, {300, 40}, {1, 1}));
  DeviceScene on_device(memory(), context(), latent.scene());
  EXPECT_TRUE(on_device.has_latent());
  const AttendOutput chosen = on_device.run(CudaAttendPath::kChoose);
  EXPECT_EQ(chosen.out, on_device.run(CudaAttendPath::kLatent).out);

  AttendScene apart(latent_options(16, {300}, {1}));
  EXPECT_FALSE(DeviceScene(memory(), context(), apart).has_latent()) << "V has bytes of its own";
  SceneOptions shorter = latent_options(16, {300}, {1});
  shorter.value_dim = 448;
  EXPECT_FALSE(DeviceScene(memory(), context(), LatentScene(shorter).scene()).has_latent());
  EXPECT_FALSE(
      DeviceScene(memory(), context(), LatentScene(latent_options(16, {300}, {1}, "f32")).scene())
          .has_latent());
}

}  // namespace
}  // namespace kvx::tests
