// attend's kernels on dual-scale blocks, held to double precision over what gather reads of them.
#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

using FormatPair = std::pair<const char*, const char*>;

// Each width of K and of V.
const FormatPair kDualPairs[] = {
    {"int2_dual", "int2_dual"}, {"int3_dual", "int2_dual"}, {"int3_dual", "int3_dual"},
    {"int4_dual", "int3_dual"}, {"int4_dual", "int4_dual"},
};
// The others, whose kernels are made of the same parts.
const FormatPair kOtherDualPairs[] = {
    {"int2_dual", "int3_dual"},
    {"int2_dual", "int4_dual"},
    {"int3_dual", "int4_dual"},
    {"int4_dual", "int2_dual"},
};

std::vector<FormatPair> all_dual_pairs() {
  std::vector<FormatPair> pairs(std::begin(kDualPairs), std::end(kDualPairs));
  pairs.insert(pairs.end(), std::begin(kOtherDualPairs), std::end(kOtherDualPairs));
  return pairs;
}

// Queries meet a block's steps in 16 bits before they meet its codes: a rounding more than other
// formats' queries have.
constexpr double kDualTolerance = 6e-4;
// Prompts read rows of bf16: K and V are rounded as queries and weights of bf16 are.
constexpr double kExpandedTolerance = 5e-3;

class GpuAttendDual : public GpuAttend {
 protected:
  static SceneOptions options_of(const std::string& k, const std::string& v, int block_size,
                                 int head_dim) {
    SceneOptions options;
    options.runs = {{2, k, v}};
    options.key_dim = options.value_dim = head_dim;
    options.order = RowOrder::kRecord;
    options.block_size = block_size;
    options.q_per_kv = 4;
    options.q_type = DType::kF16;
    return options;
  }

  bool has_decode_mma(AttendScene& scene) {
    return DeviceScene(memory(), context(), scene).has_decode_mma();
  }

  void expect_both_near(AttendScene& scene, double tolerance) {
    expect_near(scene, CudaAttendPath::kReference, 1e-4);
    ASSERT_TRUE(has_decode_mma(scene));
    expect_near(scene, CudaAttendPath::kDecodeMma, tolerance);
    expect_near(scene, CudaAttendPath::kChoose, tolerance);
  }
};

TEST_F(GpuAttendDual, TilesTakeEveryPairBlockSizeAndHeadDim) {
  for (const auto& [k, v] : all_dual_pairs()) {
    for (const int block_size : {64, 128}) {
      for (const int head_dim : {64, 128}) {
        for (const int q_per_kv : {1, 4, 12}) {
          SceneOptions options = options_of(k, v, block_size, head_dim);
          options.q_per_kv = q_per_kv;
          options.seq_lens = {0, 1, 37, 300, 1000, 130, 64, 128};
          options.q_lens = {0, 1, 1, 1, 1, 1, 1, 1};
          SCOPED_TRACE(fmt::format("{}/{}, blocks of {}, head_dim {}, {} rows", k, v, block_size,
                                   head_dim, q_per_kv));
          AttendScene scene(options);
          expect_both_near(scene, kDualTolerance);
        }
      }
    }
  }
}

// As a cache keeps them: its first and last blocks in bf16, the last one not full.
TEST_F(GpuAttendDual, TilesWalkOverFullPrecisionWindow) {
  for (const auto& [k, v] : kDualPairs) {
    for (const int block_size : {64, 128}) {
      for (int shape = 0; shape < 6; ++shape) {
        SceneOptions options = options_of(k, v, block_size, shape == 1 ? 64 : 128);
        options.q_per_kv = shape == 2 ? 12 : 4;
        set_full_precision_window(options, shape);
        options.seq_lens = {0, 1, 37, 300, 900, 130, 16, 2100};
        options.q_lens = {0, 1, 1, 1, 2, 3, 1, 1};
        SCOPED_TRACE(fmt::format("{}/{}, blocks of {}, shape {}", k, v, block_size, shape));
        AttendScene scene(options);
        ASSERT_TRUE(has_decode_mma(scene));
        expect_near(scene, CudaAttendPath::kDecodeMma, 3.5e-3);
      }
    }
  }
}

