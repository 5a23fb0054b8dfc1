// kvx_attend: attention over a layer in the caller's memory.
#include "ops/attend/attend_cuda.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "abi/call.hpp"
#include "abi/device_verb.hpp"
#include "abi/executor.hpp"
#include "abi/kernels.hpp"
#include "abi/layer_view.hpp"
#include "abi/precision.hpp"
#include "abi/rows_view.hpp"
#include "abi/table_view.hpp"
#include "core/reused.hpp"

namespace kvx::abi {
namespace {

// What stands beside the pointers.
Status check_numbers(const kvx_attend_args_t& args, const LayerOfCaller& layer) {
  if (args.reserved != 0 || args.reserved_end != 0 || args.reserved_2 != 0) {
    return invalid_argument("args.reserved is {}, reserved_end {}, reserved_2 {}; expected 0",
                            args.reserved, args.reserved_end, args.reserved_2);
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
struct OneQueryEach {
  const int32_t* starts(int num_sequences) {
    const size_t num = static_cast<size_t>(num_sequences) + 1;
    if (known.size() < num) {
      known.resize(num);
      std::iota(known.begin(), known.end(), 0);
    }
    return known.data();
  }
  std::vector<int32_t> known;
};

// The layers of a call: both on the host, or both on a GPU.
struct Layers {
  LayerOfCaller packed;
  LayerOfCaller wide;
};

Status read_layers(const kvx_attend_args_t& known, Layers& layers) {
  KVX_RETURN_IF_ERROR(read_layer(known.layer, "layer", layers.packed, LayerPlace::kAnywhere));
  KVX_RETURN_IF_ERROR(check_numbers(known, layers.packed));
  KVX_RETURN_IF_ERROR(check_wide_ends(known));
  if (known.wide == nullptr) return {};
  const LayerOfCaller& wide = layers.wide;
  KVX_RETURN_IF_ERROR(read_layer(known.wide, "wide", layers.wide, LayerPlace::kAnywhere));
  if (!wide.transform.k.is_identity() || !wide.transform.v.is_identity()) {
    return invalid_argument("wide has a transform; both layers hold rows of layer's transform");
  }
  if (wide.is_on_device() == layers.packed.is_on_device()) return {};
  return unsupported("wide and layer lie one on the host and one on a GPU; expected both in one");
}

// All but the table, the lengths and the queries' starts.
Result<ops::AttendArgs> read_args(const kvx_attend_args_t& known, const Layers& layers) {
  const LayerOfCaller& layer = layers.packed;
  ops::AttendArgs args;
  args.packed = layer.view;
  if (known.wide != nullptr) args.wide = layers.wide.view;
  args.wide_head_blocks = known.wide_head_blocks;
  args.wide_tail_block = known.wide_tail_blocks;
  args.transform = layer.transform;
  args.num_q_heads = static_cast<int>(known.num_q_heads);
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows q,
                       read_rows(known.q, args.num_q_heads, layer.k_head_dim(), "q"));
  args.q = as_input(q);
  KVX_ASSIGN_OR_RETURN(args.out, read_rows(known.out, args.num_q_heads, layer.v_head_dim(), "out"));
  args.lse = known.lse;
  args.softmax_scale = known.softmax_scale != 0
                           ? known.softmax_scale
                           : 1.0f / std::sqrt(static_cast<float>(layer.k_head_dim()));
  args.softcap = known.softcap;
  args.window = static_cast<int>(known.window);
  args.sinks = known.sinks;
  args.tree_mask = known.tree_mask;
  args.tree_mask_stride = known.tree_mask_stride;
  KVX_ASSIGN_OR_RETURN(args.precision, read_precision(known.precision));
  return args;
}

// What kernels and their workspace are shaped by.
struct DeviceAttend {
  ops::AttendArgs args;
  ops::CudaAttendLimits limits;
};

Result<DeviceAttend> read_on_device(const kvx_attend_args_t& known, const Layers& layers) {
  KVX_ASSIGN_OR_RETURN(const DeviceTable table,
                       read_device_table(known.block_table, known.seq_lens));
  DeviceAttend attend;
  attend.args.num_sequences = table.num_sequences;
  if (table.num_sequences == 0) return attend;
  KVX_ASSIGN_OR_RETURN(attend.args, read_args(known, layers));
  attend.args.num_sequences = table.num_sequences;
  attend.args.block_table = table.table;
  attend.args.max_blocks_per_sequence = table.max_blocks;
  attend.args.seq_lens = table.seq_lens;
  attend.args.q_starts = known.q_starts;
  if (known.q_starts == nullptr) {
    return unsupported("args.q_starts is null; a call on a GPU reads the queries' starts there");
  }
  if (known.max_q_len < 1 || known.max_q_len > INT32_MAX || known.num_queries < 0) {
    return invalid_argument(
        "args.max_q_len is {} and num_queries {}; for a call on a GPU the host must be told both",
        known.max_q_len, known.num_queries);
  }
  if (known.max_tokens < 0) {
    return invalid_argument("args.max_tokens is {}; expected 0 or more", known.max_tokens);
  }
  attend.limits = {.max_q_len = static_cast<int>(known.max_q_len),
                   .total_q = known.num_queries,
                   .max_tokens = known.max_tokens};
  return attend;
}

Status check_out_apart(const kvx_attend_args_t& known, const Layers& layers,
                       const ops::AttendArgs& args, int64_t num_queries) {
  const int head_dim = layers.packed.v_head_dim();
  KVX_RETURN_IF_ERROR(
      check_apart(layers.packed, args.out, num_queries, args.num_q_heads, head_dim, "out"));
  if (known.wide == nullptr) return {};
  return check_apart(layers.wide, args.out, num_queries, args.num_q_heads, head_dim, "out");
}

Result<DeviceVerb> begin(const kvx_attend_args_t& known, const Layers& layers,
                         const ops::AttendArgs& args, void* stream) {
  VerbAddresses addresses(layers.packed);
  if (known.wide != nullptr) addresses.add(layers.wide, "wide");
  addresses.add("block_table.indices", args.block_table.ids)
      .add("seq_lens.lengths", args.seq_lens)
      .add("args.q_starts", args.q_starts)
      .add_rows("q.data", args.q)
      .add_rows("out.data", args.out)
      .add("args.lse", args.lse)
      .add("args.sinks", args.sinks)
      .add("args.tree_mask", args.tree_mask)
      .add("args.wide_head_blocks", args.wide_head_blocks)
      .add("args.wide_tail_blocks", args.wide_tail_block)
      .add("args.workspace", static_cast<const uint8_t*>(known.workspace));
  return begin_on_device(layers.packed, addresses, stream);
}

Status attend_on_device(const kvx_attend_args_t& known, const Layers& layers, void* stream) {
  KVX_ASSIGN_OR_RETURN(const DeviceAttend call, read_on_device(known, layers));
  if (call.args.num_sequences == 0) return {};
  KVX_RETURN_IF_ERROR(check_out_apart(known, layers, call.args, call.limits.total_q));
  KVX_RETURN_IF_ERROR(ops::check_attend(call.args, call.limits));
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin(known, layers, call.args, stream));
  const int64_t needed = ops::attend_workspace_bytes(verb.context, call.args, call.limits);
  constexpr uintptr_t kAlignment = 256;
  if (known.workspace_bytes < static_cast<uint64_t>(needed) ||
      reinterpret_cast<uintptr_t>(known.workspace) % kAlignment != 0) {
    return invalid_argument(
        "args.workspace is {} bytes at {}; expected {} (kvx_attend_workspace) "
        "on a multiple of {}",
        known.workspace_bytes, known.workspace, needed, kAlignment);
  }
  return ops::attend(verb.context, call.args, call.limits, static_cast<uint8_t*>(known.workspace),
                     verb.findings);
}

Status attend(const kvx_attend_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_attend_args_t known, read_struct(caller, "args"));
  Reused<Layers> kept_layers;
  Layers& layers = *kept_layers;
  KVX_RETURN_IF_ERROR(read_layers(known, layers));
  const LayerOfCaller& layer = layers.packed;
  if (layer.is_on_device()) return attend_on_device(known, layers, stream);
  Reused<TableOfCaller> kept_table;
  TableOfCaller& table = *kept_table;
  KVX_RETURN_IF_ERROR(read_table(known.block_table, known.seq_lens, layer.view.block_size, table));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(known.executor));
  if (table.num_sequences == 0) return {};
  KVX_ASSIGN_OR_RETURN(ops::AttendArgs args, read_args(known, layers));
  args.num_sequences = table.num_sequences;
  args.block_table = table.table;
  args.max_blocks_per_sequence = table.max_blocks;
  args.seq_lens = table.seq_lens;
  Reused<OneQueryEach> one_each;
  args.q_starts =
      known.q_starts != nullptr ? known.q_starts : one_each->starts(table.num_sequences);
  const int64_t num_queries = args.q_starts[table.num_sequences];
  KVX_RETURN_IF_ERROR(check_out_apart(known, layers, args, num_queries));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  return ops::attend({kernels, &chosen_executor(threads)}, args);
}

