/* The layout of the ABI's structs with a C compiler, for layout_test.cpp. */
#ifndef KVX_TESTS_ABI_LAYOUT_C_H
#define KVX_TESTS_ABI_LAYOUT_C_H

#ifdef __cplusplus
extern "C" {
#endif

/* "type.field" of the first entry of abi/layout.inc that does not hold in C, or "". */
const char* kvx_first_wrong_layout_in_c(void);

#ifdef __cplusplus
}
#endif

#endif
