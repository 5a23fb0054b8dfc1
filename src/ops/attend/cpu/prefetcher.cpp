// Prefetcher's lists: which rows a tile has.
#include "ops/attend/cpu/prefetcher.hpp"

namespace kvx::ops::cpu {

void Prefetcher::start(const PackedTile& keys, const PackedTile& values) {
  num_lists_ = 0;
  int64_t num_bytes = 0;
  for (const PackedTile* tile : {&keys, &values}) {
    if (tile->num_tokens == 0) continue;
    const int code_bytes = format::code_bytes_per_row(*tile->spec, tile->head_dim);
    const int scale_bytes = format::scale_bytes_per_row(*tile->spec, tile->head_dim);
    lists_[num_lists_++] = {tile->codes, tile->num_tokens, code_bytes};
    if (scale_bytes > 0) lists_[num_lists_++] = {tile->scales, tile->num_tokens, scale_bytes};
    num_bytes += int64_t{tile->num_tokens} * (code_bytes + scale_bytes);
  }
  num_lines_ = static_cast<int>(num_bytes / kLine) + num_lists_;
  list_ = token_ = owed_ = 0;
  at_ = end_ = nullptr;
}

}  // namespace kvx::ops::cpu
