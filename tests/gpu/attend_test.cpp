// attend on the device against double precision over the dequantised cache: formats, shapes,
// features, both kernels.
#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

TEST_F(GpuAttend, ReferenceKernelTakesEveryFormatAndHeadDim) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const auto& [key_dim, value_dim] :
         {std::pair{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {192, 128}, {576, 512}}) {
      if (key_dim % facts->head_dim_multiple != 0) continue;
      SceneOptions options;
      options.runs = {{2, std::string(facts->name), std::string(facts->name)}};
      options.key_dim = key_dim;
      options.value_dim = value_dim;
      options.q_per_kv = 3;
      options.seq_lens = {0, 1, 37, 90, 70, 21};
      options.q_lens = {0, 1, 1, 90, 5, 0};
      SCOPED_TRACE(fmt::format("{} {}/{}", facts->name, key_dim, value_dim));
      AttendScene scene(options);
      expect_near(scene, CudaAttendPath::kReference, 1e-5);
    }
  }
}

const std::pair<const char*, const char*> kTilePairs[] = {
    {"bf16", "bf16"},
    {"f16", "f16"},
    {"fp8_e4m3", "fp8_e4m3"},
    {"fp8_e5m2", "fp8_e5m2"},
    {"int8", "int8"},
    {"int4", "int4"},
    {"int8_affine", "int8_affine"},
    {"int4_affine", "int4_affine"},
    {"mxfp4_g16", "mxfp4_g16"},
    {"mxfp4", "mxfp4"},
    {"nvfp4", "nvfp4"},
    {"fp4_row", "fp4_row"},
    {"int4_row", "int4_row"},
    {"int8", "int4"},
    {"fp8_e4m3", "nvfp4"},
    {"bf16", "int4"},
    {"fp8_e4m3@row", "fp8_e4m3@row"},
    {"fp8_e5m2@row", "fp8_e5m2@row"},
};

bool is_16_bit(const std::string& format) {
  return format == "bf16" || format == "f16";
}

TEST_F(GpuAttend, TilesTakeEveryPairOfFormats) {
  for (const auto& [k, v] : kTilePairs) {
    for (const int head_dim : {64, 128}) {
      for (const RowOrder order : {RowOrder::kNhd, RowOrder::kRecord}) {
        SceneOptions options;
        options.runs = {{2, k, v}};
        options.key_dim = options.value_dim = head_dim;
        options.q_per_kv = 4;
        options.block_size = 32;
        options.order = order;
        options.q_type = DType::kF16;
        options.seq_lens = {0, 1, 37, 300, 1000, 130, 16};
        options.q_lens = {0, 1, 1, 1, 2, 7, 1};
        SCOPED_TRACE(fmt::format("{}/{} {} order {}", k, v, head_dim, static_cast<int>(order)));
        AttendScene scene(options);
        // Rows that have their scales beside them do not lie on 16 bytes.
        const bool fits = order == RowOrder::kRecord || (is_16_bit(k) && is_16_bit(v));
        EXPECT_EQ(DeviceScene(memory(), context(), scene).has_decode_mma(), fits);
        if (!fits) continue;
        expect_near(scene, CudaAttendPath::kDecodeMma, tile_tolerance(k, v, options.q_type));
      }
    }
  }
}

// metal-marlin's rows under f32 scales, and under f16 ones that lie by tokens and heads, of which
// two share a word.
TEST_F(GpuAttend, TilesTakeScalesThatAreWords) {
  const struct {
    const char* scale;
    RowOrder order;
    int num_heads;
    bool fits;
  } kCases[] = {{"@f32", RowOrder::kHnd, 2, true},
                {"@f32", RowOrder::kNhd, 3, true},
                {"", RowOrder::kNhd, 2, true},
                {"", RowOrder::kNhd, 4, true},
                {"", RowOrder::kNhd, 3, false}};  // words of two rows
  const struct {
    int key_dim, value_dim, q_per_kv;
  } kShapes[] = {{64, 64, 4}, {128, 128, 1}, {128, 128, 12}, {128, 96, 4}, {192, 192, 4}};
  for (const char* format : {"fp4_row", "int4_row"}) {
    for (const auto& [scale, order, num_heads, fits] : kCases) {
      for (const auto& [key_dim, value_dim, q_per_kv] : kShapes) {
        SceneOptions options;
        const std::string name = std::string(format) + scale;
        options.runs = {{num_heads, name, name}};
        options.key_dim = key_dim;
        options.value_dim = value_dim;
        options.order = order;
        options.scales_apart = true;
        options.q_per_kv = q_per_kv;
        options.block_size = q_per_kv == 1 ? 16 : 48;
        options.window = q_per_kv == 12 ? 77 : 0;
        options.q_type = DType::kF16;
        options.seq_lens = {0, 1, 37, 300, 1000, 130, 16};
        options.q_lens = {0, 1, 1, 1, 2, 7, 1};
        SCOPED_TRACE(fmt::format("{} order {}, {} heads of {} and {}, {} queries", name,
                                 static_cast<int>(order), num_heads, key_dim, value_dim, q_per_kv));
        AttendScene scene(options);
        EXPECT_EQ(DeviceScene(memory(), context(), scene).has_decode_mma(), fits);
        expect_near(scene, fits ? CudaAttendPath::kDecodeMma : CudaAttendPath::kReference,
                    tile_tolerance(format, format, options.q_type));
      }
    }
  }
}

