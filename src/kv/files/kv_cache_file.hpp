// A cache's sequences and prefixes in files (docs/cache-file.md). KvCache's functions of the same
// names document their errors; verbs move the bytes of who calls.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/result.hpp"

namespace kvx::kv {

struct SequenceTable;
class Verbs;

struct SaveOptions {
  int zstd_level = 0;  // 0: blocks lie in the file as they lie in the pool
  // Called as blocks are written, with their number so far and in all; it must not call back.
  std::function<void(int64_t, int64_t)> on_block = {};
};

// What load_prefixes() did with a file's blocks; a bad block is a miss, never data.
struct LoadReport {
  int64_t num_blocks = 0;
  int64_t num_loaded = 0;
  int64_t num_known = 0;  // were there already
  int64_t num_bad = 0;    // damaged, or after a damaged one
  int64_t num_no_room = 0;
  std::string first_problem;  // empty: none
};

// Each takes the table's lock and waits until no block is under way between tiers. Requires of all:
// prefixes are on.
Status save_sequence(SequenceTable& table, Verbs& verbs, int sequence, const std::string& path,
                     const SaveOptions& options);
Status save_prefixes(const SequenceTable& table, Verbs& verbs, const std::string& path,
                     const SaveOptions& options);
Result<int> load_sequence(SequenceTable& table, Verbs& verbs, const std::string& path);
Result<LoadReport> load_prefixes(SequenceTable& table, Verbs& verbs, const std::string& path);

}  // namespace kvx::kv