TEST_F(GpuAttendDual, TilesTakeEveryFeature) {
  for (const auto& [k, v] : kDualPairs) {
    for (int feature = 0; feature < 7; ++feature) {
      SceneOptions options = options_of(k, v, feature % 2 == 0 ? 64 : 128, 128);
      options.q_per_kv = feature == 0 ? 1 : feature == 1 ? 16 : 8;
      options.q_type = feature == 2 ? DType::kBF16 : feature == 6 ? DType::kF32 : DType::kF16;
      options.out_type = feature == 3 ? DType::kF16 : DType::kF32;
      options.window = feature == 4 ? 177 : 0;
      options.softcap = feature == 5 ? 2.0f : 0.0f;
      options.softmax_scale = feature == 6 ? -0.1f : 0.15f;
      options.sinks = feature >= 3;
      options.seq_lens = {257, 16, 900};
      options.q_lens = {1, 2, 1};
      SCOPED_TRACE(fmt::format("{}/{} feature {}", k, v, feature));
      AttendScene scene(options);
      expect_near(scene, CudaAttendPath::kDecodeMma,
                  std::max(kDualTolerance, tile_tolerance(k, v, options.q_type)));
    }
  }
}

TEST_F(GpuAttendDual, TilesFoldTransforms) {
  for (const auto& [k, v] : kDualPairs) {
    for (const int head_dim : {64, 128}) {
      for (int which = 0; which < 4; ++which) {
        SceneOptions options = options_of(k, v, 64, head_dim);
        set_transforms(options, which);
        set_full_precision_window(options, 0);
        options.k_hadamard = which != 1;
        options.v_hadamard = which != 2;
        options.softcap = which == 3 ? 3.0f : 0.0f;
        options.seq_lens = {257, 16, 300, 2100};
        options.q_lens = {1, 2, 2, 1};
        SCOPED_TRACE(fmt::format("{}/{} {} case {}", k, v, head_dim, which));
        AttendScene scene(options);
        expect_near(scene, CudaAttendPath::kDecodeMma, 5e-3);
      }
    }
  }
}

// One sequence that is split, few that are a cluster's, and long ones among short ones, which the
// device cuts by their lengths.
TEST_F(GpuAttendDual, SplitsAndMixedLengthsAreMerged) {
  const std::vector<int> all_lens[] = {
      {20000}, {1000, 1, 1024, 0, 130}, {37, 17000, 0, 1, 900, 4100, 64}};
  for (const auto& [k, v] : kDualPairs) {
    for (const std::vector<int>& lens : all_lens) {
      for (const bool has_window : {false, true}) {
        SceneOptions options = options_of(k, v, 64, 128);
        options.runs.front().num_heads = 1;
        options.seq_lens = lens;
        options.q_lens.clear();
        for (const int len : lens) options.q_lens.push_back(len > 0 ? 1 : 0);
        options.full_precision_format = has_window ? "bf16" : "";
        SCOPED_TRACE(fmt::format("{}/{} {} sequences{}", k, v, lens.size(),
                                 has_window ? ", with a full-precision window" : ""));
        AttendScene scene(options);
        expect_near(scene, CudaAttendPath::kDecodeMma, has_window ? 3.5e-3 : kDualTolerance);
      }
    }
  }
}

