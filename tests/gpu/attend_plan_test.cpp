// Plans of attend: made once for several layers, with decodes in front of prompts, over rows of
// padding; what a launch refuses by its plan; and the bound of their workspace. The last two need
// no GPU, but a build with CUDA.
#include <gmock/gmock.h>

#include "tests/gpu/attend_near.hpp"

namespace kvx::tests::attend_plan_test {
namespace {

using ops::AttendArgs;
using ops::AttendPlan;
using ops::CudaAttendLimits;
using ops::CudaAttendPath;
using testing::HasSubstr;

// --- on a GPU ---

// Outputs on the device, poisoned, with rows behind those of a scene.
struct Outputs {
  Outputs(cache::Memory& memory, const SceneOptions& options, int num_q_heads, int64_t num_rows)
      : row_bytes(int64_t{num_q_heads} * options.value_dim * bytes_of(options.out_type)),
        num_heads(num_q_heads),
        out(memory.allocate(num_rows * row_bytes, "out").value()),
        lse(memory.allocate(num_rows * num_q_heads * 4, "lse").value()),
        out_bytes(static_cast<size_t>(num_rows * row_bytes)),
        lse_bytes(static_cast<size_t>(num_rows * num_q_heads * 4)) {
    EXPECT_TRUE(device::cuda_fill(out.data(), 0xFF, std::ssize(out_bytes)).ok());
    EXPECT_TRUE(device::cuda_fill(lse.data(), 0xFF, std::ssize(lse_bytes)).ok());
  }
  void give_to(AttendArgs& args) {
    args.out.data = out.data();
    args.lse = reinterpret_cast<float*>(lse.data());
  }
  void fetch() {
    EXPECT_TRUE(device::cuda_copy(out_bytes.data(), out.data(), std::ssize(out_bytes)).ok());
    EXPECT_TRUE(device::cuda_copy(lse_bytes.data(), lse.data(), std::ssize(lse_bytes)).ok());
  }
  void expect_untouched_from(int64_t row) const {
    for (size_t i = row * row_bytes; i < out_bytes.size(); ++i) {
      ASSERT_EQ(out_bytes[i], 0xFF) << "out, row " << i / row_bytes;
    }
    for (size_t i = row * num_heads * 4; i < lse_bytes.size(); ++i) {
      ASSERT_EQ(lse_bytes[i], 0xFF) << "lse, row " << i / (num_heads * 4);
    }
  }

