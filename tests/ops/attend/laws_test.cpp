// Laws of attend: what must not change its result, and what must stay out of it.
#include <gtest/gtest.h>

#include "ops/attend/softmax_state.hpp"
#include "ops/attend/tiling.hpp"
#include "tests/support/allocation_counter.hpp"
#include "tests/support/attend_scene.hpp"

namespace kvx::tests {
namespace {

// The output and the log-sum-exps as bytes.
std::vector<uint8_t> bits_of_run(AttendScene& scene, CpuLevel level,
                                 Executor& executor = serial_executor()) {
  scene.run(level, executor);
  std::vector<uint8_t> bits = scene.out_bytes();
  const auto* lse = reinterpret_cast<const uint8_t*>(scene.lse().data());
  bits.insert(bits.end(), lse, lse + scene.lse().size() * sizeof(float));
  return bits;
}

SceneOptions ragged_options() {
  SceneOptions options;
  options.runs = {{2, "int8", "int4"}};
  options.q_per_kv = 3;
  options.seq_lens = {100, 1, 0, 75};
  options.q_lens = {60, 1, 0, 1};
  return options;
}

TEST(AttendLaws, PermutedPhysicalBlocksGiveEqualBits) {
  SceneOptions options = ragged_options();
  AttendScene scene(options);
  options.table_seed = 99;
  AttendScene permuted(options);
  ASSERT_NE(scene.table(), permuted.table());
  for (CpuLevel level : cpu_levels_here()) {
    EXPECT_EQ(bits_of_run(scene, level), bits_of_run(permuted, level));
  }
}

TEST(AttendLaws, TheOrderOfRowsInMemoryDoesNotMatter) {
  for (const char* format : {"f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"}) {
    SceneOptions options = ragged_options();
    options.runs = {{2, format, format}};
    options.order = RowOrder::kNhd;
    AttendScene nhd(options);
    options.order = RowOrder::kHnd;
    AttendScene hnd(options);
    options.order = RowOrder::kFused;
    AttendScene fused(options);
    for (CpuLevel level : cpu_levels_here()) {
      const std::vector<uint8_t> bits = bits_of_run(nhd, level);
      EXPECT_EQ(bits, bits_of_run(hnd, level)) << format;
      EXPECT_EQ(bits, bits_of_run(fused, level)) << format;
    }
  }
}

// Pages with a token's heads side by side are read some heads at a time, the others head by head.
void expect_heads_together_to_give_the_bits_of_heads_apart(SceneOptions options, int together) {
  const int64_t num_work_tiles = 8 * std::ssize(options.seq_lens);
  const int64_t num_parts = std::max(options.seq_lens[0] / 1024, 1);
  ASSERT_EQ(ops::choose_heads_together(ops::kTilings[0], 64, 64, 8, num_work_tiles, num_parts),
            together);
  for (const char* format : {"bf16", "int8"}) {
    options.runs = {{8, format, format}};
    options.order = RowOrder::kNhd;
    AttendScene nhd(options);
    options.order = RowOrder::kHnd;
    AttendScene hnd(options);
    for (CpuLevel level : cpu_levels_here()) {
      EXPECT_EQ(bits_of_run(nhd, level), bits_of_run(hnd, level)) << format;
    }
  }
}

TEST(AttendLaws, HeadsThatAreReadTogetherGiveTheBitsOfHeadsReadApart) {
  SceneOptions options;
  options.q_per_kv = 2;
  options.sinks = options.k_mean = options.k_hadamard = options.v_mean = true;
  for (int s = 1; s < 16; ++s) {
    options.seq_lens.push_back(s == 3 ? 0 : 4 + 5 * s);
    options.q_lens.push_back(s == 3 ? 0 : 1 + s % 4);
  }
  expect_heads_together_to_give_the_bits_of_heads_apart(options, 8);
  options.window = 40;
  options.window_sinks = 20;
  expect_heads_together_to_give_the_bits_of_heads_apart(options, 8);
}

TEST(AttendLaws, PartsOfHeadsThatAreReadTogetherGiveTheBitsOfHeadsReadApart) {
  SceneOptions options;
  options.q_per_kv = 4;
  options.seq_lens = {2080, 70};
  options.q_lens = {1, 2};
  expect_heads_together_to_give_the_bits_of_heads_apart(options, 2);
}

TEST(AttendLaws, AContiguousCacheIsOneBlockASequence) {
  SceneOptions options = ragged_options();
  AttendScene paged(options);
  options.block_size = 128;
  AttendScene contiguous(options);
  for (CpuLevel level : cpu_levels_here()) {
    EXPECT_EQ(bits_of_run(paged, level), bits_of_run(contiguous, level));
  }
}

TEST(AttendLaws, TheNumberOfThreadsDoesNotMatter) {
  SceneOptions options = ragged_options();
  options.sinks = true;
  options.window = 33;
  AttendScene scene(options);
  const CpuLevel level = cpu_levels_here().back();
  const std::vector<uint8_t> bits = bits_of_run(scene, level);
  for (int num_threads : {2, 3, 8}) {
    const auto pool = make_thread_pool(num_threads);
    for (int repeat = 0; repeat < 5; ++repeat) EXPECT_EQ(bits, bits_of_run(scene, level, *pool));
  }
}

TEST(AttendLaws, TheNumberOfThreadsDoesNotMatterToASequenceThatIsCutIntoParts) {
  SceneOptions options;
  options.runs = {{2, "int8", "nvfp4"}};
  options.seq_lens = {3000, 40, 1500};
  options.q_lens = {2, 1, 0};
  options.sinks = true;
  for (const int window : {0, 1700, 1701}) {
    options.window = window;
    options.window_sinks = window == 1701 ? 70 : 0;
    AttendScene scene(options);
    const AttendOutput expected = scene.reference();
    const auto pool = make_thread_pool(3);
    for (CpuLevel level : cpu_levels_here()) {
      const std::vector<uint8_t> bits = bits_of_run(scene, level);
      EXPECT_EQ(bits, bits_of_run(scene, level, *pool));
      EXPECT_LE(relative_rms(scene.run(level).out, expected.out), kCodeTolerance);
    }
  }
}

TEST(AttendLaws, NothingIsAllocatedAndScratchDoesNotGrowWithTheLength) {
  // A work tile's memory is one struct on its thread's stack, whatever the length.
  static_assert(sizeof(ops::UsualMemory) <= 176 * 1024);
  static_assert(sizeof(ops::MatrixMemory) <= 316 * 1024);
  const auto pool = make_thread_pool(2);
  for (int seq_len : {40, 4000}) {
    SceneOptions options;
    options.runs = {{2, "int8", "nvfp4"}};
    options.seq_lens = {seq_len};
    options.q_lens = {30};
    options.k_mean = options.k_offset = options.v_mean = options.v_hadamard = true;
    AttendScene scene(options);
    for (CpuLevel level : cpu_levels_here()) {
      ASSERT_TRUE(scene.attend(level, *pool).ok());
      const int64_t before = num_allocations();
      const Status status = scene.attend(level, *pool);
      EXPECT_EQ(num_allocations() - before, 0);
      EXPECT_TRUE(status.ok());
    }
  }
}

TEST(AttendLaws, ACausalTreeMaskEqualsNoMask) {
  AttendScene scene(ragged_options());
  std::vector<uint8_t> mask(62 * 60);
  for (int row = 0; row < 62; ++row) {
    for (int j = 0; j < 60; ++j) mask[row * 60 + j] = row >= 60 ? j == 0 : j <= row;
  }
  for (CpuLevel level : cpu_levels_here()) {
    scene.args().tree_mask = nullptr;
    const AttendOutput causal = scene.run(level);
    scene.args().tree_mask = mask.data();
    scene.args().tree_mask_stride = 60;
    const AttendOutput tree = scene.run(level);
    // The mask's tiles are decoded; the others may be multiplied as codes.
    EXPECT_LE(relative_rms(tree.out, causal.out), kCodeTolerance);
    EXPECT_LE(relative_rms(tree.lse, causal.lse), kCodeTolerance);
  }
}

TEST(AttendLaws, ATreeMaskShowsEachQueryItsBranch) {
  SceneOptions options;
  options.seq_lens = {70};
  options.q_lens = {7};
  AttendScene scene(options);
  // A binary tree in heap order: a node sees itself and its ancestors.
  std::vector<uint8_t> mask(7 * 7, 0);
  for (int node = 0; node < 7; ++node) {
    for (int seen = node + 1; seen > 0; seen /= 2) mask[node * 7 + seen - 1] = 1;
  }
  scene.args().tree_mask = mask.data();
  scene.args().tree_mask_stride = 7;
  const AttendOutput expected = scene.reference();
  for (CpuLevel level : cpu_levels_here()) {
    EXPECT_LE(relative_rms(scene.run(level).out, expected.out), 1e-5);
  }
}

TEST(AttendLaws, AQueryThatSeesNothingGetsZeros) {
  SceneOptions options;
  options.seq_lens = {2};
  options.q_lens = {2};
  options.v_mean = true;
  AttendScene scene(options);
  const std::vector<uint8_t> mask = {0, 0, 1, 1};
  scene.args().tree_mask = mask.data();
  scene.args().tree_mask_stride = 2;
  const std::vector<float> sinks(scene.num_q_heads(), 0.5f);
  const int row = scene.num_q_heads() * options.value_dim;
  for (CpuLevel level : cpu_levels_here()) {
    for (bool with_sink : {false, true}) {
      scene.args().sinks = with_sink ? sinks.data() : nullptr;
      const AttendOutput got = scene.run(level);
      for (int i = 0; i < row; ++i) EXPECT_EQ(got.out[i], 0.0);
      for (int h = 0; h < scene.num_q_heads(); ++h) {
        EXPECT_EQ(got.lse[h], with_sink ? 0.5 : -std::numeric_limits<double>::infinity());
      }
      EXPECT_NE(got.out[row], 0.0);
    }
  }
}

TEST(AttendLaws, PartsOfASequenceMergeToTheWhole) {
  SceneOptions options;
  options.runs = {{2, "bf16", "bf16"}};
  options.seq_lens = {96};
  options.q_lens = {1};
  AttendScene scene(options);
  const int split = 48;  // a whole number of blocks
  for (CpuLevel level : cpu_levels_here()) {
    const AttendOutput whole = scene.run(level);
    const int32_t lens[] = {split, 96 - split};
    AttendOutput parts[2];
    for (int part = 0; part < 2; ++part) {
      ops::AttendArgs& args = scene.args();
      const ops::AttendArgs saved = args;
      args.seq_lens = &lens[part];
      args.block_table.ids += part * split / options.block_size;
      args.max_blocks_per_sequence = 3;
      parts[part] = scene.run(level);
      args = saved;
    }
    for (int h = 0; h < scene.num_q_heads(); ++h) {
      ops::SoftmaxState states[2];
      for (int part = 0; part < 2; ++part) {
        states[part] = {static_cast<float>(parts[part].lse[h]), 1.0f};
      }
      const ops::SoftmaxState merged = merge(states[0], states[1]);
      EXPECT_NEAR(merged.log_sum_exp(), whole.lse[h], 1e-5);
      for (int d = 0; d < options.value_dim; ++d) {
        const int i = h * options.value_dim + d;
        const double sum = parts[0].out[i] * output_weight(states[0], merged) +
                           parts[1].out[i] * output_weight(states[1], merged);
        EXPECT_NEAR(sum, whole.out[i], 2e-6);
      }
    }
  }
}

// Attention of a transformed cache that quantises nothing, against the plain one.
void expect_transform_changes_nothing(const SceneOptions& transformed) {
  SceneOptions plain = transformed;
  plain.k_mean = plain.k_factor = plain.k_offset = plain.k_hadamard = false;
  plain.v_mean = plain.v_factor = plain.v_hadamard = false;
  AttendScene plain_scene(plain);
  AttendScene scene(transformed);
  for (CpuLevel level : cpu_levels_here()) {
    const AttendOutput expected = plain_scene.run(level);
    const AttendOutput got = scene.run(level);
    EXPECT_LE(relative_rms(got.out, expected.out), 5e-6);
    EXPECT_LE(relative_rms(got.lse, expected.lse), 5e-6);
  }
}

TEST(AttendLaws, ATransformWithoutQuantisationChangesNothing) {
  for (int dim : {64, 80}) {
    for (int term = 0; term < 8; ++term) {
      SceneOptions options;
      options.key_dim = options.value_dim = dim;
      options.seq_lens = {75, 20};
      options.q_lens = {10, 1};
      options.sinks = term % 2 == 0;
      options.softcap = term % 3 == 0 ? 3.0f : 0.0f;
      const bool all = term == 7;
      options.k_mean = term == 0 || all;
      options.k_factor = term == 1 || all;
      options.k_offset = term == 2 || all;
      options.k_hadamard = term == 3 || all;
      options.v_mean = term == 4 || all;
      options.v_factor = term == 5 || all;
      options.v_hadamard = term == 6 || all;
      expect_transform_changes_nothing(options);
    }
  }
}

TEST(AttendLaws, FullPrecisionWindowInTheSameFormatEqualOneUniformCache) {
  SceneOptions options;
  options.seq_lens = {120, 10, 33};
  options.q_lens = {40, 1, 1};
  AttendScene uniform(options);
  options.full_precision_format = "f32";
  AttendScene full_precision(options);
  for (CpuLevel level : cpu_levels_here()) {  // a tile ends where the kind of block changes
    EXPECT_LE(relative_rms(full_precision.run(level).out, uniform.run(level).out), 1e-6);
    EXPECT_LE(relative_rms(full_precision.run(level).lse, uniform.run(level).lse), 1e-6);
  }
}

TEST(AttendLaws, ValuesMayBeAPartOfTheKeysRows) {
  SceneOptions options;
  options.runs = {{1, "bf16", "bf16"}};
  options.key_dim = 96;
  options.value_dim = 64;
  options.q_per_kv = 16;
  options.seq_lens = {50};
  options.q_lens = {3};
  AttendScene scene(options);
  // A latent row: its first 64 numbers are the value.
  std::vector<float>& keys = scene.keys();
  for (int t = 0; t < 50; ++t) {
    std::copy_n(keys.begin() + t * 96, 64, scene.values().begin() + t * 64);
  }
  scene.fill();
  const CpuLevel level = cpu_levels_here().back();
  const std::vector<uint8_t> stored_twice = bits_of_run(scene, level);
  ops::HeadRun& run = scene.packed().run(0);
  run.v.codes = run.k.codes;
  run.v.is_alias = true;
  EXPECT_EQ(stored_twice, bits_of_run(scene, level));
}

TEST(AttendLaws, BlocksBeforeTheWindowAreNeverRead) {
  SceneOptions options;
  options.runs = {{2, "int8", "bf16"}};
  options.seq_lens = {200};
  options.q_lens = {4};
  options.window = 20;  // the first query sees tokens 177 to 196
  AttendScene scene(options);
  for (CpuLevel level : cpu_levels_here()) {
    const std::vector<uint8_t> bits = bits_of_run(scene, level);
    const std::vector<int32_t> table = scene.table();
    for (int block = 0; block < 177 / options.block_size; ++block) scene.table()[block] = -7;
    EXPECT_EQ(bits, bits_of_run(scene, level));
    scene.table() = table;
  }
}

TEST(AttendLaws, BlocksBetweenTheSinksAndTheWindowAreNeverRead) {
  SceneOptions options;
  options.runs = {{2, "int8", "bf16"}};
  options.seq_lens = {200};
  options.q_lens = {4};
  options.window = 20;  // the first query sees tokens 177 to 196
  options.window_sinks = 5;
  AttendScene scene(options);
  const AttendOutput expected = scene.reference();
  const int sinks_end = (5 + options.block_size - 1) / options.block_size;
  for (CpuLevel level : cpu_levels_here()) {
    const std::vector<uint8_t> bits = bits_of_run(scene, level);
    EXPECT_LE(relative_rms(scene.run(level).out, expected.out), kCodeTolerance);
    const std::vector<int32_t> table = scene.table();
    for (int b = sinks_end; b < 177 / options.block_size; ++b) scene.table()[b] = -7;
    EXPECT_EQ(bits, bits_of_run(scene, level));
    scene.table() = table;
  }
}

// Which queries of an output are NaN.
std::vector<bool> nan_queries(const AttendOutput& output, int num_queries) {
  const size_t row = output.out.size() / num_queries;
  std::vector<bool> is_nan;
  for (int q = 0; q < num_queries; ++q) {
    int count = 0;
    for (size_t i = q * row; i < (q + 1) * row; ++i) count += std::isnan(output.out[i]);
    EXPECT_TRUE(count == 0 || count == static_cast<int>(row)) << "query " << q;
    is_nan.push_back(count > 0);
  }
  return is_nan;
}

TEST(AttendLaws, ANanReachesTheQueriesThatSeeItAndNoOthers) {
  for (const char* format : {"f32", "int8", "nvfp4"}) {
    for (bool in_key : {true, false}) {
      SceneOptions options;
      options.runs = {{1, format, format}};
      options.seq_lens = {40};
      options.q_lens = {40};
      options.window = 10;
      AttendScene scene(options);
      std::vector<float>& numbers = in_key ? scene.keys() : scene.values();
      for (int d = 0; d < 64; ++d) numbers[20 * 64 + d] = std::nanf("");
      scene.fill();
      for (CpuLevel level : cpu_levels_here()) {
        const std::vector<bool> is_nan = nan_queries(scene.run(level), 40);
        for (int q = 0; q < 40; ++q) {
          EXPECT_EQ(is_nan[q], q >= 20 && q < 30) << format << " query " << q;
        }
      }
    }
  }
}

TEST(AttendLaws, BytesPastTheLengthNeverMatter) {
  SceneOptions options;
  options.seq_lens = {37};
  options.q_lens = {37};
  AttendScene shorter(options);  // what append has not written is 0xFF: NaN
  options.seq_lens = {48};
  options.q_lens = {48};
  AttendScene longer(options);
  ASSERT_EQ(shorter.table().size(), longer.table().size());
  // Same tokens in the longer scene's cache, with real numbers after them.
  std::copy(shorter.keys().begin(), shorter.keys().end(), longer.keys().begin());
  std::copy(shorter.values().begin(), shorter.values().end(), longer.values().begin());
  longer.fill();
  for (CpuLevel level : cpu_levels_here()) {
    const std::vector<uint8_t> bits = bits_of_run(shorter, level);
    const ops::AttendArgs saved = shorter.args();
    shorter.args().packed = longer.args().packed;
    shorter.args().block_table = longer.args().block_table;
    EXPECT_EQ(bits, bits_of_run(shorter, level));
    shorter.args() = saved;
  }
}

}  // namespace
}  // namespace kvx::tests
