// kvx_attend: attention over a layer in the caller's memory, straight from its stored bytes.
#include "ops/attend/attend_cuda.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "api/call.hpp"
#include "api/checks/layer_view.hpp"
#include "api/checks/precision.hpp"
#include "api/checks/rows_view.hpp"
#include "api/checks/table_view.hpp"
#include "api/executor.hpp"
#include "api/kernels.hpp"
#include "api/verbs/prepared_layer.hpp"
#include "core/scratch.hpp"

namespace kvx::boundary {
namespace {

// Checks the arguments that are numbers.
Status check_numbers(const kvx_attend_args_t& args, const LayerOfCaller& layer) {
  if (args.reserved != 0 || args.reserved_end != 0 || args.reserved_2 != 0 ||
      args.reserved_3 != 0) {
    return invalid_argument(
        "args.reserved is {}, reserved_end {}, reserved_2 {}, reserved_3 {}; expected 0",
        args.reserved, args.reserved_end, args.reserved_2, args.reserved_3);
  }
  if (args.num_q_heads < 1 || args.num_q_heads > INT32_MAX) {
    return invalid_argument(
        "args.num_q_heads is {}; expected a positive multiple of num_kv_heads {}", args.num_q_heads,
        layer.view.num_kv_heads);
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

Status check_full_precision_window(const kvx_attend_args_t& args, bool has_full_precision) {
  const int given = has_full_precision + (args.num_sink_blocks != nullptr) +
                    (args.first_recent_blocks != nullptr);
  if (given == 0 || given == 3) return {};
  return invalid_argument(
      "args has {} of full_precision, num_sink_blocks and first_recent_blocks; expected all "
      "or none",
      given);
}

// The queries' starts where every sequence has one query: 0, 1, 2, ...
struct OneQueryEach {
  const int32_t* starts(int num_sequences) {
    const size_t num = static_cast<size_t>(num_sequences) + 1;
    if (numbers.size() < num) {
      numbers.resize(num);
      std::iota(numbers.begin(), numbers.end(), 0);
    }
    return numbers.data();
  }
  std::vector<int32_t> numbers;
};

Status read_layers(const kvx_attend_args_t& args, CallLayers& layers) {
  KVX_RETURN_IF_ERROR(read_call_layers(args.layer, args.full_precision, layers));
  KVX_RETURN_IF_ERROR(check_numbers(args, layers.packed));
  return check_full_precision_window(args, layers.has_full_precision);
}

// Reads everything but the table, the lengths and the queries' starts.
Result<ops::AttendArgs> read_args(const kvx_attend_args_t& args, const CallLayers& layers) {
  const LayerOfCaller& layer = layers.packed;
  ops::AttendArgs checked;
  checked.packed = layer.view;
  if (layers.has_full_precision) checked.full_precision = layers.full_precision.view;
  checked.num_sink_blocks = args.num_sink_blocks;
  checked.first_recent_block = args.first_recent_blocks;
  checked.transform = layer.transform;
  checked.num_q_heads = static_cast<int>(args.num_q_heads);
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows q,
                       read_rows(args.q, checked.num_q_heads, layer.k_head_dim(), "q"));
  checked.q = as_input(q);
  KVX_ASSIGN_OR_RETURN(checked.out,
                       read_rows(args.out, checked.num_q_heads, layer.v_head_dim(), "out"));
  checked.lse = args.lse;
  checked.softmax_scale = args.softmax_scale != 0
                              ? args.softmax_scale
                              : 1.0f / std::sqrt(static_cast<float>(layer.k_head_dim()));
  checked.softcap = args.softcap;
  checked.window = static_cast<int>(args.window);
  checked.sinks = args.sinks;
  checked.tree_mask = args.tree_mask;
  checked.tree_mask_stride = args.tree_mask_stride;
  KVX_ASSIGN_OR_RETURN(checked.precision, read_precision(args.precision));
  return checked;
}

// A call on a GPU: what its kernels and their workspace are sized by.
struct DeviceAttend {
  DeviceTable table;
  ops::AttendArgs checked;
  ops::CudaAttendLimits limits;
};

Result<DeviceAttend> read_on_device(const kvx_attend_args_t& args, const CallLayers& layers) {
  DeviceAttend attend;
  KVX_ASSIGN_OR_RETURN(attend.table,
                       read_device_table(args.block_table, args.seq_lens,
                                         layers.packed.view.block_size, args.block_table_stride));
  const DeviceTable& table = attend.table;
  attend.checked.num_sequences = table.num_sequences;
  if (table.num_sequences == 0) return attend;
  KVX_ASSIGN_OR_RETURN(attend.checked, read_args(args, layers));
  attend.checked.num_sequences = table.num_sequences;
  attend.checked.block_table = table.table;
  attend.checked.max_blocks_per_sequence = table.max_blocks;
  attend.checked.seq_lens = table.seq_lens;
  attend.checked.q_starts = args.q_starts;
  if (args.q_starts == nullptr) {
    return unsupported("args.q_starts is null; a call on a GPU needs it in that GPU's memory");
  }
  if (args.max_q_len < 1 || args.max_q_len > INT32_MAX || args.num_queries < 0) {
    return invalid_argument(
        "args.max_q_len is {} and num_queries {}; a call on a GPU needs both on the host",
        args.max_q_len, args.num_queries);
  }
  if (args.max_tokens < 0) {
    return invalid_argument("args.max_tokens is {}; expected 0 or more", args.max_tokens);
  }
  if (args.num_decodes > static_cast<uint32_t>(table.num_sequences)) {
    return invalid_argument("args.num_decodes is {}; expected 0 to seq_count, {}", args.num_decodes,
                            table.num_sequences);
  }
  attend.limits = {.max_q_len = static_cast<int>(args.max_q_len),
                   .total_q = args.num_queries,
                   .max_tokens = args.max_tokens,
                   .num_decodes = static_cast<int>(args.num_decodes)};
  return attend;
}

Status check_out_apart(const CallLayers& layers, const ops::AttendArgs& checked,
                       int64_t num_queries) {
  const int head_dim = layers.packed.v_head_dim();
  KVX_RETURN_IF_ERROR(
      check_apart(layers.packed, checked.out, num_queries, checked.num_q_heads, head_dim, "out"));
  if (!layers.has_full_precision) return {};
  return check_apart(layers.full_precision, checked.out, num_queries, checked.num_q_heads, head_dim,
                     "out");
}

void add_arrays(VerbAddresses& addresses, const kvx_attend_args_t& args, const DeviceAttend& call) {
  const ops::AttendArgs& checked = call.checked;
  add_table(addresses, call.table);
  addresses.add("args.q_starts", checked.q_starts)
      .add_rows("q.data", checked.q)
      .add_rows("out.data", checked.out)
      .add("args.lse", checked.lse)
      .add("args.sinks", checked.sinks)
      .add("args.tree_mask", checked.tree_mask)
      .add("args.num_sink_blocks", checked.num_sink_blocks)
      .add("args.first_recent_blocks", checked.first_recent_block)
      .add("args.workspace", static_cast<const uint8_t*>(args.workspace));
}

Result<DeviceVerb> begin(const kvx_attend_args_t& args, const CallLayers& layers,
                         const DeviceAttend& call, void* stream) {
  VerbAddresses addresses(layers.packed);
  if (layers.has_full_precision) addresses.add(layers.full_precision, "full_precision");
  add_arrays(addresses, args, call);
  return begin_on_device(layers.packed, addresses, stream);
}

// Launches a checked call by a plan, which this thread has from an earlier call where it can.
Status launch(const kvx_attend_args_t& args, DeviceAttend& call, const DeviceVerb& verb) {
  KVX_ASSIGN_OR_RETURN(const ops::AttendPlan* plan,
                       ops::AttendPlan::of_thread(verb.context, call.checked, call.limits));
  const int64_t needed = plan->workspace_bytes();
  if (args.workspace_bytes < static_cast<uint64_t>(needed) ||
      reinterpret_cast<uintptr_t>(args.workspace) % ops::kCudaWorkspaceAlignment != 0) {
    return invalid_argument(
        "args.workspace is {} bytes at {}; expected {} (kvx_attend_workspace) "
        "on a multiple of {}",
        args.workspace_bytes, args.workspace, needed, ops::kCudaWorkspaceAlignment);
  }
  if (call.table.has_in_place && plan->reads_in_place()) {
    call.checked.in_place = call.table.in_place;
    call.checked.block_table.row_stride = call.table.row_stride_in_place;
  } else {
    KVX_RETURN_IF_ERROR(pack_if_needed(verb.context, call.table));
    call.checked.block_table = call.table.table;
    call.checked.seq_lens = call.table.seq_lens;
  }
  return ops::attend(verb.context, call.checked, *plan, static_cast<uint8_t*>(args.workspace),
                     verb.counters);
}

Status attend_on_device(const kvx_attend_args_t& args, CallLayers& layers, void* stream) {
  KVX_ASSIGN_OR_RETURN(DeviceAttend call, read_on_device(args, layers));
  if (call.checked.num_sequences == 0) return {};
  KVX_RETURN_IF_ERROR(check_out_apart(layers, call.checked, call.limits.total_q));
  KVX_RETURN_IF_ERROR(ops::check_attend(call.checked, call.limits));
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin(args, layers, call, stream));
  KVX_ASSIGN_OR_RETURN(const auto scales, widen_scales(verb.context, layers.packed));
  WidenedScales full_precision_scales;
  if (layers.has_full_precision) {
    KVX_ASSIGN_OR_RETURN(full_precision_scales, widen_scales(verb.context, layers.full_precision));
  }
  return launch(args, call, verb);
}

Status attend_prepared(kvx_prepared_layer_t handle, const kvx_attend_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const PreparedLayer* prepared, find_prepared_layer(handle));
  KVX_ASSIGN_OR_RETURN(const kvx_attend_args_t args, read_struct(caller, "args"));
  if (args.layer != nullptr || args.full_precision != nullptr) {
    return invalid_argument(
        "args.layer or full_precision is set; expected null, since the handle has the layers");
  }
  const CallLayers& layers = prepared->layers;
  KVX_RETURN_IF_ERROR(check_numbers(args, layers.packed));
  KVX_RETURN_IF_ERROR(check_full_precision_window(args, layers.has_full_precision));
  KVX_ASSIGN_OR_RETURN(DeviceAttend call, read_on_device(args, layers));
  if (call.checked.num_sequences == 0) return {};
  KVX_RETURN_IF_ERROR(check_out_apart(layers, call.checked, call.limits.total_q));
  KVX_RETURN_IF_ERROR(ops::check_attend(call.checked, call.limits));
  Scratch<VerbAddresses> addresses;
  addresses->clear();
  add_arrays(*addresses, args, call);
  KVX_RETURN_IF_ERROR(addresses->deferred_errors().status());  // not aligned
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, prepared->begin(stream));
  return launch(args, call, verb);
}

