/* A provider that asks libkvx.so (KVX_LIBRARY) for everything and spoils one thing: VERB_FAULT. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvx/kvx_abi.h"
#include "verb_fault.h"

typedef void (*any_function)(void);

static any_function function_of_kvx(const char* name) {
  static void* library = NULL;
  if (library == NULL) library = dlopen(KVX_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == NULL ? NULL : dlsym(library, name);
  any_function function;
  memcpy(&function, &symbol, sizeof function); /* ISO C has no cast for it */
  if (symbol != NULL) return function;
  fprintf(stderr, "verb_wrapper: %s\n", dlerror());
  abort();
}

/* The function of libkvx.so that has the name of the one that asks. */
#define KVX(name) ((__typeof__(&name))function_of_kvx(#name))

static void* copy_of(const void* list, size_t count, size_t bytes) {
  void* copy = malloc((count + 1) * bytes);
  if (copy == NULL) abort();
  if (list != NULL) memcpy(copy, list, count * bytes);
  return copy;
}

/* ---- as they are */

kvx_status_t kvx_get_version(kvx_version_t* version) {
  return KVX(kvx_get_version)(version);
}
kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache) {
  return KVX(kvx_validate_cache_desc)(cache);
}
kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                          void* stream) {
  return KVX(kvx_write_kv)(cache, write, stream);
}
kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                           void* stream) {
  return KVX(kvx_gather_kv)(cache, gather, stream);
}
kvx_status_t kvx_query_features(kvx_features_t* features) {
  return KVX(kvx_query_features)(features);
}
kvx_status_t kvx_format_info(const kvx_format_spec_t* spec, uint32_t head_dim,
                             kvx_format_info_t* info) {
  return KVX(kvx_format_info)(spec, head_dim, info);
}
kvx_status_t kvx_describe_pages(const kvx_page_desc_t* page, void* pages, uint32_t num_kv_heads,
                                kvx_side_t* k, kvx_side_t* v) {
  return KVX(kvx_describe_pages)(page, pages, num_kv_heads, k, v);
}
kvx_status_t kvx_attend_workspace(const kvx_attend_args_t* args, uint64_t* bytes) {
  return KVX(kvx_attend_workspace)(args, bytes);
}

/* ---- spoiled */

kvx_status_t kvx_page_bytes_per_token(const kvx_page_desc_t* page, uint64_t* bytes) {
  const kvx_status_t status = KVX(kvx_page_bytes_per_token)(page, bytes);
  if (status != KVX_STATUS_OK || VERB_FAULT != PAGES_WITHOUT_SCALES) return status;
  kvx_format_info_t info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  if (KVX(kvx_format_info)(page->k_spec, page->k_head_dim, &info) == KVX_STATUS_OK) {
    *bytes -= info.scale_bytes_per_row;
  }
  return status;
}

static int64_t slot_of(const kvx_append_args_t* args, int64_t token) {
  return args->slot_dtype == KVX_DTYPE_S64 ? ((const int64_t*)args->slots)[token]
                                           : ((const int32_t*)args->slots)[token];
}

/* Runs an append with other slots, 64 bits each. */
static kvx_status_t append_to(kvx_append_args_t args, int64_t* slots) {
  args.slot_dtype = KVX_DTYPE_S64;
  args.slots = slots;
  const kvx_status_t status = KVX(kvx_append)(&args, NULL);
  free(slots);
  return status;
}

static int64_t* slots_of(const kvx_append_args_t* args) {
  int64_t* slots = copy_of(NULL, (size_t)args->num_tokens, sizeof *slots);
  for (int64_t t = 0; t < args->num_tokens; ++t) slots[t] = slot_of(args, t);
  return slots;
}

static kvx_status_t append_with_other_slots(const kvx_append_args_t* args) {
  const int64_t num_slots = args->layer->num_blocks * args->layer->block_size;
  int64_t* slots = slots_of(args);
  for (int64_t t = 0; t < args->num_tokens; ++t) {
    if (VERB_FAULT == NEGATIVE_SLOT_IS_ZERO && slots[t] < 0) slots[t] = 0;
    if (VERB_FAULT == COUNTED_SLOT_IS_WRITTEN && args->out_of_range_slots != NULL &&
        slots[t] >= num_slots) {
      slots[t] = num_slots - 1;
      ++*args->out_of_range_slots;
    }
    for (int64_t earlier = 0; VERB_FAULT == EARLIER_TOKEN_STAYS && earlier < t; ++earlier) {
      if (slots[t] == slot_of(args, earlier)) slots[t] = -1;
    }
  }
  return append_to(*args, slots);
}

