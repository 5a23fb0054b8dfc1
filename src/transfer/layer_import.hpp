// import_layers: a sequence that another process offers layer by layer (sequence_export.hpp).
#pragma once

#include "kv/kv_cache.hpp"
#include "transfer/peer.hpp"
#include "transfer/sequence_import.hpp"

namespace kvx::transfer {

// Takes each layer as soon as it is there, and returns the sequence when all are. Requires: the
// fingerprints were compared. INVALID_ARGUMENT: damaged bytes, or blocks that are not those of
// their fingerprint; UNSUPPORTED: nothing has come for options.timeout_ms; OUT_OF_RANGE: too few
// blocks, or too long.
Result<int> import_layers(kv::KvCache& cache, const ImportOptions& options, const Answer& offer,
                          Peer& peer, ImportReport& report);

// The fingerprint of a cache that has these heads alone. UNSUPPORTED: calibrated numbers, of which
// a fingerprint has a hash only, or an order in which heads lie apart; INVALID_ARGUMENT: heads that
// it has not, or no fingerprint.
Result<std::string> fingerprint_of_heads(std::string_view fingerprint, const kv::HeadCut& heads);

}  // namespace kvx::transfer
