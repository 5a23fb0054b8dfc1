// receive_layers: a sequence that another process offers layer by layer (sequence_export.hpp), as a
// cache file in shared memory.
#pragma once

#include "kv/kv_cache.hpp"
#include "transfer/peer.hpp"
#include "transfer/sequence_import.hpp"
#include "transfer/shared_file.hpp"

namespace kvx::transfer {

// Takes each layer as soon as it is there, and returns when all are. Requires: the fingerprints
// were compared, and the file is open and empty. INVALID_ARGUMENT: damaged bytes, or blocks that
// are not those of their fingerprint; UNSUPPORTED: nothing has come for options.timeout_ms;
// OUT_OF_RANGE: shared memory is full.
Status receive_layers(const kv::KvCache& cache, const ImportOptions& options, const Answer& offer,
                      Peer& peer, const SharedFile& file, ImportReport& report);

// The fingerprint of a cache that has these heads alone. UNSUPPORTED: calibrated numbers, of which
// a fingerprint has a hash only, or an order in which heads lie apart; INVALID_ARGUMENT: heads that
// it has not, or no fingerprint.
Result<std::string> fingerprint_of_heads(std::string_view fingerprint, const kv::HeadCut& heads);

}  // namespace kvx::transfer
