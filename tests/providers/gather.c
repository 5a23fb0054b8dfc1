/* kvx_gather_kv of the slow provider: one element after the other. */
#include <stddef.h>

#include "slow.h"

/* A product of counts; the fault keeps 32 bits of it. */
static full_precision product(full_precision a, full_precision b) {
  return FAULT == COUNTS_IN_32_BITS ? (full_precision)(uint32_t)(a * b) : a * b;
}

static int is_ragged(const kvx_block_table_t* table) {
  return table->format == KVX_BLOCK_TABLE_RAGGED;
}
static int has_pages(const kvx_block_table_t* table) {
  return (table->flags & KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES) != 0;
}
static int has_pool(const kvx_block_table_t* table) {
  return table->format == KVX_BLOCK_TABLE_KV_OFFSETS;
}

static kvx_status_t check_flags(const kvx_block_table_t* table) {
  const uint32_t format = number_of(&table->format);
  const uint32_t pages = KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
  const uint32_t kv_index = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  if ((table->flags & ~(pages | kv_index)) != 0) return KVX_STATUS_INCOMPATIBLE;
  if (format < KVX_BLOCK_TABLE_PACKED || format > KVX_BLOCK_TABLE_KV_OFFSETS) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  if (format != KVX_BLOCK_TABLE_RAGGED && (table->flags & pages) != 0) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  const int has_kv_index = (table->flags & kv_index) != 0;
  return has_kv_index == (format == KVX_BLOCK_TABLE_KV_OFFSETS) ? KVX_STATUS_OK
                                                                : KVX_STATUS_INVALID_ARGUMENT;
}

/* Bytes that a block of a tensor takes, from its first element to its last. */
static int64_t block_bytes(const kvx_tensor_desc_t* tensor) {
  kvx_tensor_desc_t block = *tensor;
  block.shape[0] = 1;
  return tensor_bytes(&block);
}

static kvx_status_t check_pool(const kvx_cache_desc_t* cache,
                               struct deferred_error* deferred_error) {
  const kvx_pool_desc_t* pool = &cache->pool;
  if ((cache->block_size & (cache->block_size - 1)) != 0) return KVX_STATUS_INVALID_ARGUMENT;
  if (pool->primary == NULL || pool->bytes_per_block == 0) return KVX_STATUS_INVALID_ARGUMENT;
  if (deferred_error->is_unsupported) return KVX_STATUS_OK;
  const kvx_tensor_desc_t* tensors[] = {&cache->k, &cache->v};
  for (int i = 0; i < 2; ++i) {
    const int bytes = element_bytes(tensors[i]->dtype);
    if (pool->bytes_per_block < block_bytes(tensors[i])) return KVX_STATUS_INVALID_ARGUMENT;
    check_alignment(pool->primary, bytes, deferred_error);
    check_alignment(pool->secondary, bytes, deferred_error);
    if (pool->bytes_per_block % (uint32_t)bytes != 0) deferred_error->is_unsupported = 1;
  }
  return KVX_STATUS_OK;
}

static kvx_status_t check_table(const kvx_cache_desc_t* cache, const kvx_block_table_t* table,
                                struct deferred_error* deferred_error) {
  kvx_status_t status = check_flags(table);
  if (status != KVX_STATUS_OK) return status;
  if (table->seq_count == 0 || table->max_blocks_per_seq == 0 || table->beam_width == 0) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  if (table->beam_width != 1 && !has_pool(table)) return KVX_STATUS_INVALID_ARGUMENT;
  if (!is_ragged(table)) {
    full_precision count = product(table->seq_count, table->beam_width);
    count = product(count, product(has_pool(table) ? 2 : 1, table->max_blocks_per_seq));
    if (count != table->indices_count) return KVX_STATUS_INVALID_ARGUMENT;
  }
  status = check_indices(table->index_dtype, table->indices, table->indices_count, deferred_error);
  if (status != KVX_STATUS_OK) return status;
  if (is_ragged(table)) {
    const full_precision count = product((full_precision)table->seq_count + 1, 1);
    if (table->indptr_count != count) return KVX_STATUS_INVALID_ARGUMENT;
    status = check_indices(table->indptr_dtype, table->indptr, (int64_t)count, deferred_error);
    if (status != KVX_STATUS_OK) return status;
  } else if (table->indptr != NULL || table->indptr_count != 0) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  if (!has_pool(table)) return KVX_STATUS_OK;
  if (table->index_dtype != KVX_DTYPE_S32) return KVX_STATUS_INVALID_ARGUMENT;
  return check_pool(cache, deferred_error);
}

