// attend's latent kernels over rows in two segments: 512 numbers in any format, and 64 in 16 bits.
#include "tests/gpu/latent_scene.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

const char* const kFirstFormats[] = {"fp8_e4m3", "fp8_e5m2", "fp8_e4m3@row", "fp8_e4m3@g128",
                                     "int8",     "int4",     "int8_affine",  "int4_affine",
                                     "nvfp4",    "mxfp4",    "mxfp4_g16"};

SceneOptions segment_options(int num_heads, std::vector<int> seq_lens, std::vector<int> q_lens,
                             const char* format, const char* rest_format = "bf16") {
  SceneOptions options = latent_options(num_heads, std::move(seq_lens), std::move(q_lens), format);
  options.rest_format = rest_format;
  options.rest_dim = 64;
  return options;
}

// Rows as vLLM's fp8_ds_mla has them: 512 E4M3, four binary32 scales, 64 bf16.
void place_as_fp8_ds_mla(AttendScene& scene) {
  constexpr int64_t kRowBytes = 656;
  SceneCache& cache = scene.packed();
  const int64_t block_size = scene.options().block_size;
  const int64_t block_bytes = block_size * kRowBytes;
  std::vector<uint8_t>& bytes =
      cache.memory().emplace_back(cache.view().num_blocks * block_bytes, uint8_t{0xFF});
  cache.run(0).k.codes = {bytes.data(), block_bytes, kRowBytes, kRowBytes};
  cache.run(0).k.scales = {bytes.data() + 512, block_bytes, kRowBytes, kRowBytes, 4};
  cache.segment(0).k.codes = {bytes.data() + 528, block_bytes, kRowBytes, kRowBytes};
  scene.fill();
}

class GpuAttendSegments : public GpuAttendLatent {};

TEST_P(GpuAttendSegments, HasEveryFormatBesideBf16AndF16) {
  for (const char* format : kFirstFormats) {
    for (const char* rest : {"bf16", "f16"}) {
      SCOPED_TRACE(fmt::format("{} + {}", format, rest));
      SceneOptions options =
          segment_options(16, {300, 1, 0, 130, 65}, {1, 1, 0, 2, 1}, format, rest);
      options.block_size = 16;
      options.q_type = DType::kF16;
      expect_latent_near(options, packed_tolerance(options.q_type));
    }
  }
}

TEST_P(GpuAttendSegments, HasRowsOf16BitsInTwoRegions) {
  for (const char* format : {"bf16", "f16"}) {
    SCOPED_TRACE(format);
    expect_latent_near(segment_options(100, {300, 1, 0, 65}, {1, 1, 0, 2}, format, format));
  }
}

TEST_P(GpuAttendSegments, HasQueriesOfEveryTypeHeadsAndDrafts) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int heads : {1, 16, 128}) {
      SCOPED_TRACE(fmt::format("type {}, {} heads", static_cast<int>(type), heads));
      SceneOptions options = segment_options(heads, {200, 77, 4}, {1, 2, 4}, "nvfp4");
      options.q_type = options.out_type = type;
      options.block_size = 48;
      const bool is_bf16 = type == DType::kBF16;
      expect_latent_near(options, is_bf16 ? 4e-3 : 5e-4);
    }
  }
}

// Rows of fp8 under a scale of 0.01 have other units than those of bf16; a negative scale of
// scores, too, must reach both segments.
TEST_P(GpuAttendSegments, BringsBothSegmentsToOneUnit) {
  for (const float scale : {-0.05f, 0.05f, 0.0f}) {
    for (const char* rest : {"bf16", "f16"}) {
      SCOPED_TRACE(fmt::format("{}, {}", scale, rest));
      SceneOptions options = segment_options(16, {150}, {1}, "fp8_e4m3", rest);
      options.q_type = DType::kF16;
      options.softmax_scale = scale;
      expect_latent_near(options, 5e-4);
    }
  }
}

// A tensor scale of 0, or nearly, hides the values, and leaves the rotary numbers' scores.
TEST_P(GpuAttendSegments, ScoresRotaryNumbersBesideRowsWhoseScaleIsZero) {
  for (const float scale : {0.0f, 1e-42f, 1e-15f}) {
    const float tensor_scales[] = {scale, scale};  // a mirror keeps a piece of memory once
    for (const char* rest : {"bf16", "f16"}) {
      SCOPED_TRACE(fmt::format("{}, {}", scale, rest));
      SceneOptions options = segment_options(16, {150}, {1}, "nvfp4", rest);
      options.q_type = DType::kF16;
      LatentScene latent(options);
      auto runs = std::vector(latent.scene().args().packed.runs.begin(),
                              latent.scene().args().packed.runs.end());
      runs[0].k.tensor_scales = &tensor_scales[0];
      runs[0].v.tensor_scales = &tensor_scales[1];
      latent.scene().args().packed.runs = runs;
      DeviceScene on_device(memory(), context(), latent.scene());
      const AttendOutput got = on_device.run(path());
      const AttendOutput expected = on_device.run(CudaAttendPath::kReference);
      for (size_t i = 0; i < got.lse.size(); ++i) ASSERT_NEAR(got.lse[i], expected.lse[i], 1e-2);
      for (const double x : got.out) ASSERT_NEAR(x, 0, 1e-10);
    }
  }
}

