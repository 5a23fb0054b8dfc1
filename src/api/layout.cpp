// Checks the layout of the C ABI's structs when the library is compiled.
#include <cstddef>

#include "kvx/kvx_abi.h"

#define KVX_STRUCT(type, bytes, alignment) \
  static_assert(sizeof(type) == (bytes) && alignof(type) == (alignment));
#define KVX_FIELD(type, field, offset) static_assert(offsetof(type, field) == (offset));
#include "api/layout.inc"
#undef KVX_STRUCT
#undef KVX_FIELD

static_assert(sizeof(kvx_status_t) == 4 && sizeof(kvx_dtype_t) == 4 && sizeof(kvx_layout_t) == 4);
static_assert(sizeof(kvx_memory_type_t) == 4 && sizeof(kvx_block_table_format_t) == 4);
static_assert(sizeof(kvx_scale_granularity_t) == 4 && sizeof(kvx_block_table_flags_t) == 4);
