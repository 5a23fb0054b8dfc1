/* The C ABI as version 1.1 had it: a frozen copy, against which client.c is compiled. Never change
 * it. */
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

typedef enum kvx_status {
  KVX_STATUS_OK = 0,
  KVX_STATUS_INVALID_ARGUMENT = 1, /* a null pointer, a size, a count or a number that cannot be */
  KVX_STATUS_UNSUPPORTED = 2,      /* a legal call that this build or this machine cannot do */
  KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot, an index or a length beyond its array */
  KVX_STATUS_INCOMPATIBLE = 4,     /* a struct of a newer ABI that asks for what is unknown here */
  KVX_STATUS_INTERNAL_ERROR = 5    /* a fault of the library, or no memory */
} kvx_status_t;

typedef enum kvx_dtype {
  KVX_DTYPE_INVALID = 0,
  KVX_DTYPE_F16 = 1,
  KVX_DTYPE_BF16 = 2,
  KVX_DTYPE_F32 = 3,
  KVX_DTYPE_F8_E4M3 = 4,
  KVX_DTYPE_F8_E5M2 = 5,
  KVX_DTYPE_S32 = 6,
  KVX_DTYPE_S64 = 7,
  KVX_DTYPE_U32 = 8,
  KVX_DTYPE_U64 = 9,
  KVX_DTYPE_U8 = 10
} kvx_dtype_t;

typedef enum kvx_memory_type {
  KVX_MEMORY_UNKNOWN = 0,
  KVX_MEMORY_HOST = 1,
  KVX_MEMORY_DEVICE = 2,
  KVX_MEMORY_UNIFIED = 3
} kvx_memory_type_t;

/* The order of a cache tensor's dimensions. pack is shape[4]; K and V may have different ones.
 *   NHD         [num_blocks, block_size, num_kv_heads, head_dim]
 *   HND         [num_blocks, num_kv_heads, block_size, head_dim]
 *   HND_PACKED  [num_blocks, num_kv_heads, head_dim / pack, block_size, pack]
 *   CUSTOM      4 dimensions: (block, token, head, dim); 5: (block, head, dim / pack, token, pack)
 */
typedef enum kvx_layout {
  KVX_LAYOUT_INVALID = 0,
  KVX_LAYOUT_BLOCK_NHD = 1,
  KVX_LAYOUT_BLOCK_HND = 2,
  KVX_LAYOUT_BLOCK_HND_PACKED = 3,
  KVX_LAYOUT_BLOCK_CUSTOM = 15
} kvx_layout_t;

enum { KVX_MAX_TENSOR_DIMS = 5 };

typedef enum kvx_block_table_format {
  KVX_BLOCK_TABLE_INVALID = 0,
  KVX_BLOCK_TABLE_PACKED = 1,    /* block ids [seq_count, max_blocks_per_seq] */
  KVX_BLOCK_TABLE_RAGGED = 2,    /* a block id per token (or page), indptr [seq_count + 1] */
  KVX_BLOCK_TABLE_KV_OFFSETS = 3 /* indices [seq_count, beam_width, 2 (K, V), max_blocks_per_seq] */
} kvx_block_table_format_t;

typedef enum kvx_block_table_flags {
  KVX_BLOCK_TABLE_FLAG_NONE = 0,
  KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 << 0 /* KV_OFFSETS: bit 31 names the secondary pool */
} kvx_block_table_flags_t;

/* Shapes of scales: PER_TENSOR [1], PER_BLOCK [num_blocks], PER_HEAD [num_kv_heads],
 * PER_BLOCK_HEAD [num_blocks, num_kv_heads]. */
typedef enum kvx_scale_granularity {
  KVX_SCALE_NONE = 0,
  KVX_SCALE_PER_TENSOR = 1,
  KVX_SCALE_PER_BLOCK = 2,
  KVX_SCALE_PER_HEAD = 3,
  KVX_SCALE_PER_BLOCK_HEAD = 4
} kvx_scale_granularity_t;

typedef struct kvx_version {
  uint32_t size; /* in: 0, or sizeof(kvx_version_t) of the caller; out: the bytes filled */
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t abi_patch;
} kvx_version_t;

typedef struct kvx_tensor_desc {
  uint32_t size;
  kvx_dtype_t dtype;
  kvx_layout_t layout; /* of a cache tensor; any value in IO tensors */
  kvx_memory_type_t memory;
  uint32_t ndim;
  int64_t shape[KVX_MAX_TENSOR_DIMS];  /* in layout order */
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* elements */
  void* data;
} kvx_tensor_desc_t;

typedef struct kvx_pool_desc {
  uint32_t size; /* 0 with all other fields 0: no pool */
  kvx_memory_type_t memory;
  uint32_t bytes_per_block; /* of one K or one V block of one layer */
  void* primary;
  void* secondary; /* null: no secondary pool */
} kvx_pool_desc_t;

typedef struct kvx_cache_desc {
  uint32_t size;
  uint32_t num_blocks;
  uint32_t block_size; /* tokens */
  uint32_t num_kv_heads;
  uint32_t head_dim;
  kvx_tensor_desc_t k;
  kvx_tensor_desc_t v;
  kvx_pool_desc_t pool; /* needed by KV_OFFSETS */
} kvx_cache_desc_t;

