// plan_window on a GPU: one CTA shares out window blocks, then a CTA a sequence writes its lists.
#include "device/cuda_error.hpp"
#include "ops/window/window_rules.hpp"

namespace kvx::ops {
namespace {

using namespace window;

constexpr int kThreads = 1024;  // of the CTA that shares out
constexpr int kWarp = 32;
constexpr int kPlaceThreads = 256;

// The number of threads before this one whose flag is set; `total` of all.
struct Ranks {
  __device__ int rank(bool flag, int& total) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const unsigned votes = __ballot_sync(~0u, flag);
    if (lane == 0) sums[warp] = __popc(votes);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) before += sums[w];
      total += sums[w];
    }
    __syncthreads();
    return before + __popc(votes & ((1u << lane) - 1));
  }
  int* sums;  // shared, a warp each
};

__device__ int touch(const WindowPlanArgs& args, const Parts& parts, Ranks ranks) {
  const int64_t num_items = SequencePlan::num_touched(args);
  const int64_t num_all = num_items * args.num_sequences;
  int64_t num_wanted = 0;
  for (int64_t first = 0; first < num_all; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    int32_t page = -1;
    if (i < num_all) {
      const SequencePlan plan(args, static_cast<int>(i / num_items));
      page = touch_item(plan, parts, i % num_items);
    }
    int total;
    const int64_t place = num_wanted + ranks.rank(page >= 0, total);
    if (page >= 0 && place < args.state.num_window_blocks) parts.wanted[place] = page;
    num_wanted += total;
  }
  for (int s = threadIdx.x / kWarp; s < args.num_sequences; s += kThreads / kWarp) {
    const SequencePlan plan(args, s);
    for (int64_t b = plan.first_written() + threadIdx.x % kWarp; b < plan.end_block; b += kWarp) {
      touch_written(plan, parts, b);
    }
  }
  return static_cast<int>(min(num_wanted, args.state.num_window_blocks));
}

__device__ int choose(const WindowPlanArgs& args, const Parts& parts, int num_wanted, Ranks ranks) {
  const int64_t num = args.state.num_window_blocks;
  const int64_t begin = parts.header[kNext];
  __syncthreads();  // all have read where to begin
  int num_given = 0;
  const int64_t num_chunks = (num + kThreads - 1) / kThreads;
  for (int64_t chunk = 0; chunk < num_chunks * num_rounds(args) && num_given < num_wanted;
       ++chunk) {
    const int64_t i = chunk % num_chunks * kThreads + threadIdx.x;
    const int64_t copy = (begin + i) % num;
    const bool is_free =
        i < num && may_take(args, parts, copy, static_cast<int>(chunk / num_chunks));
    int total;
    const int place = num_given + ranks.rank(is_free, total);
    if (is_free && place < num_wanted) {
      parts.chosen[place] = static_cast<int32_t>(copy);
      if (place == num_wanted - 1 || place == num_given + total - 1) {  // the last so far
        parts.header[kNext] = static_cast<int32_t>((copy + 1) % num);
      }
    }
    num_given = min(num_given + total, num_wanted);
    __syncthreads();
  }
  return num_given;
}