static kvx_status_t check_gather(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                 struct deferred_error* deferred_error) {
  const kvx_block_table_t* table = &gather->block_table;
  kvx_status_t status = check_top_size(gather, sizeof *gather);
  if (status == KVX_STATUS_OK) status = check_io_sizes(&gather->io);
  if (status == KVX_STATUS_OK) status = check_nested_size(table->size, sizeof *table);
  if (status == KVX_STATUS_OK) {
    status = check_nested_size(gather->seq_lens.size, sizeof gather->seq_lens);
  }
  if (status == KVX_STATUS_OK) status = check_cache(cache, deferred_error);
  if (status == KVX_STATUS_OK) status = check_table(cache, table, deferred_error);
  if (status != KVX_STATUS_OK) return status;
  if (gather->seq_lens.seq_count != table->seq_count) return KVX_STATUS_INVALID_ARGUMENT;
  status = check_indices(gather->seq_lens.dtype, gather->seq_lens.lengths, table->seq_count,
                         deferred_error);
  if (status != KVX_STATUS_OK) return status;
  const full_precision rows = product(table->seq_count, table->beam_width);
  if (product(rows, gather->max_seq_len) != gather->io.num_tokens) {
    return KVX_STATUS_INVALID_ARGUMENT;
  }
  status = check_io(cache, &gather->io, (int64_t)rows, deferred_error);
  const kvx_tensor_desc_t* stored[] = {&cache->k, &cache->v};
  const kvx_tensor_desc_t* wanted[] = {&gather->io.key, &gather->io.value};
  for (int i = 0; i < 2; ++i) {
    const int has_eight_bits = is_eight_bits(stored[i]->dtype) || is_eight_bits(wanted[i]->dtype);
    if (stored[i]->dtype != wanted[i]->dtype && has_eight_bits) deferred_error->is_unsupported = 1;
  }
  return status;
}

static int64_t sum_at(const kvx_block_table_t* table, int64_t s) {
  return index_at(table->indptr_dtype, table->indptr, s);
}

static kvx_status_t check_sums(const kvx_block_table_t* table) {
  if (!is_ragged(table)) return KVX_STATUS_OK;
  if (sum_at(table, 0) != 0) return KVX_STATUS_INVALID_ARGUMENT;
  for (int64_t s = 0; s < table->seq_count; ++s) {
    if (sum_at(table, s + 1) < sum_at(table, s)) return KVX_STATUS_INVALID_ARGUMENT;
  }
  return sum_at(table, table->seq_count) == table->indices_count ? KVX_STATUS_OK
                                                                 : KVX_STATUS_INVALID_ARGUMENT;
}

static int64_t tokens_of_row(const kvx_gather_desc_t* gather, int64_t row) {
  if (FAULT == LENGTHS_IGNORED) return gather->max_seq_len;
  const int64_t length = index_at(gather->seq_lens.dtype, gather->seq_lens.lengths,
                                  row / gather->block_table.beam_width);
  if (FAULT == MAX_SEQ_LEN_IGNORED) return length;
  return length < gather->max_seq_len ? length : gather->max_seq_len;
}

static kvx_status_t check_length(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                 int64_t row) {
  const kvx_block_table_t* table = &gather->block_table;
  const int64_t s = row / table->beam_width;
  const int64_t length = index_at(gather->seq_lens.dtype, gather->seq_lens.lengths, s);
  if (length < 0) return KVX_STATUS_INVALID_ARGUMENT;
  const int64_t entries = is_ragged(table) ? sum_at(table, s + 1) - sum_at(table, s) : 0;
  if (is_ragged(table) && !has_pages(table)) {
    return entries == length ? KVX_STATUS_OK : KVX_STATUS_INVALID_ARGUMENT;
  }
  const int64_t tokens = length < gather->max_seq_len ? length : gather->max_seq_len;
  const int64_t held = is_ragged(table) ? entries : table->max_blocks_per_seq;
  const int64_t blocks = tokens / cache->block_size + (tokens % cache->block_size != 0);
  return blocks > held ? KVX_STATUS_OUT_OF_RANGE : KVX_STATUS_OK;
}

/* The table's entry for a token of a row, K's or V's. */
static int64_t entry_of(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, int side,
                        int64_t row, int64_t token) {
  const kvx_block_table_t* table = &gather->block_table;
  const int64_t block = token / cache->block_size;
  int64_t place = row * table->max_blocks_per_seq + block;
  if (has_pool(table)) {
    if (FAULT == BEAM_IGNORED) row -= row % table->beam_width;
    if (FAULT == V_INDEX_OF_K) side = 0;
    place = (row * 2 + side) * table->max_blocks_per_seq + block;
  } else if (is_ragged(table)) {
    const int by_page = has_pages(table) || FAULT == RAGGED_AS_PAGES;
    place = sum_at(table, row) + (by_page ? block : token);
  }
  return index_at(table->index_dtype, table->indices, place);
}

