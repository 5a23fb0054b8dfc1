// summarize_kinds, num_tokens_of and check_block_copies walk a cache file's index.
#include "tier/file_summary.hpp"

namespace kvx::tier {

std::vector<KindSummary> summarize_kinds(const FileIndex& index) {
  std::vector<KindSummary> kinds(index.kinds.size());
  for (const FileBlock& block : index.blocks) {
    for (const BlockCopy& block_copy : block.block_copies) {
      KindSummary& kind = kinds[block_copy.kind];
      ++kind.num_block_copies;
      kind.memory_bytes += index.kinds[block_copy.kind].bytes;
      kind.stored_bytes += block_copy.stored_bytes;
    }
  }
  return kinds;
}

int64_t num_tokens_of(const FileIndex& index, int32_t last_block) {
  int64_t count = 0;
  for (int32_t block = last_block; block >= 0; block = index.blocks[block].parent) {
    count += static_cast<int64_t>(index.blocks[block].tokens.size());
  }
  return count;
}

Status check_block_copies(CacheFileReader& file, const std::string& path) {
  const FileIndex& index = file.index();
  int64_t num_block_copies = 0;
  int64_t num_bad = 0;
  std::string first_problem;
  std::vector<uint8_t> bytes;
  for (size_t b = 0; b < index.blocks.size(); ++b) {
    for (const BlockCopy& block_copy : index.blocks[b].block_copies) {
      bytes.resize(static_cast<size_t>(index.kinds[block_copy.kind].bytes));
      const Status read = file.read_block_copy(block_copy, bytes);
      ++num_block_copies;
      if (read.ok()) continue;
      if (num_bad++ == 0) first_problem = fmt::format("block {}: {}", b, read.error().message);
    }
  }
  if (num_bad == 0 && file.trailing_bytes() > 0) {
    return invalid_argument("'{}': {} bytes follow its index; expected none", path,
                            file.trailing_bytes());
  }
  if (num_bad == 0) return {};
  return invalid_argument("'{}': {} of {} block copies are bad; {}", path, num_bad,
                          num_block_copies, first_problem);
}

}  // namespace kvx::tier