TEST_P(GpuAttendSegments, HasSoftcapSinksAndWindows) {
  for (int which = 0; which < 4; ++which) {
    SCOPED_TRACE(which);
    SceneOptions options = segment_options(48, {500, 33, 130}, {2, 1, 1}, "int8");
    options.softcap = which == 0 || which == 3 ? 3.0f : 0.0f;
    options.sinks = which == 1 || which == 3;
    options.window = which >= 2 ? 100 : 0;
    expect_latent_near(options);
  }
}

TEST_P(GpuAttendSegments, MergesSplits) {
  for (const char* format : {"fp8_e4m3@g128", "int4", "nvfp4"}) {
    SCOPED_TRACE(format);
    SceneOptions options = segment_options(32, {6000, 70, 0, 640}, {1, 1, 0, 2}, format);
    options.q_type = DType::kF16;
    expect_latent_near(options, packed_tolerance(options.q_type));
  }
  expect_latent_near(segment_options(16, {20000}, {1}, "nvfp4"));
}

TEST_P(GpuAttendSegments, DoesNotDependOnWhichBlocks) {
  SceneOptions options = segment_options(32, {400, 130}, {1, 1}, "nvfp4");
  LatentScene one(options);
  options.table_seed = 5;
  LatentScene other(options);
  DeviceScene first(memory(), context(), one.scene()), second(memory(), context(), other.scene());
  EXPECT_EQ(first.run(path()).out, second.run(path()).out);
}

TEST_P(GpuAttendSegments, IsCapturedAndReplayedForOtherLengths) {
  SceneOptions options = segment_options(128, {900, 400}, {1, 1}, "int8");
  options.q_type = DType::kF16;
  LatentScene latent(options);
  DeviceScene on_device(memory(), context(), latent.scene());
  const std::vector<int32_t> lens[] = {{900, 400}, {17, 1}, {128, 129}};
  on_device.expect_replays(path(), lens, 5e-4);
}

TEST_P(GpuAttendSegments, ReadsRowsOf656BytesInPlace) {
  for (const int heads : {16, 128}) {
    SCOPED_TRACE(heads);
    SceneOptions options = segment_options(heads, {300, 1, 0, 130}, {1, 1, 0, 2}, "fp8_e4m3@g128");
    options.q_type = DType::kF16;
    LatentScene latent(options);
    place_as_fp8_ds_mla(latent.scene());
    latent.alias_values();
    DeviceScene on_device(memory(), context(), latent.scene());
    ASSERT_TRUE(on_device.has_latent());
    expect_near(latent.scene(), on_device, path(), 5e-4);
  }
}

TEST_P(GpuAttendSegments, SkipsAndCountsBlocksThatAreNotThere) {
  LatentScene latent(segment_options(16, {400, 300}, {1, 1}, "nvfp4"));
  latent.scene().table()[2] = -1;
  DeviceScene on_device(memory(), context(), latent.scene());
  const AttendOutput got = on_device.run(path());
  EXPECT_EQ(rows_not_finite(got.out, 512), "");
  EXPECT_GT(on_device.counters().read().out_of_range, 0u);
  EXPECT_LE(relative_rms(got.out, on_device.run(CudaAttendPath::kReference).out), kLatentTolerance);
}

KVX_FOR_BOTH_LATENT_KERNELS(GpuAttendSegments);

// Tokens at both ends of a sequence in rows of bf16, in two segments as the others or in one: in
// mma.sync's kernel, on every device.
class GpuAttendLatentWindow : public GpuAttend {
 protected:
  static SceneOptions with_window(SceneOptions options, int num_sink_blocks,
                                  int first_recent_block) {
    options.full_precision_format = "bf16";
    options.num_sink_blocks = num_sink_blocks;
    options.first_recent_block = first_recent_block;
    return options;
  }
  void expect_chosen_near(const SceneOptions& options) {
    LatentScene latent(options);
    DeviceScene on_device(memory(), context(), latent.scene());
    ASSERT_TRUE(on_device.has_latent());
    expect_near(latent.scene(), on_device, CudaAttendPath::kChoose, kLatentTolerance);
  }
};

TEST_F(GpuAttendLatentWindow, StandsBesideEveryFormatInTwoSegments) {
  for (const char* format : kFirstFormats) {
    for (const int heads : {16, 100}) {
      SCOPED_TRACE(fmt::format("{}, {} heads", format, heads));
      SceneOptions options = segment_options(heads, {300, 1, 0, 130, 65}, {1, 1, 0, 2, 1}, format);
      options.block_size = 16;
      expect_chosen_near(with_window(options, 1, 2));
    }
  }
}

