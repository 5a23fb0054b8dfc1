/* An engine's own memory, quantised: append, attend and gather over its pages of int8 and nvfp4,
 * and over llama.cpp's q8_0 rows, read where they lie. The engine keeps its block tables. */
#include <kvx/kvx_abi.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BLOCKS = 8, BLOCK_SIZE = 16, KV_HEADS = 2, Q_HEADS = 8, DIM = 64, TOKENS = 40 };

#define TRY(call)                                           \
  do {                                                      \
    if ((call) != KVX_STATUS_OK) {                          \
      fprintf(stderr, "%s: %s\n", #call, kvx_last_error()); \
      exit(1);                                              \
    }                                                       \
  } while (0)

/* One sequence of TOKENS tokens in blocks 5, 2 and 7 of the pool. */
static const int32_t block_ids[] = {5, 2, 7}, lengths[] = {TOKENS};

/* Rows as a model computes them. K grows along a row, V is the token's number. */
static float k[TOKENS][KV_HEADS][DIM], v[TOKENS][KV_HEADS][DIM];
static float q[Q_HEADS][DIM], out[Q_HEADS][DIM];

static void fill_rows(void) {
  for (int t = 0; t < TOKENS; ++t) {
    for (int h = 0; h < KV_HEADS; ++h) {
      for (int d = 0; d < DIM; ++d) {
        k[t][h][d] = 0.01f * (float)(d - t);
        v[t][h][d] = 0.1f * (float)t;
      }
    }
  }
}

static kvx_rows_t rows(void* data) {
  const kvx_rows_t desc = {.size = sizeof desc, .dtype = KVX_DTYPE_F32, .data = data};
  return desc;
}

static kvx_block_table_t block_table(void) {
  kvx_block_table_t table = {.size = sizeof table, .format = KVX_BLOCK_TABLE_PACKED};
  table.index_dtype = KVX_DTYPE_S32;
  table.seq_count = table.beam_width = 1;
  table.max_blocks_per_seq = table.indices_count = 3;
  table.indices = block_ids;
  return table;
}

static void append(const kvx_layer_t* layer, const kvx_executor_t* threads) {
  int64_t slots[TOKENS];
  for (int t = 0; t < TOKENS; ++t) {
    slots[t] = (int64_t)block_ids[t / BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE;
  }
  const kvx_rows_t k_rows = rows(k), v_rows = rows(v);
  kvx_append_args_t args = {.size = sizeof args, .slot_dtype = KVX_DTYPE_S64, .layer = layer};
  args.k = &k_rows;
  args.v = &v_rows;
  args.num_tokens = TOKENS;
  args.slots = slots;
  args.executor = threads;
  TRY(kvx_append(&args, NULL));
}

static void attend(const kvx_layer_t* layer, const kvx_executor_t* threads) {
  const kvx_block_table_t table = block_table();
  const kvx_seq_lens_t seq_lens = {sizeof seq_lens, KVX_DTYPE_S32, 1, lengths};
  const kvx_rows_t q_rows = rows(q), out_rows = rows(out);
  kvx_attend_args_t args = {.size = sizeof args, .num_q_heads = Q_HEADS, .layer = layer};
  args.block_table = &table;
  args.seq_lens = &seq_lens;
  args.q = &q_rows;
  args.out = &out_rows;
  args.executor = threads;
  TRY(kvx_attend(&args, NULL));
}

/* The largest difference of what is stored from k. */
static float largest_error_of_k(const kvx_layer_t* layer) {
  static float stored[TOKENS][KV_HEADS][DIM];
  const kvx_block_table_t table = block_table();
  const kvx_seq_lens_t seq_lens = {sizeof seq_lens, KVX_DTYPE_S32, 1, lengths};
  const kvx_rows_t k_rows = rows(stored);
  kvx_gather_args_t args = {.size = sizeof args, .num_ranges = 1, .layer = layer};
  args.block_table = &table;
  args.seq_lens = &seq_lens;
  args.k = &k_rows;
  TRY(kvx_gather(&args, NULL));
  float largest = 0;
  for (int i = 0; i < TOKENS * KV_HEADS * DIM; ++i) {
    largest = fmaxf(largest, fabsf((&stored[0][0][0])[i] - (&k[0][0][0])[i]));
  }
  return largest;
}

/* Queries of zeros weigh all tokens alike: the output is the mean of V, 0.1 * 19.5. */
static void check_result(const char* name, float error, float most) {
  printf("%-5s stores K within %.4f, attention gives %.3f\n", name, error, out[0][0]);
  if (error > most || fabsf(out[0][0] - 1.95f) > 0.05f) exit(1);
}

/* Pages: the engine allocates num_blocks * num_kv_heads * block_size * bytes_per_token zeroed
 * bytes; kvx_describe_pages fills in where a row's codes and scales lie inside a page. */
static void run_pages(const char* name, kvx_format_t format, float most,
                      const kvx_executor_t* threads) {
  const kvx_format_spec_t spec = {.size = sizeof spec, .format = format};
  kvx_page_desc_t page = {.size = sizeof page, .block_size = BLOCK_SIZE};
  page.k_head_dim = page.v_head_dim = DIM;
  page.k_spec = page.v_spec = &spec;
  uint64_t bytes_per_token = 0;
  TRY(kvx_page_bytes_per_token(&page, &bytes_per_token));
  void* const pool = calloc(BLOCKS * KV_HEADS * BLOCK_SIZE, bytes_per_token);
  kvx_side_t k_side = {.size = sizeof k_side}, v_side = {.size = sizeof v_side};
  TRY(kvx_describe_pages(&page, pool, KV_HEADS, &k_side, &v_side));

  const kvx_head_run_t run = {
      .size = sizeof run, .num_heads = KV_HEADS, .k = &k_side, .v = &v_side};
  const kvx_head_run_t* const runs[] = {&run};
  kvx_layer_t layer = {.size = sizeof layer, .block_size = BLOCK_SIZE, .num_blocks = BLOCKS};
  layer.num_kv_heads = KV_HEADS;
  layer.num_runs = 1;
  layer.runs = runs;

  append(&layer, threads);
  attend(&layer, threads);
  check_result(name, largest_error_of_k(&layer), most);
  free(pool);
}

/* llama.cpp's q8_0: a row of [n_kv_heads, head_dim] numbers is blocks of 34 bytes,
 *   block: [scale: f16, 2 bytes][codes: int8, 32 bytes]
 * kvx's int8 with groups of 32 and f16 scales means the same numbers. Its codes are fragments of 32
 * bytes that begin at byte 2 of a block, 34 bytes apart; its scales begin at byte 0. */
enum { Q8_0_BYTES = 34, Q8_0_GROUP = 32, Q8_0_ROW = DIM / Q8_0_GROUP * Q8_0_BYTES };

static kvx_side_t q8_0_side(const kvx_format_spec_t* spec, uint8_t* first) {
  kvx_side_t side = {.size = sizeof side, .head_dim = DIM, .spec = spec};
  side.codes = first + 2;
  side.scales = first;
  side.code_fragment_bytes = Q8_0_GROUP;
  side.code_fragment_stride = side.scale_group_stride = Q8_0_BYTES;
  side.code_head_stride = side.scale_head_stride = Q8_0_ROW;
  side.code_token_stride = side.scale_token_stride = KV_HEADS * Q8_0_ROW;
  side.code_block_stride = side.scale_block_stride = BLOCK_SIZE * KV_HEADS * Q8_0_ROW;
  return side;
}

static void run_q8_0(void) {
  static uint8_t k_rows_of_cache[BLOCKS * BLOCK_SIZE][KV_HEADS][Q8_0_ROW];
  static uint8_t v_rows_of_cache[BLOCKS * BLOCK_SIZE][KV_HEADS][Q8_0_ROW];
  const kvx_format_spec_t spec = {.size = sizeof spec,
                                  .format = KVX_FORMAT_INT8,
                                  .group_size = Q8_0_GROUP,
                                  .scale_type = KVX_SCALE_TYPE_F16};
  const kvx_side_t k_side = q8_0_side(&spec, k_rows_of_cache[0][0]),
                   v_side = q8_0_side(&spec, v_rows_of_cache[0][0]);
  const kvx_head_run_t run = {
      .size = sizeof run, .num_heads = KV_HEADS, .k = &k_side, .v = &v_side};
  const kvx_head_run_t* const runs[] = {&run};
  kvx_layer_t layer = {.size = sizeof layer, .block_size = BLOCK_SIZE, .num_blocks = BLOCKS};
  layer.num_kv_heads = KV_HEADS;
  layer.num_runs = 1;
  layer.runs = runs;
  append(&layer, NULL);
  attend(&layer, NULL);
  check_result("q8_0", largest_error_of_k(&layer), 0.01f);

  /* What llama.cpp wrote is read in place: the scale 0.5, the codes 0, 1, ... */
  uint8_t* const block = k_rows_of_cache[(size_t)block_ids[0] * BLOCK_SIZE][0];
  block[0] = 0x00, block[1] = 0x38; /* f16 0.5 */
  for (int i = 0; i < Q8_0_GROUP; ++i) block[2 + i] = (uint8_t)i;
  for (int i = 0; i < Q8_0_GROUP; ++i) k[0][0][i] = 0.5f * (float)i;
  if (largest_error_of_k(&layer) > 0.01f) exit(1);
  printf("q8_0  blocks of llama.cpp's are read where they lie\n");
}

int main(void) {
  fill_rows();
  kvx_executor_t threads = {.size = sizeof threads};
  TRY(kvx_thread_pool_create(0, &threads)); /* one thread a core; an engine may lend its own */
  run_pages("int8", KVX_FORMAT_INT8, 0.01f, &threads);
  run_pages("nvfp4", KVX_FORMAT_NVFP4, 0.12f, &threads);
  run_q8_0();
  TRY(kvx_thread_pool_free(&threads));
  return 0;
}
