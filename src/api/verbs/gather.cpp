// kvx_gather: stored rows of token ranges, decoded.
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

// Sequence i whole, one after the other.
void whole_sequences(const TableOfCaller& table, std::vector<ops::GatherRange>& ranges) {
  int64_t first_row = 0;
  for (int s = 0; s < table.num_sequences; ++s) {
    ranges.push_back({s, 0, table.seq_lens[s], first_row});
    first_row += table.seq_lens[s];
  }
}

// The arrays of ranges; without them a range is a sequence.
Status check_all_or_none(const kvx_gather_args_t& verb_args, int num_sequences) {
  const int given = (verb_args.sequences != nullptr) + (verb_args.first_tokens != nullptr) +
                    (verb_args.num_tokens != nullptr) + (verb_args.first_rows != nullptr);
  if (given != 0 && given != 4) {
    return invalid_argument(
        "args has some of sequences, first_tokens, num_tokens and first_rows; "
        "expected all or none");
  }
  if (given == 4 || verb_args.num_ranges == static_cast<uint32_t>(num_sequences)) return {};
  return invalid_argument(
      "args.num_ranges is {}; without arrays of ranges it is the table's seq_count {}",
      verb_args.num_ranges, num_sequences);
}

Status read_ranges(const kvx_gather_args_t& verb_args, const TableOfCaller& table,
                   std::vector<ops::GatherRange>& ranges) {
  ranges.clear();
  KVX_RETURN_IF_ERROR(check_all_or_none(verb_args, table.num_sequences));
  if (verb_args.sequences == nullptr) {
    whole_sequences(table, ranges);
    return {};
  }
  for (uint32_t i = 0; i < verb_args.num_ranges; ++i) {
    const ops::GatherRange range = {verb_args.sequences[i], verb_args.first_tokens[i],
                                    verb_args.num_tokens[i], verb_args.first_rows[i]};
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
                    ops::GatherArgs& verb_args) {
  verb_args.cache = layer.view;
  verb_args.transform = layer.transform;
  if (args.num_rows < 0) {
    return invalid_argument("args.num_rows is {}; expected 0 or more", args.num_rows);
  }
  if (args.num_rows > 0) verb_args.num_rows = args.num_rows;
  const int num_heads = layer.view.num_kv_heads;
  if (args.k != nullptr) {
    KVX_ASSIGN_OR_RETURN(verb_args.k, read_rows(args.k, num_heads, layer.k_head_dim(), "k"));
  }
  if (args.v == nullptr) return {};
  if (layer.v_head_dim() == 0) return invalid_argument("args.v is set; the layer stores no V");
  KVX_ASSIGN_OR_RETURN(verb_args.v, read_rows(args.v, num_heads, layer.v_head_dim(), "v"));
  return {};
}

Status check_outputs_apart(const LayerOfCaller& layer, const ops::GatherArgs& verb_args,
                           int64_t num_rows) {
  const int num_heads = layer.view.num_kv_heads;
  KVX_RETURN_IF_ERROR(
      check_apart(layer, verb_args.k, num_rows, num_heads, layer.k_head_dim(), "k"));
  return check_apart(layer, verb_args.v, num_rows, num_heads, layer.v_head_dim(), "v");
}

Result<ops::CudaGatherRanges> device_ranges(const kvx_gather_args_t& args,
                                            const DeviceTable& table) {
  const ops::CudaGatherRanges ranges = {.count = args.num_ranges,
                                        .sequences = args.sequences,
                                        .first_tokens = args.first_tokens,
                                        .num_tokens = args.num_tokens,
                                        .first_rows = args.first_rows,
                                        .seq_lens = table.seq_lens};
  KVX_RETURN_IF_ERROR(check_all_or_none(args, table.num_sequences));
  return ranges;
}

Status gather_on_device(const kvx_gather_args_t& args, const LayerOfCaller& layer, void* stream) {
  KVX_ASSIGN_OR_RETURN(const DeviceTable table, read_device_table(args.block_table, args.seq_lens));
  KVX_ASSIGN_OR_RETURN(const ops::CudaGatherRanges ranges, device_ranges(args, table));
  if (table.num_sequences == 0 || ranges.count == 0) return {};
  ops::GatherArgs verb_args;
  KVX_RETURN_IF_ERROR(read_outputs(args, layer, verb_args));
  verb_args.block_table = table.table;
  verb_args.max_blocks_per_sequence = table.max_blocks;
  verb_args.num_sequences = table.num_sequences;
  KVX_RETURN_IF_ERROR(check_outputs_apart(layer, verb_args, args.num_rows));
  const VerbAddresses addresses = VerbAddresses(layer)
                                      .add_rows("k.data", verb_args.k)
                                      .add_rows("v.data", verb_args.v)
                                      .add("block_table.indices", table.table.ids)
                                      .add("seq_lens.lengths", table.seq_lens)
                                      .add("args.sequences", args.sequences)
                                      .add("args.first_tokens", args.first_tokens)
                                      .add("args.num_tokens", args.num_tokens)
                                      .add("args.first_rows", args.first_rows);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(layer, addresses, stream));
  return ops::gather(verb.context, verb_args, ranges, table.max_blocks * layer.view.block_size,
                     verb.counters);
}

Status gather(const kvx_gather_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_gather_args_t args, read_struct(caller, "args"));
  Scratch<LayerOfCaller> kept_layer;
  LayerOfCaller& layer = *kept_layer;
  KVX_RETURN_IF_ERROR(read_layer(args.layer, "layer", layer, LayerPlace::kAnywhere));
  if (layer.is_on_device()) return gather_on_device(args, layer, stream);
  Scratch<TableOfCaller> kept_table;
  TableOfCaller& table = *kept_table;
  KVX_RETURN_IF_ERROR(read_table(args.block_table, args.seq_lens, layer.view.block_size, table));
  KVX_ASSIGN_OR_RETURN(auto threads, read_executor(args.executor));
  Scratch<std::vector<ops::GatherRange>> kept_ranges;
  std::vector<ops::GatherRange>& ranges = *kept_ranges;
  KVX_RETURN_IF_ERROR(read_ranges(args, table, ranges));

  ops::GatherArgs verb_args;
  KVX_RETURN_IF_ERROR(read_outputs(args, layer, verb_args));
  verb_args.block_table = table.table;
  verb_args.max_blocks_per_sequence = table.max_blocks;
  verb_args.num_sequences = table.num_sequences;
  verb_args.ranges = ranges;
  // Ranges are bounded before the rows are measured by them: 2^31 rows lie over everything.
  KVX_RETURN_IF_ERROR(ops::check_gather(verb_args));
  int64_t num_rows = 0;
  for (const ops::GatherRange& range : ranges) {
    if (range.num_tokens == 0) continue;
    num_rows = std::max(num_rows, range.first_row + range.num_tokens);
  }
  KVX_RETURN_IF_ERROR(check_outputs_apart(layer, verb_args, num_rows));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  return ops::gather({kernels, &chosen_executor(threads)}, verb_args);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_gather(const kvx_gather_args_t* verb_args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::gather(verb_args, stream); });
}
