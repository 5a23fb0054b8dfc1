// A gather with all its memory.
#include "tools/conformance/gather_call.hpp"

#include <algorithm>
#include <cstring>

#include "tools/conformance/numbers.hpp"

namespace kvx::conformance {
namespace {

constexpr int64_t kSecondaryPool = 0x80000000;
constexpr int64_t kNull = 0xFFFFFFFF;

// Entries behind a sequence's end, which a provider must not read.
constexpr int64_t kWild = INT32_MAX;

int64_t blocks_of(int64_t tokens, const Geometry& g) {
  return (tokens + g.block_size - 1) / g.block_size;
}

uint64_t place_of(int side, int64_t block, int64_t token, int64_t head, int64_t dim) {
  return static_cast<uint64_t>((((side + 7) * 1000 + block) * 1000 + token) * 1000000 +
                               head * 1000 + dim);
}

}  // namespace

std::string name_of(TableKind kind) {
  switch (kind) {
    case TableKind::kPacked:
      return "PACKED";
    case TableKind::kRaggedTokens:
      return "RAGGED";
    case TableKind::kRaggedPages:
      return "RAGGED of pages";
    case TableKind::kKvOffsets:
      return "KV_OFFSETS";
  }
  return "";
}

Features needs_of(TableKind kind) {
  Features needs;
  switch (kind) {
    case TableKind::kPacked:
      return needs.add(kTableFormats, KVX_BLOCK_TABLE_PACKED);
    case TableKind::kRaggedTokens:
      return needs.add(kTableFormats, KVX_BLOCK_TABLE_RAGGED);
    case TableKind::kRaggedPages:
      return needs.add(kTableFormats, KVX_BLOCK_TABLE_RAGGED)
          .add_flags(kTableFlags, KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES);
    case TableKind::kKvOffsets:
      return needs.add(kTableFormats, KVX_BLOCK_TABLE_KV_OFFSETS)
          .add_flags(kTableFlags, KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX);
  }
  return needs;
}

GatherCall::GatherCall(const GatherCase& gather_case) : given(gather_case) {
  cache = make_cache(memory, given.geometry, given.arrangement, given.k_cache, given.v_cache);
  gather.size = sizeof gather;
  gather.max_seq_len = given.max_seq_len;
  gather.io = make_io(memory, given.geometry, given.k_io, given.v_io,
                      num_rows() * given.max_seq_len, given.is_dense ? 0 : num_rows(), given.gap);
  if (given.table == TableKind::kKvOffsets) make_pools();
  make_table();
  gather.seq_lens = {sizeof gather.seq_lens, given.length_dtype,
                     static_cast<uint32_t>(given.lengths.size()),
                     add_indices(memory, "seq_lens.lengths", given.lengths, given.length_dtype)};
  fill_cache();
}

// K and V blocks one after the other, in HND as TensorRT-LLM has them or in the cache's layout.
void GatherCall::make_pools() {
  const Geometry& g = given.geometry;
  const int64_t block_bytes = int64_t{g.block_size} * g.num_heads * g.head_dim *
                              std::max(bytes_of(given.k_cache), bytes_of(given.v_cache));
  cache.pool.size = sizeof cache.pool;
  cache.pool.memory = KVX_MEMORY_HOST;
  cache.pool.bytes_per_block = static_cast<uint32_t>(block_bytes);
  cache.pool.primary = memory.add("pool.primary", kPoolBlocks * block_bytes).data();
  if (given.has_secondary) {
    cache.pool.secondary = memory.add("pool.secondary", kPoolBlocks * block_bytes).data();
  }
}

// Block ids in random order, some of them more than once.
int64_t GatherCall::some_entry(int64_t number) const {
  const bool has_pools = given.table == TableKind::kKvOffsets;
  if (given.has_nulls && number % 3 == 1) return has_pools ? kNull : -1;
  if (!has_pools) return (number * 3 + 2) % given.geometry.num_blocks;
  const int64_t index = (number * 7 + 5) % kPoolBlocks;
  return given.has_secondary && number % 3 == 2 ? index | kSecondaryPool : index;
}

void GatherCall::make_table() {
  kvx_block_table_t& table = gather.block_table;
  table.size = sizeof table;
  table.seq_count = static_cast<uint32_t>(given.lengths.size());
  table.beam_width = given.num_beams;
  table.index_dtype = given.index_dtype;
  table.max_blocks_per_seq = static_cast<uint32_t>(blocks_of(given.max_seq_len, given.geometry));
  const bool is_ragged =
      given.table == TableKind::kRaggedTokens || given.table == TableKind::kRaggedPages;
  if (is_ragged) {
    table.format = KVX_BLOCK_TABLE_RAGGED;
    sums_ = {0};
    for (size_t s = 0; s < given.lengths.size(); ++s) {
      const int64_t length = given.lengths[s];
      const bool has_pages = given.table == TableKind::kRaggedPages;
      const int64_t count = has_pages ? blocks_of(length, given.geometry) : length;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t page = has_pages ? i : i / given.geometry.block_size;
        entries.push_back(some_entry(static_cast<int64_t>(s) * 5 + page));
      }
      sums_.push_back(static_cast<int64_t>(entries.size()));
    }
    if (given.table == TableKind::kRaggedPages) table.flags = KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
    table.indptr_dtype = given.indptr_dtype;
    table.indptr = add_indices(memory, "block_table.indptr", sums_, given.indptr_dtype);
    table.indptr_count = static_cast<uint32_t>(sums_.size());
  } else {
    const bool has_pools = given.table == TableKind::kKvOffsets;
    table.format = has_pools ? KVX_BLOCK_TABLE_KV_OFFSETS : KVX_BLOCK_TABLE_PACKED;
    if (has_pools) table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
    for (int64_t row = 0; row < num_rows(); ++row) {
      const int64_t length = std::min<int64_t>(
          given.lengths[static_cast<size_t>(row / given.num_beams)], given.max_seq_len);
      for (int side = 0; side < (has_pools ? 2 : 1); ++side) {
        for (int64_t b = 0; b < width(); ++b) {
          entries.push_back(b < blocks_of(length, given.geometry)
                                ? some_entry((row * 2 + side) * width() + b)
                                : kWild);
        }
      }
    }
  }
  table.indices = add_indices(memory, "block_table.indices", entries, given.index_dtype);
  table.indices_count = static_cast<uint32_t>(entries.size());
}

