/* The slow provider's parts. It is written from the specification and docs/abi.md a second time, in
 * plain loops over single elements; it shares nothing with src/ and is never fast. */
#ifndef KVX_TESTS_ABI_PROVIDERS_SLOW_H
#define KVX_TESTS_ABI_PROVIDERS_SLOW_H

#include <kvx/kvx_abi.h>

#include "fault.h"

/* FullPrecision enough for every product of this ABI's numbers. */
__extension__ typedef __int128 full_precision;

/* Whether a call is unsupported. A malformed call is INVALID_ARGUMENT, whatever else is unsupported
 * in it, so the error is deferred until all descriptors have been checked. */
struct deferred_error {
  int is_unsupported;
};

/* numbers.c */
int element_bytes(uint32_t dtype);
int is_float_type(uint32_t dtype);
int is_eight_bits(uint32_t dtype);
/* One element to one element; scale is 1 where the types need none. */
void convert(uint32_t from_type, const void* from, uint32_t to_type, void* to, float scale);
/* A scale of type F32, F16 or BF16. */
float read_scale(uint32_t type, const void* data);

/* check.c: descriptors. OK, INVALID_ARGUMENT or INCOMPATIBLE, and counters beside it. */
kvx_status_t check_cache_sizes(const kvx_cache_desc_t* cache);
kvx_status_t check_cache(const kvx_cache_desc_t* cache, struct deferred_error* deferred_error);
kvx_status_t check_io_sizes(const kvx_kv_io_desc_t* io);
kvx_status_t check_io(const kvx_cache_desc_t* cache, const kvx_kv_io_desc_t* io, int64_t sequences,
                      struct deferred_error* deferred_error);
kvx_status_t check_top_size(const void* object, uint32_t known);
kvx_status_t check_nested_size(uint32_t size, uint32_t known);
kvx_status_t check_indices(kvx_dtype_t dtype, const void* data, int64_t count,
                           struct deferred_error* deferred_error);
/* Bytes from the first element to the last. Requires: a checked tensor. */
int64_t tensor_bytes(const kvx_tensor_desc_t* tensor);
int overlaps(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes);
uint32_t number_of(const void* enum_field);
void check_alignment(const void* data, int bytes, struct deferred_error* deferred_error);

/* Element (block, token, head, dim) of a cache tensor, (token, head, dim) of an IO tensor. */
int64_t cache_place(const kvx_cache_desc_t* cache, const kvx_tensor_desc_t* tensor, int64_t block,
                    int64_t token, int64_t head, int64_t dim);
char* io_element(const kvx_tensor_desc_t* tensor, int64_t token, int64_t head, int64_t dim);

int64_t index_at(kvx_dtype_t dtype, const void* data, int64_t i);

#endif
