// DeviceScene: an AttendScene, filled by the CPU, attended on the device.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <string>

#include "ops/attend/attend_cuda.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/gpu/test_kernels.hpp"
#include "tests/support/attend_scene.hpp"
#include "tests/support/interleaved_order.hpp"

namespace kvx::tests {

// Which of rows of `dim` numbers are not finite, and where; empty if none is.
inline std::string rows_not_finite(const std::vector<double>& numbers, int dim) {
  std::string found;
  for (size_t row = 0; row < numbers.size() / dim; ++row) {
    int count = 0, first = -1;
    for (int d = dim - 1; d >= 0; --d) {
      if (std::isfinite(numbers[row * dim + d])) continue;
      ++count;
      first = d;
    }
    if (count > 0) found += fmt::format(" row {}: {} from {} on", row, count, first);
  }
  return found;
}

// Case 0: rotations alone. 1: means, V rotated, sinks. 2: factors, K rotated. 3: all, with softcap.
inline void set_transforms(SceneOptions& options, int which) {
  options.k_hadamard = which != 1;
  options.v_hadamard = which != 2;
  options.k_mean = options.v_mean = which == 1 || which == 3;
  options.k_factor = options.v_factor = which >= 2;
  options.softcap = which == 3 ? 3.0f : 0.0f;
  options.sinks = which == 1;
}

// Shapes 0 to 5: bf16 blocks at both ends, some with a window, a softcap or rotations.
inline void set_full_precision_window(SceneOptions& options, int shape) {
  options.full_precision_format = "bf16";
  options.num_sink_blocks = shape % 3;
  options.first_recent_block = 1 + shape % 2 * 2;
  options.window = shape == 4 ? 100 : 0;
  options.softcap = shape == 1 ? 3.0f : 0.0f;
  options.k_hadamard = options.v_hadamard = shape >= 2;
}

class DeviceScene {
 public:
  // is_interleaved: the packed blocks' codes on the device.
  DeviceScene(cache::Memory& memory, const ops::CudaContext& context, AttendScene& scene,
              bool is_interleaved = false)
      : context_(context),
        scene_(scene),
        is_interleaved_(is_interleaved),
        mirror_(memory),
        counters_(memory),
        args_(scene.args()) {
    mirror_args(scene.options());
    make_limits();
    using Path = ops::CudaAttendPath;
    for (const Path path : {Path::kReference, Path::kDecodeMma, Path::kLatent, Path::kLatentMma,
                            Path::kPrefill, Path::kPrefillMma}) {
      workspace_bytes_ =
          std::max(workspace_bytes_, ops::attend_workspace_bytes(context, args_, limits_, path));
    }
    workspace_ = memory.allocate(workspace_bytes_ + kCanaryBytes, "workspace").value();
  }

  ops::AttendArgs& args() { return args_; }
  ops::CudaAttendLimits& limits() { return limits_; }
  const DeferredErrors& counters() const { return counters_; }
  Mirror& mirror() { return mirror_; }
  bool has_latent() const { return ops::attend_has_latent(context_, args_); }
  bool has_decode_mma() const { return ops::attend_has_decode_mma(context_, args_); }

  Status launch(ops::CudaAttendPath path) {
    return ops::attend(context_, args_, limits_, workspace_.data(), counters_.get(), path);
  }

  // Poisons what the call writes, attends and reads the outputs back.
  AttendOutput run(ops::CudaAttendPath path) {
    poison();
    const Status status = launch(path);
    EXPECT_TRUE(status.ok()) << status.error().message;
    return fetch();
  }

  // Captured once, the call serves every batch of other lengths. all_lens: of two sequences.
  void expect_replays(ops::CudaAttendPath path, std::span<const std::vector<int32_t>> all_lens,
                      double tolerance = 3e-4) {
    auto graph = device::CudaGraph::capture(context_.stream, [&] { return launch(path); });
    ASSERT_TRUE(graph.ok()) << graph.error().message;
    for (const std::vector<int32_t>& lens : all_lens) {
      const int64_t bytes = std::ssize(lens) * 4;
      memcpy(const_cast<int32_t*>(scene_.args().seq_lens), lens.data(), lens.size() * 4);
      ASSERT_TRUE(device::cuda_copy(const_cast<int32_t*>(args_.seq_lens), lens.data(), bytes).ok());
      poison();
      ASSERT_TRUE(graph.value().launch(context_.stream).ok());
      const AttendOutput got = fetch();
      EXPECT_LE(relative_rms(got.out, scene_.reference().out), tolerance);
    }
  }

  // What an earlier call left: a kernel that reads what it did not write shows it.
  void poison() {
    ASSERT_EQ(poison_shared_memory(context_), "");
    EXPECT_TRUE(device::cuda_fill(workspace_.data(), 0xFF, workspace_bytes_ + kCanaryBytes).ok());
    if (out_.empty()) return;
    EXPECT_TRUE(device::cuda_fill(out_on_device_, 0xFF, std::ssize(out_)).ok());
    EXPECT_TRUE(device::cuda_fill(args_.lse, 0xFF, std::ssize(lse_) * 4).ok());
  }

  AttendOutput fetch() {
    const Status done = device::cuda_synchronize(context_.stream);
    EXPECT_TRUE(done.ok()) << done.error().message;
    if (out_.empty()) return {};
    EXPECT_TRUE(device::cuda_copy(out_.data(), out_on_device_, std::ssize(out_)).ok());
    EXPECT_TRUE(device::cuda_copy(lse_.data(), args_.lse, std::ssize(lse_) * 4).ok());
    expect_canary();
    const DType type = scene_.options().out_type;
    std::vector<float> out(out_.size() / bytes_of(type));
    ops::cpu::kernel_table(CpuLevel::kScalar)
        .load_floats(type, out_.data(), static_cast<int>(out.size()), out.data());
    return {{out.begin(), out.end()}, {lse_.begin(), lse_.end()}};
  }