// As in TGI's paged layout and in llama.cpp's transposed V.
TEST_F(GpuAttend, RowsInFragmentsAreJoinedForTheFastKernels) {
  const std::pair<int, int> kDims[] = {{64, 64}, {128, 128}, {192, 128}, {96, 96}};
  for (const char* name : {"f16", "bf16"}) {
    for (const auto& dims : kDims) {
      for (const int block_size : {16, 48, 128}) {
        SceneOptions options;
        options.runs = {{2, name, name}};
        options.key_dim = dims.first;
        options.value_dim = dims.second;
        options.order = RowOrder::kFragments;
        options.q_per_kv = 4;
        options.block_size = block_size;
        options.window = block_size == 48 ? 77 : 0;
        options.q_type = name[0] == 'f' ? DType::kF16 : DType::kBF16;
        options.seq_lens = {0, 1, 37, 300, 1000, 130, 16};
        options.q_lens = {0, 1, 1, 1, 2, 70, 1};
        SCOPED_TRACE(
            fmt::format("{} {}/{}, blocks of {}", name, dims.first, dims.second, block_size));
        AttendScene scene(options);
        DeviceScene device(memory(), context(), scene);
        EXPECT_TRUE(device.has_decode_mma());
        const double tolerance = tile_tolerance(name, name, options.q_type);
        expect_near(scene, CudaAttendPath::kDecodeMma, tolerance);
        const bool has_prefill = ops::attend_has_prefill(context(), device.args());
        EXPECT_TRUE(has_prefill || dims.first == 96);
        if (has_prefill) expect_near(scene, CudaAttendPath::kPrefill, 2 * tolerance);
        expect_near(scene, CudaAttendPath::kReference, tolerance);
      }
    }
  }
}

TEST_F(GpuAttend, TilesTakeEveryFeature) {
  for (const char* name : {"bf16", "fp8_e4m3", "int8", "int4", "nvfp4", "fp4_row", "int4_row"}) {
    for (int feature = 0; feature < 6; ++feature) {
      SceneOptions options;
      options.runs = {{2, name, name}};
      options.key_dim = options.value_dim = 128;
      options.block_size = 16;
      options.order = RowOrder::kRecord;
      options.q_per_kv = feature == 0 ? 1 : feature == 1 ? 16 : 8;
      options.q_type = feature == 2 ? DType::kBF16 : DType::kF16;
      options.out_type = feature == 3 ? DType::kF16 : DType::kF32;
      options.window = feature == 4 ? 77 : 0;
      options.softcap = feature == 5 ? 2.0f : 0.0f;
      options.sinks = feature >= 3;
      options.seq_lens = {257, 16, 900};
      options.q_lens = {1, 16, 4};
      SCOPED_TRACE(fmt::format("{} feature {}", name, feature));
      AttendScene scene(options);
      expect_near(scene, CudaAttendPath::kDecodeMma,
                  tile_tolerance(name, name, options.q_type) + (feature == 3 ? 1e-4 : 0.0));
    }
  }
}

// Queries are rotated before they go to 16 bits. Means and factors make this scene's stored numbers
// larger than its outputs, and their errors with them.
constexpr double kRotatedTolerance = 4e-4;
constexpr double kShiftedTolerance = 1.2e-3;

