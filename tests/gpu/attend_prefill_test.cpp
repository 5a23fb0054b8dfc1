// attend's prefill kernels on the device against double precision over the dequantised cache:
// formats, features, shapes, queries that begin anywhere in a sequence.
#include "tests/gpu/prefill_near.hpp"

namespace kvx::tests {
namespace {

TEST_P(GpuPrefill, TakesEveryPairOfFormats) {
  for (const auto& [k, v] : kPrefillPairs) {
    for (const int head_dim : {64, 128}) {
      SceneOptions options = prefill_options(k, v, head_dim);
      // A whole prompt, chunks on a prefix, nothing, one token.
      options.seq_lens = {300, 0, 700, 131, 1, 16};
      options.q_lens = {300, 0, 37, 2, 1, 0};
      SCOPED_TRACE(fmt::format("{}/{} {}", k, v, head_dim));
      expect_near(options);
    }
  }
}

TEST_P(GpuPrefill, TakesIntegersAsF16UnderBf16Queries) {
  for (const auto& [k, v] : kRoundedPairs) {
    for (const int head_dim : {64, 128}) {
      for (const int block_size : {16, 48, 64}) {
        SceneOptions options = prefill_options(k, v, head_dim);
        options.q_type = DType::kBF16;
        options.block_size = block_size;
        options.seq_lens = {300, 0, 700, 131, 1, 16};
        options.q_lens = {300, 0, 37, 2, 1, 0};
        SCOPED_TRACE(fmt::format("{}/{} {} block size {}", k, v, head_dim, block_size));
        expect_within(options, kRoundedTolerance);
      }
    }
  }
}

// metal-marlin's rows become fp8 before the prompt's kernel reads them, in all orders, also beside
// a full-precision window.
TEST_P(GpuPrefill, TakesRowsOfOneScale) {
  const std::pair<const char*, const char*> kPairs[] = {
      {"fp4_row", "fp4_row"}, {"int4_row", "int4_row"}, {"fp4_row", "int4_row"}};
  for (const auto& [k, v] : kPairs) {
    for (int shape = 0; shape < 4; ++shape) {
      SceneOptions options = prefill_options(k, v, shape == 1 ? 64 : 128);
      options.order = shape == 2 ? RowOrder::kNhd : RowOrder::kRecord;
      options.block_size = shape == 1 ? 16 : 64;
      options.q_type = shape == 3 ? DType::kBF16 : DType::kF16;
      if (shape == 3) set_full_precision_window(options, shape);
      options.seq_lens = {300, 0, 700, 131, 1, 16};
      options.q_lens = {300, 0, 37, 2, 1, 0};
      SCOPED_TRACE(fmt::format("{}/{} shape {}", k, v, shape));
      expect_near(options);
    }
  }
}

TEST_P(GpuPrefill, TakesInterleaved) {
  for (const char* name : {"nvfp4", "mxfp4", "mxfp4_g16"}) {
    for (int shape = 0; shape < 4; ++shape) {
      SceneOptions options = prefill_options(name, name, shape == 1 ? 64 : 128);
      options.block_size = shape % 2 == 0 ? 64 : 16;
      if (shape >= 2) set_full_precision_window(options, shape);
      options.seq_lens = {300, 0, 700, 131, 1, 16};
      options.q_lens = {300, 0, 37, 2, 1, 0};
      SCOPED_TRACE(fmt::format("{} shape {}", name, shape));
      expect_near(options, 0, true);
    }
  }
}

TEST_P(GpuPrefill, TakesEveryFeature) {
  for (const char* name : {"bf16", "f16", "fp8_e4m3", "nvfp4", "int8", "int4_affine"}) {
    for (int feature = 0; feature < 7; ++feature) {
      SceneOptions options = prefill_options(name, name, feature == 6 ? 64 : 128);
      options.block_size = feature % 2 == 0 ? 16 : 64;
      options.q_per_kv = feature == 0 ? 1 : feature == 1 ? 16 : 7;
      options.q_type = feature == 2 ? DType::kBF16 : DType::kF16;
      options.out_type = feature == 3 ? DType::kF16 : DType::kF32;
      options.window = feature == 4 || feature == 6 ? 77 : 0;
      options.softcap = feature == 5 ? 2.0f : 0.0f;
      options.sinks = feature >= 3;
      options.softmax_scale = feature == 1 ? -0.1f : 0.15f;
      options.seq_lens = {257, 90, 400};
      options.q_lens = {255, 3, 64};
      SCOPED_TRACE(fmt::format("{} feature {}", name, feature));
      expect_near(options, feature == 3 ? 1e-4 : 0);
    }
  }
}

TEST_P(GpuPrefill, FoldsTransforms) {
  for (const char* name : {"bf16", "f16", "fp8_e4m3", "nvfp4", "int8", "int4_affine"}) {
    for (const int head_dim : {64, 128}) {
      for (int which = 0; which < 4; ++which) {
        SceneOptions options = prefill_options(name, name, head_dim);
        set_transforms(options, which);
        options.out_type = which == 0 ? DType::kF32 : DType::kF16;
        options.runs.front().num_heads = 1;
        options.seq_lens = {257, 40, 300};
        options.q_lens = {60, 40, 33};
        SCOPED_TRACE(fmt::format("{} {} case {}", name, head_dim, which));
        expect_near(options, which == 0 ? 0 : 1e-4);
      }
    }
  }
}

// A prompt whose ends are bf16, beside packed tokens of every kind.
SceneOptions with_full_precision_window(const std::string& k, const std::string& v, int shape) {
  SceneOptions options = prefill_options(k, v, shape == 1 ? 64 : 128);
  options.block_size = shape < 2 ? 16 : shape < 4 ? 64 : 48;
  set_full_precision_window(options, shape);
  options.runs.front().num_heads = 1;
  options.seq_lens = {200, 0, 400, 131, 1, 16};
  options.q_lens = {200, 0, 37, 2, 1, 16};
  return options;
}

TEST_P(GpuPrefill, WalksOverFullPrecisionWindow) {
  for (const auto& [k, v] : kPrefillPairs) {
    const bool is_f16 = std::string(k) == "f16";  // has no ends of another format
    for (int shape = 0; shape < 5; ++shape) {
      const SceneOptions options = with_full_precision_window(k, v, shape);
      SCOPED_TRACE(fmt::format("{}/{} shape {}", k, v, shape));
      if (!is_f16) {
        expect_near(options);
        continue;
      }
      AttendScene scene(options);
      DeviceScene on_device(memory(), context(), scene);
      EXPECT_FALSE(ops::attend_has_prefill(context(), on_device.args()));
    }
  }
}

TEST_P(GpuPrefill, WalksOverFullPrecisionWindowUnderBf16Queries) {
  for (const auto& [k, v] : kRoundedPairs) {
    for (int shape = 0; shape < 5; ++shape) {
      SceneOptions options = with_full_precision_window(k, v, shape);
      options.q_type = DType::kBF16;
      SCOPED_TRACE(fmt::format("{}/{} shape {}", k, v, shape));
      expect_within(options, kRoundedTolerance);
    }
  }
}

TEST_P(GpuPrefill, SplitsAPrefixBetweenFullPrecisionWindow) {
  for (const char* name : {"nvfp4", "int4"}) {
    SceneOptions options = prefill_options(name, name, 128);
    options.runs.front().num_heads = 1;
    options.block_size = 64;
    options.full_precision_format = "bf16";
    options.k_hadamard = options.v_hadamard = true;
    options.seq_lens = {9000};
    options.q_lens = {20};
    SCOPED_TRACE(name);
    expect_near(options);
  }
}

// What numbers are multiplied by so that f16 has them no more, or fewer of their digits, as far as
// packed tokens go along: E8M0 scales go into f16 tiles, and zeros of affine codes are f16.
std::vector<float> far_factors(const std::string& format) {
  if (format == "nvfp4") return {1e6f, 1e-4f};
  if (format.starts_with("mxfp4")) return {1e3f, 1e-4f};
  return {format.ends_with("affine") ? 1e3f : 1e6f, 1e-7f};
}

// FullPrecision rows have scales of their own, and rows that are zero or not there none.
TEST_P(GpuPrefill, WideNumbersMayLieOutsideOfF16sRange) {
  for (const char* name : {"fp8_e4m3", "fp8_e4m3@row", "fp8_e5m2", "nvfp4", "mxfp4", "mxfp4_g16",
                           "int8", "int4", "int8_affine", "int4_affine"}) {
    for (const int head_dim : {64, 128}) {
      for (const float factor : far_factors(name)) {
        SceneOptions options = with_full_precision_window(name, name, 0);
        options.key_dim = options.value_dim = head_dim;
        options.num_sink_blocks = 1;
        options.softmax_scale /= factor;
        AttendScene scene(options);
        for (float& x : scene.keys()) x *= factor;
        for (float& x : scene.values()) x *= factor;
        scene.fill();
        DeviceScene on_device(memory(), context(), scene);
        const AttendOutput got = on_device.run(path());
        SCOPED_TRACE(fmt::format("{} {} times {}", name, head_dim, factor));
        EXPECT_LE(relative_rms(got.out, scene.reference().out), tolerance_of(options));
      }
    }
  }
}

TEST_P(GpuPrefill, AWholePromptNeedsNoWorkspace) {
  SceneOptions options = prefill_options("int8", "int8", 128);
  options.runs.front().num_heads = 8;
  options.q_per_kv = 16;
  options.seq_lens = options.q_lens = {300};
  AttendScene scene(options);
  DeviceScene on_device(memory(), context(), scene);
  EXPECT_EQ(ops::attend_workspace_bytes(context(), on_device.args(), on_device.limits()), 0);
  EXPECT_EQ(ops::attend_workspace_bytes(context(), on_device.args(), on_device.limits(), path()),
            0);
}

TEST_P(GpuPrefill, ReadsBlocksOfAnyOrder) {
  for (const char* name : {"bf16", "f16"}) {
    for (const RowOrder order : {RowOrder::kNhd, RowOrder::kHnd, RowOrder::kFused}) {
      SceneOptions options = prefill_options(name, name, 128);
      options.order = order;
      options.seq_lens = {333};
      options.q_lens = {100};
      SCOPED_TRACE(fmt::format("{} order {}", name, static_cast<int>(order)));
      expect_near(options);
    }
  }
}

// Few work tiles of a long sequence are split and merged.
SceneOptions few_queries_on_a_long_prefix(const char* format) {
  SceneOptions options = prefill_options(format, format, 128);
  options.runs.front().num_heads = 1;
  options.seq_lens = {9000};
  options.q_lens = {20};
  options.sinks = true;
  return options;
}

TEST_P(GpuPrefill, SplitsAFewQueriesOnALongPrefix) {
  for (const char* name : {"bf16", "nvfp4"}) {
    SCOPED_TRACE(name);
    expect_near(few_queries_on_a_long_prefix(name));
  }
}

TEST_P(GpuPrefill, SplitsAFewQueriesUnderTokenScales) {
  expect_near(few_queries_on_a_long_prefix("int8"));
}

// Odd numbers of queries, of heads and of tokens, drawn at random.
TEST_P(GpuPrefill, TakesBatchesOfAnyLengths) {
  std::mt19937 random(5);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  for (int i = 0; i < 40; ++i) {
    const auto& [k, v] = kPrefillPairs[below(std::size(kPrefillPairs))];
    SceneOptions options = prefill_options(k, v, 64 << below(2));
    options.table_seed = 1 + i;
    options.q_type = i % 2 == 0 ? DType::kF16 : DType::kBF16;
    options.q_per_kv = 1 + below(8);
    options.block_size = 16 * (1 + below(4));
    options.window = below(3) == 0 ? 1 + below(200) : 0;
    options.sinks = below(2);
    options.seq_lens.clear();
    options.q_lens.clear();
    for (int s = 1 + below(4); s > 0; --s) {
      options.seq_lens.push_back(below(500));
      options.q_lens.push_back(below(std::min(options.seq_lens.back(), 299) + 1));
    }
    SCOPED_TRACE(fmt::format("case {}: {}/{}", i, k, v));
    expect_near(options);
  }
}

TEST_P(GpuPrefill, CapturedGraphsFollowTheLengthsOnTheDevice) {
  for (const char* name : {"f16", "int8"}) {
    SceneOptions options = prefill_options(name, name, 128);
    options.seq_lens = {500, 200};
    options.q_lens = {60, 60};
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene);
    const std::vector<int32_t> lens[] = {{500, 200}, {61, 133}, {480, 60}};
    on_device.expect_replays(path() == CudaAttendPath::kPrefill ? CudaAttendPath::kChoose : path(),
                             lens);
  }
}

TEST_P(GpuPrefill, SkipsAndCountsWhatIsOutOfRange) {
  for (const char* name : {"bf16", "nvfp4", "int8"}) {
    SceneOptions options = prefill_options(name, name, 128);
    options.runs.front().num_heads = 1;
    options.seq_lens = {100, 100, 100};
    options.q_lens = {40, 40, 40};
    AttendScene scene(options);
    DeviceScene on_device(memory(), context(), scene);
    std::vector<int32_t> lens = {100, 1 << 30, 100};
    ASSERT_TRUE(
        device::cuda_copy(const_cast<int32_t*>(on_device.args().seq_lens), lens.data(), 12).ok());
    std::vector<int32_t> table = scene.table();
    table[2 * scene.args().block_table.row_stride] = -5;
    table[2 * scene.args().block_table.row_stride + 1] = 1 << 30;
    ASSERT_TRUE(device::cuda_copy(const_cast<int32_t*>(on_device.args().block_table.ids),
                                  table.data(), std::ssize(table) * 4)
                    .ok());
    const AttendOutput got = on_device.run(path());
    EXPECT_GT(on_device.counters().read().out_of_range, 0u);
    const AttendOutput plain = on_device.run(CudaAttendPath::kReference);
    const int rows = 40 * scene.num_q_heads() * options.value_dim;
    SCOPED_TRACE(name);
    for (int d = 0; d < rows; ++d) ASSERT_EQ(got.out[rows + d], 0.0) << d;
    // What the reference kernel sees of the others, the blocks that are not there hidden.
    EXPECT_LE(relative_rms(got.out, plain.out), tolerance_of(options));
  }
}

INSTANTIATE_TEST_SUITE_P(, GpuPrefill,
                         testing::Values(CudaAttendPath::kPrefill, CudaAttendPath::kPrefillMma),
                         [](const auto& test) {
                           return test.param == CudaAttendPath::kPrefill ? "Wgmma" : "MmaSync";
                         });

}  // namespace
}  // namespace kvx::tests