Status attend(const kvx_attend_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_attend_args_t args, read_struct(caller, "args"));
  Scratch<CallLayers> kept_layers;
  CallLayers& layers = *kept_layers;
  KVX_RETURN_IF_ERROR(read_layers(args, layers));
  const LayerOfCaller& layer = layers.packed;
  if (layer.is_on_device()) return attend_on_device(args, layers, stream);
  Scratch<TableOfCaller> kept_table;
  TableOfCaller& table = *kept_table;
  KVX_RETURN_IF_ERROR(read_table(args.block_table, args.seq_lens, layer.view.block_size, table,
                                 args.block_table_stride));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(args.executor));
  if (table.num_sequences == 0) return {};
  KVX_ASSIGN_OR_RETURN(ops::AttendArgs checked, read_args(args, layers));
  checked.num_sequences = table.num_sequences;
  checked.block_table = table.table;
  checked.max_blocks_per_sequence = table.max_blocks;
  checked.seq_lens = table.seq_lens;
  Scratch<OneQueryEach> one_each;
  checked.q_starts =
      args.q_starts != nullptr ? args.q_starts : one_each->starts(table.num_sequences);
  const int64_t num_queries = checked.q_starts[table.num_sequences];
  KVX_RETURN_IF_ERROR(check_out_apart(layers, checked, num_queries));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  return ops::attend({kernels, &chosen_executor(threads)}, checked);
}