TEST_F(GpuAttend, TilesFoldTransforms) {
  for (const char* name : {"bf16", "fp8_e4m3", "int8", "int4_affine", "nvfp4", "int4_row"}) {
    for (const int head_dim : {64, 128}) {
      for (int which = 0; which < 4; ++which) {
        SceneOptions options;
        options.runs = {{2, name, name}};
        options.key_dim = options.value_dim = head_dim;
        options.order = RowOrder::kRecord;
        options.q_per_kv = 4;
        options.q_type = DType::kF16;
        set_transforms(options, which);
        options.seq_lens = {257, 16, 300, 2100};
        options.q_lens = {1, 16, 4, 1};
        SCOPED_TRACE(fmt::format("{} {} case {}", name, head_dim, which));
        AttendScene scene(options);
        const double tolerance = tile_tolerance(name, name, options.q_type);
        expect_near(scene, CudaAttendPath::kDecodeMma,
                    std::max(tolerance, which == 0 ? kRotatedTolerance : kShiftedTolerance));
      }
    }
  }
}

TEST_F(GpuAttend, TilesWalkOverFullPrecisionWindow) {
  for (const auto& [k, v] : kTilePairs) {
    if (is_16_bit(k) && is_16_bit(v)) continue;  // no ends of another format
    for (int shape = 0; shape < 6; ++shape) {
      SceneOptions options;
      options.runs = {{2, k, v}};
      options.key_dim = options.value_dim = shape == 1 ? 64 : 128;
      options.order = RowOrder::kRecord;
      options.block_size = shape < 3 ? 16 : shape < 5 ? 64 : 48;
      options.q_per_kv = shape == 2 ? 12 : 4;
      options.q_type = DType::kF16;
      set_full_precision_window(options, shape);
      options.seq_lens = {0, 1, 37, 300, 900, 130, 16, 2100};
      options.q_lens = {0, 1, 1, 1, 2, 7, 1, 1};
      SCOPED_TRACE(fmt::format("{}/{} shape {}", k, v, shape));
      AttendScene scene(options);
      EXPECT_TRUE(DeviceScene(memory(), context(), scene).has_decode_mma());
      expect_near(scene, CudaAttendPath::kDecodeMma, 3.5e-3);
    }
  }
}

// The walk over full-precision window takes its queries from the one over packed tokens, which met
// them in other orders of channels, with factors and scales of its own.
TEST_F(GpuAttend, FullPrecisionWindowMeetTheSameQueries) {
  for (const char* name : {"fp8_e4m3", "int8", "int4", "int4_affine", "mxfp4", "nvfp4"}) {
    for (const int q_per_kv : {2, 7}) {
      for (int which = 0; which < 4; ++which) {
        SceneOptions options;
        options.runs = {{2, name, name}};
        options.key_dim = options.value_dim = which == 1 ? 64 : 128;
        options.order = which == 3 ? RowOrder::kNhd : RowOrder::kRecord;
        options.scales_apart = which == 3;
        options.block_size = which == 2 ? 64 : 16;
        options.q_per_kv = q_per_kv;
        options.q_type = which == 2 ? DType::kBF16 : DType::kF32;
        options.softmax_scale = which == 0 ? -0.1f : 0.15f;
        set_full_precision_window(options, 3);
        set_transforms(options, which);
        options.seq_lens = {16, 40, 300, 900};
        options.q_lens = {1, 2, 1, 2};
        SCOPED_TRACE(fmt::format("{} {} rows, case {}", name, q_per_kv, which));
        AttendScene scene(options);
        expect_near(scene, CudaAttendPath::kDecodeMma, 5e-3);
      }
    }
  }
}

// K's and V's, without instances of their own.
const std::pair<int, int> kOtherDims[] = {{80, 80},   {96, 96},  {192, 192}, {256, 256},
                                          {192, 128}, {64, 128}, {48, 112}};

bool takes_dims(const std::string& format, const std::pair<int, int>& dims) {
  const auto& facts =
      format::facts_of(format::format_named(format.substr(0, format.find('@'))).value());
  return dims.first % facts.head_dim_multiple == 0 && dims.second % facts.head_dim_multiple == 0;
}