TEST_F(GpuAttendLatentWindow, StandsBesideRowsInOneSegment) {
  for (const char* format :
       {"bf16", "f16", "fp8_e4m3", "fp8_e4m3@row", "int8", "int4_affine", "nvfp4", "mxfp4"}) {
    SCOPED_TRACE(format);
    expect_chosen_near(
        with_window(latent_options(16, {300, 1, 0, 130, 65}, {1, 1, 0, 2, 1}, format), 1, 1));
  }
}

TEST_F(GpuAttendLatentWindow, HasAnyNumberOfBlocksAtEitherEnd) {
  for (const int sinks : {0, 1, 3}) {
    for (const int recent : {0, 1, 20}) {
      SCOPED_TRACE(fmt::format("{} and {} blocks", sinks, recent));
      SceneOptions options = segment_options(32, {200, 70, 3}, {3, 1, 2}, "nvfp4");
      options.block_size = 24;
      expect_chosen_near(with_window(options, sinks, recent));
    }
  }
}

TEST_F(GpuAttendLatentWindow, HasSoftcapSinksWindowsAndSplits) {
  for (int which = 0; which < 4; ++which) {
    SCOPED_TRACE(which);
    SceneOptions options = segment_options(48, {500, 33, 130}, {2, 1, 1}, "int8");
    options.softcap = which == 0 || which == 3 ? 3.0f : 0.0f;
    options.sinks = which == 1 || which == 3;
    options.window = which >= 2 ? 100 : 0;
    options.block_size = 16;
    expect_chosen_near(with_window(options, 2, 3));
  }
  expect_chosen_near(with_window(segment_options(16, {6000}, {1}, "int4"), 1, 2));
  expect_chosen_near(with_window(segment_options(16, {17000, 70, 640}, {1, 1, 2}, "nvfp4"), 1, 2));
}

// Packed numbers whose unit is 0 are nothing, and must not take the window's with them.
TEST_F(GpuAttendLatentWindow, KeepsItsNumbersBesideRowsWhoseScaleIsZero) {
  const float scales[] = {0, 0};  // a mirror keeps a piece of memory once
  LatentScene latent(with_window(segment_options(16, {150}, {1}, "nvfp4"), 0, 1));
  auto runs = std::vector(latent.scene().args().packed.runs.begin(),
                          latent.scene().args().packed.runs.end());
  runs[0].k.tensor_scales = &scales[0];
  runs[0].v.tensor_scales = &scales[1];
  latent.scene().args().packed.runs = runs;
  DeviceScene on_device(memory(), context(), latent.scene());
  const AttendOutput got = on_device.run(CudaAttendPath::kChoose);
  EXPECT_EQ(rows_not_finite(got.out, 512), "");
  const AttendOutput expected = on_device.run(CudaAttendPath::kReference);
  EXPECT_LE(relative_rms(got.out, expected.out), kLatentTolerance);
}

TEST_F(GpuAttendLatentWindow, MustBeInBf16) {
  SceneOptions options = with_window(segment_options(16, {300}, {1}, "int8"), 1, 1);
  options.full_precision_format = "f16";
  EXPECT_FALSE(DeviceScene(memory(), context(), LatentScene(options).scene()).has_latent());
  options = with_window(segment_options(16, {300}, {1}, "int8", "f16"), 1, 1);
  EXPECT_FALSE(DeviceScene(memory(), context(), LatentScene(options).scene()).has_latent());
}

class GpuAttendSegmentsChoice : public GpuAttend {};

TEST_F(GpuAttendSegmentsChoice, IsChosenWhereItCanReadBothSegments) {
  LatentScene latent(segment_options(16, {300, 40}, {1, 1}, "int8"));
  DeviceScene on_device(memory(), context(), latent.scene());
  EXPECT_TRUE(on_device.has_latent());
  EXPECT_FALSE(on_device.has_decode_mma());
  const AttendOutput chosen = on_device.run(CudaAttendPath::kChoose);
  EXPECT_EQ(chosen.out, on_device.run(CudaAttendPath::kLatent).out);

  const auto has_latent = [this](const SceneOptions& options) {
    return DeviceScene(memory(), context(), LatentScene(options).scene()).has_latent();
  };
  EXPECT_FALSE(has_latent(segment_options(16, {300}, {1}, "bf16", "f16")));
  EXPECT_FALSE(has_latent(segment_options(16, {300}, {1}, "int8", "f32")));
  SceneOptions shorter = segment_options(16, {300}, {1}, "int8");
  shorter.key_dim = 544;
  shorter.rest_dim = 32;
  EXPECT_FALSE(has_latent(shorter));
}

}  // namespace
}  // namespace kvx::tests
