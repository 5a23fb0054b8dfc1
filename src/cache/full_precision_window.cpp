// FullPrecisionWindow: counting blocks.
#include "cache/full_precision_window.hpp"

namespace kvx::cache {
namespace {

Status check_tokens(int64_t tokens, std::string_view field) {
  if (tokens >= 0) return {};
  return invalid_argument("{} is {}; expected 0 or more", field, tokens);
}

}  // namespace

Result<FullPrecisionWindow> make_full_precision_window(int64_t sink_tokens, int64_t recent_tokens,
                                                       int64_t block_size) {
  KVX_RETURN_IF_ERROR(check_tokens(sink_tokens, "sink"));
  KVX_RETURN_IF_ERROR(check_tokens(recent_tokens, "recent"));
  if (block_size < 1) {
    return invalid_argument("block_size is {}; expected 1 or more", block_size);
  }
  // The open block comes on top: when it holds its query's token alone, the blocks before it keep
  // the promise.
  return FullPrecisionWindow{blocks_for(sink_tokens, block_size),
                             blocks_for(recent_tokens, block_size) + 1};
}

std::optional<int64_t> block_leaving_window(const FullPrecisionWindow& window, int64_t position,
                                            int64_t block_size) {
  if (!window.is_on()) return std::nullopt;
  const int64_t before = first_recent_block_of(window, position, block_size);
  const int64_t after = first_recent_block_of(window, position + 1, block_size);
  return after > before ? std::optional<int64_t>(before) : std::nullopt;
}

BlockCounts count_blocks(const FullPrecisionWindow& window, int64_t num_tokens, int64_t block_size,
                         int64_t first_block) {
  const int64_t end = blocks_for(num_tokens, block_size);
  const int64_t sinks_end = std::clamp(window.sink_blocks, first_block, end);
  const int64_t tail =
      std::clamp(first_recent_block_of(window, num_tokens, block_size), first_block, end);
  const int64_t packed = tail - sinks_end;
  return {packed, end - first_block - packed};
}

}  // namespace kvx::cache