TEST_F(GpuAttend, TilesTakeOtherHeadDims) {
  for (const auto& [k, v] : kTilePairs) {
    for (const auto& dims : kOtherDims) {
      if (!takes_dims(k, dims) || !takes_dims(v, dims)) continue;
      SceneOptions options;
      options.runs = {{2, k, v}};
      options.key_dim = dims.first;
      options.value_dim = dims.second;
      options.q_per_kv = 4;
      options.block_size = 32;
      options.order = RowOrder::kRecord;
      options.q_type = DType::kF16;
      options.seq_lens = {0, 1, 37, 300, 1000, 130, 16};
      options.q_lens = {0, 1, 1, 1, 2, 7, 1};
      SCOPED_TRACE(fmt::format("{}/{} {}/{}", k, v, dims.first, dims.second));
      AttendScene scene(options);
      EXPECT_TRUE(DeviceScene(memory(), context(), scene).has_decode_mma());
      expect_near(scene, CudaAttendPath::kDecodeMma, tile_tolerance(k, v, options.q_type));
    }
  }
}

TEST_F(GpuAttend, TilesTakeOtherHeadDimsWithEveryFeature) {
  for (const char* name : {"bf16", "fp8_e4m3", "int8", "int4_affine", "nvfp4"}) {
    for (const auto& dims : kOtherDims) {
      for (int feature = 0; feature < 4; ++feature) {
        SceneOptions options;
        options.runs = {{2, name, name}};
        options.key_dim = dims.first;
        options.value_dim = dims.second;
        options.q_per_kv = feature == 2 ? 16 : 4;
        options.block_size = feature == 3 ? 64 : 16;
        options.order = RowOrder::kRecord;
        options.q_type = feature == 2 ? DType::kBF16 : DType::kF16;
        options.k_hadamard = options.v_hadamard = feature < 2;
        options.k_mean = options.v_mean = options.k_factor = options.v_factor = feature == 0;
        options.full_precision_format = feature == 1 && !is_16_bit(name) ? "bf16" : "";
        options.window = feature == 2 ? 77 : 0;
        options.softcap = feature == 2 ? 3.0f : 0.0f;
        options.sinks = feature >= 2;
        options.seq_lens = {257, 16, 300, feature == 3 ? 2100 : 900};
        options.q_lens = {1, 16, 4, 1};
        SCOPED_TRACE(fmt::format("{} {}/{} feature {}", name, dims.first, dims.second, feature));
        AttendScene scene(options);
        const double tolerance = tile_tolerance(name, name, options.q_type);
        expect_near(scene, CudaAttendPath::kDecodeMma,
                    feature == 0   ? std::max(tolerance, kShiftedTolerance)
                    : feature == 1 ? 3.5e-3
                                   : tolerance);
      }
    }
  }
}

TEST_F(GpuAttend, TilesTakeTreeMasks) {
  for (const char* name : {"int8", "nvfp4"}) {
    for (const bool has_ends : {false, true}) {
      SceneOptions options;
      options.runs = {{2, name, name}};
      options.key_dim = options.value_dim = 128;
      options.order = RowOrder::kRecord;
      options.q_type = DType::kF16;
      options.seq_lens = {70, 515};
      options.q_lens = {15, 15};
      options.full_precision_format = has_ends ? "bf16" : "";
      AttendScene scene(options);
      // A binary tree in heap order: a node sees itself and its ancestors.
      std::vector<uint8_t> mask(30 * 16, 0);
      for (int row = 0; row < 30; ++row) {
        for (int seen = row % 15 + 1; seen > 0; seen /= 2) mask[row * 16 + seen - 1] = 1;
      }
      scene.args().tree_mask = mask.data();
      scene.args().tree_mask_stride = 16;
      SCOPED_TRACE(fmt::format("{} {}", name, has_ends ? "with full-precision window" : ""));
      expect_near(scene, CudaAttendPath::kReference, 1e-5);
      expect_near(scene, CudaAttendPath::kDecodeMma, has_ends ? 3.5e-3 : 3e-4);
    }
  }
}

TEST_F(GpuAttend, LongSequencesAreSplitAndMerged) {
  for (const char* name : {"bf16", "int8", "nvfp4"}) {
    SceneOptions options;
    options.runs = {{1, name, name}};
    options.key_dim = options.value_dim = 128;
    options.block_size = 64;
    options.order = RowOrder::kRecord;
    options.seq_lens = {20000};
    options.q_type = DType::kF16;
    SCOPED_TRACE(name);
    AttendScene scene(options);
    expect_near(scene, CudaAttendPath::kDecodeMma, tile_tolerance(name, name, options.q_type));
    expect_near(scene, CudaAttendPath::kReference, 1e-4);
  }
}