void GatherCall::store_entries() {
  void* data = const_cast<void*>(gather.block_table.indices);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (given.index_dtype == KVX_DTYPE_S64) {
      static_cast<int64_t*>(data)[i] = entries[i];
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(entries[i]);
    }
  }
}

void GatherCall::fill_cache() {
  const Geometry& g = given.geometry;
  for (int side = 0; side < 2; ++side) {
    const kvx_tensor_desc_t& tensor = cache_tensor(side);
    if (tensor.dtype == io_tensor(side).dtype) continue;
    for (int64_t b = 0; b < g.num_blocks; ++b) {
      for (int64_t t = 0; t < g.block_size; ++t) {
        for (int64_t h = 0; h < g.num_heads; ++h) {
          for (int64_t d = 0; d < g.head_dim; ++d) {
            const uint32_t bits = bits_of(tensor.dtype, some_number(place_of(side, b, t, h, d)));
            memcpy(const_cast<uint8_t*>(stored_element(side, b, t, h, d)), &bits,
                   static_cast<size_t>(bytes_of(tensor.dtype)));
          }
        }
      }
    }
  }
}

int64_t GatherCall::entry_of(int side, int64_t row, int64_t token) const {
  const int64_t block = token / given.geometry.block_size;
  int64_t place = 0;
  switch (given.table) {
    case TableKind::kPacked:
      place = row * width() + block;
      break;
    case TableKind::kRaggedTokens:
      place = sums_[static_cast<size_t>(row)] + token;
      break;
    case TableKind::kRaggedPages:
      place = sums_[static_cast<size_t>(row)] + block;
      break;
    case TableKind::kKvOffsets:
      place = (row * 2 + side) * width() + block;
      break;
  }
  const int64_t entry = entries[static_cast<size_t>(place)];
  return given.table == TableKind::kKvOffsets && entry == kNull ? -1 : entry;
}

const uint8_t* GatherCall::stored_element(int side, int64_t entry, int64_t token, int64_t head,
                                          int64_t dim) const {
  const kvx_tensor_desc_t& tensor = cache_tensor(side);
  const int64_t bytes = bytes_of(tensor.dtype);
  if (given.table != TableKind::kKvOffsets) {
    return static_cast<const uint8_t*>(tensor.data) +
           place_in_cache(tensor, entry, token, head, dim) * bytes;
  }
  const bool is_secondary = (entry & kSecondaryPool) != 0;
  const void* pool = is_secondary ? cache.pool.secondary : cache.pool.primary;
  return static_cast<const uint8_t*>(pool) +
         (entry & ~kSecondaryPool) * cache.pool.bytes_per_block +
         place_in_cache(tensor, 0, token, head, dim) * bytes;
}

void GatherCall::expect_moved() {
  const Geometry& g = given.geometry;
  for (int side = 0; side < 2; ++side) {
    const kvx_tensor_desc_t& io = io_tensor(side);
    const int64_t bytes = bytes_of(io.dtype);
    for (int64_t row = 0; row < num_rows(); ++row) {
      const int64_t length = given.lengths[static_cast<size_t>(row / given.num_beams)];
      for (int64_t t = 0; t < length && t < given.max_seq_len; ++t) {
        const int64_t entry = entry_of(side, row, t);
        if (entry < 0) continue;
        for (int64_t h = 0; h < g.num_heads; ++h) {
          for (int64_t d = 0; d < g.head_dim; ++d) {
            const int64_t token = t % g.block_size;
            uint32_t bits = bits_of(io.dtype, some_number(place_of(side, entry, token, h, d)));
            if (io.dtype == cache_tensor(side).dtype) {
              memcpy(&bits, stored_element(side, entry, token, h, d), static_cast<size_t>(bytes));
            }
            memcpy(memory.expect(io_element(io, row * given.max_seq_len + t, h, d)), &bits,
                   static_cast<size_t>(bytes));
          }
        }
      }
    }
  }
}

void GatherCall::must_move(GatherFunction function) {
  memory.take_picture();
  expect_moved();
  require_status(function(&cache, &gather, nullptr), KVX_STATUS_OK, "the gather");
  require_picture(memory, cache, gather.io, "after the gather");
}

void GatherCall::must_refuse(GatherFunction function, kvx_status_t expected,
                             const std::string& what) {
  memory.take_picture();
  require_status(function(&cache, &gather, nullptr), expected, what);
  require_picture(memory, cache, gather.io, what);
}

}  // namespace kvx::conformance