// The CPU's kernels use the thread's own scratch, so a call on the host, or one without a layer,
// needs no workspace.
Status attend_workspace(const kvx_attend_args_t* caller, uint64_t* bytes) {
  KVX_ASSIGN_OR_RETURN(const kvx_attend_args_t args, read_struct(caller, "args"));
  if (bytes == nullptr) return invalid_argument("bytes is null");
  if (args.layer != nullptr) {
    Scratch<CallLayers> kept_layers;
    CallLayers& layers = *kept_layers;
    KVX_RETURN_IF_ERROR(read_layers(args, layers));
    if (layers.packed.is_on_device()) {
      KVX_ASSIGN_OR_RETURN(const DeviceAttend call, read_on_device(args, layers));
      if (call.checked.num_sequences > 0) {
        KVX_RETURN_IF_ERROR(ops::check_attend(call.checked, call.limits));
        KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin(args, layers, call, nullptr));
        *bytes = static_cast<uint64_t>(
            ops::attend_workspace_bytes(verb.context, call.checked, call.limits));
        return {};
      }
    }
  }
  *bytes = 0;
  return {};
}

Status check_bound(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return {};
  return invalid_argument("bounds.{} is {}; expected 1 to {}", name, value, most);
}

Result<ops::CudaAttendBounds> read_bounds(const kvx_attend_bounds_t* caller, int num_q_heads) {
  KVX_ASSIGN_OR_RETURN(const kvx_attend_bounds_t bounds, read_struct(caller, "bounds"));
  if (bounds.reserved != 0) {
    return invalid_argument("bounds.reserved is {}; expected 0", bounds.reserved);
  }
  const int64_t most_queries = INT32_MAX / num_q_heads;
  KVX_RETURN_IF_ERROR(check_bound("max_sequences", bounds.max_sequences, ops::kMaxCudaSequences));
  KVX_RETURN_IF_ERROR(check_bound("max_queries", bounds.max_queries, most_queries));
  KVX_RETURN_IF_ERROR(check_bound("max_tokens", bounds.max_tokens, INT32_MAX));
  KVX_RETURN_IF_ERROR(check_bound("max_q_len", bounds.max_q_len, most_queries));
  return ops::CudaAttendBounds{.max_sequences = static_cast<int>(bounds.max_sequences),
                               .max_total_q = bounds.max_queries,
                               .max_q_len = static_cast<int>(bounds.max_q_len),
                               .max_tokens = bounds.max_tokens};
}