 private:
  static constexpr int64_t kCanaryBytes = 4096;

  struct Segment {
    std::vector<ops::HeadRun> runs;
    ops::LayerView view;
  };

  void expect_canary() {
    std::vector<uint8_t> canary(kCanaryBytes);
    EXPECT_TRUE(
        device::cuda_copy(canary.data(), workspace_.data() + workspace_bytes_, kCanaryBytes).ok());
    for (const uint8_t byte : canary) ASSERT_EQ(byte, 0xFF) << "written past the workspace";
  }

  ops::LayerView mirrored_view(const ops::LayerView& host, SceneCache& cache,
                               std::vector<ops::HeadRun>& runs, bool is_interleaved) {
    const auto convert = [&](const auto& codes) {
      for (const ops::HeadRun& run : host.runs) {
        for (const ops::SideView* side : {&run.k, &run.v}) {
          convert_codes(*side, host.num_blocks, host.block_size, run.num_heads, codes);
        }
      }
    };
    if (is_interleaved) convert(format::interleaved_from_nibbles);
    for (std::vector<uint8_t>& bytes : cache.memory()) mirror_.add(bytes);
    if (is_interleaved) convert(format::nibbles_from_interleaved);
    runs.assign(host.runs.begin(), host.runs.end());
    for (ops::HeadRun& run : runs) {
      for (ops::SideView* side : {&run.k, &run.v}) {
        side->is_interleaved = is_interleaved;
        side->codes.base = mirror_.at(side->codes.base);
        side->scales.base = mirror_.at(side->scales.base);
        if (side->channels.base) side->channels.base = mirror_.at(side->channels.base);
        if (side->tensor_scales) {
          side->tensor_scales = mirror_.add(side->tensor_scales, run.num_heads);
        }
      }
    }
    ops::LayerView view = host;
    view.runs = runs;
    if (host.next_segment != nullptr) view.next_segment = mirrored_segment(*host.next_segment);
    return view;
  }

  // Rows' second one, whose bytes are mirrored already.
  const ops::LayerView* mirrored_segment(const ops::LayerView& host) {
    Segment& segment = segments_.emplace_back();
    segment.runs.assign(host.runs.begin(), host.runs.end());
    for (ops::HeadRun& run : segment.runs) run.k.codes.base = mirror_.at(run.k.codes.base);
    segment.view = host;
    segment.view.runs = segment.runs;
    return &segment.view;
  }

  void mirror_args(const SceneOptions& options) {
    const ops::AttendArgs& host = scene_.args();
    args_.packed = mirrored_view(host.packed, scene_.packed(), packed_runs_, is_interleaved_);
    if (scene_.full_precision())
      args_.full_precision =
          mirrored_view(host.full_precision, *scene_.full_precision(), full_precision_runs_, false);
    const int64_t n = host.num_sequences;
    args_.num_sink_blocks = mirror_.add(host.num_sink_blocks, n);
    args_.first_recent_block = mirror_.add(host.first_recent_block, n);
    args_.block_table.ids = mirror_.add(host.block_table.ids, n * host.block_table.row_stride);
    args_.seq_lens = mirror_.add(host.seq_lens, n);
    args_.q_starts = mirror_.add(host.q_starts, n + 1);
    const int64_t total_q = host.q_starts[n];
    const int64_t q_numbers = total_q * host.num_q_heads * options.key_dim;
    args_.q.data = mirror_.add(host.q.data, q_numbers * bytes_of(options.q_type));
    out_.resize(total_q * host.num_q_heads * options.value_dim * bytes_of(options.out_type));
    lse_.resize(total_q * host.num_q_heads);
    out_on_device_ = mirror_.add(out_);
    args_.out.data = out_on_device_;
    args_.lse = mirror_.add(lse_);
    args_.sinks = mirror_.add(host.sinks, host.num_q_heads);
    args_.tree_mask = mirror_.add(host.tree_mask, total_q * host.tree_mask_stride);
    const int64_t heads = host.packed.num_kv_heads;
    args_.transform.k = mirrored(mirror_, host.transform.k, heads * options.key_dim);
    args_.transform.v = mirrored(mirror_, host.transform.v, heads * options.value_dim);
  }

  void make_limits() {
    const ops::AttendArgs& host = scene_.args();
    limits_.max_q_len = 1;
    for (int s = 0; s < host.num_sequences; ++s) {
      limits_.max_q_len = std::max(limits_.max_q_len, host.q_starts[s + 1] - host.q_starts[s]);
    }
    limits_.total_q = host.q_starts[host.num_sequences];
  }

  ops::CudaContext context_;
  AttendScene& scene_;
  const bool is_interleaved_;
  Mirror mirror_;
  DeferredErrors counters_;
  ops::AttendArgs args_;
  ops::CudaAttendLimits limits_;
  cache::Region workspace_;
  int64_t workspace_bytes_ = 0;
  std::vector<ops::HeadRun> packed_runs_, full_precision_runs_;
  std::deque<Segment> segments_;  // of packed rows and of the full-precision window's
  std::vector<uint8_t> out_;
  std::vector<float> lse_;
  uint8_t* out_on_device_ = nullptr;
};

}  // namespace kvx::tests
