/* A program of version 1.1: compiled against the frozen header beside it, run with today's library.
 * It must keep passing as it stands. */
#include <stdio.h>
#include <string.h>

#include "kvx_abi.h"

enum { BLOCKS = 3, BLOCK_SIZE = 4, HEADS = 2, HEAD_DIM = 8, ROW = HEADS * HEAD_DIM, TOKENS = 5 };

static float k_cache[BLOCKS * BLOCK_SIZE * ROW];
static float v_cache[BLOCKS * BLOCK_SIZE * ROW];

#define EXPECT(condition)                                                       \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      return 1;                                                                 \
    }                                                                           \
  } while (0)

/* A dense row-major f32 tensor. */
static kvx_tensor_desc_t tensor(kvx_layout_t layout, uint32_t ndim, const int64_t* shape,
                                void* data) {
  kvx_tensor_desc_t desc;
  int64_t stride = 1;
  int i;
  memset(&desc, 0, sizeof desc);
  desc.size = sizeof desc;
  desc.dtype = KVX_DTYPE_F32;
  desc.layout = layout;
  desc.memory = KVX_MEMORY_HOST;
  desc.ndim = ndim;
  for (i = (int)ndim - 1; i >= 0; --i) {
    desc.shape[i] = shape[i];
    desc.stride[i] = stride;
    stride *= shape[i];
  }
  desc.data = data;
  return desc;
}

static kvx_cache_desc_t cache_desc(void) {
  const int64_t shape[] = {BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM};
  kvx_cache_desc_t cache;
  memset(&cache, 0, sizeof cache);
  cache.size = sizeof cache;
  cache.num_blocks = BLOCKS;
  cache.block_size = BLOCK_SIZE;
  cache.num_kv_heads = HEADS;
  cache.head_dim = HEAD_DIM;
  cache.k = tensor(KVX_LAYOUT_BLOCK_NHD, 4, shape, k_cache);
  cache.v = tensor(KVX_LAYOUT_BLOCK_NHD, 4, shape, v_cache);
  return cache;
}

static kvx_kv_io_desc_t io_desc(uint32_t ndim, const int64_t* shape, uint32_t num_tokens, void* key,
                                void* value) {
  kvx_kv_io_desc_t io;
  memset(&io, 0, sizeof io);
  io.size = sizeof io;
  io.key = tensor(KVX_LAYOUT_BLOCK_CUSTOM, ndim, shape, key);
  io.value = tensor(KVX_LAYOUT_BLOCK_CUSTOM, ndim, shape, value);
  io.num_tokens = num_tokens;
  io.num_kv_heads = HEADS;
  io.head_dim = HEAD_DIM;
  return io;
}

static int check_version(void) {
  kvx_version_t version;
  memset(&version, 0, sizeof version);
  EXPECT(kvx_get_version(&version) == KVX_STATUS_OK);
  EXPECT(version.size >= sizeof version);
  EXPECT(version.abi_major == KVX_ABI_VERSION_MAJOR);
  EXPECT(version.abi_minor == KVX_ABI_VERSION_MINOR);
  return 0;
}

static int check_data(void) {
  const kvx_cache_desc_t cache = cache_desc();
  /* Block 2, then block 0. */
  const int64_t slots[TOKENS] = {8, 9, 10, 11, 0};
  const int64_t written_shape[] = {TOKENS, HEADS, HEAD_DIM};
  float key[TOKENS * ROW], value[TOKENS * ROW];
  kvx_write_desc_t write;
  int i;
  for (i = 0; i < TOKENS * ROW; ++i) {
    key[i] = (float)i;
    value[i] = (float)-i;
  }
  memset(&write, 0, sizeof write);
  write.size = sizeof write;
  write.io = io_desc(3, written_shape, TOKENS, key, value);
  write.slots.size = sizeof write.slots;
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.token_count = TOKENS;
  write.slots.invalid_slot = -1;
  write.slots.slots = slots;
  EXPECT(kvx_validate_cache_desc(&cache) == KVX_STATUS_OK);
  EXPECT(kvx_write_kv(&cache, &write, NULL) == KVX_STATUS_OK);
  EXPECT(k_cache[8 * ROW] == key[0] && k_cache[11 * ROW + 3] == key[3 * ROW + 3]);
  EXPECT(v_cache[ROW - 1] == value[TOKENS * ROW - 1]);
  EXPECT(v_cache[ROW] == 0.0f);

  {
    const int32_t blocks[2] = {2, 0};
    const int32_t lengths[1] = {TOKENS};
    const int64_t gathered_shape[] = {1, TOKENS, HEADS, HEAD_DIM};
    float key_out[TOKENS * ROW], value_out[TOKENS * ROW];
    kvx_gather_desc_t gather;
    memset(&gather, 0, sizeof gather);
    gather.size = sizeof gather;
    gather.io = io_desc(4, gathered_shape, TOKENS, key_out, value_out);
    gather.block_table.size = sizeof gather.block_table;
    gather.block_table.format = KVX_BLOCK_TABLE_PACKED;
    gather.block_table.index_dtype = KVX_DTYPE_S32;
    gather.block_table.seq_count = 1;
    gather.block_table.beam_width = 1;
    gather.block_table.max_blocks_per_seq = 2;
    gather.block_table.indices = blocks;
    gather.block_table.indices_count = 2;
    gather.seq_lens.size = sizeof gather.seq_lens;
    gather.seq_lens.dtype = KVX_DTYPE_S32;
    gather.seq_lens.seq_count = 1;
    gather.seq_lens.lengths = lengths;
    gather.max_seq_len = TOKENS;
    EXPECT(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_OK);
    EXPECT(memcmp(key, key_out, sizeof key) == 0);
    EXPECT(memcmp(value, value_out, sizeof value) == 0);
    EXPECT(kvx_launch_gather_kv_f32(&cache, &gather, NULL) == KVX_STATUS_OK);
    gather.block_table.indices_count = 1;
    EXPECT(kvx_gather_kv(&cache, &gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  }
  return 0;
}

static int check_errors(void) {
  kvx_cache_desc_t cache = cache_desc();
  cache.block_size = 0;
  EXPECT(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
  cache = cache_desc();
  cache.size = sizeof cache - 4;
  EXPECT(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
  cache = cache_desc();
  cache.k.stride[0] += 1;
  EXPECT(kvx_validate_cache_desc(&cache) == KVX_STATUS_UNSUPPORTED);
  cache = cache_desc();
  cache.v.layout = KVX_LAYOUT_BLOCK_HND;
  EXPECT(kvx_validate_cache_desc(&cache) == KVX_STATUS_INVALID_ARGUMENT);
  return 0;
}

int main(void) {
  return check_version() || check_data() || check_errors();
}
