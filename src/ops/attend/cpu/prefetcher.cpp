// Prefetcher's lists: which rows a tile has.
#include "ops/attend/cpu/prefetcher.hpp"

namespace kvx::ops::cpu {

void Prefetcher::start(const PackedTile& keys, const PackedTile& values) {
  start_share(keys, values, 0, 1);
}

void Prefetcher::start_share(const PackedTile& keys, const PackedTile& values, int share,
                             int num_heads) {
  num_lists_ = 0;
  num_lines_ = 0;
  for (const PackedTile* tile : {&keys, &values}) {
    const int first = tile->num_tokens * share / num_heads;
    const int end = tile->num_tokens * (share + 1) / num_heads;
    if (first < end) add_lists(*tile, first, end - first, num_heads);
  }
  list_ = token_ = owed_ = 0;
  at_ = end_ = nullptr;
}

void Prefetcher::add_lists(const PackedTile& tile, int first_token, int num_tokens, int num_heads) {
  const auto add = [&](const uint8_t* const* of_token, int row_bytes) {
    if (row_bytes == 0) return;
    const int bytes = row_bytes * num_heads;
    lists_[num_lists_++] = {of_token + first_token, num_tokens, bytes};
    num_lines_ += num_tokens * bytes / kLine + 1;
  };
  add(tile.codes, format::code_bytes_per_row(*tile.spec, tile.head_dim));
  add(tile.scales, format::scale_bytes_per_row(*tile.spec, tile.head_dim));
}

}  // namespace kvx::ops::cpu
