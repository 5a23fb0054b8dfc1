// The checks of attend's arguments: heads, numbers, lengths, and the blocks that it would read.
#include "ops/attend/check.hpp"

#include <algorithm>
#include <cmath>

#include "core/checked.hpp"
#include "ops/segments.hpp"

namespace kvx::ops {
namespace {

bool has_full_precision_window(const AttendArgs& args) {
  return args.num_sink_blocks != nullptr;
}

// The segments of K's rows behind the first one.
Status check_more_segments(const char* name, const LayerView& view) {
  int dim = view.runs.front().k.head_dim;
  for (const LayerView* next = view.next_segment; next != nullptr; next = next->next_segment) {
    if (next->block_size != view.block_size || next->num_kv_heads != view.num_kv_heads ||
        next->num_blocks != view.num_blocks || next->runs.empty()) {
      return invalid_argument(
          "a segment of {}'s rows has {} blocks of {} tokens and {} KV heads in {} runs; expected "
          "{}, {} and {}",
          name, next->num_blocks, next->block_size, next->num_kv_heads, next->runs.size(),
          view.num_blocks, view.block_size, view.num_kv_heads);
    }
    for (const HeadRun& run : next->runs) {
      if (run.k.head_dim <= 0 || run.k.head_dim > format::kMaxHeadDim - dim) {
        return invalid_argument("a segment of {}'s rows has {} numbers; attention needs 1 to {}",
                                name, run.k.head_dim, format::kMaxHeadDim - dim);
      }
      if (!run.k.codes.base && view.num_blocks > 0) {
        return invalid_argument("a segment of {}'s rows has null codes", name);
      }
    }
    dim += next->runs.front().k.head_dim;
  }
  return {};
}

Status check_view(const char* name, const LayerView& view) {
  if (view.block_size <= 0) {
    return invalid_argument("{}.block_size is {}; expected at least 1", name, view.block_size);
  }
  if (view.num_kv_heads <= 0 || view.runs.empty()) {
    return invalid_argument("{}.num_kv_heads is {} in {} runs; expected at least 1", name,
                            view.num_kv_heads, view.runs.size());
  }
  for (const HeadRun& run : view.runs) {
    for (const SideView* side : {&run.k, &run.v}) {
      const char* side_name = side == &run.k ? "k" : "v";
      if (side->head_dim <= 0 || side->head_dim > format::kMaxHeadDim) {
        return invalid_argument("{}.{}.head_dim is {}; attention needs 1 to {}", name, side_name,
                                side->head_dim, format::kMaxHeadDim);
      }
      // A pool whose sequences fit into their full-precision window has no packed blocks at all.
      if (!side->codes.base && view.num_blocks > 0) {
        return invalid_argument("{}.{}.codes is null", name, side_name);
      }
    }
  }
  return check_more_segments(name, view);
}

Status check_views(const AttendArgs& args) {
  KVX_RETURN_IF_ERROR(check_view("packed", args.packed));
  if ((args.num_sink_blocks == nullptr) != (args.first_recent_block == nullptr)) {
    return invalid_argument(
        "{} is null; full-precision window need num_sink_blocks and first_recent_block",
        args.num_sink_blocks ? "first_recent_block" : "num_sink_blocks");
  }
  if (!has_full_precision_window(args)) return {};
  KVX_RETURN_IF_ERROR(check_view("full_precision", args.full_precision));
  const HeadRun& packed = args.packed.runs.front();
  const HeadRun& full_precision = args.full_precision.runs.front();
  if (args.full_precision.block_size != args.packed.block_size ||
      args.full_precision.num_kv_heads != args.packed.num_kv_heads ||
      args.full_precision.key_dim() != args.packed.key_dim() ||
      full_precision.v.head_dim != packed.v.head_dim) {
    return invalid_argument(
        "full_precision has block_size {}, {} KV heads, head_dim {}/{}; expected packed's {}, {}, "
        "{}/{}",
        args.full_precision.block_size, args.full_precision.num_kv_heads,
        args.full_precision.key_dim(), full_precision.v.head_dim, args.packed.block_size,
        args.packed.num_kv_heads, args.packed.key_dim(), packed.v.head_dim);
  }
  return check_same_segments("full_precision", args.full_precision, "packed", args.packed);
}

Status check_numbers(const AttendArgs& args) {
  if (args.num_q_heads <= 0 || args.num_q_heads % args.packed.num_kv_heads != 0) {
    return invalid_argument("num_q_heads is {}; expected a positive multiple of num_kv_heads {}",
                            args.num_q_heads, args.packed.num_kv_heads);
  }
  if (!std::isfinite(args.softmax_scale)) {
    return invalid_argument("softmax_scale is {}; expected a finite number", args.softmax_scale);
  }
  if (!std::isfinite(args.softcap) || args.softcap < 0) {
    return invalid_argument("softcap is {}; expected 0 (none) or a positive finite number",
                            args.softcap);
  }
  if (args.window < 0) {
    return invalid_argument("window is {}; expected 0 (none) or at least 1", args.window);
  }
  if (args.window_sinks < 0 || (args.window_sinks > 0 && args.window == 0)) {
    return invalid_argument("window_sinks is {} with a window of {}; expected 0 or more, 0 without",
                            args.window_sinks, args.window);
  }
  if (args.num_sequences < 0) {
    return invalid_argument("num_sequences is {}; expected at least 0", args.num_sequences);
  }
  if (args.max_blocks_per_sequence < 0) {
    return invalid_argument("max_blocks_per_sequence is {}; expected at least 0",
                            args.max_blocks_per_sequence);
  }
  return {};
}

Status check_pointers(const AttendArgs& args) {
  if (!args.seq_lens) return invalid_argument("seq_lens is null");
  if (!args.q_starts) return invalid_argument("q_starts is null");
  const int64_t num_queries = int64_t{args.q_starts[args.num_sequences]} - args.q_starts[0];
  if (num_queries == 0) return {};  // nothing is read or written
  if (!args.block_table.ids) return invalid_argument("block_table is null");
  if (!args.q.data) return invalid_argument("q is null; {} queries need it", num_queries);
  if (!args.out.data) return invalid_argument("out is null; {} queries need it", num_queries);
  return {};
}

Status check_lengths(const AttendArgs& args, int s) {
  const int64_t q_len = int64_t{args.q_starts[s + 1]} - args.q_starts[s];
  if (args.q_starts[s] < 0 || q_len < 0) {
    return invalid_argument("q_starts[{}..{}] is {}, {}; expected non-negative and not decreasing",
                            s, s + 1, args.q_starts[s], args.q_starts[s + 1]);
  }
  const int64_t seq_len = args.seq_lens[s];
  if (seq_len < q_len && seq_len != 0) {  // 0: padding, whose queries see nothing
    return invalid_argument("seq_lens[{}] is {}; expected at least its {} new tokens", s, seq_len,
                            q_len);
  }
  const int64_t num_blocks = ceil_div<int64_t>(seq_len, args.packed.block_size);
  if (num_blocks > args.max_blocks_per_sequence) {
    return out_of_range("seq_lens[{}] is {}; {} blocks of {} tokens hold less", s, seq_len,
                        args.max_blocks_per_sequence, args.packed.block_size);
  }
  if (args.transform.k.block_offset && num_blocks > args.transform.k.num_offset_blocks) {
    return out_of_range("seq_lens[{}] is {}; transform.k.block_offset has {} blocks of {} tokens",
                        s, seq_len, args.transform.k.num_offset_blocks, args.packed.block_size);
  }
  if (args.tree_mask && args.tree_mask_stride < q_len) {
    return invalid_argument("tree_mask_stride is {}; sequence {} has {} new tokens",
                            args.tree_mask_stride, s, q_len);
  }
  return {};
}

// Only the blocks that a query reads: those between the sinks and the window may be gone already.
Status check_blocks(const AttendArgs& args, int s) {
  const int64_t q_len = args.q_starts[s + 1] - args.q_starts[s];
  if (q_len == 0) return {};
  const int64_t seq_len = args.seq_lens[s];
  const int64_t first_token =
      args.window > 0 ? std::max<int64_t>(0, seq_len - q_len - args.window + 1) : 0;
  const int64_t end = ceil_div<int64_t>(seq_len, args.packed.block_size);
  const int64_t sinks_end = ceil_div<int64_t>(args.window_sinks, args.packed.block_size);
  const int64_t first_block = first_token / args.packed.block_size;
  for (int64_t b = sinks_end > 0 ? 0 : first_block; b < end; ++b) {
    if (b >= sinks_end && b < first_block) b = first_block;
    const bool full_precision = has_full_precision_window(args) &&
                                (b < args.num_sink_blocks[s] || b >= args.first_recent_block[s]);
    const int64_t num_blocks =
        full_precision ? args.full_precision.num_blocks : args.packed.num_blocks;
    const int32_t id = args.block_table.at(s, b);
    if (id < 0 || id >= num_blocks) {
      return out_of_range("block_table[{}][{}] is {}; expected a block of {} in [0, {})", s, b, id,
                          full_precision ? "full_precision" : "packed", num_blocks);
    }
  }
  return {};
}

}  // namespace

Status check_attend_shape(const AttendArgs& args) {
  KVX_RETURN_IF_ERROR(check_views(args));
  return check_numbers(args);
}

Status check_attend(const AttendArgs& args) {
  KVX_RETURN_IF_ERROR(check_attend_shape(args));
  if (args.num_sequences == 0) return {};
  KVX_RETURN_IF_ERROR(check_pointers(args));
  for (int s = 0; s < args.num_sequences; ++s) {
    KVX_RETURN_IF_ERROR(check_lengths(args, s));
    KVX_RETURN_IF_ERROR(check_blocks(args, s));
  }
  return {};
}

}  // namespace kvx::ops