/* Where a block begins, or null for an entry without a block. */
static char* block_of(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, int side,
                      int64_t entry) {
  if (FAULT == K_AND_V_CHANGE_PLACES) side = 1 - side;
  const kvx_tensor_desc_t* tensor = side == 0 ? &cache->k : &cache->v;
  if (!has_pool(&gather->block_table)) {
    if (entry < 0 && FAULT == UNMAPPED_IS_BLOCK_ZERO) entry = 0;
    if (entry < 0) return NULL;
    return (char*)tensor->data +
           cache_place(cache, tensor, entry, 0, 0, 0) * element_bytes(tensor->dtype);
  }
  if (entry == -1 || (FAULT == NULL_INDEX_IS_NEGATIVE && entry < 0)) return NULL;
  const int is_secondary = entry < 0 && FAULT != SECONDARY_IGNORED;
  char* pool = (char*)(is_secondary ? cache->pool.secondary : cache->pool.primary);
  return pool + (entry & 0x7FFFFFFF) * (int64_t)cache->pool.bytes_per_block;
}

static kvx_status_t check_entry(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                int side, int64_t entry) {
  if (!has_pool(&gather->block_table)) {
    const int is_outside = entry >= cache->num_blocks && FAULT != READS_BLOCKS_OUTSIDE;
    return is_outside ? KVX_STATUS_OUT_OF_RANGE : KVX_STATUS_OK;
  }
  if (entry == -1) return KVX_STATUS_OK;
  if (entry < 0 && cache->pool.secondary == NULL) return KVX_STATUS_INVALID_ARGUMENT;
  const char* block = block_of(cache, gather, side, entry);
  const kvx_tensor_desc_t* tensor = side == 0 ? &cache->k : &cache->v;
  const kvx_tensor_desc_t* io[] = {&gather->io.key, &gather->io.value};
  for (int i = 0; i < 2; ++i) {
    if (overlaps(io[i]->data, tensor_bytes(io[i]), block, block_bytes(tensor))) {
      return KVX_STATUS_INVALID_ARGUMENT;
    }
  }
  return KVX_STATUS_OK;
}

static kvx_status_t check_rows(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather) {
  const kvx_block_table_t* table = &gather->block_table;
  kvx_status_t status = check_sums(table);
  const int64_t rows = (int64_t)table->seq_count * table->beam_width;
  for (int64_t row = 0; row < rows && status == KVX_STATUS_OK; ++row) {
    status = check_length(cache, gather, row);
    if (status != KVX_STATUS_OK) return status;
    const int64_t tokens = tokens_of_row(gather, row) + (FAULT == READS_BEHIND_THE_TABLE);
    for (int64_t t = 0; t < tokens && status == KVX_STATUS_OK; ++t) {
      for (int side = 0; side < 2 && status == KVX_STATUS_OK; ++side) {
        const int64_t entry = entry_of(cache, gather, side, row, t);
        const int is_behind = FAULT == READS_BEHIND_THE_TABLE && t + 1 == tokens;
        if (!is_behind) status = check_entry(cache, gather, side, entry);
      }
    }
  }
  return status;
}

static void gather_row(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                       int64_t row) {
  const int64_t tokens = tokens_of_row(gather, row);
  for (int side = 0; side < 2; ++side) {
    const kvx_tensor_desc_t* tensor = side == 0 ? &cache->k : &cache->v;
    const kvx_tensor_desc_t* io = side == 0 ? &gather->io.key : &gather->io.value;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t entry = entry_of(cache, gather, side, row, t);
      const char* block = block_of(cache, gather, side, entry);
      if (block == NULL) continue;
      for (int64_t h = 0; h < cache->num_kv_heads; ++h) {
        for (int64_t d = 0; d < cache->head_dim; ++d) {
          const int64_t place = cache_place(cache, tensor, 0, t % cache->block_size, h, d);
          convert(tensor->dtype, block + place * element_bytes(tensor->dtype), io->dtype,
                  io_element(io, row * gather->max_seq_len + t, h, d), 1);
        }
      }
    }
  }
}

kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                           void* stream) {
  (void)stream;
  if (cache == NULL || gather == NULL) return KVX_STATUS_INVALID_ARGUMENT;
  struct deferred_error deferred_error = {0};
  kvx_status_t status = check_gather(cache, gather, &deferred_error);
  if (status != KVX_STATUS_OK) return status;
  if (deferred_error.is_unsupported) return KVX_STATUS_UNSUPPORTED;
  if (gather->io.num_tokens == 0) return KVX_STATUS_OK;
  const kvx_tensor_desc_t* io[] = {&gather->io.key, &gather->io.value};
  for (int i = 0; i < 2 && !has_pool(&gather->block_table); ++i) {
    if (overlaps(io[i]->data, tensor_bytes(io[i]), cache->k.data, tensor_bytes(&cache->k)) ||
        overlaps(io[i]->data, tensor_bytes(io[i]), cache->v.data, tensor_bytes(&cache->v))) {
      return KVX_STATUS_INVALID_ARGUMENT;
    }
  }
  status = check_rows(cache, gather);
  if (status != KVX_STATUS_OK || FAULT == MOVES_NOTHING) return status;
  const int64_t rows = (int64_t)gather->block_table.seq_count * gather->block_table.beam_width;
  for (int64_t row = 0; row < rows; ++row) gather_row(cache, gather, row);
  return KVX_STATUS_OK;
}