// The splits of a few short sequences are a cluster of CTAs, where the device has clusters.
TEST_F(GpuAttend, SplitsOfShortSequencesAreMergedWhereTheyAre) {
  for (const char* name : {"bf16", "int8", "int4", "nvfp4"}) {
    for (const bool has_all : {false, true}) {
      SceneOptions options;
      options.runs = {{2, name, name}};
      options.key_dim = options.value_dim = 128;
      options.block_size = 64;
      options.order = RowOrder::kRecord;
      options.q_type = DType::kF16;
      options.q_per_kv = has_all ? 5 : 4;
      options.full_precision_format = has_all && !is_16_bit(name) ? "bf16" : "";
      options.v_hadamard = has_all;
      options.sinks = has_all;
      options.seq_lens = {1000, 1, 1024, 0, 130};
      options.q_lens = {1, 1, 3, 0, 1};
      SCOPED_TRACE(fmt::format("{} {}", name, has_all ? "with every feature" : ""));
      AttendScene scene(options);
      expect_near(scene, CudaAttendPath::kDecodeMma,
                  has_all ? 3.5e-3 : tile_tolerance(name, name, options.q_type));
    }
  }
}

// Where sequences may be long, the device gives each as many work tiles as its length deserves.
TEST_F(GpuAttend, LongSequencesAmongShortOnesAreCutIntoMoreWorkTiles) {
  for (const char* name : {"bf16", "int8", "int4", "nvfp4"}) {
    for (const bool has_ends : {false, true}) {
      SceneOptions options;
      options.runs = {{2, name, name}};
      options.key_dim = options.value_dim = 64;
      options.block_size = 64;
      options.order = RowOrder::kRecord;
      options.q_type = DType::kF16;
      options.q_per_kv = has_ends ? 4 : 6;
      options.full_precision_format = has_ends && !is_16_bit(name) ? "bf16" : "";
      options.v_hadamard = has_ends;
      options.sinks = has_ends;
      options.seq_lens = {37, 17000, 0, 1, 900, 4100, 64};
      options.q_lens = {1, 2, 0, 1, 3, 1, 1};
      SCOPED_TRACE(fmt::format("{} {}", name, has_ends ? "with full-precision window" : ""));
      AttendScene scene(options);
      expect_near(scene, CudaAttendPath::kDecodeMma,
                  has_ends ? 3.5e-3 : tile_tolerance(name, name, options.q_type));
    }
  }
}

TEST_F(GpuAttend, HeadsInRunsOfDifferentFormatsWork) {
  SceneOptions options;
  options.runs = {{1, "int8", "int4"}, {2, "bf16", "bf16"}, {1, "nvfp4", "nvfp4"}};
  options.key_dim = options.value_dim = 128;
  options.block_size = 32;
  options.order = RowOrder::kRecord;
  options.seq_lens = {500, 33};
  options.q_lens = {1, 2};
  AttendScene scene(options);
  expect_near(scene, CudaAttendPath::kDecodeMma, 3.5e-3);
  expect_near(scene, CudaAttendPath::kReference, 1e-5);
}

TEST_F(GpuAttend, ReferenceKernelTakesFeaturesAndShapesAtRandom) {
  std::mt19937 random(11);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  const std::string formats[] = {"f32", "bf16", "int8", "int4", "int8_affine", "nvfp4"};
  for (int i = 0; i < 60; ++i) {
    SceneOptions options;
    options.runs = {{1 + below(2), formats[below(6)], formats[below(6)]}};
    if (below(2)) options.runs.push_back({1, formats[below(6)], formats[below(6)]});
    options.key_dim = 16 * (1 + below(8));
    options.value_dim = 16 * (1 + below(8));
    options.q_per_kv = 1 + below(9);
    options.block_size = 1 + below(39);
    options.seq_lens.clear();
    options.q_lens.clear();
    for (int s = 1 + below(3); s > 0; --s) {
      options.seq_lens.push_back(below(150));
      options.q_lens.push_back(below(std::min(options.seq_lens.back(), 20) + 1));
    }
    const RowOrder orders[] = {RowOrder::kNhd, RowOrder::kHnd, RowOrder::kFused, RowOrder::kRecord};
    options.order = orders[below(4)];
    options.softcap = below(2) ? 2.0f : 0.0f;
    options.window = below(2) ? 1 + below(100) : 0;
    options.window_sinks = options.window > 0 ? below(3) * below(60) : 0;
    options.sinks = below(2);
    options.k_mean = below(2);
    options.k_factor = below(2);
    options.k_offset = below(2);
    options.k_hadamard = below(2);
    options.v_mean = below(2);
    options.v_factor = below(2);
    options.v_hadamard = below(2);
    options.full_precision_format = below(2) ? "bf16" : "";
    options.num_sink_blocks = below(3);
    options.first_recent_block = below(4);
    SCOPED_TRACE(fmt::format("case {}", i));
    AttendScene scene(options);
    expect_near(scene, CudaAttendPath::kReference, 1e-5);
  }
}

