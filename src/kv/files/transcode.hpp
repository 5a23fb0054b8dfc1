// Loading a file of another cache: the same model's K and V in another format, block size or with
// a longer full-precision window. Rows are decoded, appended and quantised again: what that costs
// in accuracy, the caller asks for. A shorter window's blocks are loaded as they lie.
#pragma once

#include <string>

#include "kv/kv_cache.hpp"

namespace kvx::kv {

// Can blocks with this fingerprint become this cache's by transcoding? The errors of
// transcode_sequence that do not depend on a file's blocks, and parse_fingerprint's.
Status check_transcodable(std::string_view fingerprint, const KvCacheConfig& config);

// As KvCache::load_sequence where the file is of a cache like this one; otherwise its tokens are
// appended one after the other, those that this cache already has apart. INVALID_ARGUMENT: what
// no transcoding bridges (another geometry, another model, calibrated tables that this cache has
// not), a damaged block; UNSUPPORTED: a sliding window whose blocks begin elsewhere in this cache.
// Nothing has changed then, but that cached blocks may have gone.
Result<int> transcode_sequence(KvCache& cache, const std::string& path);

// As KvCache::load_prefixes where the file is of a cache like this one; otherwise every chain of
// its blocks up to its end, by way of a sequence that is free again afterwards: cached blocks may
// go to make room. A chain ends before a damaged block. In sliding-window groups what is found
// again is a chain's end. The report counts the file's blocks. Needs a sequence that is not in use.
Result<LoadReport> transcode_prefixes(KvCache& cache, const std::string& path);

}  // namespace kvx::kv
