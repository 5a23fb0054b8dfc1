// copy_blocks: rows as stored where both sides store alike, else decoded and encoded again.
#include "ops/copy_blocks/copy_blocks.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "format/spec.hpp"
#include "ops/segments.hpp"
#include "ops/side_rows.hpp"
#include "ops/task_grid.hpp"

namespace kvx::ops {
namespace {

// The head_dim of a layer's K or V, the same in all runs.
int head_dim_of(const LayerView& layer, SideView HeadRun::*side) {
  return layer.runs.empty() ? 0 : (layer.runs.front().*side).head_dim;
}

Status check_geometry(const LayerView& from, const LayerView& to) {
  if (from.block_size != to.block_size) {
    return invalid_argument("block_size is {} in from and {} in to; expected the same",
                            from.block_size, to.block_size);
  }
  if (from.num_kv_heads != to.num_kv_heads) {
    return invalid_argument("num_kv_heads is {} in from and {} in to; expected the same",
                            from.num_kv_heads, to.num_kv_heads);
  }
  for (SideView HeadRun::*side : {&HeadRun::k, &HeadRun::v}) {
    const int from_dim = head_dim_of(from, side);
    const int to_dim = head_dim_of(to, side);
    if (from_dim == to_dim) continue;
    return invalid_argument("{} head_dim is {} in from and {} in to; expected the same",
                            side == &HeadRun::k ? "k" : "v", from_dim, to_dim);
  }
  return check_same_segments("from", from, "to", to);
}

Status check_copies(const LayerView& from, const LayerView& to, std::span<const BlockCopy> copies) {
  for (size_t i = 0; i < copies.size(); ++i) {
    const BlockCopy& copy = copies[i];
    if (copy.from_block < 0 || copy.from_block >= from.num_blocks) {
      return out_of_range("copies[{}].from_block is {}; expected 0 to {}", i, copy.from_block,
                          from.num_blocks - 1);
    }
    if (copy.to_block < 0 || copy.to_block >= to.num_blocks) {
      return out_of_range("copies[{}].to_block is {}; expected 0 to {}", i, copy.to_block,
                          to.num_blocks - 1);
    }
    if (copy.num_tokens < 0 || copy.num_tokens > from.block_size) {
      return out_of_range("copies[{}].num_tokens is {}; expected 0 to {}", i, copy.num_tokens,
                          from.block_size);
    }
  }
  return {};
}

// A head of a side, with the head's number in its run.
struct HeadOfSide {
  const SideView& side;
  int head;

