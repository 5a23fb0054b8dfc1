// attend's decode_mma kernel on callers' pages: codes and scales apart, scales that a page's tokens
// share, pages that are not there.
#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

// Codes and scales in regions of their own, as engines lay out pages of four bits.
TEST_F(GpuAttend, TilesTakeCallersPagesOfFourBits) {
  for (const char* name : {"int4", "int4_affine", "mxfp4_g16", "mxfp4", "nvfp4"}) {
    for (const int head_dim : {64, 128}) {
      for (const RowOrder order : {RowOrder::kNhd, RowOrder::kHnd}) {
        for (const int block_size : {16, 48, 64, 128}) {
          SceneOptions options;
          options.runs = {{2, name, name}};
          options.key_dim = options.value_dim = head_dim;
          options.q_per_kv = block_size == 48 ? 12 : 4;
          options.block_size = block_size;
          options.order = order;
          options.scales_apart = true;
          options.q_type = DType::kF16;
          options.window = block_size == 64 ? 200 : 0;
          options.seq_lens = {0, 1, 37, 300, 1000, 130, 64};
          options.q_lens = {0, 1, 1, 1, 2, 7, 1};
          SCOPED_TRACE(fmt::format("{} {} order {} in blocks of {}", name, head_dim,
                                   static_cast<int>(order), block_size));
          AttendScene scene(options);
          // Rows of scales of less than four bytes must follow each other.
          const int scale_bytes = format::scale_bytes_per_row(scene_spec(name), head_dim);
          const bool fits = order == RowOrder::kHnd || scale_bytes % 4 == 0;
          EXPECT_EQ(DeviceScene(memory(), context(), scene).has_decode_mma(), fits);
          const auto path = fits ? CudaAttendPath::kDecodeMma : CudaAttendPath::kChoose;
          expect_near(scene, path, tile_tolerance(name, name, options.q_type));
        }
      }
    }
  }
}

// Scales that a block's tokens share lie at a token stride of 0; rows of them that are shorter than
// four bytes are copied in pairs, which these do not come in.
TEST_F(GpuAttend, TilesTakePageSharedScales) {
  for (const char* facts :
       {"fp8_e4m3", "fp8_e5m2", "int8", "int4", "mxfp4_g16", "mxfp4", "nvfp4"}) {
    for (const int head_dim : {64, 128}) {
      for (const RowOrder order : {RowOrder::kNhd, RowOrder::kHnd}) {
        for (const int block_size : {16, 64}) {
          SceneOptions options;
          const std::string name = std::string(facts) + "@page";
          options.runs = {{2, name, name}};
          options.key_dim = options.value_dim = head_dim;
          options.q_per_kv = 4;
          options.block_size = block_size;
          options.order = order;
          options.scales_apart = true;
          options.q_type = DType::kF16;
          options.seq_lens = {0, 1, 37, 300, 1000, 130};
          options.q_lens = {0, 1, 1, 1, 2, 7};
          SCOPED_TRACE(fmt::format("{} {} order {} in blocks of {}", name, head_dim,
                                   static_cast<int>(order), block_size));
          AttendScene scene(options);
          const bool fits = format::scale_bytes_per_row(scene_spec(name), head_dim) % 4 == 0;
          EXPECT_EQ(DeviceScene(memory(), context(), scene).has_decode_mma(), fits);
          expect_near(scene, fits ? CudaAttendPath::kDecodeMma : CudaAttendPath::kChoose, 3e-4);
        }
      }
    }
  }
}

// Neighbour heads of NHD pages: eight and four go in fours, six in twos, three alone. Sequences
// that are not split, split alike, and cut by their lengths.
TEST_F(GpuAttend, HeadsOfCallersPagesShareACta) {
  const std::vector<int> lengths[] = {{64, 1, 0, 37}, {300, 3000, 5, 1100}, {37, 17000, 0, 900}};
  for (const char* name : {"int4", "nvfp4"}) {
    for (const int num_heads : {8, 4, 6, 3}) {
      for (const std::vector<int>& seq_lens : lengths) {
        if (seq_lens[1] > 10000 && num_heads != 8) continue;  // takes its time on the CPU
        SceneOptions options;
        options.runs = {{1, "int8", "int8"}, {num_heads, name, name}};
        options.key_dim = options.value_dim = 128;
        options.block_size = num_heads == 6 ? 64 : 16;
        options.scales_apart = true;
        options.q_type = DType::kF16;
        options.q_per_kv = num_heads == 4 ? 6 : 2;
        options.v_hadamard = options.sinks = num_heads == 8;
        options.seq_lens = seq_lens;
        options.q_lens = {1, 1, seq_lens[2] == 0 ? 0 : 2, 3};
        SCOPED_TRACE(fmt::format("{} {} heads, {} tokens", name, num_heads, seq_lens[1]));
        AttendScene scene(options);
        expect_near(scene, CudaAttendPath::kDecodeMma, options.v_hadamard ? 4e-4 : 3e-4);
      }
    }
  }
}