TEST_F(GpuAttend, CapturedGraphsFollowTheLengthsOnTheDevice) {
  for (const CudaAttendPath path : {CudaAttendPath::kReference, CudaAttendPath::kDecodeMma}) {
    SceneOptions options;
    options.runs = {{2, "int8", "int8"}};
    options.key_dim = options.value_dim = 128;
    options.order = RowOrder::kRecord;
    options.q_type = DType::kF16;
    options.seq_lens = {500, 200};
    options.q_lens = {1, 1};
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene);
    const std::vector<int32_t> lens[] = {{500, 200}, {17, 33}, {480, 1}};
    on_device.expect_replays(path, lens);
  }
}

TEST_F(GpuAttend, SkipsAndCountsWhatIsOutOfRange) {
  for (const CudaAttendPath path : {CudaAttendPath::kReference, CudaAttendPath::kDecodeMma}) {
    SceneOptions options;
    options.runs = {{1, "int8", "int8"}};
    options.key_dim = options.value_dim = 128;
    options.order = RowOrder::kRecord;
    options.seq_lens = {40, 40, 40};
    options.q_lens = {1, 1, 1};
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene);
    std::vector<int32_t> lens = {40, 1 << 30, 40};
    ASSERT_TRUE(
        device::cuda_copy(const_cast<int32_t*>(on_device.args().seq_lens), lens.data(), 12).ok());
    std::vector<int32_t> table = scene.table();
    table[2 * scene.args().block_table.row_stride] = -5;
    ASSERT_TRUE(device::cuda_copy(const_cast<int32_t*>(on_device.args().block_table.ids),
                                  table.data(), std::ssize(table) * 4)
                    .ok());
    const AttendOutput got = on_device.run(path);
    EXPECT_GT(on_device.counters().read().out_of_range, 0u);
    const int row = scene.num_q_heads() * options.value_dim;
    for (int d = 0; d < row; ++d) {
      EXPECT_EQ(got.out[row + d], 0.0);
      EXPECT_TRUE(std::isfinite(got.out[2 * row + d]));
    }
  }
}

// Their difference is more than 32 bits can say.
TEST_F(GpuAttend, QueriesThatEndFarBeforeTheyBeginAreNobodys) {
  for (const CudaAttendPath path : {CudaAttendPath::kReference, CudaAttendPath::kDecodeMma}) {
    SceneOptions options;
    options.runs = {{1, "int8", "int8"}};
    options.key_dim = options.value_dim = 128;
    options.order = RowOrder::kRecord;
    options.seq_lens = {40, 40, 40};
    options.q_lens = {1, 1, 1};
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene);
    const std::vector<int32_t> starts = {0, 1, INT32_MIN, 3};
    ASSERT_TRUE(
        device::cuda_copy(const_cast<int32_t*>(on_device.args().q_starts), starts.data(), 16).ok());
    const AttendOutput got = on_device.run(path);
    EXPECT_EQ(on_device.counters().read().out_of_range, 2u);
    const std::vector<double> expected = scene.reference().out;
    const int row = scene.num_q_heads() * options.value_dim;
    for (int d = 0; d < row; ++d) {
      EXPECT_NEAR(got.out[d], expected[d], 2e-3) << d;
      EXPECT_TRUE(std::isnan(got.out[row + d])) << d;  // as it was poisoned
    }
  }
}

TEST_F(GpuAttend, ErrorsNameWhatIsWrongAndLaunchNothing) {
  SceneOptions options;
  AttendScene scene(options);
  DeviceScene on_device(memory(), context(), scene);
  on_device.args().num_q_heads = 3;
  const Status status = on_device.launch(CudaAttendPath::kReference);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("num_q_heads is 3"), std::string::npos);
}

}  // namespace
}  // namespace kvx::tests