  int64_t row_bytes;
  int64_t num_heads;
  cache::Region out;
  cache::Region lse;
  std::vector<uint8_t> out_bytes;
  std::vector<uint8_t> lse_bytes;
};

class GpuAttendPlan : public GpuTest {
 protected:
  cache::Region poisoned_workspace(int64_t bytes) {
    cache::Region workspace = memory().allocate(bytes + 256, "workspace").value();
    EXPECT_TRUE(device::cuda_fill(workspace.data(), 0xFF, bytes + 256).ok());
    return workspace;
  }
  // Attends into new outputs of so many rows.
  Outputs attend(DeviceScene& scene, const AttendScene& host, AttendArgs args,
                 const CudaAttendLimits& limits, int64_t num_rows, CudaAttendPath path) {
    Outputs outputs(memory(), host.options(), host.num_q_heads(), num_rows);
    outputs.give_to(args);
    attend_into(scene, args, limits, path);
    outputs.fetch();
    return outputs;
  }
  void attend_into(DeviceScene& scene, const AttendArgs& args, const CudaAttendLimits& limits,
                   CudaAttendPath path) {
    const int64_t bytes = ops::attend_workspace_bytes(context(), args, limits, path);
    const cache::Region workspace = poisoned_workspace(bytes);
    const Status status =
        ops::attend(context(), args, limits, workspace.data(), scene.counters().get(), path);
    EXPECT_TRUE(status.ok()) << status.error().message;
    synchronize();
  }
};

SceneOptions options_of(const char* format, std::vector<int> seq_lens, std::vector<int> q_lens) {
  SceneOptions options;
  options.runs = {{2, format, format}};
  options.key_dim = options.value_dim = 128;
  options.q_per_kv = 4;
  options.block_size = 64;
  options.order = RowOrder::kRecord;
  options.q_type = DType::kBF16;
  options.seq_lens = std::move(seq_lens);
  options.q_lens = std::move(q_lens);
  return options;
}

const char* const kPlannedFormats[] = {"bf16", "int8", "int4", "nvfp4"};

TEST_F(GpuAttendPlan, ServesEveryLayerThatIsStoredAlike) {
  for (const char* format : kPlannedFormats) {
    for (const bool has_prompts : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, prompts {}", format, has_prompts));
      const SceneOptions options =
          options_of(format, {700, 90, 300},
                     has_prompts ? std::vector<int>{200, 90, 1} : std::vector<int>{1, 1, 1});
      std::vector<std::unique_ptr<AttendScene>> hosts;
      std::vector<std::unique_ptr<DeviceScene>> layers;
      for (int layer = 0; layer < 3; ++layer) {
        hosts.push_back(std::make_unique<AttendScene>(options));
        for (float& x : hosts.back()->keys()) x *= static_cast<float>(1 + layer) / 2;
        hosts.back()->fill();
        layers.push_back(std::make_unique<DeviceScene>(memory(), context(), *hosts.back()));
      }
      const auto plan = AttendPlan::make(context(), layers[0]->args(), layers[0]->limits());
      ASSERT_TRUE(plan.ok()) << plan.error().message;
      const cache::Region workspace = poisoned_workspace(plan.value().workspace_bytes());
      for (int layer = 0; layer < 3; ++layer) {
        DeviceScene& scene = *layers[layer];
        const AttendOutput alone = scene.run(CudaAttendPath::kChoose);
        scene.poison();
        const Status status = ops::attend(context(), scene.args(), plan.value(), workspace.data(),
                                          scene.counters().get());
        ASSERT_TRUE(status.ok()) << status.error().message;
        const AttendOutput planned = scene.fetch();
        EXPECT_EQ(planned.out, alone.out) << "layer " << layer;
        EXPECT_EQ(planned.lse, alone.lse) << "layer " << layer;
        EXPECT_EQ(scene.counters().read().out_of_range, 0u);
      }
    }
  }
}

TEST_F(GpuAttendPlan, IsCapturedAndReplayedForOtherLengths) {
  AttendScene host(options_of("int8", {900, 400, 0}, {1, 1, 1}));
  DeviceScene scene(memory(), context(), host);
  const auto plan = AttendPlan::make(context(), scene.args(), scene.limits());
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  const cache::Region workspace = poisoned_workspace(plan.value().workspace_bytes());
  auto graph = device::CudaGraph::capture(context().stream, [&] {
    return ops::attend(context(), scene.args(), plan.value(), workspace.data(),
                       scene.counters().get());
  });
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  for (const std::vector<int32_t>& lens : {std::vector<int32_t>{900, 400, 0}, {17, 1, 0}}) {
    std::copy(lens.begin(), lens.end(), const_cast<int32_t*>(host.args().seq_lens));
    ASSERT_TRUE(
        device::cuda_copy(const_cast<int32_t*>(scene.args().seq_lens), lens.data(), 12).ok());
    scene.poison();
    ASSERT_TRUE(graph.value().launch(context().stream).ok());
    EXPECT_LE(relative_rms(scene.fetch().out, host.reference().out), 3.5e-3);
  }
}

// Cases whose splits are merged by a launch of their own, which takes all rows of q.
SceneOptions padded_case(int which) {
  SceneOptions options = options_of("int8", {2300, 70, 0, 640, 0}, {1, 5, 0, 2, 0});
  if (which == 1) {
    options.window = 512;
    options.window_sinks = 300;  // more than a warp takes: a split of their own
  }
  if (which == 2) options.q_lens = {1, 1, 0, 1, 0};
  if (which == 3) options.q_lens = {300, 70, 0, 64, 0};  // prefill
  if (which == 4) {
    options.seq_lens = {17000, 70, 0, 640, 0};  // balanced by length
    options.q_lens = {1, 1, 0, 1, 0};
  }
  return options;
}

TEST_F(GpuAttendPlan, NeitherReadsNorWritesRowsOfPadding) {
  for (int which = 0; which < 5; ++which) {
    AttendScene host(padded_case(which));
    DeviceScene scene(memory(), context(), host);
    const AttendOutput expected = host.reference();
    for (const CudaAttendPath path : {CudaAttendPath::kChoose, CudaAttendPath::kReference}) {
      for (const int64_t padding : {1, 7, 500}) {
        SCOPED_TRACE(
            fmt::format("case {}, path {}, {} rows more", which, static_cast<int>(path), padding));
        CudaAttendLimits limits = scene.limits();
        const int64_t num_rows = limits.total_q;
        limits.total_q += padding;
        // Queries of padding are not there at all: a kernel that read them would fault, or not.
        const Outputs got = attend(scene, host, scene.args(), limits, limits.total_q, path);
        got.expect_untouched_from(num_rows);
        const auto* numbers = reinterpret_cast<const float*>(got.out_bytes.data());
        const std::vector<double> out(numbers, numbers + expected.out.size());
        EXPECT_LE(relative_rms(out, expected.out), 3.5e-3);
        EXPECT_EQ(scene.counters().read().out_of_range, 0u);
      }
    }
  }
}

// Sequences [first, first + num) of a scene's arguments.
AttendArgs sequences_of(AttendArgs args, int first, int num) {
  args.num_sequences = num;
  args.block_table.ids += first * args.block_table.row_stride;
  args.seq_lens += first;
  args.q_starts += first;
  if (args.num_sink_blocks) {
    args.num_sink_blocks += first;
    args.first_recent_block += first;
  }
  return args;
}

TEST_F(GpuAttendPlan, OfDecodesInFrontOfPromptsIsThatOfTwoCalls) {
  constexpr int kDecodes = 4;
  for (const char* format : kPlannedFormats) {
    for (int which = 0; which < 4; ++which) {
      SCOPED_TRACE(fmt::format("{} case {}", format, which));
      SceneOptions options =
          options_of(format, {900, 33, 0, 3100, 70, 333, 640}, {1, 1, 0, 1, 70, 33, 200});
      if (which == 1) options.q_lens = {1, 0, 0, 1, 5, 2, 1};  // drafts
      if (which == 2 && std::string(format) != "bf16") {
        options.full_precision_format = "bf16";
      }
      options.window = which == 3 ? 400 : 0;
      AttendScene host(options);
      DeviceScene scene(memory(), context(), host);
      for (const CudaAttendPath path : {CudaAttendPath::kChoose, CudaAttendPath::kReference}) {
        CudaAttendLimits limits = scene.limits();
        const int64_t num_rows = limits.total_q;
        const int num_others = scene.args().num_sequences - kDecodes;
        AttendArgs args = scene.args();
        Outputs apart(memory(), options, host.num_q_heads(), num_rows);
        apart.give_to(args);
        attend_into(scene, sequences_of(args, 0, kDecodes), {.max_q_len = 1, .total_q = kDecodes},
                    path);
        attend_into(scene, sequences_of(args, kDecodes, num_others), limits, path);
        apart.fetch();

        limits.num_decodes = kDecodes;
        const Outputs mixed = attend(scene, host, scene.args(), limits, num_rows, path);
        EXPECT_EQ(mixed.out_bytes, apart.out_bytes);
        EXPECT_EQ(mixed.lse_bytes, apart.lse_bytes);
        const auto* numbers = reinterpret_cast<const float*>(mixed.out_bytes.data());
        const AttendOutput expected = host.reference();
        const std::vector<double> out(numbers, numbers + expected.out.size());
        EXPECT_LE(relative_rms(out, expected.out), 3.5e-3);
        EXPECT_EQ(scene.counters().read().out_of_range, 0u);
      }
    }
  }
}

// --- without a GPU ---

#if KVX_HAS_CUDA

ops::CudaContext made_up_device() {
  ops::CudaContext context;
  context.device.compute_major = 9;
  context.device.num_multiprocessors = 132;
  context.device.shared_bytes_per_multiprocessor = 228 << 10;
  context.device.shared_bytes_per_cta = 227 << 10;
  context.device.reserved_shared_bytes = 1 << 10;
  return context;
}

// A layer's description, whose memory is not there: a plan does not look at it.
struct MadeUpCall {
  explicit MadeUpCall(const std::string& format, int num_kv_heads = 8, int q_per_kv = 4) {
    int64_t bytes = 0;
    for (ops::SideView* side : {&run.k, &run.v}) {
      side->spec = scene_spec(format);
      side->head_dim = 128;
      const int code_bytes = format::code_bytes_per_row(side->spec, 128);
      const int scale_bytes = format::scale_bytes_per_row(side->spec, 128);
      side->codes = {address(4096 + bytes), 0, code_bytes, 0};
      bytes += 64 * code_bytes;
      side->scales = {address(4096 + bytes), 0, scale_bytes, 0,
                      format::scale_bytes_per_group(side->spec)};
      bytes += 64 * scale_bytes;
    }
    for (ops::SideView* side : {&run.k, &run.v}) {
      side->codes.head_stride = side->scales.head_stride = bytes;
      side->codes.block_stride = side->scales.block_stride = bytes * num_kv_heads;
    }
    run.num_heads = num_kv_heads;
    args.packed = {100000, 64, num_kv_heads, {&run, 1}};
    args.num_q_heads = num_kv_heads * q_per_kv;
    args.num_sequences = 4;
    args.block_table = {reinterpret_cast<const int32_t*>(address(64)), 2048};
    args.max_blocks_per_sequence = 2048;
    args.seq_lens = args.q_starts = args.block_table.ids;
    args.q =
        dense_rows(static_cast<const void*>(address(1024)), DType::kBF16, args.num_q_heads, 128);
    args.out = dense_rows(static_cast<void*>(address(2048)), DType::kBF16, args.num_q_heads, 128);
  }
  MadeUpCall(const MadeUpCall&) = delete;
  static uint8_t* address(int64_t at) { return reinterpret_cast<uint8_t*>(at); }