// The same beside full-precision window, whose rows lie as the packed ones.
TEST_F(GpuAttend, HeadsThatShareACtaHaveFullPrecisionWindow) {
  const std::vector<int> lengths[] = {{64, 1, 0, 37}, {300, 3000, 5, 1100}, {37, 17000, 0, 900}};
  for (const char* name : {"int4", "nvfp4"}) {
    for (const int num_heads : {8, 6, 3}) {
      for (const std::vector<int>& seq_lens : lengths) {
        if (seq_lens[1] > 10000 && num_heads != 8) continue;  // takes its time on the CPU
        SceneOptions options;
        options.runs = {{1, "int8", "int8"}, {num_heads, name, name}};
        options.key_dim = options.value_dim = 128;
        options.scales_apart = true;
        options.q_type = DType::kF16;
        options.q_per_kv = num_heads == 6 ? 6 : 2;
        options.full_precision_format = "bf16";
        options.num_sink_blocks = 3;
        options.first_recent_block = 5;
        options.k_hadamard = options.v_hadamard = num_heads != 3;
        options.seq_lens = seq_lens;
        options.q_lens = {1, 1, seq_lens[2] == 0 ? 0 : 2, 3};
        SCOPED_TRACE(fmt::format("{} {} heads, {} tokens", name, num_heads, seq_lens[1]));
        AttendScene scene(options);
        expect_near(scene, CudaAttendPath::kDecodeMma, 3.5e-3);
      }
    }
  }
}

TEST_F(GpuAttend, ASequenceThatIsNotValidGetsZerosInAllHeadsOfACta) {
  SceneOptions options;
  options.runs = {{4, "nvfp4", "nvfp4"}};
  options.key_dim = options.value_dim = 128;
  options.scales_apart = true;
  options.q_type = DType::kF16;
  options.seq_lens = {40, 40, 40};
  options.q_lens = {1, 1, 1};
  AttendScene scene(options);
  DeviceScene on_device(memory(), context(), scene);
  const std::vector<int32_t> lens = {40, 1 << 30, 40};
  ASSERT_TRUE(
      device::cuda_copy(const_cast<int32_t*>(on_device.args().seq_lens), lens.data(), 12).ok());
  const AttendOutput got = on_device.run(CudaAttendPath::kDecodeMma);
  EXPECT_EQ(on_device.counters().read().out_of_range, 1u);
  const std::vector<double> expected = scene.reference().out;
  const int row = scene.num_q_heads() * options.value_dim;
  for (int i = 0; i < 3 * row; ++i) {
    EXPECT_NEAR(got.out[i], i / row == 1 ? 0.0 : expected[i], 2e-3) << i / 128 << " " << i % 128;
  }
}

TEST_F(GpuAttend, CallersPagesThatAreNotThereAreSkippedAndCounted) {
  for (const int block_size : {16, 64}) {
    SceneOptions options;
    options.runs = {{1, "nvfp4", "nvfp4"}};
    options.key_dim = options.value_dim = 128;
    options.block_size = block_size;
    options.scales_apart = true;
    options.q_type = DType::kF16;
    options.seq_lens = {400, 300};
    options.q_lens = {1, 1};
    options.window = 150;  // of the tokens before it no block is asked for
    AttendScene scene(options);
    const AttendOutput expected = scene.reference();
    for (int i = 0; i * block_size < 400 - 150 - 64; ++i) scene.table()[i] = -7;
    DeviceScene on_device(memory(), context(), scene);
    const AttendOutput got = on_device.run(CudaAttendPath::kDecodeMma);
    EXPECT_LE(relative_rms(got.out, expected.out), 3e-4);
    EXPECT_EQ(on_device.counters().read().out_of_range, 0u);

    scene.table()[399 / block_size] = 1000000;
    DeviceScene lacking(memory(), context(), scene);
    EXPECT_EQ(rows_not_finite(lacking.run(CudaAttendPath::kDecodeMma).out, 128), "");
    EXPECT_GT(lacking.counters().read().out_of_range, 0u);
  }
}

}  // namespace
}  // namespace kvx::tests
