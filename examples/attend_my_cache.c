/* My engine's NHD cache in, attention out: kvx reads the engine's own memory, where it lies. */
#include <kvx/kvx_abi.h>
#include <math.h>
#include <stdio.h>

enum { BLOCKS = 4, BLOCK_SIZE = 16, KV_HEADS = 2, Q_HEADS = 8, DIM = 64, TOKENS = 40 };

/* The engine's cache [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM], one sequence's block table, queries. */
static float keys[BLOCKS][BLOCK_SIZE][KV_HEADS][DIM], values[BLOCKS][BLOCK_SIZE][KV_HEADS][DIM];
static const int32_t block_ids[] = {2, 0, 3}, lengths[] = {TOKENS};
static float q[Q_HEADS][DIM], out[Q_HEADS][DIM];

static kvx_tensor_desc_t nhd(void* data) {
  kvx_tensor_desc_t tensor = {.size = sizeof tensor, .dtype = KVX_DTYPE_F32, .ndim = 4};
  const int64_t shape[] = {BLOCKS, BLOCK_SIZE, KV_HEADS, DIM};
  tensor.layout = KVX_LAYOUT_BLOCK_NHD;
  tensor.memory = KVX_MEMORY_HOST;
  tensor.data = data;
  for (int i = 3; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = i == 3 ? 1 : tensor.stride[i + 1] * shape[i + 1];
  }
  return tensor;
}

int main(void) {
  kvx_cache_desc_t cache = {.size = sizeof cache, .num_blocks = BLOCKS, .block_size = BLOCK_SIZE};
  cache.num_kv_heads = KV_HEADS;
  cache.head_dim = DIM;
  cache.k = nhd(keys);
  cache.v = nhd(values);
  kvx_block_table_t table = {.size = sizeof table, .format = KVX_BLOCK_TABLE_PACKED};
  table.index_dtype = KVX_DTYPE_S32;
  table.seq_count = table.beam_width = 1;
  table.max_blocks_per_seq = table.indices_count = 3;
  table.indices = block_ids;
  kvx_seq_lens_t seq_lens = {sizeof seq_lens, KVX_DTYPE_S32, 1, lengths};
  kvx_rows_t q_rows = {sizeof q_rows, KVX_DTYPE_F32, q, 0, 0};
  kvx_rows_t out_rows = {sizeof out_rows, KVX_DTYPE_F32, out, 0, 0};
  kvx_layer_t layer = {.size = sizeof layer, .cache = &cache};
  kvx_attend_args_t args = {.size = sizeof args, .num_q_heads = Q_HEADS, .layer = &layer};
  args.block_table = &table;
  args.seq_lens = &seq_lens;
  args.q = &q_rows;
  args.out = &out_rows;

  /* Every key is alike, so all tokens weigh the same: the output is the mean of the values. */
  for (int i = 0; i < TOKENS * KV_HEADS * DIM; ++i) {
    const int token = i / DIM / KV_HEADS, head = i / DIM % KV_HEADS;
    values[block_ids[token / BLOCK_SIZE]][token % BLOCK_SIZE][head][i % DIM] =
        (float)(token + head);
  }
  if (kvx_attend(&args, NULL) != KVX_STATUS_OK) {
    fprintf(stderr, "kvx_attend: %s\n", kvx_last_error());
    return 1;
  }
  printf("head 0: %g, head 7: %g\n", out[0][0], out[7][0]);
  return fabsf(out[0][0] - 19.5f) < 1e-3f && fabsf(out[7][0] - 20.5f) < 1e-3f ? 0 : 1;
}
