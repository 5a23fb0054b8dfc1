// attend's kernels on windows with sinks: a sequence's first tokens that all its queries see.
#include "tests/gpu/attend_near.hpp"

namespace kvx::tests {
namespace {

using ops::CudaAttendPath;

// As a cache does: blocks between the sinks and the window are not the sequence's any more.
void release_between(AttendScene& scene) {
  const SceneOptions& options = scene.options();
  const int sinks_end = (options.window_sinks + options.block_size - 1) / options.block_size;
  for (size_t s = 0; s < options.seq_lens.size(); ++s) {
    const int first_seen = options.seq_lens[s] - options.q_lens[s] - options.window + 1;
    int32_t* ids = scene.table().data() + s * scene.args().block_table.row_stride;
    for (int b = sinks_end; b < first_seen / options.block_size; ++b) ids[b] = -7;
  }
}

// Windows that begin behind their sinks, among them and between two queries' first tokens.
TEST_F(GpuAttend, AWindowsSinksAreSeenAndTheBlocksBetweenAreNotRead) {
  struct Case {
    const char* k;
    const char* v;
    RowOrder order;
    int block_size;
    bool has_decode_mma;
  };
  const Case cases[] = {
      {"int8", "bf16", RowOrder::kNhd, 16, false},   {"bf16", "bf16", RowOrder::kNhd, 16, true},
      {"int8", "int8", RowOrder::kRecord, 16, true}, {"nvfp4", "nvfp4", RowOrder::kNhd, 16, true},
      {"int4", "int4", RowOrder::kRecord, 64, true},
  };
  for (const Case& c : cases) {
    SceneOptions options;
    options.runs = {{2, c.k, c.v}};
    options.key_dim = options.value_dim = 128;
    options.order = c.order;
    options.block_size = c.block_size;
    options.scales_apart = c.order == RowOrder::kNhd;
    options.q_type = DType::kF16;
    options.seq_lens = {5000, 300, 90, 260, 290};
    options.q_lens = {3, 1, 90, 16, 30};
    options.window = 200;
    options.window_sinks = 70;
    SCOPED_TRACE(fmt::format("{}/{}", c.k, c.v));
    AttendScene scene(options);
    release_between(scene);
    EXPECT_EQ(DeviceScene(memory(), context(), scene).has_decode_mma(), c.has_decode_mma);
    expect_near(scene, CudaAttendPath::kReference, 1e-4);
    expect_near(scene, CudaAttendPath::kChoose, tile_tolerance(c.k, c.v, options.q_type));
    if (c.has_decode_mma) {
      expect_near(scene, CudaAttendPath::kDecodeMma, tile_tolerance(c.k, c.v, options.q_type));
    }
  }
}

// Windows that begin at every tile of a step, a few blocks behind the sinks.
TEST_F(GpuAttend, BlocksBetweenSinksAndWindowAreNotReadWhereverTheWindowBegins) {
  for (const char* name : {"bf16", "int8", "int4", "nvfp4"}) {
    for (const int window_sinks : {4, 32, 290}) {
      SceneOptions options;
      options.runs = {{2, name, name}};
      options.key_dim = options.value_dim = 128;
      options.order = RowOrder::kRecord;
      options.block_size = 16;
      options.q_type = DType::kF16;
      options.window = 200;
      options.window_sinks = window_sinks;
      for (int begin = window_sinks + 1; begin < window_sinks + 130; begin += 7) {
        options.seq_lens.push_back(begin + options.window);
      }
      options.q_lens.assign(options.seq_lens.size(), 1);
      SCOPED_TRACE(fmt::format("{}, {} sinks", name, window_sinks));
      AttendScene scene(options);
      release_between(scene);
      expect_near(scene, CudaAttendPath::kReference, 1e-4);
      expect_near(scene, CudaAttendPath::kDecodeMma, tile_tolerance(name, name, options.q_type));
    }
  }
}

// A tree larger than the window, whose sinks are tokens before all of it.
TEST_F(GpuAttend, AWindowsSinksAreSeenByATreesQueries) {
  constexpr int kNodes = 200;
  for (const char* name : {"bf16", "int8", "nvfp4"}) {
    SceneOptions options;
    options.runs = {{1, name, name}};
    options.key_dim = options.value_dim = 128;
    options.q_per_kv = 1;
    options.order = RowOrder::kRecord;
    options.block_size = 64;
    options.q_type = DType::kF16;
    options.seq_lens = {1000};
    options.q_lens = {kNodes};
    options.window = 16;
    options.window_sinks = 4;
    SCOPED_TRACE(name);
    AttendScene scene(options);
    // In heap order: a node sees itself and its ancestors.
    std::vector<uint8_t> mask(kNodes * kNodes, 0);
    for (int row = 0; row < kNodes; ++row) {
      for (int seen = row + 1; seen > 0; seen /= 2) mask[row * kNodes + seen - 1] = 1;
    }
    scene.args().tree_mask = mask.data();
    scene.args().tree_mask_stride = kNodes;
    expect_near(scene, CudaAttendPath::kReference, 1e-4);
    expect_near(scene, CudaAttendPath::kDecodeMma, tile_tolerance(name, name, options.q_type));
  }
}

// Sinks and window in bf16, packed and both: also a window that lies in the end in bf16 whole, and
// packed tokens that are all sinks.
TEST_F(GpuAttend, TilesSeeAWindowsSinksAmongFullPrecisionWindow) {
  struct Case {
    int block_size;
    int num_sink_blocks;
    int first_recent_block;
    int window_sinks;
  };
  const Case cases[] = {{16, 1, 2, 40}, {16, 0, 9, 40}, {16, 2, 1, 20},  {16, 1, 59, 40},
                        {16, 5, 2, 40}, {64, 1, 1, 4},  {64, 0, 3, 100}, {64, 2, 3, 70}};
  for (const char* name : {"int8", "nvfp4", "fp8_e4m3"}) {
    for (const Case& c : cases) {
      SceneOptions options;
      options.runs = {{2, name, name}};
      options.key_dim = options.value_dim = 128;
      options.order = RowOrder::kRecord;
      options.block_size = c.block_size;
      options.q_type = DType::kF16;
      options.full_precision_format = "bf16";
      options.num_sink_blocks = c.num_sink_blocks;
      options.first_recent_block = c.first_recent_block;
      options.seq_lens = {1000, 150, 20, 2500};
      options.q_lens = {2, 1, 4, 1};
      options.window = 100;
      options.window_sinks = c.window_sinks;
      SCOPED_TRACE(
          fmt::format("{}, blocks of {}, {} at the beginning and {} at the end in bf16, {} "
                      "sinks",
                      name, c.block_size, c.num_sink_blocks, c.first_recent_block, c.window_sinks));
      AttendScene scene(options);
      release_between(scene);
      expect_near(scene, CudaAttendPath::kDecodeMma, 3.5e-3);
    }
  }
}

// Cut in several, of which the first alone has the sinks, merged in a cluster or by a launch.
TEST_F(GpuAttend, ALongWindowsSinksAreSeenOnce) {
  for (const char* name : {"bf16", "int8", "int4", "nvfp4"}) {
    for (const int num_sequences : {1, 12}) {
      SceneOptions options;
      options.runs = {{1, name, name}};
      options.key_dim = options.value_dim = 128;
      options.order = RowOrder::kRecord;
      options.block_size = 64;
      options.q_type = DType::kF16;
      options.seq_lens.assign(num_sequences, 6000);
      options.q_lens.assign(num_sequences, 1);
      options.window = 4000;
      options.window_sinks = 130;
      SCOPED_TRACE(fmt::format("{}, {} sequences", name, num_sequences));
      AttendScene scene(options);
      release_between(scene);
      expect_near(scene, CudaAttendPath::kDecodeMma, tile_tolerance(name, name, options.q_type));
    }
  }
}

}  // namespace
}  // namespace kvx::tests
