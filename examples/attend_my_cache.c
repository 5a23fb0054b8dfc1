/* My engine's NHD cache in, attention out: kvx reads the engine's own memory, where it lies. */
#include <kvx/kvx_abi.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BLOCKS = 4, BLOCK_SIZE = 16, KV_HEADS = 2, Q_HEADS = 8, DIM = 64, TOKENS = 40 };

/* The engine's cache [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM] and the block table of its one sequence.
 */
static float keys[BLOCKS][BLOCK_SIZE][KV_HEADS][DIM], values[BLOCKS][BLOCK_SIZE][KV_HEADS][DIM];
static const int32_t block_ids[] = {2, 0, 3}, lengths[] = {TOKENS};
static float q[Q_HEADS][DIM], out[Q_HEADS][DIM];

static kvx_tensor_desc_t nhd(void* data) {
  kvx_tensor_desc_t tensor = {sizeof tensor,
                              KVX_DTYPE_F32,
                              KVX_LAYOUT_BLOCK_NHD,
                              KVX_MEMORY_HOST,
                              4,
                              {BLOCKS, BLOCK_SIZE, KV_HEADS, DIM},
                              {BLOCK_SIZE * KV_HEADS * DIM, KV_HEADS * DIM, DIM, 1},
                              data};
  return tensor;
}

int main(void) {
  kvx_cache_desc_t cache = {
      sizeof cache, BLOCKS,    BLOCK_SIZE,  KV_HEADS,
      DIM,          nhd(keys), nhd(values), {0, KVX_MEMORY_UNKNOWN, 0, NULL, NULL}};
  kvx_block_table_t table = {sizeof table,
                             KVX_BLOCK_TABLE_PACKED,
                             KVX_DTYPE_S32,
                             KVX_DTYPE_INVALID,
                             1,
                             1,
                             3,
                             block_ids,
                             NULL,
                             3,
                             0,
                             0};
  kvx_seq_lens_t seq_lens = {sizeof seq_lens, KVX_DTYPE_S32, 1, lengths};
  kvx_rows_t q_rows = {sizeof q_rows, KVX_DTYPE_F32, q, 0, 0};
  kvx_rows_t out_rows = {sizeof out_rows, KVX_DTYPE_F32, out, 0, 0};
  kvx_layer_t layer;
  kvx_attend_args_t args;
  int t, h, d;

  /* Every key is alike, so all tokens weigh the same: the output is the mean of the values. */
  for (t = 0; t < TOKENS; ++t)
    for (h = 0; h < KV_HEADS; ++h)
      for (d = 0; d < DIM; ++d)
        values[block_ids[t / BLOCK_SIZE]][t % BLOCK_SIZE][h][d] = (float)(t + h);

  memset(&layer, 0, sizeof layer);
  layer.size = sizeof layer;
  layer.cache = &cache;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.layer = &layer;
  args.block_table = &table;
  args.seq_lens = &seq_lens;
  args.num_q_heads = Q_HEADS;
  args.q = &q_rows;
  args.out = &out_rows;
  if (kvx_attend(&args, NULL) != KVX_STATUS_OK) {
    fprintf(stderr, "kvx_attend: %s\n", kvx_last_error());
    return 1;
  }
  printf("head 0: %g, head 7: %g\n", out[0][0], out[7][0]);
  return fabsf(out[0][0] - 19.5f) < 1e-3f && fabsf(out[7][0] - 20.5f) < 1e-3f ? 0 : 1;
}