typedef struct kvx_block_table {
  uint32_t size;
  kvx_block_table_format_t format;
  kvx_dtype_t index_dtype;  /* S32 or S64; KV_OFFSETS: S32 */
  kvx_dtype_t indptr_dtype; /* S32 or S64; RAGGED only */
  uint32_t seq_count;
  uint32_t beam_width; /* 1 but for KV_OFFSETS */
  uint32_t max_blocks_per_seq;
  const void* indices;
  const void* indptr;
  uint32_t indices_count;
  uint32_t indptr_count; /* RAGGED: seq_count + 1; otherwise 0 */
  uint32_t flags;        /* kvx_block_table_flags_t */
} kvx_block_table_t;

/* slot = block id * block_size + offset. */
typedef struct kvx_slot_mapping {
  uint32_t size;
  kvx_dtype_t dtype; /* S32 or S64 */
  uint32_t token_count;
  int64_t invalid_slot; /* a token with this slot, or with a negative one, is not written */
  const void* slots;    /* [token_count] */
} kvx_slot_mapping_t;

typedef struct kvx_seq_lens {
  uint32_t size;
  kvx_dtype_t dtype; /* S32 or S64 */
  uint32_t seq_count;
  const void* lengths; /* [seq_count], tokens */
} kvx_seq_lens_t;

/* key and value are [num_tokens, num_kv_heads, head_dim], or padded
 * [sequences, tokens of each, num_kv_heads, head_dim] with num_tokens = the product of the first
 * two. */
typedef struct kvx_kv_io_desc {
  uint32_t size;
  kvx_tensor_desc_t key;
  kvx_tensor_desc_t value;
  uint32_t num_tokens;
  uint32_t num_kv_heads;
  uint32_t head_dim;
} kvx_kv_io_desc_t;

/* value = code * scale. All fields zero: no scales. */
typedef struct kvx_scale_desc {
  uint32_t size;
  kvx_dtype_t dtype; /* F32, F16 or BF16 */
  kvx_scale_granularity_t granularity;
  uint32_t ndim;
  int64_t shape[KVX_MAX_TENSOR_DIMS];
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* elements */
  const void* data;                    /* in the cache's memory */
} kvx_scale_desc_t;

typedef struct kvx_write_desc {
  uint32_t size;
  kvx_kv_io_desc_t io;
  kvx_slot_mapping_t slots;
  const void* k_scale; /* one F32, read when k_scale_desc.data is null; null too: 1 */
  const void* v_scale;
  kvx_scale_desc_t k_scale_desc; /* F8 caches */
  kvx_scale_desc_t v_scale_desc;
} kvx_write_desc_t;

typedef struct kvx_gather_desc {
  uint32_t size;
  kvx_kv_io_desc_t io;
  kvx_block_table_t block_table;
  kvx_seq_lens_t seq_lens;
  uint32_t max_seq_len; /* no sequence gives more tokens than this */
} kvx_gather_desc_t;

/* Tells which version of this ABI the library speaks.
 *
 * size 0 on entry: a caller of version 1.1, which never had to set it; 16 bytes are filled and 1.1
 * is reported. size >= 16 on entry: at most that many bytes are filled, with the library's own
 * version. INVALID_ARGUMENT, and nothing written: version is null, or size is 1 to 15. Thread-safe.
 */
KVX_API kvx_status_t kvx_get_version(kvx_version_t* version);

/* Checks a cache descriptor as the other calls do: kvx_write_kv and kvx_gather_kv accept its k and
 * v when this does. */
KVX_API kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache);

/* Writes key and value of num_tokens tokens into their slots. A slot beyond the cache is
 * OUT_OF_RANGE and nothing is written; of equal slots the last token's row stays. */
KVX_API kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                  void* stream);

/* Copies the first min(length, max_seq_len) tokens of every sequence to rows
 * [sequence * max_seq_len, ...) of key and value; other rows are left as they are. */
KVX_API kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                   void* stream);

/* The same with a backend's kernels; host memory is served by the CPU. The forms with a type's name
 * ask for cache and IO of it and are UNSUPPORTED with others. prefill: the tokens are sequences of
 * tokens_per_seq, which is a hint: every token still has its slot. */
KVX_API kvx_status_t kvx_launch_write_kv(const kvx_cache_desc_t* cache,
                                         const kvx_write_desc_t* write, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_f32(const kvx_cache_desc_t* cache,
                                             const kvx_write_desc_t* write, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_f16(const kvx_cache_desc_t* cache,
                                             const kvx_write_desc_t* write, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_bf16(const kvx_cache_desc_t* cache,
                                              const kvx_write_desc_t* write, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill(const kvx_cache_desc_t* cache,
                                                 const kvx_write_desc_t* write,
                                                 int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill_f32(const kvx_cache_desc_t* cache,
                                                     const kvx_write_desc_t* write,
                                                     int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill_f16(const kvx_cache_desc_t* cache,
                                                     const kvx_write_desc_t* write,
                                                     int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_write_kv_prefill_bf16(const kvx_cache_desc_t* cache,
                                                      const kvx_write_desc_t* write,
                                                      int32_t tokens_per_seq, void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv(const kvx_cache_desc_t* cache,
                                          const kvx_gather_desc_t* gather, void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv_f32(const kvx_cache_desc_t* cache,
                                              const kvx_gather_desc_t* gather, void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv_f16(const kvx_cache_desc_t* cache,
                                              const kvx_gather_desc_t* gather, void* stream);
KVX_API kvx_status_t kvx_launch_gather_kv_bf16(const kvx_cache_desc_t* cache,
                                               const kvx_gather_desc_t* gather, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVX_KVX_ABI_H */