// Needs no array of a batch, of which an engine that starts has none.
Status attend_workspace_up_to(const kvx_attend_args_t* caller, const kvx_attend_bounds_t* bounds,
                              uint64_t* bytes) {
  KVX_ASSIGN_OR_RETURN(const kvx_attend_args_t args, read_struct(caller, "args"));
  if (bytes == nullptr) return invalid_argument("bytes is null");
  Scratch<CallLayers> kept_layers;
  CallLayers& layers = *kept_layers;
  KVX_RETURN_IF_ERROR(read_call_layers(args.layer, args.full_precision, layers));
  KVX_RETURN_IF_ERROR(check_numbers(args, layers.packed));
  ops::AttendArgs checked;
  checked.packed = layers.packed.view;
  if (layers.has_full_precision) {
    static constexpr int32_t kAnyBlock = 0;  // that there is such an array is what matters
    checked.full_precision = layers.full_precision.view;
    checked.num_sink_blocks = checked.first_recent_block = &kAnyBlock;
  }
  checked.transform = layers.packed.transform;
  checked.num_q_heads = static_cast<int>(args.num_q_heads);
  checked.softmax_scale = 1.0f;
  checked.window = static_cast<int>(args.window);
  KVX_RETURN_IF_ERROR(ops::check_attend(checked, {}));
  KVX_ASSIGN_OR_RETURN(const ops::CudaAttendBounds most, read_bounds(bounds, checked.num_q_heads));
  if (!layers.packed.is_on_device()) {
    *bytes = 0;
    return {};
  }
  VerbAddresses addresses(layers.packed);
  if (layers.has_full_precision) addresses.add(layers.full_precision, "full_precision");
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb,
                       begin_on_device(layers.packed, addresses, /*stream=*/nullptr));
  *bytes = static_cast<uint64_t>(ops::attend_workspace_bytes_up_to(verb.context, checked, most));
  return {};
}

Status attend_prefers_interleaved_order(const kvx_layer_t* caller, uint32_t* prefers) {
  if (prefers == nullptr) return invalid_argument("prefers is null");
  LayerOfCaller layer;
  KVX_RETURN_IF_ERROR(read_layer(caller, "layer", layer, LayerMemory::kHostOrDevice));
  if (!layer.is_on_device()) {
    return unsupported("layer lies on the host; only a GPU reads codes in interleaved order");
  }
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb,
                       begin_on_device(layer, VerbAddresses(layer), /*stream=*/nullptr));
  // Only the reference kernel handles K's offsets by block, and it decodes interleaved codes
  // slower.
  const bool has_offsets = layer.transform.k.block_offset != nullptr;
  *prefers = !has_offsets && !layer.has_segments() &&
             std::all_of(layer.runs.begin(), layer.runs.end(), [&](const ops::HeadRun& run) {
               return !run.v.is_alias &&
                      ops::attend_takes_interleaved_order(verb.context, run, layer.view.block_size);
             });
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_attend_workspace(const kvx_attend_args_t* args, uint64_t* bytes) {
  return kvx::boundary::run_call([&] { return kvx::boundary::attend_workspace(args, bytes); });
}

extern "C" kvx_status_t kvx_attend_workspace_up_to(const kvx_attend_args_t* args,
                                                   const kvx_attend_bounds_t* bounds,
                                                   uint64_t* bytes) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::attend_workspace_up_to(args, bounds, bytes); });
}

extern "C" kvx_status_t kvx_attend_prefers_interleaved_order(const kvx_layer_t* layer,
                                                             uint32_t* prefers) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::attend_prefers_interleaved_order(layer, prefers); });
}

extern "C" kvx_status_t kvx_attend(const kvx_attend_args_t* args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::attend(args, stream); });
}

extern "C" kvx_status_t kvx_prepared_attend(kvx_prepared_layer_t prepared,
                                            const kvx_attend_args_t* args, void* stream) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::attend_prepared(prepared, args, stream); });
}
