// Runs of heads that two layers have in common: a kernel takes heads that are stored alike on each
// side, and the layers may be cut differently.
#pragma once

#include <algorithm>

#include "core/result.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops::cuda {

// Heads [first_head, first_head + num_heads) of the layer. Requires: they lie in the run.
inline HeadRun part_of(const HeadRun& run, int first_head, int num_heads) {
  const int skipped = first_head - run.first_head;
  return {first_head, num_heads, side_from(run.k, skipped), side_from(run.v, skipped)};
}

// Calls visit(source, target), which returns a Status, for heads that are one run on both sides.
// Requires: both layers have as many heads.
template <class Visit>
Status for_each_common_run(const LayerView& from, const LayerView& to, const Visit& visit) {
  for (int head = 0; head < to.num_kv_heads;) {
    const HeadRun& source = run_of_head(from, head);
    const HeadRun& target = run_of_head(to, head);
    const int end =
        std::min(source.first_head + source.num_heads, target.first_head + target.num_heads);
    KVX_RETURN_IF_ERROR(
        visit(part_of(source, head, end - head), part_of(target, head, end - head)));
    head = end;
  }
  return {};
}

}  // namespace kvx::ops::cuda