// Sinks of a sliding window, and blocks between that are not the sequence's any more.
TEST_F(GpuAttendDual, AWindowsSinksAreSeenAndTheBlocksBetweenAreNotRead) {
  for (const auto& [k, v] : kDualPairs) {
    for (const bool has_full_precision : {false, true}) {
      SceneOptions options = options_of(k, v, 64, 128);
      options.seq_lens = {5000, 300, 90, 260, 290};
      options.q_lens = {3, 1, 2, 1, 1};
      options.window = 200;
      options.window_sinks = 70;
      options.full_precision_format = has_full_precision ? "bf16" : "";
      SCOPED_TRACE(fmt::format("{}/{}{}", k, v, has_full_precision ? " and bf16" : ""));
      AttendScene scene(options);
      for (size_t s = 0; s < options.seq_lens.size(); ++s) {
        const int first_seen = options.seq_lens[s] - options.q_lens[s] - options.window + 1;
        int32_t* ids = scene.table().data() + s * scene.args().block_table.row_stride;
        for (int b = 2; b < first_seen / options.block_size; ++b) ids[b] = -7;
      }
      expect_near(scene, CudaAttendPath::kReference, 1e-4);
      expect_near(scene, CudaAttendPath::kDecodeMma, has_full_precision ? 3.5e-3 : kDualTolerance);
    }
  }
}

// A block that is not there is counted, and the others are attended without it.
TEST_F(GpuAttendDual, MissingBlocksAreCountedAndNotRead) {
  SceneOptions options = options_of("int3_dual", "int2_dual", 64, 128);
  options.seq_lens = {640, 200};
  options.q_lens = {1, 1};
  AttendScene scene(options);
  scene.table()[0] = -1;
  scene.table()[3] = 1 << 20;
  DeviceScene on_device(memory(), context(), scene);
  const AttendOutput expected = on_device.run(CudaAttendPath::kReference);
  const AttendOutput got = on_device.run(CudaAttendPath::kDecodeMma);
  EXPECT_EQ(rows_not_finite(got.out, options.value_dim), "");
  EXPECT_LE(relative_rms(got.out, expected.out), kDualTolerance);
  EXPECT_GT(on_device.counters().read().out_of_range, 0u);
}

// A token that could not be quantised is NaNs for whoever sees it, and for nobody else.
TEST_F(GpuAttendDual, ATokenOfNansIsSeenAsNans) {
  SceneOptions options = options_of("int3_dual", "int3_dual", 64, 64);
  options.seq_lens = {100, 300};
  options.q_lens = {1, 1};
  AttendScene scene(options);
  scene.keys()[70 * 2 * 64] = std::numeric_limits<float>::quiet_NaN();  // sequence 0, head 0
  scene.fill();
  DeviceScene on_device(memory(), context(), scene);
  const AttendOutput got = on_device.run(CudaAttendPath::kDecodeMma);
  for (int head = 0; head < scene.num_q_heads(); ++head) {
    EXPECT_EQ(std::isnan(got.out[head * 64]), head < options.q_per_kv) << "query head " << head;
    EXPECT_TRUE(std::isfinite(got.out[(scene.num_q_heads() + head) * 64]));
  }
}

TEST_F(GpuAttendDual, ACapturedCallServesOtherLengths) {
  for (const auto& [k, v] : kDualPairs) {
    SceneOptions options = options_of(k, v, 64, 128);
    options.seq_lens = {1500, 1300};
    options.q_lens = {1, 1};
    SCOPED_TRACE(fmt::format("{}/{}", k, v));
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene);
    const std::vector<int32_t> all_lens[] = {{1500, 1300}, {64, 1}, {700, 1300}, {129, 640}};
    on_device.expect_replays(CudaAttendPath::kDecodeMma, all_lens, kDualTolerance);
  }
}

// Blocks become rows of bf16 before a prompt's kernel reads them.
TEST_F(GpuAttendDual, PromptsTakePrefill) {
  for (const auto& [k, v] : kDualPairs) {
    for (const int head_dim : {64, 128}) {
      for (const bool has_window : {false, true}) {
        SceneOptions options = options_of(k, v, head_dim, head_dim);
        options.seq_lens = {200, 0, 400, 130};
        options.q_lens = {200, 0, 100, 1};
        options.full_precision_format = has_window ? "bf16" : "";
        options.k_hadamard = options.v_hadamard = has_window;
        SCOPED_TRACE(fmt::format("{}/{}, head_dim {}{}", k, v, head_dim,
                                 has_window ? ", with a full-precision window" : ""));
        AttendScene scene(options);
        DeviceScene on_device(memory(), context(), scene);
        expect_near(scene, on_device, CudaAttendPath::kPrefill, kExpandedTolerance);
        expect_near(scene, on_device, CudaAttendPath::kChoose, kExpandedTolerance);
      }
    }
  }
}

