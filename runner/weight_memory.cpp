// WeightMemory: chunks of the machine's memory, cut from the front.
#include "runner/weight_memory.hpp"

#include <algorithm>

#include "core/checked.hpp"

namespace kvx::runner {

Result<uint8_t*> WeightMemory::take(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  constexpr int64_t kChunkBytes = int64_t{128} << 20;  // of addresses; pages come when written
  const int64_t begin = round_up(used_, kAlignment);
  if (!chunks_.empty() && bytes <= chunks_.back().bytes() - begin) {
    used_ = begin + bytes;
    return chunks_.back().data() + begin;
  }
  KVX_ASSIGN_OR_RETURN(
      cache::Region chunk,
      cache::host_memory().allocate(std::max(bytes, kChunkBytes), "the model's weights"));
  chunks_.push_back(std::move(chunk));
  used_ = bytes;
  return chunks_.back().data();
}

}  // namespace kvx::runner
