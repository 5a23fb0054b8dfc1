// import_sequence: takes a sequence that another process offers (sequence_export.hpp) into a cache.
#pragma once

#include <string>

#include "kv/files/layer_places.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::transfer {

struct ImportOptions {
  std::string endpoint;        // the exporter's
  int64_t timeout_ms = 30000;  // without any progress; 1 to a day
  bool may_transcode = false;  // another format, block size or order is converted here
  kv::HeadCut heads = {};      // of the exporter's cache, which are all of this one's
};

struct ImportReport {
  int64_t bytes = 0;            // that came over the endpoint; 0 where memory is shared
  int64_t num_asked_again = 0;  // requests without an answer in time
  bool was_shared = false;      // read from the exporter's shared memory, or from its GPU's
};

// A new sequence as it was exported, or, where it is offered layer by layer, as it is computed
// there meanwhile. All or nothing. INVALID_ARGUMENT: caches that differ (the message names both
// sides; the exporter is told as well), damaged bytes, or an option out of range; OUT_OF_RANGE: too
// few blocks, or too long; UNSUPPORTED: nobody answers, no libkvx_transfer.so, prefixes are off, or
// some heads of a sequence that is offered as a whole, or of a calibrated cache; INCOMPATIBLE: an
// exporter of another version.
Result<int> import_sequence(kv::KvCache& cache, const ImportOptions& options,
                            ImportReport* report = nullptr);

}  // namespace kvx::transfer