/* The tokens before the first slot that is refused. */
static void append_the_beginning(const kvx_append_args_t* args) {
  kvx_append_args_t beginning = *args;
  const int64_t num_slots = args->layer->num_blocks * args->layer->block_size;
  beginning.num_tokens = 0;
  while (beginning.num_tokens < args->num_tokens &&
         slot_of(args, beginning.num_tokens) < num_slots) {
    ++beginning.num_tokens;
  }
  KVX(kvx_append)(&beginning, NULL);
}

/* The steps of K, one F32 or F16 for all or one a head, as their reciprocals during the call. */
static kvx_status_t append_with_inverted_scale(const kvx_append_args_t* args) {
  const kvx_side_t* side = args->layer->runs[0]->k;
  const int is_given = side->spec->scale_source == KVX_SCALE_SOURCE_GIVEN;
  if (!is_given || side->spec->format != KVX_FORMAT_FP8_E4M3) return KVX(kvx_append)(args, NULL);
  float* scale = side->scales;
  const float kept = *scale;
  *scale = 1 / kept;
  const kvx_status_t status = KVX(kvx_append)(args, NULL);
  *scale = kept;
  return status;
}

static void spoil_a_code(const kvx_append_args_t* args) {
  const kvx_side_t* side = args->layer->runs[0]->k;
  kvx_format_info_t info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  KVX(kvx_format_info)(side->spec, side->head_dim, &info);
  for (int64_t t = 0; t < args->num_tokens; ++t) {
    const int64_t slot = slot_of(args, t);
    if (slot < 0) continue;
    const int64_t block_size = args->layer->block_size;
    uint8_t* row = (uint8_t*)side->codes + slot / block_size * side->code_block_stride +
                   slot % block_size * side->code_token_stride;
    row[info.code_bytes_per_row - 1] ^= 1;
    return;
  }
}

kvx_status_t kvx_append(const kvx_append_args_t* args, void* stream) {
  (void)stream;
  if (args == NULL || args->size < sizeof *args || args->layer == NULL || args->slots == NULL) {
    return KVX(kvx_append)(args, NULL);
  }
  kvx_layer_t layer = *args->layer;
  kvx_append_args_t spoiled = *args;
  spoiled.size = sizeof spoiled;
  switch (VERB_FAULT) {
    case NEGATIVE_SLOT_IS_ZERO:
    case COUNTED_SLOT_IS_WRITTEN:
    case EARLIER_TOKEN_STAYS:
      return args->num_tokens > 0 ? append_with_other_slots(args) : KVX(kvx_append)(args, NULL);
    case TRANSFORM_FORGOTTEN:
      layer.k_transform = NULL;
      spoiled.layer = &layer;
      return KVX(kvx_append)(&spoiled, NULL);
    case NONFINITE_UNCOUNTED:
      spoiled.nonfinite_inputs = NULL;
      return KVX(kvx_append)(&spoiled, NULL);
    case GIVEN_SCALE_INVERTED:
      return args->layer->runs != NULL ? append_with_inverted_scale(args)
                                       : KVX(kvx_append)(args, NULL);
    default:
      break;
  }
  const kvx_status_t status = KVX(kvx_append)(args, NULL);
  if (VERB_FAULT == WRITES_BEFORE_IT_REFUSES && status == KVX_STATUS_OUT_OF_RANGE) {
    append_the_beginning(args);
  }
  if (VERB_FAULT == LAST_CODE_DIFFERS && status == KVX_STATUS_OK && args->layer->runs != NULL) {
    spoil_a_code(args);
  }
  return status;
}

kvx_status_t kvx_gather(const kvx_gather_args_t* args, void* stream) {
  (void)stream;
  if (args == NULL || args->size < sizeof *args || args->layer == NULL) {
    return KVX(kvx_gather)(args, NULL);
  }
  kvx_gather_args_t spoiled = *args;
  kvx_layer_t layer = *args->layer;
  int64_t* list = NULL;
  if (VERB_FAULT == TRANSFORM_NOT_UNDONE) {
    layer.k_transform = layer.v_transform = NULL;
    spoiled.layer = &layer;
  }
  if (VERB_FAULT == NUM_ROWS_IGNORED && args->num_rows > 0) spoiled.num_rows = 1 << 10;
  if (VERB_FAULT == RANGE_OFF_BY_ONE && args->first_tokens != NULL) {
    list = copy_of(args->first_tokens, args->num_ranges, sizeof *list);
    if (list[0] == 3) ++list[0];
    spoiled.first_tokens = list;
  }
  if (VERB_FAULT == FIRST_ROW_IGNORED && args->first_rows != NULL) {
    list = copy_of(NULL, args->num_ranges, sizeof *list);
    int64_t row = 0;
    for (uint32_t i = 0; i < args->num_ranges; ++i) {
      list[i] = row;
      row += args->num_tokens[i];
    }
    spoiled.first_rows = list;
  }
  const kvx_status_t status = KVX(kvx_gather)(&spoiled, NULL);
  free(list);
  return status;
}

