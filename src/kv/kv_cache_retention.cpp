// KvCache: how long blocks stay that no sequence uses.
#include "kv/kv_cache.hpp"

namespace kvx::kv {
namespace {

Status check_ranges(std::span<const RetentionRange> ranges, int64_t max_tokens) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    const RetentionRange& range = ranges[i];
    if (range.first_token < 0 || range.first_token >= max_tokens) {
      return invalid_argument("ranges[{}].first_token is {}; expected 0 to {}", i,
                              range.first_token, max_tokens - 1);
    }
    if (range.num_tokens < 0 || range.num_tokens > max_tokens - range.first_token) {
      return invalid_argument("ranges[{}].num_tokens is {}; expected 0 (to the end) to {}", i,
                              range.num_tokens, max_tokens - range.first_token);
    }
    if (range.priority < 0 || range.priority > cache::kMostPriority) {
      return invalid_argument("ranges[{}].priority is {}; expected 0 to {}", i, range.priority,
                              cache::kMostPriority);
    }
    constexpr int64_t kMostMs = int64_t{1000} * 3600 * 24 * 3650;  // ten years
    if (range.duration_ms < 0 || range.duration_ms > kMostMs) {
      return invalid_argument("ranges[{}].duration_ms is {}; expected 0 (for good) to {}", i,
                              range.duration_ms, kMostMs);
    }
  }
  return {};
}

Status check_session(std::string_view session) {
  if (!session.empty()) return {};
  return invalid_argument("session is ''; expected the name that its sequences were created with");
}

}  // namespace

Status KvCache::retain(int sequence, std::span<const RetentionRange> ranges) {
  if (!table_->prefixes) return prefixes_are_off();
  KVX_RETURN_IF_ERROR(check_ranges(ranges, storage().config.max_tokens_per_sequence));
  const std::lock_guard lock(table_->mutex);
  KVX_RETURN_IF_ERROR(table_->check_sequence(sequence));
  return table_->prefixes->retain(sequence, ranges);
}

Result<int64_t> KvCache::end_session(std::string_view session) {
  if (!table_->prefixes) return prefixes_are_off();
  KVX_RETURN_IF_ERROR(check_session(session));
  const auto lock = table_->lock_drained();
  return table_->prefixes->end_session(session);
}

Result<int64_t> KvCache::delete_session(std::string_view session) {
  if (!table_->prefixes) return prefixes_are_off();
  KVX_RETURN_IF_ERROR(check_session(session));
  const auto lock = table_->lock_drained();
  return table_->prefixes->delete_session(session);
}

}  // namespace kvx::kv
