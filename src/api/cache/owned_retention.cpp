// kvx_sequence_retain and kvx_session_*: how long blocks stay that no sequence uses.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {
namespace {

Result<kv::RetentionRange> read_range(const kvx_retention_range_t& caller, uint32_t i) {
  KVX_ASSIGN_OR_RETURN(const kvx_retention_range_t args,
                       read_struct(&caller, fmt::format("ranges[{}]", i).c_str()));
  if ((args.flags & ~uint32_t{KVX_RETENTION_PIN}) != 0 || args.reserved != 0) {
    return invalid_argument(
        "ranges[{}].flags is {:#x}, reserved {}; expected KVX_RETENTION_* and 0", i, args.flags,
        args.reserved);
  }
  if (args.priority > static_cast<uint32_t>(cache::kMostPriority)) {
    return invalid_argument("ranges[{}].priority is {}; expected 0 to {}", i, args.priority,
                            cache::kMostPriority);
  }
  return kv::RetentionRange{args.first_token, args.num_tokens, static_cast<int>(args.priority),
                            (args.flags & KVX_RETENTION_PIN) != 0, args.duration_ms};
}

Status retain(kvx_cache_t handle, int32_t sequence, const kvx_retention_range_t* ranges,
              uint32_t num_ranges) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  if (num_ranges != 0 && ranges == nullptr) return invalid_argument("ranges is null");
  constexpr uint32_t kMostRanges = 1 << 16;
  if (num_ranges > kMostRanges) {
    return invalid_argument("num_ranges is {}; expected at most {}", num_ranges, kMostRanges);
  }
  std::vector<kv::RetentionRange> read;
  for (uint32_t i = 0; i < num_ranges; ++i) {
    KVX_ASSIGN_OR_RETURN(const kv::RetentionRange range, read_range(ranges[i], i));
    read.push_back(range);
  }
  return owned->cache->retain(index, read);
}

enum class Fate { kEnd, kDelete };

Status finish_session(kvx_cache_t handle, const char* session, int64_t* num_blocks, Fate fate) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (session == nullptr) return invalid_argument("session is null");
  KVX_ASSIGN_OR_RETURN(const int64_t count, fate == Fate::kEnd
                                                ? owned->cache->end_session(session)
                                                : owned->cache->delete_session(session));
  if (num_blocks != nullptr) *num_blocks = count;
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_sequence_retain(kvx_cache_t cache, int32_t sequence,
                                            const kvx_retention_range_t* ranges,
                                            uint32_t num_ranges) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::retain(cache, sequence, ranges, num_ranges); });
}

extern "C" kvx_status_t kvx_session_end(kvx_cache_t cache, const char* session,
                                        int64_t* num_blocks) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::finish_session(cache, session, num_blocks, kvx::boundary::Fate::kEnd);
  });
}

extern "C" kvx_status_t kvx_session_delete(kvx_cache_t cache, const char* session,
                                           int64_t* num_blocks) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::finish_session(cache, session, num_blocks, kvx::boundary::Fate::kDelete);
  });
}
