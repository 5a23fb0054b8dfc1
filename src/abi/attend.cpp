// kvx_attend: attention over a layer in the caller's memory.
#include "ops/attend/attend.hpp"

#include <cmath>
#include <numeric>

#include "abi/call.hpp"
#include "abi/executor.hpp"
#include "abi/kernels.hpp"
#include "abi/layer_view.hpp"
#include "abi/table_view.hpp"

namespace kvx::abi {
namespace {

// What stands beside the pointers.
Status check_numbers(const kvx_attend_args_t& args, const LayerOfCaller& layer) {
  if (args.reserved != 0) {
    return invalid_argument("args.reserved is {}; expected 0", args.reserved);
  }
  if (args.num_q_heads < 1 || args.num_q_heads > INT32_MAX) {
    return invalid_argument(
        "args.num_q_heads is {}; expected a positive multiple of num_kv_heads "
        "{}",
        args.num_q_heads, layer.view.num_kv_heads);
  }
  if (args.window > INT32_MAX) {
    return invalid_argument("args.window is {}; expected at most {}", args.window, INT32_MAX);
  }
  if (layer.v_head_dim() == 0) {
    return invalid_argument("layer stores no V; attention needs one");
  }
  if (args.workspace == nullptr && args.workspace_bytes != 0) {
    return invalid_argument("args.workspace is null; workspace_bytes is {}", args.workspace_bytes);
  }
  return {};
}

Status check_wide_ends(const kvx_attend_args_t& args) {
  const int given = (args.wide != nullptr) + (args.wide_head_blocks != nullptr) +
                    (args.wide_tail_blocks != nullptr);
  if (given == 0 || given == 3) return {};
  return invalid_argument(
      "args has {} of wide, wide_head_blocks and wide_tail_blocks; expected all "
      "or none",
      given);
}

// 0, 1, 2, ...: one query a sequence.
const int32_t* one_query_each(int num_sequences) {
  thread_local std::vector<int32_t> starts;
  if (std::ssize(starts) < num_sequences + 1) {
    starts.resize(static_cast<size_t>(num_sequences) + 1);
    std::iota(starts.begin(), starts.end(), 0);
  }
  return starts.data();
}

Status attend(const kvx_attend_args_t* caller) {
  KVX_ASSIGN_OR_RETURN(const kvx_attend_args_t known, read_struct(caller, "args"));
  thread_local LayerOfCaller layer;
  thread_local LayerOfCaller wide;
  KVX_RETURN_IF_ERROR(read_layer(known.layer, "layer", layer));
  KVX_RETURN_IF_ERROR(check_numbers(known, layer));
  KVX_RETURN_IF_ERROR(check_wide_ends(known));
  if (known.wide != nullptr) {
    KVX_RETURN_IF_ERROR(read_layer(known.wide, "wide", wide));
    if (!wide.transform.k.is_identity() || !wide.transform.v.is_identity()) {
      return invalid_argument("wide has a transform; both layers hold rows of layer's transform");
    }
  }
  thread_local TableOfCaller table;
  KVX_RETURN_IF_ERROR(read_table(known.block_table, known.seq_lens, layer.view.block_size, table));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(known.executor));
  if (table.num_sequences == 0) return {};

  ops::AttendArgs args;
  args.packed = layer.view;
  if (known.wide != nullptr) args.wide = wide.view;
  args.wide_head_blocks = known.wide_head_blocks;
  args.wide_tail_block = known.wide_tail_blocks;
  args.transform = layer.transform;
  args.num_sequences = table.num_sequences;
  args.block_table = table.table;
  args.max_blocks_per_sequence = table.max_blocks;
  args.seq_lens = table.seq_lens;
  args.q_starts = known.q_starts != nullptr ? known.q_starts : one_query_each(table.num_sequences);
  args.num_q_heads = static_cast<int>(known.num_q_heads);
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows q,
                       read_rows(known.q, args.num_q_heads, layer.k_head_dim(), "q"));
  args.q = as_input(q);
  KVX_ASSIGN_OR_RETURN(args.out, read_rows(known.out, args.num_q_heads, layer.v_head_dim(), "out"));
  const int64_t num_queries = args.q_starts[table.num_sequences];
  KVX_RETURN_IF_ERROR(
      check_apart(layer, args.out, num_queries, args.num_q_heads, layer.v_head_dim(), "out"));
  args.lse = known.lse;
  args.softmax_scale = known.softmax_scale != 0
                           ? known.softmax_scale
                           : 1.0f / std::sqrt(static_cast<float>(layer.k_head_dim()));
  args.softcap = known.softcap;
  args.window = static_cast<int>(known.window);
  args.sinks = known.sinks;
  args.tree_mask = known.tree_mask;
  args.tree_mask_stride = known.tree_mask_stride;
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  return ops::attend({kernels, &chosen_executor(threads)}, args);
}

// The CPU's kernels take their scratch from the thread's stack.
Status attend_workspace(const kvx_attend_args_t* caller, uint64_t* bytes) {
  KVX_RETURN_IF_ERROR(read_struct(caller, "args"));
  if (bytes == nullptr) return invalid_argument("bytes is null");
  *bytes = 0;
  return {};
}

}  // namespace
}  // namespace kvx::abi

extern "C" kvx_status_t kvx_attend_workspace(const kvx_attend_args_t* args, uint64_t* bytes) {
  return kvx::abi::run_call([&] { return kvx::abi::attend_workspace(args, bytes); });
}

extern "C" kvx_status_t kvx_attend(const kvx_attend_args_t* args, void* /*stream*/) {
  return kvx::abi::run_call([&] { return kvx::abi::attend(args); });
}