  ops::HeadRun run;
  AttendArgs args;
};

TEST(AttendPlanShape, RefusesCallsThatDiffer) {
  const CudaAttendLimits limits{.max_q_len = 256, .total_q = 512, .max_tokens = 1024};
  const auto refused = [&](const char* words, auto change) {
    MadeUpCall call("int8");
    const auto plan = AttendPlan::make(made_up_device(), call.args, limits);
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    change(call);
    const Status status = ops::attend(made_up_device(), call.args, plan.value(), nullptr, nullptr);
    ASSERT_FALSE(status.ok()) << words;
    EXPECT_THAT(status.error().message, HasSubstr(words));
  };
  refused("num_sequences", [](auto& call) { --call.args.num_sequences; });
  refused("num_q_heads", [](auto& call) { call.args.num_q_heads = 64; });
  refused("blocks of a sequence", [](auto& call) { --call.args.max_blocks_per_sequence; });
  refused("window", [](auto& call) { call.args.window = 77; });
  refused("type of q", [](auto& call) { call.args.q.dtype = DType::kF16; });
  refused("block_size", [](auto& call) { call.args.packed.block_size = 128; });
  refused("format", [](auto& call) { call.run.v.spec = scene_spec("int4"); });
  refused("head_dim", [](auto& call) { call.run.k.head_dim = 64; });
  refused("order", [](auto& call) { call.run.k.is_interleaved = true; });
  refused("strides", [](auto& call) { call.run.k.codes.token_stride += 16; });
  refused("strides", [](auto& call) { call.run.v.scales.block_stride += 16; });
  refused("alignment", [](auto& call) { call.run.v.codes.base += 8; });
  refused("alignment", [](auto& call) { call.run.k.scales.base += 4; });
  refused("tree_mask", [](auto& call) {
    call.args.tree_mask = MadeUpCall::address(64);
    call.args.tree_mask_stride = 256;
  });
  refused("full-precision window", [](auto& call) {
    call.args.num_sink_blocks = call.args.first_recent_block = call.args.seq_lens;
    call.args.full_precision = call.args.packed;
  });
  refused("block_offset", [](auto& call) {
    call.args.transform.k.block_offset = reinterpret_cast<const float*>(MadeUpCall::address(64));
  });
  refused("q or out has rows off 16 bytes", [](auto& call) { call.args.q.data += 2; });
  refused("q or out has rows off 16 bytes", [](auto& call) { call.args.out.token_stride += 1; });
}

TEST(AttendPlanShape, IsFoundAgainByTheThreadForLayersThatAreStoredAlike) {
  MadeUpCall call("int8");
  const CudaAttendLimits limits{.max_q_len = 1, .total_q = 4, .max_tokens = 1024};
  const auto find = [&](const CudaAttendLimits& of_call) {
    return AttendPlan::of_thread(made_up_device(), call.args, of_call).value();
  };
  const AttendPlan* const first = find(limits);
  EXPECT_EQ(find(limits), first);
  call.run.k.codes.base += 1 << 20;  // another layer
  call.args.q.data += 4096;
  call.args.softmax_scale = 0.5f;
  EXPECT_EQ(find(limits), first);
  CudaAttendLimits others = limits;
  others.max_tokens = 2048;
  const AttendPlan* const second = find(others);
  EXPECT_NE(second, first);
  EXPECT_EQ(find(limits), first);
  call.args.q.data += 2;  // not where prefill kernels accept it: planned apart, even for decodes
  EXPECT_NE(find(limits), first);
  // More kinds of calls than a thread remembers take each other's places, and serve nothing wrong.
  for (int i = 0; i < 40; ++i) {
    others.max_tokens = 3000 + i;
    EXPECT_EQ(find(others)->limits(), others);
  }
}

struct BoundCase {
  const char* format;
  int num_kv_heads;
  int q_per_kv;
  int window;
  int window_sinks;
};

// A bound that every call within it keeps, and that engines can afford.
TEST(AttendWorkspaceBound, HoldsForEveryCallBelowIt) {
  for (const BoundCase& c : {BoundCase{"bf16", 8, 4, 0, 0},
                             {"int8", 8, 4, 0, 0},
                             {"nvfp4", 8, 4, 0, 0},
                             {"int4", 32, 1, 0, 0},
                             {"int8", 2, 32, 0, 0},
                             {"int8", 8, 4, 4096, 0},
                             {"bf16", 8, 4, 4096, 4}}) {
    SCOPED_TRACE(fmt::format("{}, {} KV heads of {} query heads, window {}", c.format,
                             c.num_kv_heads, c.q_per_kv, c.window));
    MadeUpCall call(c.format, c.num_kv_heads, c.q_per_kv);
    call.args.window = c.window;
    call.args.window_sinks = c.window_sinks;
    const ops::CudaContext context = made_up_device();
    const int64_t bound = ops::attend_workspace_bytes_up_to(
        context, call.args,
        {.max_sequences = 256, .max_total_q = 8192, .max_q_len = 8192, .max_tokens = 131072});
    EXPECT_LE(bound, int64_t{64} << 20);
    int64_t most = 0;
    for (const int sequences : {1, 2, 3, 5, 16, 31, 64, 100, 200, 256}) {
      for (const int q_len : {1, 2, 4, 5, 8, 16, 33, 100, 512, 2048, 8192}) {
        for (const int64_t tokens : {1, 100, 2000, 8192, 16384, 40000, 131072}) {
          for (const int num_decodes : {0, sequences / 2}) {
            call.args.num_sequences = sequences;
            CudaAttendLimits limits;
            limits.max_q_len = q_len;
            limits.total_q = std::min<int64_t>(int64_t{sequences} * q_len, 8192);
            limits.max_tokens = tokens;
            limits.num_decodes = num_decodes;
            const int64_t bytes = ops::attend_workspace_bytes(context, call.args, limits);
            most = std::max(most, bytes);
            ASSERT_LE(bytes, bound) << sequences << " x " << q_len << ", tokens " << tokens;
            const int64_t tight = ops::attend_workspace_bytes_up_to(context, call.args,
                                                                    {.max_sequences = sequences,
                                                                     .max_total_q = limits.total_q,
                                                                     .max_q_len = q_len,
                                                                     .max_tokens = tokens});
            ASSERT_LE(bytes, tight) << sequences << " x " << q_len << ", tokens " << tokens;
          }
        }
      }
    }
    EXPECT_GT(most, 0) << "nothing was split";
  }
}

// The reference kernel stores a partial result of each row, split or not.
TEST(AttendWorkspaceBound, IsThatOfOneSplitWhereRowsAreMoreThanThat) {
  MadeUpCall call("f32");
  const ops::CudaContext context = made_up_device();
  const int64_t rows_bytes = int64_t{8192} * 32 * (128 * 4 + 8);
  const int64_t bound = ops::attend_workspace_bytes_up_to(
      context, call.args,
      {.max_sequences = 256, .max_total_q = 8192, .max_q_len = 8192, .max_tokens = 131072});
  EXPECT_GE(bound, rows_bytes);
  EXPECT_LE(bound, rows_bytes + 4096);
  for (const int sequences : {1, 7, 256}) {
    for (const int q_len : {1, 32, 8192}) {
      call.args.num_sequences = sequences;
      const CudaAttendLimits limits{
          .max_q_len = q_len, .total_q = std::min(sequences * q_len, 8192), .max_tokens = 131072};
      EXPECT_LE(ops::attend_workspace_bytes(context, call.args, limits), bound);
    }
  }
}

#endif

}  // namespace
}  // namespace kvx::tests::attend_plan_test
