// BlockParts: where the layers of a block lie in its record, for checksums of their own: so that a
// layer can come back from a tier, and be read, before the next one is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvx::tier {

struct BlockParts {
  struct LayerPlace {
    int group = 0;  // of layers that share blocks
    int part = -1;  // of each of the group's blocks; -1: an earlier layer's holds this one, too
  };

  // [classes][parts]: where each part ends, the last one with the block. No classes: a block is one
  // part.
  std::vector<std::vector<int64_t>> ends;
  std::vector<LayerPlace> layers;  // of the model

  std::span<const int64_t> ends_of(int block_class) const {
    if (ends.empty()) return {};
    return ends[static_cast<size_t>(block_class)];
  }
  int64_t num_parts(int block_class) const {
    return ends.empty() ? 1 : std::ssize(ends[static_cast<size_t>(block_class)]);
  }
  int64_t begin_of(int block_class, int part) const {
    return part == 0 ? 0 : ends_of(block_class)[static_cast<size_t>(part) - 1];
  }
};

}  // namespace kvx::tier
