/* A cache that kvx owns: two answers to one prompt, a third from the prefix cache, a cut, and all
 * of it from a file again. */
#include <kvx/kvx_abi.h>
#include <stdio.h>
#include <stdlib.h>

enum { KV_HEADS = 2, Q_HEADS = 4, DIM = 32, BLOCK_SIZE = 8, PROMPT = 20 };

#define TRY(call)                                           \
  do {                                                      \
    if ((call) != KVX_STATUS_OK) {                          \
      fprintf(stderr, "%s: %s\n", #call, kvx_last_error()); \
      exit(1);                                              \
    }                                                       \
  } while (0)

static kvx_rows_t rows(void* data) {
  const kvx_rows_t desc = {.size = sizeof desc, .dtype = KVX_DTYPE_F32, .data = data};
  return desc;
}

/* One step: appends the tokens' K and V and attends. A model would compute q, k and v. */
static void feed(kvx_cache_t cache, int32_t sequence, const int32_t* tokens, int32_t count) {
  static float q[PROMPT * Q_HEADS * DIM], k[PROMPT * KV_HEADS * DIM], out[PROMPT * Q_HEADS * DIM];
  for (int i = 0; i < count * KV_HEADS * DIM; ++i) k[i] = (float)tokens[i / DIM / KV_HEADS];
  const kvx_rows_t q_rows = rows(q), k_rows = rows(k), out_rows = rows(out);
  kvx_step_layer_args_t layer = {.size = sizeof layer, .num_q_heads = Q_HEADS};
  layer.q = &q_rows;
  layer.k = layer.v = &k_rows;
  layer.out = &out_rows;
  TRY(kvx_step_begin(cache, 1, &sequence, &count));
  TRY(kvx_step_layer(cache, &layer));
  TRY(kvx_step_end(cache));
  TRY(kvx_sequence_record(cache, sequence, tokens, count)); /* blocks can be found by them */
}

int main(void) {
  kvx_cache_config_t config = {.size = sizeof config, .num_layers = 1, .num_kv_heads = KV_HEADS};
  config.k_head_dim = config.v_head_dim = DIM;
  config.block_size = BLOCK_SIZE;
  config.max_sequences = 4;
  config.max_tokens_per_sequence = 64;
  config.recipe = "int8";
  const kvx_cache_options_t options = {.size = sizeof options, .flags = KVX_CACHE_PREFIXES};
  kvx_cache_t cache;
  TRY(kvx_cache_create_with(&config, &options, &cache));

  int32_t prompt[PROMPT], first, second, third, loaded;
  for (int t = 0; t < PROMPT; ++t) prompt[t] = t % 7;
  TRY(kvx_sequence_create(cache, &first));
  feed(cache, first, prompt, PROMPT);
  TRY(kvx_sequence_fork(cache, first, &second)); /* shares every block of the prompt */
  feed(cache, first, (const int32_t[]){1, 2, 3}, 3);
  feed(cache, second, (const int32_t[]){4}, 1);
  TRY(kvx_sequence_truncate(cache, second, 10)); /* forgets the tokens from the tenth on */

  int64_t num_found, num_loaded, num_left;
  TRY(kvx_sequence_create_from(cache, NULL, prompt, PROMPT, &third, &num_found));
  TRY(kvx_sequence_save(cache, first, "owned_cache_c.kvx", NULL));
  TRY(kvx_sequence_free(cache, first));
  TRY(kvx_sequence_load(cache, "owned_cache_c.kvx", NULL, &loaded));
  TRY(kvx_sequence_tokens(cache, loaded, &num_loaded, NULL));
  TRY(kvx_sequence_tokens(cache, second, &num_left, NULL));
  printf("%d of %d prompt tokens were found, %d are left after the cut, %d came from the file\n",
         (int)num_found, PROMPT, (int)num_left, (int)num_loaded);
  kvx_cache_free(cache);
  const int is_removed = remove("owned_cache_c.kvx") == 0;
  return num_found == 16 && num_left == 10 && num_loaded == 23 && is_removed ? 0 : 1;
}