  uint8_t* scale(int64_t block, int token, int group) const {
    return side.scales.at(block, token, head) + group * side.scales.group_stride;
  }
};

// The same bytes mean the same numbers: all of the format but the encoder's choice is equal, and
// so is the order of the codes.
bool means_alike(const HeadOfSide& from, const HeadOfSide& to) {
  format::FormatSpec read_as = from.side.spec;
  read_as.scale_choice = to.side.spec.scale_choice;
  return read_as == to.side.spec && from.side.is_interleaved == to.side.is_interleaved &&
         from.side.tensor_scale(from.head) == to.side.tensor_scale(to.head);
}

// Calls per_scale(source, target) for every scale of the copied tokens until it returns false.
template <class PerScale>
bool for_each_scale(const HeadOfSide& from, const HeadOfSide& to, const BlockCopy& copy,
                    PerScale per_scale) {
  const int groups = format::groups_per_row(from.side.spec, from.side.head_dim);
  for (int t = 0; t < copy.num_tokens; ++t) {
    for (int g = 0; g < groups; ++g) {
      if (!per_scale(from.scale(copy.from_block, t, g), to.scale(copy.to_block, t, g))) {
        return false;
      }
    }
  }
  return true;
}

// Whether the codes may be copied. Given scales are not written, so they must be equal already.
bool codes_fit(const HeadOfSide& from, const HeadOfSide& to, const BlockCopy& copy) {
  if (!means_alike(from, to)) return false;
  if (from.side.spec.scale_source != format::ScaleSource::kGiven) return true;
  const int bytes = format::scale_bytes_per_group(from.side.spec);
  return for_each_scale(from, to, copy, [bytes](const uint8_t* source, const uint8_t* target) {
    return memcmp(source, target, bytes) == 0;
  });
}

void copy_as_stored(const HeadOfSide& from, const HeadOfSide& to, const BlockCopy& copy) {
  const int channel_bytes = format::channel_bytes_per_block(from.side.spec, from.side.head_dim);
  if (channel_bytes != 0 && copy.num_tokens > 0) {
    memmove(to.side.channels.at(copy.to_block, to.head),
            from.side.channels.at(copy.from_block, from.head), channel_bytes);
  }
  const int row_bytes = format::code_bytes_per_row(from.side.spec, from.side.head_dim);
  uint8_t codes[kMaxRowBytes];  // source and target may be one place
  for (int t = 0; t < copy.num_tokens; ++t) {
    load_codes(from.side.codes, from.side.codes.at(copy.from_block, t, from.head), row_bytes,
               codes);
    store_codes(to.side.codes, codes, row_bytes, to.side.codes.at(copy.to_block, t, to.head));
  }
  if (from.side.spec.scale_source == format::ScaleSource::kGiven) return;
  const int bytes = format::scale_bytes_per_group(from.side.spec);
  for_each_scale(from, to, copy, [bytes](const uint8_t* source, uint8_t* target) {
    memmove(target, source, bytes);
    return true;
  });
}

// One call's work: a task is a head, which takes the copies in order, as if one after another.
struct CopyTask {
  const CpuContext& context;
  const LayerView& from;
  const LayerView& to;
  std::span<const BlockCopy> copies;
  std::atomic<int64_t> nonfinite{0};

  void run(int head) {
    const HeadRun& from_run = run_of_head(from, head);
    const HeadRun& to_run = run_of_head(to, head);
    int64_t found = 0;
    for (const BlockCopy& copy : copies) {
      for (SideView HeadRun::*side : {&HeadRun::k, &HeadRun::v}) {
        found += copy_side({from_run.*side, head - from_run.first_head},
                           {to_run.*side, head - to_run.first_head}, copy);
      }
    }
    if (found != 0) nonfinite += found;
  }

  // Returns the number of non-finite inputs that the target's codes cannot express.
  int64_t copy_side(const HeadOfSide& source, const HeadOfSide& target,
                    const BlockCopy& copy) const {
    if (!target.side.is_stored()) return 0;
    if (codes_fit(source, target, copy)) {
      copy_as_stored(source, target, copy);
      return 0;
    }
    int64_t found = 0;
    const int at_once = tokens_encoded_at_once(to);
    float* rows = scratch_floats(int64_t{at_once} * target.side.head_dim);
    for (int t = 0; t < copy.num_tokens; t += at_once) {
      const int n = std::min(at_once, copy.num_tokens - t);
      decode_rows(*context.kernels, source.side, source.head, {copy.from_block, t, n},
                  format::DecodeFor::kGather, rows);
      found += encode_rows(*context.kernels, target.side, target.head, {copy.to_block, t, n},
                           {rows, target.side.head_dim});
    }
    return found;
  }
};

}  // namespace

Result<int64_t> copy_blocks(const CpuContext& context, const LayerView& from, const LayerView& to,
                            std::span<const BlockCopy> copies) {
  KVX_RETURN_IF_ERROR(check_geometry(from, to));
  KVX_RETURN_IF_ERROR(check_copies(from, to, copies));
  int64_t nonfinite = 0;
  if (to.next_segment != nullptr) {
    KVX_ASSIGN_OR_RETURN(nonfinite,
                         copy_blocks(context, *from.next_segment, *to.next_segment, copies));
  }
  int64_t num_tokens = 0;
  for (const BlockCopy& copy : copies) num_tokens += copy.num_tokens;
  CopyTask task{context, from, to, copies};
  run_tasks(*context.executor, to.num_kv_heads, num_tokens * floats_per_token(to), task);
  return task.nonfinite.load() + nonfinite;
}

}  // namespace kvx::ops