TEST_F(GpuAttendDual, PromptsOfLongRowsTakePrefill) {
  for (const int head_dim : {192, 256}) {
    SceneOptions options = options_of("int3_dual", "int2_dual", 64, head_dim);
    options.seq_lens = {200, 300};
    options.q_lens = {200, 60};
    options.full_precision_format = "bf16";
    SCOPED_TRACE(head_dim);
    AttendScene scene(options);
    expect_near(scene, CudaAttendPath::kPrefill, kExpandedTolerance);
  }
}

TEST_F(GpuAttendDual, TilesTakeLongRows) {
  for (const auto& [k, v] : all_dual_pairs()) {
    for (const int head_dim : {192, 256}) {
      for (const int q_per_kv : {4, 12}) {
        SceneOptions options = options_of(k, v, q_per_kv == 4 ? 64 : 128, head_dim);
        options.q_per_kv = q_per_kv;
        options.seq_lens = {0, 1, 37, 700, 130, 128};
        options.q_lens = {0, 1, 1, 1, 2, 1};
        SCOPED_TRACE(fmt::format("{}/{}, head_dim {}, {} rows", k, v, head_dim, q_per_kv));
        AttendScene scene(options);
        expect_both_near(scene, kDualTolerance);
      }
    }
  }
}

// Their full-precision windows, and transforms, which are undone in a CTA, in a cluster and in the
// merge of splits.
TEST_F(GpuAttendDual, LongRowsTakeWindowsAndTransforms) {
  const std::vector<int> all_lens[] = {{257, 16, 300, 900}, {1000, 1, 1024, 0, 130}, {20000}};
  for (const auto& [k, v] : kDualPairs) {
    for (const int head_dim : {192, 256}) {
      for (const std::vector<int>& lens : all_lens) {
        SceneOptions options = options_of(k, v, 64, head_dim);
        options.runs.front().num_heads = lens.size() == 1 ? 1 : 2;
        options.seq_lens = lens;
        options.q_lens.clear();
        for (const int len : lens) options.q_lens.push_back(len > 0 ? 1 : 0);
        set_full_precision_window(options, 0);
        options.k_hadamard = options.v_hadamard = true;
        SCOPED_TRACE(fmt::format("{}/{}, head_dim {}, {} sequences", k, v, head_dim, lens.size()));
        AttendScene scene(options);
        ASSERT_TRUE(has_decode_mma(scene));
        expect_near(scene, CudaAttendPath::kDecodeMma, 5e-3);
      }
    }
  }
}

TEST_F(GpuAttendDual, PromptsCountMissingBlocksAndDoNotReadThem) {
  SceneOptions options = options_of("int2_dual", "int2_dual", 64, 128);
  options.seq_lens = {640};
  options.q_lens = {200};
  AttendScene scene(options);
  scene.table()[2] = -1;
  DeviceScene on_device(memory(), context(), scene);
  const AttendOutput expected = on_device.run(CudaAttendPath::kReference);
  const AttendOutput got = on_device.run(CudaAttendPath::kPrefill);
  EXPECT_LE(relative_rms(got.out, expected.out), kExpandedTolerance);
  EXPECT_GT(on_device.counters().read().out_of_range, 0u);
}

// One side of another kind, as a budget of bits may choose.
TEST_F(GpuAttendDual, PairsWithoutAnInstanceTakeTheReferenceKernel) {
  for (const auto& [k, v] : {FormatPair{"int2_dual", "int4"}, {"int8", "int2_dual"}}) {
    SceneOptions options = options_of(k, v, 64, 64);
    options.seq_lens = {200};
    SCOPED_TRACE(fmt::format("{}/{}", k, v));
    AttendScene scene(options);
    EXPECT_FALSE(has_decode_mma(scene));
    expect_near(scene, CudaAttendPath::kChoose, 1e-4);
  }
}

}  // namespace
}  // namespace kvx::tests
