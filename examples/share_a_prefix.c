/* Two answers to one prompt, a third from the prefix cache, and all of it from a file again. */
#include <kvx/kvx_abi.h>
#include <stdio.h>

enum { KV_HEADS = 2, Q_HEADS = 4, DIM = 32, BLOCK_SIZE = 8, PROMPT = 20 };

static int check(kvx_status_t status, const char* call) {
  if (status != KVX_STATUS_OK) printf("%s: %s\n", call, kvx_last_error());
  return status == KVX_STATUS_OK;
}
#define TRY(call) \
  if (!check(call, #call)) return 1

/* Feeds tokens one by one: a model would compute q, k and v from them. */
static int feed(kvx_cache_t cache, int32_t sequence, const int32_t* tokens, int count) {
  float q[Q_HEADS * DIM] = {0}, k[KV_HEADS * DIM], v[KV_HEADS * DIM], out[Q_HEADS * DIM];
  const kvx_rows_t q_rows = {sizeof q_rows, KVX_DTYPE_F32, q, 0, 0};
  const kvx_rows_t k_rows = {sizeof k_rows, KVX_DTYPE_F32, k, 0, 0};
  const kvx_rows_t v_rows = {sizeof v_rows, KVX_DTYPE_F32, v, 0, 0};
  const kvx_rows_t out_rows = {sizeof out_rows, KVX_DTYPE_F32, out, 0, 0};
  kvx_step_layer_args_t layer = {.size = sizeof layer, .num_q_heads = Q_HEADS, .q = &q_rows};
  layer.k = &k_rows, layer.v = &v_rows, layer.out = &out_rows;
  for (int t = 0; t < count; ++t) {
    const int32_t one = 1;
    for (int i = 0; i < KV_HEADS * DIM; ++i) k[i] = v[i] = (float)tokens[t];
    TRY(kvx_step_begin(cache, 1, &sequence, &one));
    TRY(kvx_step_layer(cache, &layer));
    TRY(kvx_step_end(cache));
  }
  TRY(kvx_sequence_record(cache, sequence, tokens, count));
  return 0;
}

int main(void) {
  kvx_cache_config_t config = {.size = sizeof config, .num_layers = 1, .num_kv_heads = KV_HEADS};
  config.k_head_dim = config.v_head_dim = DIM, config.block_size = BLOCK_SIZE;
  config.max_sequences = 4, config.max_tokens_per_sequence = 64, config.recipe = "int8";
  kvx_cache_options_t options = {.size = sizeof options, .flags = KVX_CACHE_PREFIXES};
  kvx_cache_t cache;
  TRY(kvx_cache_create_with(&config, &options, &cache));
  int32_t prompt[PROMPT], first, second, third, loaded;
  int64_t num_found, num_tokens;
  for (int t = 0; t < PROMPT; ++t) prompt[t] = t % 7;
  TRY(kvx_sequence_create(cache, &first));
  if (feed(cache, first, prompt, PROMPT)) return 1;
  TRY(kvx_sequence_fork(cache, first, &second)); /* shares every block of the prompt */
  if (feed(cache, first, (int32_t[]){1, 2, 3}, 3) || feed(cache, second, (int32_t[]){4}, 1))
    return 1;
  TRY(kvx_sequence_create_from(cache, NULL, prompt, PROMPT, &third, &num_found));
  TRY(kvx_sequence_save(cache, first, "share_a_prefix.kvx", NULL));
  TRY(kvx_sequence_load(cache, "share_a_prefix.kvx", NULL, &loaded));
  TRY(kvx_sequence_tokens(cache, loaded, &num_tokens, NULL));
  printf("%d of %d tokens were found, %d loaded\n", (int)num_found, PROMPT, (int)num_tokens);
  kvx_cache_free(cache);
  return num_found == 16 && num_tokens == 23 && remove("share_a_prefix.kvx") == 0 ? 0 : 1;
}
