// StoredChain: blocks of a cache file, one after the other from the first token, as rows of floats.
// The file's fingerprint defines how they are stored, whatever cache they go to.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/rows.hpp"
#include "kv/files/fingerprint.hpp"
#include "kv/plan/layer_store.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "tier/cache_file.hpp"

namespace kvx::kv {

class StoredChain {
 public:
  // calibration: the tables that stored.calibration names. INVALID_ARGUMENT: kinds of blocks that
  // are not those of the fingerprint; LayerTables::create's errors.
  static Result<StoredChain> create(StoredCache stored,
                                    std::span<const LayerCalibration> calibration,
                                    std::span<const tier::StoredBlockKind> kinds,
                                    const ops::CpuContext& context);

  // How many of these leading blocks can be used as a sequence: all layer groups have all that
  // their windows see at its end.
  int64_t num_usable(std::span<const tier::FileBlock* const> path) const;

  struct Reading {
    int64_t num_blocks = 0;  // of the path before the first damaged one
    std::string problem;     // of that; empty: all are whole
  };
  // Reads the block copies of blocks [first_block, path.size()) into memory of its own: a block's
  // full-precision block copy where there is one, else the packed one. Errors as
  // LayerTables::create.
  Result<Reading> read(tier::CacheFileReader& file, std::span<const tier::FileBlock* const> path,
                       int64_t first_block);

  // The first token from which on all are there, in the group of this layer.
  int64_t first_token(int layer) const;
  // Before it, tokens [0, sinks_end) are there, the window's sinks in whole blocks.
  int64_t sinks_end(int layer) const;
  // Rows of tokens [first_token, first_token + num_tokens) with the file's transforms undone;
  // those of tokens that are not there are left as they are. Requires: read() of the others.
  Status gather(int layer, int64_t first_token, int64_t num_tokens, MutableFloatRows k,
                MutableFloatRows v) const;

  const StoredCache& stored() const { return stored_; }

 private:
  struct Group {
    std::vector<uint8_t> packed;  // [blocks of that kind], one after the other
    std::vector<uint8_t> full_precision;
    std::vector<int32_t>
        ids;  // [blocks of the path]: of `packed` or `full_precision`; kNoBlock: none
    std::vector<uint8_t> is_full_precision;  // [blocks of the path]
    int64_t first_block = 0;                 // all from here on are there, and the sinks
  };

  StoredChain() = default;
  void read_group(tier::CacheFileReader& file, std::span<const tier::FileBlock* const> path,
                  int64_t first_block, int group, Reading& reading);
  Status create_stores();
  int64_t sink_blocks(int group) const {
    return cache::blocks_for(plans_[group].sinks, stored_.block_size);
  }
  int num_kinds_per_group() const { return stored_.full_precision_window.is_on() ? 2 : 1; }
  // The block copy to read: its index in the block's list, or -1.
  int best_block_copy(const tier::FileBlock& block, int group) const;

  StoredCache stored_;
  std::vector<LayerCalibration> calibration_;
  const ops::CpuContext* context_ = nullptr;
  std::vector<GroupPlan> plans_;
  std::vector<int> group_of_layer_;
  std::vector<int> index_in_group_;
  std::vector<Group> groups_;
  std::vector<std::unique_ptr<LayerStore>> layers_;  // views of the groups' memory
};

}  // namespace kvx::kv
