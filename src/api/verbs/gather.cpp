// kvx_gather: decodes the stored rows of token ranges.
#include <algorithm>

#include "api/call.hpp"
#include "api/checks/layer_view.hpp"
#include "api/checks/rows_view.hpp"
#include "api/checks/table_view.hpp"
#include "api/executor.hpp"
#include "api/kernels.hpp"
#include "api/verbs/device_verb.hpp"
#include "core/scratch.hpp"
#include "ops/gather/gather.hpp"
#include "ops/gather/gather_cuda.hpp"

namespace kvx::boundary {
namespace {

// One range per sequence: all of its tokens, one sequence after the other.
void whole_sequences(const TableOfCaller& table, std::vector<ops::GatherRange>& ranges) {
  int64_t first_row = 0;
  for (int s = 0; s < table.num_sequences; ++s) {
    ranges.push_back({s, 0, table.seq_lens[s], first_row});
    first_row += table.seq_lens[s];
  }
}

// The four arrays of ranges come together. Without them range i is all of sequence i.
Status check_all_or_none(const kvx_gather_args_t& args, int num_sequences) {
  const int given = (args.sequences != nullptr) + (args.first_tokens != nullptr) +
                    (args.num_tokens != nullptr) + (args.first_rows != nullptr);
  if (given != 0 && given != 4) {
    return invalid_argument(
        "args has some of sequences, first_tokens, num_tokens and first_rows; "
        "expected all or none");
  }
  if (given == 4 || args.num_ranges == static_cast<uint32_t>(num_sequences)) return {};
  return invalid_argument(
      "args.num_ranges is {}; without arrays of ranges it is the table's seq_count {}",
      args.num_ranges, num_sequences);
}

Status read_ranges(const kvx_gather_args_t& args, const TableOfCaller& table,
                   std::vector<ops::GatherRange>& ranges) {
  ranges.clear();
  KVX_RETURN_IF_ERROR(check_all_or_none(args, table.num_sequences));
  if (args.sequences == nullptr) {
    whole_sequences(table, ranges);
    return {};
  }
  for (uint32_t i = 0; i < args.num_ranges; ++i) {
    const ops::GatherRange range = {args.sequences[i], args.first_tokens[i], args.num_tokens[i],
                                    args.first_rows[i]};
    if (range.sequence >= 0 && range.sequence < table.num_sequences && range.first_token >= 0 &&
        range.num_tokens >= 0 &&
        range.num_tokens > table.seq_lens[range.sequence] - range.first_token) {
      return out_of_range("range {} is {} tokens from {}; sequence {} has {}", i, range.num_tokens,
                          range.first_token, range.sequence, table.seq_lens[range.sequence]);
    }
    ranges.push_back(range);
  }
  return {};
}

Status read_outputs(const kvx_gather_args_t& args, const LayerOfCaller& layer,
                    ops::GatherArgs& checked) {
  checked.cache = layer.view;
  checked.transform = layer.transform;
  if (args.num_rows < 0) {
    return invalid_argument("args.num_rows is {}; expected 0 or more", args.num_rows);
  }
  if (args.num_rows > 0) checked.num_rows = args.num_rows;
  const int num_heads = layer.view.num_kv_heads;
  if (args.k != nullptr) {
    KVX_ASSIGN_OR_RETURN(checked.k, read_rows(args.k, num_heads, layer.k_head_dim(), "k"));
  }
  if (args.v == nullptr) return {};
  if (layer.v_head_dim() == 0) return invalid_argument("args.v is set; the layer stores no V");
  KVX_ASSIGN_OR_RETURN(checked.v, read_rows(args.v, num_heads, layer.v_head_dim(), "v"));
  return {};
}

Status check_outputs_apart(const LayerOfCaller& layer, const ops::GatherArgs& checked,
                           int64_t num_rows) {
  const int num_heads = layer.view.num_kv_heads;
  KVX_RETURN_IF_ERROR(check_apart(layer, checked.k, num_rows, num_heads, layer.k_head_dim(), "k"));
  return check_apart(layer, checked.v, num_rows, num_heads, layer.v_head_dim(), "v");
}

Result<ops::CudaGatherRanges> device_ranges(const kvx_gather_args_t& args,
                                            const DeviceTable& table) {
  const ops::CudaGatherRanges ranges = {.count = args.num_ranges,
                                        .sequences = args.sequences,
                                        .first_tokens = args.first_tokens,
                                        .num_tokens = args.num_tokens,
                                        .first_rows = args.first_rows};
  KVX_RETURN_IF_ERROR(check_all_or_none(args, table.num_sequences));
  return ranges;
}

Status gather_on_device(const kvx_gather_args_t& args, LayerOfCaller& layer, void* stream) {
  KVX_ASSIGN_OR_RETURN(DeviceTable table,
                       read_device_table(args.block_table, args.seq_lens, layer.view.block_size));
  KVX_ASSIGN_OR_RETURN(ops::CudaGatherRanges ranges, device_ranges(args, table));
  if (table.num_sequences == 0 || ranges.count == 0) return {};
  ops::GatherArgs checked;
  KVX_RETURN_IF_ERROR(read_outputs(args, layer, checked));
  checked.max_blocks_per_sequence = table.max_blocks;
  checked.num_sequences = table.num_sequences;
  KVX_RETURN_IF_ERROR(check_outputs_apart(layer, checked, args.num_rows));
  VerbAddresses addresses(layer);
  add_table(addresses, table);
  addresses.add_rows("k.data", checked.k)
      .add_rows("v.data", checked.v)
      .add("args.sequences", args.sequences)
      .add("args.first_tokens", args.first_tokens)
      .add("args.num_tokens", args.num_tokens)
      .add("args.first_rows", args.first_rows);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(layer, addresses, stream));
  KVX_RETURN_IF_ERROR(pack_if_needed(verb.context, table));
  KVX_ASSIGN_OR_RETURN(const auto scales, widen_scales(verb.context, layer));
  checked.block_table = table.table;
  ranges.seq_lens = table.seq_lens;
  return ops::gather(verb.context, checked, ranges, table.max_blocks * layer.view.block_size,
                     verb.counters);
}

Status gather(const kvx_gather_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_gather_args_t args, read_struct(caller, "args"));
  Scratch<LayerOfCaller> kept_layer;
  LayerOfCaller& layer = *kept_layer;
  KVX_RETURN_IF_ERROR(read_layer(args.layer, "layer", layer, LayerMemory::kHostOrDevice));
  if (layer.is_on_device()) return gather_on_device(args, layer, stream);
  Scratch<TableOfCaller> kept_table;
  TableOfCaller& table = *kept_table;
  KVX_RETURN_IF_ERROR(read_table(args.block_table, args.seq_lens, layer.view.block_size, table));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(args.executor));
  Scratch<std::vector<ops::GatherRange>> kept_ranges;
  std::vector<ops::GatherRange>& ranges = *kept_ranges;
  KVX_RETURN_IF_ERROR(read_ranges(args, table, ranges));

  ops::GatherArgs checked;
  KVX_RETURN_IF_ERROR(read_outputs(args, layer, checked));
  checked.block_table = table.table;
  checked.max_blocks_per_sequence = table.max_blocks;
  checked.num_sequences = table.num_sequences;
  checked.ranges = ranges;
  // Checked before the output rows are measured: a range of 2^31 rows would overlap everything.
  KVX_RETURN_IF_ERROR(ops::check_gather(checked));
  int64_t num_rows = 0;
  for (const ops::GatherRange& range : ranges) {
    if (range.num_tokens == 0) continue;
    num_rows = std::max(num_rows, range.first_row + range.num_tokens);
  }
  KVX_RETURN_IF_ERROR(check_outputs_apart(layer, checked, num_rows));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  return ops::gather({kernels, &chosen_executor(threads)}, checked);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_gather(const kvx_gather_args_t* args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::gather(args, stream); });
}
