/* kvx_abi.h: the KVX v1 C ABI, and its manual.
 *
 * The door grows additively: numbers, names, field order and offsets that stand here never change.
 * Every struct begins with `size`, which its caller writes. Every function returns a status and
 * throws nothing.
 */
#ifndef KVX_KVX_ABI_H
#define KVX_KVX_ABI_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(KVX_BUILD_DLL)
#define KVX_API __declspec(dllexport)
#elif defined(_WIN32) && defined(KVX_USE_DLL)
#define KVX_API __declspec(dllimport)
#elif defined(__GNUC__)
#define KVX_API __attribute__((visibility("default")))
#else
#define KVX_API
#endif

/* A caller checks that the major version is the one it was compiled with; a newer minor only adds.
 */
#define KVX_ABI_VERSION_MAJOR 1
#define KVX_ABI_VERSION_MINOR 1
#define KVX_ABI_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvx_status_t {
  KVX_STATUS_OK = 0,
  KVX_STATUS_INVALID_ARGUMENT = 1, /* a null pointer, a size, a count or a number that cannot be */
  KVX_STATUS_UNSUPPORTED = 2,      /* a legal call that this build or this machine cannot do */
  KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot, an index or a length beyond its array */
  KVX_STATUS_INCOMPATIBLE = 4,  /* a struct from a newer ABI that asks for what is unknown here */
  KVX_STATUS_INTERNAL_ERROR = 5 /* a fault of the library */
} kvx_status_t;

typedef struct kvx_version_t {
  uint32_t
      size; /* in: 0, or sizeof(kvx_version_t) of the caller; out: the bytes that were filled */
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t abi_patch;
} kvx_version_t;

/* Tells which version of this ABI the library speaks.
 *
 * size 0 on entry: a caller of version 1.1, which never had to set it; 16 bytes are filled and 1.1
 * is reported. size >= 16 on entry: at most that many bytes are filled, with the library's own
 * version. INVALID_ARGUMENT, and nothing written: version is null, or size is 1 to 15. Thread-safe.
 */
KVX_API kvx_status_t kvx_get_version(kvx_version_t* version);

#ifdef __cplusplus
}
#endif

#endif /* KVX_KVX_ABI_H */