/* Attention over lengths that are a token shorter. */
static kvx_status_t attend_without_the_last(const kvx_attend_args_t* args) {
  kvx_attend_args_t spoiled = *args;
  kvx_seq_lens_t shorter = *args->seq_lens;
  if (shorter.dtype != KVX_DTYPE_S32) return KVX(kvx_attend)(args, NULL);
  int32_t* lengths = copy_of(shorter.lengths, shorter.seq_count, sizeof *lengths);
  for (uint32_t s = 0; s < shorter.seq_count; ++s) lengths[s] -= lengths[s] > 6;
  shorter.lengths = lengths;
  spoiled.seq_lens = &shorter;
  const kvx_status_t status = KVX(kvx_attend)(&spoiled, NULL);
  free(lengths);
  return status;
}

/* A tree in which everybody sees everybody. */
static kvx_status_t attend_to_all(const kvx_attend_args_t* args) {
  kvx_attend_args_t spoiled = *args;
  const size_t num_queries = (size_t)args->q_starts[args->block_table->seq_count];
  uint8_t* mask = copy_of(NULL, num_queries, 16);
  memset(mask, 1, num_queries * 16);
  spoiled.tree_mask = mask;
  spoiled.tree_mask_stride = 16;
  const kvx_status_t status = KVX(kvx_attend)(&spoiled, NULL);
  free(mask);
  return status;
}

kvx_status_t kvx_attend(const kvx_attend_args_t* args, void* stream) {
  (void)stream;
  const int is_whole = args != NULL && args->size >= sizeof *args && args->seq_lens != NULL &&
                       args->block_table != NULL;
  if (!is_whole) return KVX(kvx_attend)(args, NULL);
  kvx_attend_args_t spoiled = *args;
  if (VERB_FAULT == LAST_TOKEN_LOST) return attend_without_the_last(args);
  if (VERB_FAULT == NOT_CAUSAL && args->tree_mask == NULL && args->q_starts != NULL) {
    return attend_to_all(args);
  }
  if (VERB_FAULT == WINDOW_OFF_BY_ONE && args->window != 0) ++spoiled.window;
  if (VERB_FAULT == SINKS_IGNORED) spoiled.sinks = NULL;
  if (VERB_FAULT == SOFTCAP_IGNORED) spoiled.softcap = 0;
  if (VERB_FAULT == TREE_MASK_IGNORED) spoiled.tree_mask = NULL;
  if (VERB_FAULT == FULL_PRECISION_WINDOW_IGNORED) {
    spoiled.full_precision = NULL;
    spoiled.num_sink_blocks = spoiled.first_recent_blocks = NULL;
  }
  const kvx_status_t status = KVX(kvx_attend)(&spoiled, NULL);
  if (VERB_FAULT == LSE_IN_BASE_TWO && status == KVX_STATUS_OK && args->lse != NULL) {
    args->lse[0] *= 1.442695f;
  }
  return status;
}

kvx_status_t kvx_copy_blocks(const kvx_copy_args_t* args, void* stream) {
  (void)stream;
  if (args == NULL || args->size < sizeof *args) return KVX(kvx_copy_blocks)(args, NULL);
  kvx_copy_args_t spoiled = *args;
  if (VERB_FAULT == COPIES_WHOLE_BLOCKS) spoiled.num_tokens = NULL;
  return KVX(kvx_copy_blocks)(&spoiled, NULL);
}

kvx_status_t kvx_transcode(const kvx_transcode_args_t* args, void* stream) {
  (void)stream;
  const int can_turn = VERB_FAULT == SLOTS_CHANGE_PLACES && args != NULL &&
                       args->size >= sizeof *args && args->slot_dtype == KVX_DTYPE_S64 &&
                       args->num_tokens > 1 && args->to_slots != NULL;
  if (!can_turn) return KVX(kvx_transcode)(args, NULL);
  kvx_transcode_args_t spoiled = *args;
  int64_t* slots = copy_of(args->to_slots, (size_t)args->num_tokens, sizeof *slots);
  const int64_t first = slots[0];
  slots[0] = slots[1];
  slots[1] = first;
  spoiled.to_slots = slots;
  const kvx_status_t status = KVX(kvx_transcode)(&spoiled, NULL);
  free(slots);
  return status;
}
