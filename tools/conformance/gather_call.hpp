// GatherCall: a gather with all its memory, and its expected result.
#pragma once

#include "tools/conformance/check.hpp"
#include "tools/conformance/tensors.hpp"

namespace kvx::conformance {

enum class TableKind { kPacked, kRaggedTokens, kRaggedPages, kKvOffsets };
constexpr TableKind kTableKinds[] = {TableKind::kPacked, TableKind::kRaggedTokens,
                                     TableKind::kRaggedPages, TableKind::kKvOffsets};
std::string name_of(TableKind kind);
Features needs_of(TableKind kind);

struct GatherCase {
  Geometry geometry = {};
  Arrangement arrangement = {};
  kvx_dtype_t k_cache = KVX_DTYPE_F16;
  kvx_dtype_t v_cache = KVX_DTYPE_F16;
  kvx_dtype_t k_io = KVX_DTYPE_F16;
  kvx_dtype_t v_io = KVX_DTYPE_F16;
  TableKind table = TableKind::kPacked;
  kvx_dtype_t index_dtype = KVX_DTYPE_S32;
  kvx_dtype_t indptr_dtype = KVX_DTYPE_S32;
  kvx_dtype_t length_dtype = KVX_DTYPE_S32;
  std::vector<int64_t> lengths = {5, 0, 8, 3};
  uint32_t max_seq_len = 8;
  uint32_t num_beams = 1;
  bool has_secondary = false;  // KV_OFFSETS: every third block lies in the secondary pool
  bool has_nulls = false;      // every third entry is -1
  bool is_dense = false;       // IO of three dimensions
  int64_t gap = 0;             // of IO

  GatherCase& set_types(kvx_dtype_t cache, kvx_dtype_t io) {
    k_cache = v_cache = cache;
    k_io = v_io = io;
    return *this;
  }
};

class GatherCall {
 public:
  explicit GatherCall(const GatherCase& gather_case);
  GatherCall(const GatherCall&) = delete;

  void must_move(GatherFunction function);
  void must_refuse(GatherFunction function, kvx_status_t expected, const std::string& what);
  void expect_moved();
  // Writes `entries` into the table's buffer.
  void store_entries();

  GatherCase given;
  Memory memory;
  kvx_cache_desc_t cache{};
  kvx_gather_desc_t gather{};
  std::vector<int64_t> entries;  // the table's, in its order

 private:
  static constexpr int64_t kPoolBlocks = 11;  // of one pool; more than the cache's blocks

  void make_pools();
  void make_table();
  void fill_cache();
  int64_t some_entry(int64_t number) const;
  // The entry for a token of a row of the output, -1 when it has no block.
  int64_t entry_of(int side, int64_t row, int64_t token) const;
  const uint8_t* stored_element(int side, int64_t entry, int64_t token, int64_t head,
                                int64_t dim) const;

  int64_t num_rows() const { return static_cast<int64_t>(given.lengths.size()) * given.num_beams; }
  int64_t width() const { return gather.block_table.max_blocks_per_seq; }
  const kvx_tensor_desc_t& cache_tensor(int side) const { return side == 0 ? cache.k : cache.v; }
  const kvx_tensor_desc_t& io_tensor(int side) const {
    return side == 0 ? gather.io.key : gather.io.value;
  }

  std::vector<int64_t> sums_;  // prefix sums of a ragged table
};

}  // namespace kvx::conformance