// The CPU's kernels take their scratch from the thread's stack: whatever a call on the host says,
// and one without a layer, needs nothing.
Status attend_workspace(const kvx_attend_args_t* caller, uint64_t* bytes) {
  KVX_ASSIGN_OR_RETURN(const kvx_attend_args_t known, read_struct(caller, "args"));
  if (bytes == nullptr) return invalid_argument("bytes is null");
  if (known.layer != nullptr) {
    Reused<Layers> kept_layers;
    Layers& layers = *kept_layers;
    KVX_RETURN_IF_ERROR(read_layers(known, layers));
    if (layers.packed.is_on_device()) {
      KVX_ASSIGN_OR_RETURN(const DeviceAttend call, read_on_device(known, layers));
      if (call.args.num_sequences > 0) {
        KVX_RETURN_IF_ERROR(ops::check_attend(call.args, call.limits));
        KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin(known, layers, call.args, nullptr));
        *bytes = static_cast<uint64_t>(
            ops::attend_workspace_bytes(verb.context, call.args, call.limits));
        return {};
      }
    }
  }
  *bytes = 0;
  return {};
}

Status attend_prefers_cells(const kvx_layer_t* caller, uint32_t* prefers) {
  if (prefers == nullptr) return invalid_argument("prefers is null");
  LayerOfCaller layer;
  KVX_RETURN_IF_ERROR(read_layer(caller, "layer", layer, LayerPlace::kAnywhere));
  if (!layer.is_on_device()) {
    return unsupported("layer lies on the host; only a GPU reads codes in cells");
  }
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb,
                       begin_on_device(layer, VerbAddresses(layer), /*stream=*/nullptr));
  // K's offsets by block are in the plain kernel alone, for which cells are more work.
  const bool has_offsets = layer.transform.k.block_offset != nullptr;
  *prefers =
      !has_offsets &&
      std::all_of(layer.runs.begin(), layer.runs.end(), [&](const ops::HeadRun& run) {
        return !run.v.is_alias && ops::attend_takes_cells(verb.context, run, layer.view.block_size);
      });
  return {};
}

}  // namespace
}  // namespace kvx::abi

extern "C" kvx_status_t kvx_attend_workspace(const kvx_attend_args_t* args, uint64_t* bytes) {
  return kvx::abi::run_call([&] { return kvx::abi::attend_workspace(args, bytes); });
}

extern "C" kvx_status_t kvx_attend_prefers_cells(const kvx_layer_t* layer, uint32_t* prefers) {
  return kvx::abi::run_call([&] { return kvx::abi::attend_prefers_cells(layer, prefers); });
}

extern "C" kvx_status_t kvx_attend(const kvx_attend_args_t* args, void* stream) {
  return kvx::abi::run_call([&] { return kvx::abi::attend(args, stream); });
}
