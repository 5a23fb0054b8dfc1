/* The ABI's structs seen by a C99 compiler. */
#include "tests/api/layout_c.h"

#include <stddef.h>

#include "kvx/kvx_abi.h"

const char* kvx_first_wrong_layout_in_c(void) {
#define KVX_STRUCT(type, bytes, alignment)                                        \
  {                                                                               \
    struct probe {                                                                \
      char before;                                                                \
      type object;                                                                \
    };                                                                            \
    if (sizeof(type) != (bytes)) return #type;                                    \
    if (offsetof(struct probe, object) != (alignment)) return #type " alignment"; \
  }
#define KVX_FIELD(type, field, offset) \
  if (offsetof(type, field) != (offset)) return #type "." #field;
#include "api/layout.inc"
  return "";
}
