// attend's prefill kernels at head_dims other than 64 and 128: shorter rows, longer ones, K and V
// apart.
#include <cmath>

#include "tests/gpu/prefill_near.hpp"

namespace kvx::tests::attend_prefill_dims_test {
namespace {

class GpuPrefillDims : public GpuPrefill {};

// Rows that end in zeros in a tile of 64 or 128 numbers; those of 4 bits have to be whole copies.
TEST_P(GpuPrefillDims, TakesOtherHeadDims) {
  for (const auto& [k, v] : kPrefillPairs) {
    for (const int head_dim : {48, 80, 96}) {
      SceneOptions options = prefill_options(k, v, head_dim);
      options.runs.front().num_heads = 1;
      options.seq_lens = {200, 0, 300, 40};
      options.q_lens = {200, 0, 37, 2};
      SCOPED_TRACE(fmt::format("{}/{} {}", k, v, head_dim));
      if (head_dim % 32 != 0 && (has_4_bits(k) || has_4_bits(v))) {
        AttendScene scene(options);
        DeviceScene on_device(memory(), context(), scene);
        EXPECT_FALSE(ops::attend_has_prefill(context(), on_device.args()));
        continue;
      }
      expect_near(options);
    }
  }
}

TEST_P(GpuPrefillDims, TakesOtherHeadDimsWithEveryFeature) {
  for (const char* name : {"bf16", "fp8_e4m3", "nvfp4", "int8", "int4_affine"}) {
    for (int which = 0; which < 5; ++which) {
      SceneOptions options = prefill_options(name, name, 96);
      if (which < 4) set_transforms(options, which);
      if (which == 4) set_full_precision_window(options, 2);
      options.runs.front().num_heads = 1;
      options.seq_lens = {257, 40, 300};
      options.q_lens = {60, 40, 33};
      SCOPED_TRACE(fmt::format("{} case {}", name, which));
      expect_near(options);
    }
  }
}

struct Dims {
  int key;
  int value;
};

// Scores are as large as models have them: their rounding errors go with their size.
SceneOptions options_of(const char* k, const char* v, const Dims& dims) {
  SceneOptions options = prefill_options(k, v, dims.key);
  options.value_dim = dims.value;
  options.softmax_scale = 1 / std::sqrt(static_cast<float>(dims.key));
  return options;
}

TEST_P(GpuPrefillDims, TakesKeysAndValuesApart) {
  for (const auto& [k, v] : kPrefillPairs) {
    for (const Dims dims : {Dims{64, 128}, Dims{128, 64}, Dims{96, 32}}) {
      SceneOptions options = options_of(k, v, dims);
      options.runs.front().num_heads = 1;
      options.seq_lens = {200, 0, 300, 40};
      options.q_lens = {200, 0, 37, 2};
      SCOPED_TRACE(fmt::format("{}/{} {}/{}", k, v, dims.key, dims.value));
      expect_near(options);
    }
  }
}

TEST_P(GpuPrefillDims, TakesIntegersAsF16UnderBf16Queries) {
  for (const auto& [k, v] : kRoundedPairs) {
    for (const Dims dims : {Dims{64, 128}, Dims{128, 64}, Dims{96, 32}, Dims{96, 96}}) {
      SceneOptions options = options_of(k, v, dims);
      options.q_type = DType::kBF16;
      options.runs.front().num_heads = 1;
      options.seq_lens = {200, 0, 300, 40};
      options.q_lens = {200, 0, 37, 2};
      SCOPED_TRACE(fmt::format("{}/{} {}/{}", k, v, dims.key, dims.value));
      expect_within(options, kRoundedTolerance);
    }
  }
}

TEST_P(GpuPrefillDims, TakesKeysAndValuesApartWithEveryFeature) {
  for (const char* name : {"bf16", "fp8_e4m3", "nvfp4", "int8", "int4_affine"}) {
    for (int which = 0; which < 5; ++which) {
      SceneOptions options = options_of(name, name, which % 2 == 0 ? Dims{64, 128} : Dims{128, 64});
      if (which < 4) set_transforms(options, which);
      if (which == 4) set_full_precision_window(options, 2);
      options.runs.front().num_heads = 1;
      options.seq_lens = {257, 40, 300};
      options.q_lens = {60, 40, 33};
      SCOPED_TRACE(fmt::format("{} case {}", name, which));
      expect_near(options);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, GpuPrefillDims,
                         testing::Values(CudaAttendPath::kPrefill, CudaAttendPath::kPrefillMma),
                         [](const auto& test) {
                           return test.param == CudaAttendPath::kPrefill ? "Wgmma" : "MmaSync";
                         });

// Rows of more than 128 numbers, which the kernel on wgmma alone takes.
class GpuPrefillLong : public GpuPrefill {};

constexpr Dims kLongest[] = {{256, 256}, {192, 128}};
const char* const kLongFormats[] = {"bf16",  "f16",          "fp8_e4m3",    "nvfp4",
                                    "mxfp4", "fp8_e4m3@row", "int8_affine", "int4_affine"};

// Groups of 64 would be four sums of scores, and four sets of weights.
bool has_groups(const std::string& name) {
  return name == "int8" || name == "int4";
}

TEST_P(GpuPrefillLong, TakesEveryPairOfFormatsButGroupsOf64) {
  for (const auto& [k, v] : kPrefillPairs) {
    for (const Dims dims : kLongest) {
      SceneOptions options = options_of(k, v, dims);
      options.runs.front().num_heads = 1;
      options.seq_lens = {200, 0, 300, 40};
      options.q_lens = {200, 0, 37, 2};
      SCOPED_TRACE(fmt::format("{}/{} {}", k, v, dims.key));
      if (!has_groups(k) && !has_groups(v)) {
        expect_near(options);
        continue;
      }
      AttendScene scene(options);
      DeviceScene on_device(memory(), context(), scene);
      EXPECT_FALSE(ops::attend_has_prefill(context(), on_device.args()));
      EXPECT_TRUE(ops::attend_has_decode_mma(context(), on_device.args()));
    }
  }
}

TEST_P(GpuPrefillLong, TakesIntegersAsF16UnderBf16Queries) {
  for (const auto& [k, v] : kRoundedPairs) {
    for (const Dims dims :
         {Dims{256, 256}, Dims{192, 128}, Dims{192, 192}, Dims{160, 96}, Dims{128, 256}}) {
      for (const int ends : {-1, 2, 4}) {  // of set_full_precision_window
        SceneOptions options = options_of(k, v, dims);
        options.q_type = DType::kBF16;
        options.block_size = 64;
        if (ends >= 0) set_full_precision_window(options, ends);
        options.runs.front().num_heads = 1;
        options.seq_lens = {300, 0, 700, 131, 1, 16};
        options.q_lens = {300, 0, 37, 2, 1, 0};
        SCOPED_TRACE(fmt::format("{}/{} {}/{} ends {}", k, v, dims.key, dims.value, ends));
        expect_within(options, kRoundedTolerance);
      }
    }
  }
}

TEST_P(GpuPrefillLong, TakesRowsOfUpTo256Numbers) {
  for (const char* name : kLongFormats) {
    for (const Dims dims : {Dims{256, 256}, Dims{192, 128}, Dims{192, 192}, Dims{160, 96},
                            Dims{128, 256}, Dims{240, 208}}) {
      if (dims.key == 240 && has_4_bits(name)) continue;  // rows are not whole copies
      SceneOptions options = options_of(name, name, dims);
      options.seq_lens = {300, 0, 700, 131, 1, 16};
      options.q_lens = {300, 0, 37, 2, 1, 0};
      SCOPED_TRACE(fmt::format("{} {}/{}", name, dims.key, dims.value));
      expect_near(options);
    }
  }
}

TEST_P(GpuPrefillLong, TakesEveryFeature) {
  for (const char* name : kLongFormats) {
    for (int feature = 0; feature < 7; ++feature) {
      SceneOptions options = options_of(name, name, kLongest[feature % 2]);
      options.block_size = feature % 3 == 0 ? 16 : 64;
      options.q_per_kv = feature == 0 ? 1 : feature == 1 ? 16 : 7;
      options.q_type = feature == 2 ? DType::kBF16 : feature == 3 ? DType::kF32 : DType::kF16;
      options.out_type = feature == 3 ? DType::kF16 : DType::kF32;
      options.window = feature == 4 || feature == 5 ? 77 : 0;
      options.softcap = feature == 6 || feature == 5 ? 2.0f : 0.0f;
      options.sinks = feature >= 3;
      if (feature == 1) options.softmax_scale = -0.1f;
      options.seq_lens = {257, 90, 400};
      options.q_lens = {255, 3, 64};
      SCOPED_TRACE(fmt::format("{} feature {}", name, feature));
      expect_near(options, feature == 3 ? 1e-4 : 0);
    }
  }
}

TEST_P(GpuPrefillLong, FoldsTransforms) {
  for (const char* name : kLongFormats) {
    for (const Dims dims : kLongest) {
      for (int which = 0; which < 4; ++which) {
        SceneOptions options = options_of(name, name, dims);
        set_transforms(options, which);
        options.out_type = which == 0 ? DType::kF32 : DType::kF16;
        options.runs.front().num_heads = 1;
        options.seq_lens = {257, 40, 300};
        options.q_lens = {60, 40, 33};
        SCOPED_TRACE(fmt::format("{} {} case {}", name, dims.key, which));
        expect_near(options, which == 0 ? 0 : 1e-4);
      }
    }
  }
}

TEST_P(GpuPrefillLong, WalksOverFullPrecisionWindow) {
  for (const char* name : kLongFormats) {
    if (name == std::string("f16")) continue;  // has no ends of another format
    for (int shape = 0; shape < 5; ++shape) {
      SceneOptions options = options_of(name, name, kLongest[shape % 2]);
      options.block_size = shape < 2 ? 16 : shape < 4 ? 64 : 48;
      set_full_precision_window(options, shape);
      options.runs.front().num_heads = 1;
      options.seq_lens = {200, 0, 400, 131, 1, 16};
      options.q_lens = {200, 0, 37, 2, 1, 16};
      SCOPED_TRACE(fmt::format("{} shape {}", name, shape));
      expect_near(options);
    }
  }
}

TEST_P(GpuPrefillLong, ReadsBlocksOfAnyOrder) {
  for (const char* name : {"bf16", "f16"}) {
    for (const Dims dims : kLongest) {
      for (const RowOrder order : {RowOrder::kNhd, RowOrder::kHnd, RowOrder::kFused}) {
        SceneOptions options = options_of(name, name, dims);
        options.order = order;
        options.seq_lens = {333};
        options.q_lens = {100};
        SCOPED_TRACE(fmt::format("{} {} order {}", name, dims.key, static_cast<int>(order)));
        expect_near(options);
      }
    }
  }
}

TEST_P(GpuPrefillLong, SplitsAFewQueriesOnALongPrefix) {
  for (const char* name : {"bf16", "nvfp4", "int8_affine"}) {
    for (const Dims dims : kLongest) {
      SceneOptions options = options_of(name, name, dims);
      options.runs.front().num_heads = 1;
      options.seq_lens = {9000};
      options.q_lens = {20};
      options.sinks = true;
      SCOPED_TRACE(fmt::format("{} {}", name, dims.key));
      expect_near(options);
    }
  }
}

TEST_P(GpuPrefillLong, TakesBatchesOfAnyLengths) {
  std::mt19937 random(6);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  for (int i = 0; i < 40; ++i) {
    const char* name = kLongFormats[below(std::size(kLongFormats))];
    SceneOptions options = options_of(name, name, kLongest[below(2)]);
    options.table_seed = 1 + i;
    options.q_per_kv = 1 + below(8);
    options.block_size = 16 * (1 + below(4));
    options.window = below(3) == 0 ? 1 + below(200) : 0;
    options.seq_lens.clear();
    options.q_lens.clear();
    for (int s = 1 + below(4); s > 0; --s) {
      options.seq_lens.push_back(below(500));
      options.q_lens.push_back(below(std::min(options.seq_lens.back(), 299) + 1));
    }
    SCOPED_TRACE(fmt::format("case {}: {}", i, name));
    expect_near(options);
  }
}

INSTANTIATE_TEST_SUITE_P(, GpuPrefillLong, testing::Values(CudaAttendPath::kPrefill),
                         [](const auto&) { return "Wgmma"; });

}  // namespace
}  // namespace kvx::tests::attend_prefill_dims_test