__device__ void clear_evicted(const WindowPlanArgs& args) {
  for (int64_t i = threadIdx.x; i < args.num_evicted(); i += kThreads) {
    args.evicted_from[i] = args.evicted_to[i] = 0;
    args.evicted_tokens[i] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    share_out(const __grid_constant__ WindowPlanArgs args, DeviceCounters* counters) {
  __shared__ int sums[kThreads / kWarp];
  const Parts parts(args.state);
  if (threadIdx.x == 0) begin_step(parts);
  if (args.reopens()) clear_evicted(args);
  __syncthreads();
  const int num_wanted = touch(args, parts, {sums});
  __syncthreads();
  const int num_given = choose(args, parts, num_wanted, {sums});
  __syncthreads();
  // One thread, because a page may be wanted twice: the later window block is its copy, as on the
  // CPU. The pairs are as many as new blocks of the step's windows.
  if (threadIdx.x != 0) return;
  parts.header[kWanted] = num_wanted;
  parts.header[kGiven] = num_given;
  for (int i = 0; i < num_given; ++i) assign(args, parts, i);
  const int num_missing = args.reopens() ? num_wanted - num_given : 0;
  if (num_missing > 0) {
    atomicAdd(&counters->out_of_range, static_cast<unsigned long long>(num_missing));
  }
}

__device__ void count_out_of_range(const SequencePlan& plan, DeviceCounters* counters) {
  if (!plan.is_valid) {
    if (threadIdx.x == 0) atomicAdd(&counters->out_of_range, 1ull);
    return;
  }
  for (int64_t b = threadIdx.x; b < plan.end_block; b += kPlaceThreads) {
    if (plan.page(b) < 0) atomicAdd(&counters->out_of_range, 1ull);
  }
}

__device__ void hide_row(const WindowPlanArgs& args, int64_t row) {
  args.window_slots[row] = -1;
  if (args.slots != nullptr) args.slots[row] = -1;
}

// A CTA a sequence, and one for the rows behind the last sequence's.
__global__ void __launch_bounds__(kPlaceThreads)
    place(const __grid_constant__ WindowPlanArgs args, DeviceCounters* counters) {
  const int s = blockIdx.x;
  if (s == args.num_sequences) {
    for (int64_t row = max(args.q_starts[s], 0) + threadIdx.x; row < args.num_tokens;
         row += kPlaceThreads) {
      hide_row(args, row);
    }
    return;
  }
  const Parts parts(args.state);
  const SequencePlan plan(args, s);
  count_out_of_range(plan, counters);
  __shared__ Edges edges;
  if (threadIdx.x == 0) {
    edges = find_edges(plan, parts);
    args.num_sink_blocks[s] = static_cast<int32_t>(edges.num_sinks);
    args.first_recent_block[s] = static_cast<int32_t>(edges.first_recent);
    if (args.reopens()) place_reopened(plan, parts);
  }
  __syncthreads();
  for (int64_t b = threadIdx.x; b < args.max_blocks_per_sequence; b += kPlaceThreads) {
    args.ids[s * args.max_blocks_per_sequence + b] = placed_id(plan, parts, edges, b);
  }
  const int64_t num_rows = min(plan.num_rows, args.num_tokens);
  for (int64_t row = threadIdx.x; row < num_rows; row += kPlaceThreads) {
    if (plan.is_valid) {
      place_row(plan, parts, row);
    } else if (plan.first_row >= 0 && plan.first_row + row < args.num_tokens) {
      hide_row(args, plan.first_row + row);
    }
  }
  if (args.unit != WindowUnit::kBlocks) return;
  const int64_t num_closing = args.closing_blocks_per_sequence();
  for (int64_t i = threadIdx.x; i < num_closing; i += kPlaceThreads) {
    place_closing(plan, parts, i);
  }
}

__global__ void forget(const __grid_constant__ WindowState state, const int64_t* blocks,
                       int64_t num_blocks, DeviceCounters* counters) {
  const int64_t i = int64_t{blockIdx.x} * kPlaceThreads + threadIdx.x;
  if (i >= num_blocks) return;
  if (blocks[i] < 0 || blocks[i] >= state.num_blocks) {
    atomicAdd(&counters->out_of_range, 1ull);
    return;
  }
  Parts(state).forget(static_cast<int32_t>(blocks[i]));
}

}  // namespace

Status plan_window(const CudaContext& context, const WindowPlanArgs& args,
                   DeviceCounters* counters) {
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  share_out<<<1, kThreads, 0, stream>>>(args, counters);
  place<<<static_cast<unsigned>(args.num_sequences) + 1, kPlaceThreads, 0, stream>>>(args,
                                                                                     counters);
  return device::cuda_launch_status("plan_window");
}

Status forget_window_blocks(const CudaContext& context, const WindowState& state,
                            std::span<const int64_t> blocks, DeviceCounters* counters) {
  if (blocks.empty()) return {};
  const auto num = static_cast<int64_t>(blocks.size());
  const auto grid = static_cast<unsigned>((num + kPlaceThreads - 1) / kPlaceThreads);
  forget<<<grid, kPlaceThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(
      state, blocks.data(), num, counters);
  return device::cuda_launch_status("forget_window_blocks");
}

}  // namespace kvx::ops
