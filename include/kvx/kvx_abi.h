/* kvx_abi.h: the C ABI of kvx. Part 1 is KVX v1 (1.1), part 2 is what version 1.2 adds. docs/abi.md
 * is the manual.
 *
 * Rules for every call:
 *   - A caller zeroes a struct and then sets `size` to sizeof of the struct. A field that is zero
 *     has its default.
 *   - Later versions add functions and append fields to structs of part 2. They change no number
 *     and no offset.
 *   - A function returns a kvx_status_t and throws nothing. After an error its outputs are
 *     unchanged, and kvx_last_error() returns the text of the error.
 *   - The library does not keep a caller's pointer after a call returns, except the hooks and
 *     addresses that a handle or kvx_set_log() holds, as their comments describe.
 *   - Calls are safe from several threads at once, except that one kvx_cache_t is used by one
 *     thread at a time, and that log functions are set by one thread at a time.
 *   - Memory belongs to the caller, except the memory of a kvx_cache_t.
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

/* A caller compares the major version with the one that it was compiled with. A newer minor version
 * only adds. */
#define KVX_ABI_VERSION_MAJOR 1
#define KVX_ABI_VERSION_MINOR 2
#define KVX_ABI_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* ======================================== 1. KVX v1 ========================================== */

typedef enum kvx_status {
  KVX_STATUS_OK = 0,
  KVX_STATUS_INVALID_ARGUMENT = 1, /* a null pointer or an illegal size, count or number */
  KVX_STATUS_UNSUPPORTED = 2,      /* a legal call that this build or machine does not support */
  KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot, an index or a length beyond its array */
  KVX_STATUS_INCOMPATIBLE = 4,     /* a struct of a newer ABI uses what this library lacks */
  KVX_STATUS_INTERNAL_ERROR = 5    /* a fault of the library, or memory is exhausted */
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

/* The order of a cache tensor's dimensions. pack is shape[4], and K and V may have different packs.
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
  KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 << 0, /* KV_OFFSETS: bit 31 selects the secondary pool */
  KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES = 1
                                      << 1 /* since 1.2; RAGGED: an index per page, not per token */
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
  uint32_t size; /* in: 0 or sizeof(kvx_version_t); out: the bytes filled */
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t abi_patch;
} kvx_version_t;

typedef struct kvx_tensor_desc {
  uint32_t size;
  kvx_dtype_t dtype;
  kvx_layout_t layout; /* of a cache tensor; ignored in IO tensors */
  kvx_memory_type_t memory;
  uint32_t ndim;
  int64_t shape[KVX_MAX_TENSOR_DIMS];  /* in layout order */
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* elements */
  void* data;
} kvx_tensor_desc_t;

typedef struct kvx_pool_desc {
  uint32_t size; /* 0 with all other fields 0: no pool */
  kvx_memory_type_t memory;
  uint32_t bytes_per_block; /* bytes of one K block, or one V block, of one layer */
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
  uint32_t beam_width; /* 1, except with KV_OFFSETS */
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
  int64_t invalid_slot; /* a token with this slot, or a negative one, is not written */
  const void* slots;    /* [token_count] */
} kvx_slot_mapping_t;

typedef struct kvx_seq_lens {
  uint32_t size;
  kvx_dtype_t dtype; /* S32 or S64 */
  uint32_t seq_count;
  const void* lengths; /* [seq_count], tokens */
} kvx_seq_lens_t;

/* key and value have shape [num_tokens, num_kv_heads, head_dim], or the padded shape
 * [sequences, tokens per sequence, num_kv_heads, head_dim], where num_tokens is the product of the
 * first two dimensions. */
typedef struct kvx_kv_io_desc {
  uint32_t size;
  kvx_tensor_desc_t key;
  kvx_tensor_desc_t value;
  uint32_t num_tokens;
  uint32_t num_kv_heads;
  uint32_t head_dim;
} kvx_kv_io_desc_t;

/* Scales of a cache of 8-bit floats: value = code * scale. All fields zero: no scales. */
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
  const void* k_scale; /* one F32, used when k_scale_desc.data is null; null: 1 */
  const void* v_scale;
  kvx_scale_desc_t k_scale_desc; /* F8 caches */
  kvx_scale_desc_t v_scale_desc;
} kvx_write_desc_t;

typedef struct kvx_gather_desc {
  uint32_t size;
  kvx_kv_io_desc_t io;
  kvx_block_table_t block_table;
  kvx_seq_lens_t seq_lens;
  uint32_t max_seq_len; /* at most this many tokens of a sequence are copied */
} kvx_gather_desc_t;

/* Reports the version of this ABI that the library implements.
 *
 * size 0 on entry means a caller of version 1.1, which did not require it: 16 bytes are filled and
 * version 1.1 is reported. With size >= 16 at most that many bytes are filled, with the library's
 * own version. INVALID_ARGUMENT: version is null, or size is 1 to 15. Thread-safe. */
KVX_API kvx_status_t kvx_get_version(kvx_version_t* version);

/* Checks a cache descriptor as kvx_write_kv and kvx_gather_kv do. Returns OK for a descriptor whose
 * k and v they accept. */
KVX_API kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache);

/* Writes key and value of num_tokens tokens into their slots. Of several tokens with the same slot
 * the last one is stored. OUT_OF_RANGE: a slot is beyond the cache; nothing is written. With a
 * cache in a GPU's memory the call is a launch on `stream` (a cudaStream_t), which skips such
 * slots. */
KVX_API kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                  void* stream);

/* Copies the first min(length, max_seq_len) tokens of every sequence to rows
 * [sequence * max_seq_len, ...) of key and value. Other rows are not changed. OUT_OF_RANGE: a block
 * id or a length is beyond its array. */
KVX_API kvx_status_t kvx_gather_kv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather,
                                   void* stream);

/* kvx_write_kv and kvx_gather_kv under the names of backend launches; host memory is served by the
 * CPU. A form with a type's name returns UNSUPPORTED unless cache and IO have that type. prefill:
 * the tokens are sequences of tokens_per_seq tokens, which is a hint; every token still has a slot.
 * INVALID_ARGUMENT: tokens_per_seq does not divide num_tokens. */
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

/* ================================= 2. What version 1.2 adds ================================== */

/* Returns the text of the calling thread's most recent error: the field, its value and what was
 * expected. "" when no call of this thread has failed. Valid until the thread's next failing call.
 */
KVX_API const char* kvx_last_error(void);

/* Returns "OK", "INVALID_ARGUMENT", ..., or "UNKNOWN" for a number outside the enum. Never null. */
KVX_API const char* kvx_status_name(kvx_status_t status);

/* What the v1 calls of this library support on this machine. Bit n of a mask stands for the value n
 * of its enum. */
typedef struct kvx_features_t {
  uint32_t size;
  uint32_t table_flags;         /* kvx_block_table_flags_t */
  uint64_t layouts;             /* kvx_layout_t */
  uint64_t cache_dtypes;        /* kvx_dtype_t */
  uint64_t io_dtypes;           /* kvx_dtype_t */
  uint64_t index_dtypes;        /* kvx_dtype_t, of slots, tables and lengths */
  uint64_t table_formats;       /* kvx_block_table_format_t */
  uint64_t memory_types;        /* kvx_memory_type_t */
  uint64_t scale_granularities; /* kvx_scale_granularity_t */
  uint64_t traits;              /* KVX_TRAIT_* */
  uint64_t formats;             /* KVX_FORMAT_*, of quantised caches */
  uint64_t block_formats;       /* KVX_FORMAT_*, of those whose blocks are quantised whole */
} kvx_features_t;

enum {
  KVX_TRAIT_STRIDED_CACHE = 1 << 0, /* strides other than the canonical, in multiples of 16 bytes */
  KVX_TRAIT_MIXED_KV_DTYPES = 1 << 1,      /* K and V of different dtypes */
  KVX_TRAIT_CONVERTS_DTYPES = 1 << 2,      /* IO and cache of different float dtypes */
  KVX_TRAIT_SECONDARY_POOL = 1 << 3,       /* KV_OFFSETS: bit 31 */
  KVX_TRAIT_BEAMS = 1 << 4,                /* KV_OFFSETS: beam_width above 1 */
  KVX_TRAIT_PADDED_WRITE_IO = 1 << 5,      /* 4-D IO in writes */
  KVX_TRAIT_DENSE_GATHER_IO = 1 << 6,      /* 3-D IO in gathers */
  KVX_TRAIT_STRIDED_IO = 1 << 7,           /* gaps between rows of IO */
  KVX_TRAIT_REPORTS_OUT_OF_RANGE = 1 << 8, /* host calls return OUT_OF_RANGE and write nothing */
  KVX_TRAIT_LAUNCH_ON_HOST = 1 << 9,       /* kvx_launch_* serve host memory */
  KVX_TRAIT_FRAGMENTED_ROWS = 1 << 10,     /* verbs of 1.2: HND_PACKED and code_fragment_bytes */
  KVX_TRAIT_V_IN_K = 1 << 11,              /* verbs of 1.2: KVX_SIDE_PREFIX_OF_K */
  KVX_TRAIT_ROW_SEGMENTS = 1 << 12         /* verbs of 1.2: kvx_head_run_t.k_rest */
};

/* Fills at most features->size bytes and sets size to the number of bytes filled. INVALID_ARGUMENT:
 * features is null, or its size is below 8. */
KVX_API kvx_status_t kvx_query_features(kvx_features_t* features);

/* ---- log ---- */

enum { KVX_LOG_DEBUG = 1, KVX_LOG_INFO = 2, KVX_LOG_WARNING = 3 };

/* The caller's function for log lines. The library calls `write` from the thread that logs, one
 * call at a time, inside the library call that logs. text is valid until write returns. write must
 * not call this library. */
typedef struct kvx_log_t {
  uint32_t size;
  uint32_t least; /* KVX_LOG_*: lines below this level are dropped; 0: none is */
  void* user;
  void (*write)(void* user, uint32_t level, const char* text);
} kvx_log_t;

/* Sets the process's only log function; the struct is copied. Null turns logging off, as it is at
 * the start. When this returns, the previous function is no longer called. Two threads must not
 * call this at the same time. Errors of calls are not logged: see kvx_last_error. INVALID_ARGUMENT:
 * log->write is null, or this is called from a log function. */
KVX_API kvx_status_t kvx_set_log(const kvx_log_t* log);

/* ---- formats: how a row of K or V is stored ----
 *
 * The structs from here on contain each other by pointer. A caller's struct may be shorter than the
 * library's: fields that it lacks are zero. */

typedef enum kvx_format {
  KVX_FORMAT_INVALID = 0,
  KVX_FORMAT_F32 = 1,
  KVX_FORMAT_F16 = 2,
  KVX_FORMAT_BF16 = 3,
  KVX_FORMAT_FP8_E4M3 = 4,
  KVX_FORMAT_FP8_E5M2 = 5,
  KVX_FORMAT_INT8 = 6,
  KVX_FORMAT_INT4 = 7,
  KVX_FORMAT_INT8_AFFINE = 8,
  KVX_FORMAT_INT4_AFFINE = 9,
  KVX_FORMAT_MXFP4_G16 = 10,
  KVX_FORMAT_MXFP4 = 11,
  KVX_FORMAT_NVFP4 = 12,
  KVX_FORMAT_FP4_ROW = 13,
  KVX_FORMAT_INT4_ROW = 14,
  KVX_FORMAT_INT4_DUAL = 15, /* dual: quantised by whole blocks, of 64 or 128 tokens */
  KVX_FORMAT_INT3_DUAL = 16,
  KVX_FORMAT_INT2_DUAL = 17
} kvx_format_t;

typedef enum kvx_scale_type {
  KVX_SCALE_TYPE_DEFAULT = 0,
  KVX_SCALE_TYPE_F32 = 1,
  KVX_SCALE_TYPE_F16 = 2,
  KVX_SCALE_TYPE_BF16 = 3,
  KVX_SCALE_TYPE_E8M0 = 4,
  KVX_SCALE_TYPE_E4M3 = 5
} kvx_scale_type_t;

typedef enum kvx_scale_rule {
  KVX_SCALE_RULE_DEFAULT = 0,
  KVX_SCALE_RULE_AMAX = 1,
  KVX_SCALE_RULE_E8M0_CEIL = 2,
  KVX_SCALE_RULE_E8M0_FLOOR = 3,
  KVX_SCALE_RULE_AFFINE = 4,
  KVX_SCALE_RULE_DUAL = 5
} kvx_scale_rule_t;

typedef enum kvx_scale_source {
  KVX_SCALE_SOURCE_DEFAULT = 0,
  KVX_SCALE_SOURCE_COMPUTED = 1,   /* by append, one per group of a row */
  KVX_SCALE_SOURCE_GIVEN = 2,      /* by the caller; append reads it */
  KVX_SCALE_SOURCE_PAGE_SHARED = 3 /* by append, one per group of a block */
} kvx_scale_source_t;

/* How append chooses a scale. Reading does not depend on it. */
typedef enum kvx_scale_choice {
  KVX_SCALE_CHOICE_DEFAULT = 0,
  KVX_SCALE_CHOICE_AMAX = 1,
  KVX_SCALE_CHOICE_4OVER6 = 2,
  KVX_SCALE_CHOICE_SEARCH = 3
} kvx_scale_choice_t;

#define KVX_GROUP_WHOLE_ROW 0xFFFFFFFFu

typedef struct kvx_format_spec_t {
  uint32_t size;
  uint32_t format;       /* kvx_format_t */
  uint32_t group_size;   /* along head_dim; 0: the format's default; KVX_GROUP_WHOLE_ROW */
  uint32_t scale_type;   /* kvx_scale_type_t */
  uint32_t scale_rule;   /* kvx_scale_rule_t */
  uint32_t scale_source; /* kvx_scale_source_t */
  uint32_t scale_choice; /* kvx_scale_choice_t */
  uint32_t reserved;     /* 0 */
} kvx_format_spec_t;

/* A format for rows of one head_dim, with the defaults filled in. */
typedef struct kvx_format_info_t {
  uint32_t size;
  uint32_t head_dim_multiple; /* head_dim must be a multiple of this */
  const char* name;           /* "int8"; lives as long as the library */
  const char* summary;        /* one line */
  uint32_t group_size;        /* values that share a scale; head_dim for a whole row */
  uint32_t groups_per_row;    /* 0: no scale */
  uint32_t code_bytes_per_row;
  uint32_t scale_bytes_per_row;   /* inside the row or apart from it */
  uint32_t scale_bytes_per_group; /* an affine format's scale and zero together */
  uint32_t scale_type;            /* kvx_scale_type_t; 0: none */
  uint32_t scale_rule;            /* kvx_scale_rule_t; 0: none */
  uint32_t scale_source;          /* kvx_scale_source_t */
  uint32_t has_tensor_scale;      /* 1: a second, f32 scale per head */
  uint32_t reserved;
} kvx_format_info_t;

/* Fills info, up to its size, for rows of head_dim values. INVALID_ARGUMENT: an unknown format, an
 * option that the format lacks, or a head_dim that it cannot store. */
KVX_API kvx_status_t kvx_format_info(const kvx_format_spec_t* spec, uint32_t head_dim,
                                     kvx_format_info_t* info);

/* ---- a layer of a cache in the caller's memory ---- */

enum {
  /* V is the first head_dim values of K's rows, as in latent caches (MLA). The side's other fields
   * are zero, append takes no v, and the layer has no transforms. */
  KVX_SIDE_PREFIX_OF_K = 1 << 0,
  /* The codes of NVFP4, MXFP4 or MXFP4_G16 are in sign-magnitude interleaved order: a row has as
   * many bytes as without it, with their bits in an order that a Hopper GPU decodes with fewer
   * instructions (docs/cuda/decode.md). For layers on a GPU that only kvx reads and writes, with
   * computed or given scales and contiguous rows. */
  KVX_SIDE_INTERLEAVED_ORDER = 1 << 1,
  /* Blocks lie anywhere, as an engine's pointers name them: a block id is a distance from `codes`
   * in units of code_block_stride, and from `scales` in units of scale_block_stride, which may be
   * shorter than a block (kvx_turbomind_find_pools). The caller guarantees that the blocks which
   * its slots and tables name are blocks, apart from each other and from all rows. */
  KVX_SIDE_SCATTERED_BLOCKS = 1 << 2,
  /* Rows of ggml's q4_0 blocks, as llama.cpp's caches have them: [f16 scale d][16 bytes of codes],
   * where byte j has code j in its low half and code j + 16 in its high half, and a number is (code
   * - 8) * d. append makes d as ggml does. For INT4 with group_size 32, F16 scales and
   * code_fragment_bytes 16; 18 bytes from block to block is what ggml has
   * (docs/numbers.md, section 10). */
  KVX_SIDE_Q4_0_BLOCKS = 1 << 3
};

/* K or V of a run of heads that have one format and one set of strides. Strides are bytes. The
 * codes of (block, token, head) begin at codes + block * code_block_stride + token *
 * code_token_stride + head * code_head_stride, where head counts from the run's first head; scales
 * likewise. A stride of 0 shares a scale: with only scale_head_stride set there is one scale per
 * head. */
typedef struct kvx_side_t {
  uint32_t size;
  uint32_t head_dim;
  const kvx_format_spec_t* spec;
  void* codes; /* those of block 0, token 0, the run's first head */
  int64_t code_block_stride;
  int64_t code_token_stride;
  int64_t code_head_stride;
  void* scales; /* likewise, of group 0; null: the format has no scales */
  int64_t scale_block_stride;
  int64_t scale_token_stride;
  int64_t scale_head_stride;
  int64_t scale_group_stride;
  const float* tensor_scales; /* [heads of the run]; null: 1 */
  uint32_t flags;             /* KVX_SIDE_* */
  /* 0: a row's codes are contiguous. Otherwise they lie in fragments of this many bytes, which are
   * code_fragment_stride bytes apart, as in HND_PACKED. UNSUPPORTED with page-shared scales. */
  uint32_t code_fragment_bytes;
  int64_t code_fragment_stride;
  /* [heads of the run, head_dim, head_dim]: append rounds with error feedback by these weights,
   * each at most 2^20 and 0 on and below the diagonal (docs/numbers.md, section 8). For K of
   * formats with scales; null: it does not. */
  const float* feedback;
  /* The steps and zeros of a dual-scale format's channels (docs/numbers.md, section 9): 2 *
   * head_dim bytes of (block, head) begin at channels + block * channel_block_stride + head *
   * channel_head_stride. Null: the format has none. */
  void* channels;
  int64_t channel_block_stride;
  int64_t channel_head_stride;
} kvx_side_t;

/* num_heads adjacent heads of a layer. */
typedef struct kvx_head_run_t {
  uint32_t size;
  uint32_t num_heads;
  const kvx_side_t* k;
  const kvx_side_t* v; /* null: V is not stored */
  /* Rows of K in two segments: the numbers behind those of k, with a format and addresses of their
   * own, as the rotary numbers of a latent row. A row has the numbers of both. k_transform is of
   * k's numbers, and a V with KVX_SIDE_PREFIX_OF_K a prefix of k. All runs of a layer have one, or
   * none. Null: rows are one segment. */
  const kvx_side_t* k_rest;
} kvx_head_run_t;

enum { KVX_TRANSFORM_HADAMARD = 1 << 0 };

/* y = H((x - mean - block_offset) * factor), where H is the Hadamard rotation. append applies it,
 * gather inverts it, and attend folds it into q and the output. A null term is left out. */
typedef struct kvx_transform_t {
  uint32_t size;
  uint32_t flags;            /* KVX_TRANSFORM_* */
  const float* mean;         /* [num_kv_heads, head_dim] */
  const float* factor;       /* [num_kv_heads, head_dim], positive */
  const float* block_offset; /* [num_offset_blocks, num_kv_heads, head_dim]; K only */
  int64_t num_offset_blocks; /* a token has the offset of its position / block_size */
} kvx_transform_t;

/* One layer of a cache in the caller's memory. It is described either by `cache`, a v1 descriptor,
 * with the counts and runs left zero, or by the runs of heads, in head order, with block_size,
 * num_blocks, num_kv_heads and num_runs. Both may have transforms. */
typedef struct kvx_layer_t {
  uint32_t size;
  uint32_t block_size; /* tokens */
  int64_t num_blocks;
  uint32_t num_kv_heads;
  uint32_t num_runs;
  const kvx_head_run_t* const* runs; /* [num_runs] */
  const kvx_cache_desc_t* cache;
  const kvx_transform_t* k_transform;
  const kvx_transform_t* v_transform;
  /* The memory of everything that a call with this layer names by address: codes, scales,
   * transforms, rows, slots, tables, lengths, lists of ranges or blocks. 0: the memory of `cache`,
   * or the host. With DEVICE and UNIFIED the call is a launch on `stream` (a cudaStream_t) that
   * allocates nothing and does not wait. Kernels skip slots, ids and lengths that are out of range,
   * because the host cannot read them. */
  uint32_t memory; /* kvx_memory_type_t */
  uint32_t reserved;
  /* [2], in the GPU's memory, for a layer on a GPU: the number of slots, ids and lengths that were
   * out of range, and of non-finite inputs as in kvx_append. Every call adds to them. Null: nothing
   * is counted. */
  uint64_t* counters;
  /* The scales of a `cache` whose K or V is F8, as in kvx_write_desc_t, in the cache's memory.
   * append reads them, as kvx_write_kv does, and writes the same bytes. Null: that side is no F8.
   * On a GPU each call makes F32 of F16 and BF16 ones first, which takes about a launch. */
  const kvx_scale_desc_t* k_scale;
  const kvx_scale_desc_t* v_scale;
} kvx_layer_t;

/* Pages of an engine that allocates bytes and does not depend on formats: a uint8 array
 * [num_blocks, num_kv_heads, block_size * bytes_per_token]. The library chooses the order inside a
 * page. A page of zeros is legal and decodes to zeros. bytes_per_token counts the channels of a
 * dual-scale format, a block's share of them. */
typedef struct kvx_page_desc_t {
  uint32_t size;
  uint32_t block_size; /* a multiple of 4 */
  uint32_t k_head_dim;
  uint32_t v_head_dim;             /* 0: no V */
  const kvx_format_spec_t* k_spec; /* computed scales, or none */
  const kvx_format_spec_t* v_spec;
} kvx_page_desc_t;

/* bytes: what one token of one KV head takes, K and V together. */
KVX_API kvx_status_t kvx_page_bytes_per_token(const kvx_page_desc_t* page, uint64_t* bytes);

/* Fills k and v, up to their sizes, for pages that begin at `pages`. v is ignored when v_head_dim
 * is 0. Their spec pointers are those of `page`, which must outlive k and v. */
KVX_API kvx_status_t kvx_describe_pages(const kvx_page_desc_t* page, void* pages,
                                        uint32_t num_kv_heads, kvx_side_t* k, kvx_side_t* v);

/* ---- the verbs ---- */

/* The caller's threads. parallel_for calls task(context, i) once for every i in [0, num_tasks), on
 * any threads, and returns when all of them have returned. Results do not depend on the number of
 * threads. */
typedef struct kvx_executor_t {
  uint32_t size;
  uint32_t num_threads;
  void* user;
  void (*parallel_for)(void* user, uint32_t num_tasks, void (*task)(void* context, uint32_t i),
                       void* context);
} kvx_executor_t;

/* A pool of the library's own: fills `executor`, which any number of calls in any threads may use
 * at once. num_threads counts the calling thread; 0: one a core. A pool does not survive fork(). */
KVX_API kvx_status_t kvx_thread_pool_create(uint32_t num_threads, kvx_executor_t* executor);
/* Ends the pool's threads, after the last call that uses it, and clears the executor. Null, and an
 * executor that was cleared, are allowed. INVALID_ARGUMENT: an executor of the caller's own. */
KVX_API kvx_status_t kvx_thread_pool_free(kvx_executor_t* executor);

/* Rows of floats, [tokens, heads, head_dim]. The head_dim values of a row are contiguous. */
typedef struct kvx_rows_t {
  uint32_t size;
  uint32_t dtype; /* KVX_DTYPE_F16, BF16 or F32 */
  void* data;
  int64_t token_stride; /* in elements; 0: heads * head_stride */
  int64_t head_stride;  /* in elements; 0: head_dim */
} kvx_rows_t;

typedef struct kvx_append_args_t {
  uint32_t size;
  uint32_t slot_dtype; /* KVX_DTYPE_S32 or S64 */
  const kvx_layer_t* layer;
  const kvx_rows_t* k; /* [num_tokens, num_kv_heads, k head_dim] */
  const kvx_rows_t* v; /* null when no V is stored */
  int64_t num_tokens;
  const void* slots;        /* [num_tokens]; negative: not written */
  const int64_t* positions; /* [num_tokens], absolute; needed with a block_offset only */
  /* Null: a slot beyond the cache is OUT_OF_RANGE and nothing is written. Otherwise tokens with
   * such slots are skipped and their number is added here. Null on a GPU. */
  uint64_t* out_of_range_slots;
  uint64_t* nonfinite_inputs;     /* may be null, and is on a GPU; see kvx_append */
  const kvx_executor_t* executor; /* null: the calling thread */
  /* For dual-scale formats: the dtype of the full-precision window beside the layer, KVX_DTYPE_F16,
   * BF16 or F32. Rows are rounded to it before they are quantised, so that a block has the same
   * bytes by way of the window. 0: they are not rounded. */
  uint32_t window_dtype;
  uint32_t reserved; /* 0 */
} kvx_append_args_t;

/* Transforms and quantises rows of K and V and stores them in their slots. Of several tokens with
 * the same slot the last one is stored (on a GPU: any of them). The number of NaN and infinities
 * that the format cannot represent is added to nonfinite_inputs.
 *
 * A dual-scale format quantises whole blocks: all tokens of a block come in one call, in order.
 * INVALID_ARGUMENT: a part of a block, which a window takes (kvx_window_plan); on a GPU its tokens
 * are skipped and counted. */
KVX_API kvx_status_t kvx_append(const kvx_append_args_t* args, void* stream);

/* Range i is the tokens [first_tokens[i], first_tokens[i] + num_tokens[i]) of sequence
 * sequences[i]. It goes to rows [first_rows[i], first_rows[i] + num_tokens[i]) of k and v. With all
 * four arrays null, range i is all of sequence i, the ranges follow each other, and num_ranges is
 * the table's seq_count. */
typedef struct kvx_gather_args_t {
  uint32_t size;
  uint32_t num_ranges;
  const kvx_layer_t* layer;
  const kvx_block_table_t* block_table; /* KV_OFFSETS: V lies in the block after K */
  const kvx_seq_lens_t* seq_lens;
  const int32_t* sequences;
  const int64_t* first_tokens;
  const int64_t* num_tokens;
  const int64_t* first_rows;
  const kvx_rows_t* k;            /* [num_rows, num_kv_heads, k head_dim]; null: K is not read */
  const kvx_rows_t* v;            /* [num_rows, num_kv_heads, v head_dim]; null: V is not read */
  const kvx_executor_t* executor; /* null: the calling thread */
  /* Rows that k and v have. A range beyond them is OUT_OF_RANGE; on a GPU it is skipped and
   * counted. 0: the caller guarantees that k and v have all rows of the ranges. */
  int64_t num_rows;
} kvx_gather_args_t;

/* Decodes stored rows to floats and inverts the transforms. */
KVX_API kvx_status_t kvx_gather(const kvx_gather_args_t* args, void* stream);

/* The accuracy of attention: the root mean square error, relative to the output, against double
 * precision over the same stored values, before the output is rounded to its type. A GPU's tensor
 * cores read 16-bit numbers, so there it is 3e-4 for either value; 4e-4 with a rotation, 1.2e-3
 * with means or factors, and 3.5e-3 where the cache or the queries are bf16. On a GPU, with many
 * bf16 queries per sequence, integer codes are decoded to f16: a group whose largest value is above
 * 65504 becomes infinite. */
typedef enum kvx_precision {
  KVX_PRECISION_ACCURATE = 0, /* CPU: 1e-5 where K and V have at least 16 bits, else 3e-4 */
  KVX_PRECISION_FAST = 1      /* CPU: 8e-3 where that saves time */
} kvx_precision_t;

typedef struct kvx_attend_args_t {
  uint32_t size;
  uint32_t num_q_heads; /* a multiple of num_kv_heads */
  const kvx_layer_t* layer;
  const kvx_block_table_t* block_table; /* KV_OFFSETS: V lies in the block after K */
  /* Tokens in the cache, the queries' own included. 0: a padding sequence, whose queries see
   * nothing: their output is 0 and their lse -infinity, or the sink's. */
  const kvx_seq_lens_t* seq_lens;
  /* [seq_count + 1]: the queries of sequence s are rows [q_starts[s], q_starts[s + 1]) of q. They
   * are the sequence's last tokens, and attention is causal. Null: one query per sequence; required
   * on a GPU. */
  const int32_t* q_starts;
  const kvx_rows_t* q;   /* [queries, num_q_heads, k head_dim] */
  const kvx_rows_t* out; /* [queries, num_q_heads, v head_dim] */
  float* lse;            /* [queries, num_q_heads], natural logarithm; or null */
  float softmax_scale;   /* 0: 1 / sqrt(k head_dim) */
  float softcap;         /* 0: none */
  uint32_t window;       /* a query sees its own token and window - 1 before it; 0: all */
  uint32_t reserved;     /* 0 */
  const float* sinks;    /* [num_q_heads], logits in the softmax's denominator only; or null */
  /* [queries, tree_mask_stride]: entry (i, j) is other than 0 where query i sees the j-th new token
   * of its sequence; it sees all earlier tokens within the window. Null: causal. */
  const uint8_t* tree_mask;
  int64_t tree_mask_stride; /* bytes */
  /* The full-precision window: blocks [0, num_sink_blocks[s]) (the sink tokens) and blocks from
   * first_recent_blocks[s] on (the recent tokens) of sequence s lie in `full_precision`, the others
   * in `layer`. [seq_count] each. All three null: there is no window. */
  const kvx_layer_t* full_precision;
  const int32_t* num_sink_blocks;
  const int32_t* first_recent_blocks;
  void* workspace; /* on a GPU: in its memory, aligned to 256 bytes; see kvx_attend_workspace */
  uint64_t workspace_bytes;
  const kvx_executor_t* executor;
  /* Upper limits of arrays on a GPU, which the host cannot read. A call captured in a CUDA graph
   * serves every batch within these limits. Ignored for a layer on the host.
   *
   * num_queries: rows of q and out. It may exceed q_starts[seq_count], and seq_count * max_q_len:
   * the rows behind are padding, which is neither read nor written. Sequences without queries, of
   * any length, are padding too. q_starts[0] is 0. */
  int64_t num_queries;
  int64_t max_tokens;    /* the most tokens of a sequence; 0: those of a full row of the table */
  uint32_t max_q_len;    /* the most queries of a sequence */
  uint32_t reserved_end; /* 0 */
  uint32_t precision;    /* kvx_precision_t */
  uint32_t reserved_2;   /* 0 */
  /* Entries from a sequence's row of block_table to the next, for a PACKED table inside a larger
   * array. 0: max_blocks_per_seq. indices_count stays seq_count * max_blocks_per_seq. */
  int64_t block_table_stride;
  /* On a GPU: each of the first num_decodes sequences has one query or none. They are launched
   * apart from the others, so that the max_q_len of prompts does not shape their launch. 0: it is
   * not known, and one launch serves all. Ignored for a layer on the host. */
  uint32_t num_decodes;
  uint32_t reserved_3; /* 0 */
} kvx_attend_args_t;

/* bytes: the workspace that kvx_attend needs for these arguments; 0 for a layer on the host. On a
 * GPU it depends on shapes, types and the upper limits, not on the contents of arrays. */
KVX_API kvx_status_t kvx_attend_workspace(const kvx_attend_args_t* args, uint64_t* bytes);

/* A range of calls: every number of a call is at most this. */
typedef struct kvx_attend_bounds_t {
  uint32_t size;
  uint32_t max_sequences; /* seq_count */
  int64_t max_queries;    /* num_queries */
  int64_t max_tokens;     /* of a sequence; at least 1 */
  uint32_t max_q_len;     /* at least 1 */
  uint32_t reserved;      /* 0 */
} kvx_attend_bounds_t;

/* bytes: a workspace that is large enough for every call of kvx_attend and kvx_prepared_attend with
 * these layers and options within the bounds; 0 for a layer on the host. An engine asks once, when
 * it starts. It is at most 64 MiB, except where only the kernel for all formats accepts the layer,
 * which needs num_q_heads * (4 * v head_dim + 8) bytes a query, with a block_offset of K, for which
 * up to 256 MiB are added, and with dual-scale formats, for whose prompts up to 1 GiB is. args: of
 * its fields, layer, num_q_heads, window and full_precision are read. INVALID_ARGUMENT: a bound
 * below 1, or above what a call may have. */
KVX_API kvx_status_t kvx_attend_workspace_up_to(const kvx_attend_args_t* args,
                                                const kvx_attend_bounds_t* bounds, uint64_t* bytes);
/* prefers: 1 where kvx_attend is faster if K and V of every run have KVX_SIDE_INTERLEAVED_ORDER, 0
 * otherwise. Call it with the layer's final addresses before the first kvx_append. UNSUPPORTED: a
 * layer on the host. */
KVX_API kvx_status_t kvx_attend_prefers_interleaved_order(const kvx_layer_t* layer,
                                                          uint32_t* prefers);

/* Computes attention of the queries over the stored K and V, for decode and prefill. out must not
 * overlap the cache. */
KVX_API kvx_status_t kvx_attend(const kvx_attend_args_t* args, void* stream);

/* A layer on a GPU whose description was checked, and whose addresses were found in the GPU's
 * memory, once: its calls take a few microseconds of the host. A handle may be used by several
 * threads at once. */
typedef struct kvx_prepared_layer_s* kvx_prepared_layer_t;

/* Prepares a layer for kvx_prepared_append and kvx_prepared_attend. full_precision: the layer of
 * the full-precision window, as in kvx_attend_args_t; or null. The descriptions need not outlive
 * the call. What they name by address (codes, scales, tensor scales, transforms, counters) must
 * stay until kvx_prepared_layer_free. UNSUPPORTED: a layer on the host, or one of a cache whose
 * scales are F16 or BF16, since each call converts those. */
KVX_API kvx_status_t kvx_prepare_layer(const kvx_layer_t* layer, const kvx_layer_t* full_precision,
                                       kvx_prepared_layer_t* prepared);
/* Ends a handle, after its last call has returned. Launches that are under way do not need it. Null
 * and a handle that was freed are allowed. */
KVX_API void kvx_prepared_layer_free(kvx_prepared_layer_t prepared);

/* kvx_append and kvx_attend with a prepared layer: args->layer and args->full_precision are null.
 * The caller guarantees that what the other fields name lies in the GPU's memory, which is not
 * checked. attend finds the plan of an earlier call of this thread with the same shapes and limits
 * again, also of another layer that is stored alike. INVALID_ARGUMENT: not a handle, or as the
 * calls without a handle. */
KVX_API kvx_status_t kvx_prepared_append(kvx_prepared_layer_t prepared,
                                         const kvx_append_args_t* args, void* stream);
KVX_API kvx_status_t kvx_prepared_attend(kvx_prepared_layer_t prepared,
                                         const kvx_attend_args_t* args, void* stream);

/* Copy i copies the first num_tokens[i] tokens of block from_blocks[i] to block to_blocks[i]. */
typedef struct kvx_copy_args_t {
  uint32_t size;
  uint32_t num_copies;
  const kvx_layer_t* from;
  const kvx_layer_t* to;
  const int64_t* from_blocks; /* [num_copies] */
  const int64_t* to_blocks;   /* [num_copies] */
  const int32_t* num_tokens;  /* [num_copies]; null: all tokens of a block */
  uint64_t* nonfinite_inputs; /* may be null; see kvx_append */
  const kvx_executor_t* executor;
} kvx_copy_args_t;

/* Copies blocks from one layer to another, which may be the same. Where both layers have the same
 * format, bytes are copied; otherwise rows are decoded and encoded again. Transforms are ignored,
 * because both layers contain transformed rows. The order of the copies is unspecified, so no block
 * may be the target of two copies, or the target of one and the source of another. */
KVX_API kvx_status_t kvx_copy_blocks(const kvx_copy_args_t* args, void* stream);

typedef struct kvx_transcode_args_t {
  uint32_t size;
  uint32_t slot_dtype; /* KVX_DTYPE_S32 or S64, of both lists */
  const kvx_layer_t* from;
  const kvx_layer_t* to;
  int64_t num_tokens;
  const void* from_slots;     /* [num_tokens] */
  const void* to_slots;       /* [num_tokens]; a negative slot in either list is skipped */
  uint64_t* nonfinite_inputs; /* may be null; see kvx_append */
  const kvx_executor_t* executor;
} kvx_transcode_args_t;

/* Copies tokens from slots of one layer to slots of another with any other format, layout, block
 * size and transform. UNSUPPORTED: a transform with a block_offset. INVALID_ARGUMENT: the layers
 * share memory. */
KVX_API kvx_status_t kvx_transcode(const kvx_transcode_args_t* args, void* stream);

/* ---- TurboMind's and LMDeploy's pools ----
 *
 * Blocks of TurboMind's KV cache in memory that the engine owns:
 *
 *   data block   layer after layer, and in a layer (L(H2SDQ+H2S2T) in TurboMind's words):
 *                head 0: [K: block_len rows][V: block_len rows] | head 1: ... | ...
 *                head 0: [K: block_len x {scale, zero}][V: likewise] | ...      INT4 and INT8
 *   scale block  [layer][head][token][K: head_dim / 16 bytes][V: likewise]      FP4, another pool
 *
 * kvx_turbomind_layer describes a layer of them for kvx_append, kvx_attend, kvx_gather,
 * kvx_copy_blocks and kvx_transcode, which work in place on the host and on a GPU. A cache that
 * owns such blocks (with prefixes, forks, eviction, files) has "order=turbomind" in its recipe. */

typedef enum kvx_turbomind_mode {
  KVX_TURBOMIND_MODE_NONE = 0,   /* the compute type itself */
  KVX_TURBOMIND_MODE_INT4 = 1,   /* with a scale and a zero for each token, head, K and V */
  KVX_TURBOMIND_MODE_INT8 = 2,   /* likewise */
  KVX_TURBOMIND_MODE_FP4_MX = 3, /* E2M1, and a power of two for each 16 values */
  KVX_TURBOMIND_MODE_FP4_NV = 4  /* E2M1, and an E4M3 scale for each 16 under a float per head */
} kvx_turbomind_mode_t;

/* Which mode bit 16 of a quant_policy selects. */
typedef enum kvx_turbomind_fp4 {
  KVX_TURBOMIND_FP4_AUTO = 0, /* NV from SM100 on, MX on SM89, SM90 and the CPU */
  KVX_TURBOMIND_FP4_MX = 1,
  KVX_TURBOMIND_FP4_NV = 2
} kvx_turbomind_fp4_t;

/* mode: the kvx_turbomind_mode_t that LMDeploy's quant_policy selects, a mask of 4 (int4), 8 (int8)
 * and 16 (FP4), of which the largest decides. sm_version is major * 10 + minor, 0: the CPU.
 * INVALID_ARGUMENT: a reserved or unknown bit, or an impossible sm_version. UNSUPPORTED: FP4 where
 * the architecture has none; with may_fall_back other than 0 the next bit decides instead. */
KVX_API kvx_status_t kvx_turbomind_mode(int32_t quant_policy, uint32_t sm_version,
                                        uint32_t fp4_format, uint32_t may_fall_back,
                                        uint32_t* mode);

/* The pools of one model. Block b begins data_stride * b bytes behind `data`, and its scale block
 * scale_stride * b bytes behind `scales`. */
typedef struct kvx_turbomind_pools_t {
  uint32_t size;
  uint32_t mode;  /* kvx_turbomind_mode_t */
  uint32_t dtype; /* the engine's compute type: KVX_DTYPE_F16 or BF16 */
  uint32_t num_layers;
  uint32_t num_kv_heads; /* of this rank */
  uint32_t head_dim;     /* FP4: a multiple of 16 */
  uint32_t block_len;    /* cache_block_seq_len: tokens in a block */
  uint32_t scale_choice; /* kvx_scale_choice_t of append in FP4 modes; it changes no layout */
  int64_t num_blocks;
  void* data;           /* the rest: not read by kvx_turbomind_block_sizes */
  int64_t data_stride;  /* bytes; 0: a data block's */
  void* scales;         /* FP4 modes alone */
  int64_t scale_stride; /* bytes; 0: a scale block's */
  /* FP4_NV: [num_layers, num_kv_heads] on the host; null: 1. On a GPU they are null, and the caller
   * sets tensor_scales of each layer's k and v to its copy there. */
  const float* global_k_scales;
  const float* global_v_scales;
  uint32_t is_scattered; /* 1: as kvx_turbomind_find_pools sets it (KVX_SIDE_SCATTERED_BLOCKS) */
  uint32_t reserved;     /* 0 */
} kvx_turbomind_pools_t;

/* A memory budget divides by block_bytes + scale_block_bytes. */
typedef struct kvx_turbomind_sizes_t {
  uint32_t size;
  uint32_t q_bits; /* of a stored number */
  uint32_t t_bits; /* of each of a row's two parameters, scale and zero; 0: none */
  uint32_t reserved;
  uint64_t block_bytes;       /* of the data pool: get_cache_block_size() */
  uint64_t scale_block_bytes; /* of the scale pool; 0: there is none */
} kvx_turbomind_sizes_t;

/* Fills sizes, up to its size. INVALID_ARGUMENT names the field: a count below 1, a head_dim that
 * the mode cannot store, a dtype that TurboMind does not compute in. */
KVX_API kvx_status_t kvx_turbomind_block_sizes(const kvx_turbomind_pools_t* pools,
                                               kvx_turbomind_sizes_t* sizes);

/* Fills k and v, up to their sizes, with one layer of the pools: the only run of a kvx_layer_t with
 * num_blocks blocks of block_len tokens. Their spec lives as long as the library; global scales are
 * read at each call. INVALID_ARGUMENT: as above, a missing pool, a stride below a block's bytes,
 * or global scales that are not positive and finite. */
KVX_API kvx_status_t kvx_turbomind_layer(const kvx_turbomind_pools_t* pools, uint32_t layer,
                                         kvx_side_t* k, kvx_side_t* v);

/* Pointer tables. TurboMind names blocks by addresses: block i of a sequence is block_ptrs[
 * cu_block_nums[sequence] + i], and scale_block_ptrs likewise in FP4 modes. Both tables are on the
 * host and hold addresses of any memory.
 *
 * find_pools sets data, data_stride, scales, scale_stride, num_blocks and is_scattered of `pools`
 * so that every block of the tables has an id, wherever the engine's allocator put it: in one chunk
 * or in several. UNSUPPORTED: the blocks lie so far apart that ids pass 2^31, or scale blocks lie
 * in another order than data blocks. INVALID_ARGUMENT: two blocks overlap, or a null entry. */
KVX_API kvx_status_t kvx_turbomind_find_pools(kvx_turbomind_pools_t* pools,
                                              const void* const* block_ptrs,
                                              const void* const* scale_block_ptrs,
                                              int64_t num_block_ptrs);
/* ids: [num_block_ptrs], for a block table. OUT_OF_RANGE: an address that begins no block of the
 * pools, or a scale block of another id than its data block. */
KVX_API kvx_status_t kvx_turbomind_block_ids(const kvx_turbomind_pools_t* pools,
                                             const void* const* block_ptrs,
                                             const void* const* scale_block_ptrs,
                                             int64_t num_block_ptrs, int32_t* ids);
/* The same where both tables and ids lie in a GPU's memory, as an engine's kernels have them; ids
 * are there for the verbs behind it in the stream. An entry for which the host's call returns
 * OUT_OF_RANGE becomes -1 and adds to counters[0] (kvx_layer_t; null: nobody counts). */
KVX_API kvx_status_t kvx_turbomind_device_block_ids(const kvx_turbomind_pools_t* pools,
                                                    const void* const* block_ptrs,
                                                    const void* const* scale_block_ptrs,
                                                    int64_t num_block_ptrs, int32_t* ids,
                                                    uint64_t* counters, void* stream);

/* What TurboMind's ProcessKV does to a step's rows: biases, RoPE, the write. */
typedef struct kvx_turbomind_process_args_t {
  uint32_t size;
  uint32_t rope_pairs; /* KVX_ROPE_PAIRS_INTERLEAVED 1, as TurboMind's weights are, or HALVES 0 */
  /* The write. Its rows k and v are changed in place, for prefill attention to read; rows
   * with a negative slot stay as they are. RoPE needs its positions. */
  const kvx_append_args_t* append;
  const void* k_bias;    /* [num_kv_heads, k head_dim] of k's dtype; null: none */
  const void* v_bias;    /* [num_kv_heads, v head_dim] of v's dtype; null: none */
  const float* cos_sin;  /* [num_positions, 2, num_pairs]: cosines, then sines; null: K is turned */
  int64_t num_positions; /* 0 without cos_sin */
  uint32_t num_pairs;    /* at most k head_dim / 2; numbers behind the pairs do not turn */
  uint32_t reserved;     /* 0 */
} kvx_turbomind_process_args_t;

/* Adds the biases, turns K and appends, for any layer. A sum is rounded to the rows' dtype; a turn
 * is computed in binary32 and rounded once. A GPU computes the same bytes: one kernel for both, and
 * append's. Errors: as kvx_append, and INVALID_ARGUMENT for a position that cos_sin does not have.
 * On the host no row has changed then; on a GPU such a row stays as it is and is counted. */
KVX_API kvx_status_t kvx_turbomind_process_kv(const kvx_turbomind_process_args_t* args,
                                              void* stream);

/* Both pools in memory of the library's own. A block and its scale block have one id, are allocated
 * and released together, and count together against a budget. A pool belongs to one thread at a
 * time. */
typedef struct kvx_turbomind_pool_s* kvx_turbomind_pool_t;

typedef struct kvx_turbomind_pool_config_t {
  uint32_t size;
  uint32_t memory; /* KVX_MEMORY_HOST (or 0) or DEVICE */
  uint32_t device; /* a GPU's index; 0 on the host */
  uint32_t reserved;
  /* Mode and geometry. num_blocks: how many blocks; 0: as many as budget_bytes holds. The rest is
   * zero but for global scales, which outlive the pool. */
  const kvx_turbomind_pools_t* pools;
  uint64_t budget_bytes; /* of both pools together; 0 with num_blocks */
} kvx_turbomind_pool_config_t;

/* INVALID_ARGUMENT names the field. OUT_OF_RANGE: a budget below one block, or no memory. */
KVX_API kvx_status_t kvx_turbomind_pool_create(const kvx_turbomind_pool_config_t* config,
                                               kvx_turbomind_pool_t* pool);
/* Null is allowed. Layers that describe its memory end with it. */
KVX_API void kvx_turbomind_pool_free(kvx_turbomind_pool_t pool);

typedef struct kvx_turbomind_pool_facts_t {
  uint32_t size;
  uint32_t reserved;
  int64_t num_blocks;
  int64_t num_free;
  uint64_t data_bytes;  /* of the data pool */
  uint64_t scale_bytes; /* of the scale pool; 0: there is none */
} kvx_turbomind_pool_facts_t;

/* Fills facts, up to its size. */
KVX_API kvx_status_t kvx_turbomind_pool_facts(kvx_turbomind_pool_t pool,
                                              kvx_turbomind_pool_facts_t* facts);
/* Fills pools, which must have its whole size, for kvx_turbomind_layer: write, attend and flatten
 * are kvx_turbomind_process_kv or kvx_append, kvx_attend and kvx_gather on such a layer. */
KVX_API kvx_status_t kvx_turbomind_pool_describe(kvx_turbomind_pool_t pool,
                                                 kvx_turbomind_pools_t* pools);
/* ids: [num_blocks], which is filled with free blocks. OUT_OF_RANGE, and none taken: too few. */
KVX_API kvx_status_t kvx_turbomind_pool_allocate(kvx_turbomind_pool_t pool, int64_t num_blocks,
                                                 int32_t* ids);
/* Gives all of them back, or none. INVALID_ARGUMENT: one is free already, or is named twice.
 * OUT_OF_RANGE: an id that the pool does not have. */
KVX_API kvx_status_t kvx_turbomind_pool_release(kvx_turbomind_pool_t pool, int64_t num_blocks,
                                                const int32_t* ids);
/* The pointer tables of these blocks, [num_blocks] on the host. scale_block_ptrs is null without a
 * scale pool. OUT_OF_RANGE: an id that the pool does not have. */
KVX_API kvx_status_t kvx_turbomind_pool_pointers(kvx_turbomind_pool_t pool, int64_t num_blocks,
                                                 const int32_t* ids, const void** block_ptrs,
                                                 const void** scale_block_ptrs);

/* What append has stored of one token: the first scale bytes and the first code byte. */
typedef struct kvx_turbomind_probe_t {
  uint32_t size;
  uint32_t reserved;
  uint8_t k_scale0; /* of K's values 0 to 15 */
  uint8_t v_scale0;
  uint8_t k_scale1; /* of values 16 to 31 */
  uint8_t v_scale1;
  uint8_t kv_byte0; /* K's values 0 (low four bits) and 1 */
  uint8_t reserved_2[3];
} kvx_turbomind_probe_t;

/* Reads a token of a sequence whose num_blocks blocks the tables name, in FP4 modes. memory: of the
 * blocks and of the tables, KVX_MEMORY_HOST (or 0) or DEVICE; on a GPU it waits for `stream`.
 * INVALID_ARGUMENT: another mode, head_dim below 32, a layer, head or token that does not exist. */
KVX_API kvx_status_t kvx_turbomind_probe(const kvx_turbomind_pools_t* pools,
                                         const void* const* block_ptrs,
                                         const void* const* scale_block_ptrs, int64_t num_blocks,
                                         uint32_t layer, uint32_t head, int64_t token,
                                         uint32_t memory, void* stream,
                                         kvx_turbomind_probe_t* probe);

/* ---- the order of nvfp4's scales ---- */

enum {
  KVX_SCALE_ORDER_LINEAR = 1, /* [tokens, groups] in each head of a block, as the verbs read them */
  KVX_SCALE_ORDER_SWIZZLED =
      2 /* [tokens / 4, groups, 4] in the same rows, as trtllm-gen reads V's */
};

/* Scales of one byte of a side of a layer. Strides are bytes; a token's groups lie side by side. */
typedef struct kvx_turn_scales_args_t {
  uint32_t size;
  uint32_t order; /* KVX_SCALE_ORDER_*: that is made of the other one */
  void* scales;   /* those of block 0, token 0, head 0 */
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t num_blocks;
  uint32_t num_heads;
  uint32_t block_size; /* tokens: a multiple of 4 */
  uint32_t num_groups; /* of a row: at most 64 */
  uint32_t memory;     /* KVX_MEMORY_HOST or 0, or where a GPU reaches it, as in kvx_layer_t */
} kvx_turn_scales_args_t;

/* Turns the scales in place: to LINEAR before verbs read or write such a layer, to SWIZZLED before
 * the engine does. stream: of scales on a GPU, as in the verbs. INVALID_ARGUMENT names the field;
 * rows over each other are the caller's mistake. */
KVX_API kvx_status_t kvx_turn_scales(const kvx_turn_scales_args_t* args, void* stream);

/* ---- contiguous caches ----
 *
 * K and V of a batch of equally long sequences, in arrays that are allocated at once and zeroed:
 *
 *   per layer and run of heads, for K and for V:
 *     codes   [batch_size, heads, capacity, row]     fp4_row, int4_row: uint32 words of eight codes
 *     scales  [batch_size, heads, capacity, groups]
 *
 * capacity is max_seq_len, or that of a ring where the layer has a window. metal-marlin's cache is
 * one of these. Rows of a call are the sequences' tokens, one sequence after the other. */

typedef struct kvx_contiguous_s* kvx_contiguous_t;

enum {
  /* At max_seq_len the oldest tokens leave and the others move to the front. Otherwise OUT_OF_RANGE
   * and nothing is written. */
  KVX_CONTIGUOUS_EVICTS = 1 << 0
};

typedef struct kvx_contiguous_config_t {
  uint32_t size;
  uint32_t num_layers;
  uint32_t num_q_heads; /* a multiple of num_kv_heads */
  uint32_t num_kv_heads;
  uint32_t k_head_dim;
  uint32_t v_head_dim; /* 0: k_head_dim */
  uint32_t batch_size;
  uint32_t max_seq_len;
  uint32_t max_append; /* queries of one attend that a full ring must serve; 0: 1 */
  uint32_t flags;      /* KVX_CONTIGUOUS_EVICTS */
  /* "fp4_row", "int4_row", "int8/int4"; without a full-precision window and page-shared scales. */
  const char* recipe;
  const int32_t* layer_windows;   /* [num_layers], tokens; 0: no window. Null: no layer has one */
  const kvx_executor_t* executor; /* kept until kvx_contiguous_free; null: the calling thread */
  uint32_t memory;                /* KVX_MEMORY_HOST (or 0) or DEVICE */
  uint32_t device;                /* a GPU's index; 0 on the host */
  uint32_t max_step_tokens;       /* on a GPU: of one append, all sequences together; 0: 4096 */
  uint32_t reserved;              /* 0 */
  void* stream;                   /* on a GPU: all work goes there; null on the host */
} kvx_contiguous_config_t;

/* INVALID_ARGUMENT names the field. OUT_OF_RANGE: no memory. A cache belongs to one thread at a
 * time. On a GPU rows and outputs lie in memory that it reads, and calls return when the work is on
 * its way. */
KVX_API kvx_status_t kvx_contiguous_create(const kvx_contiguous_config_t* config,
                                           kvx_contiguous_t* cache);
KVX_API void kvx_contiguous_free(kvx_contiguous_t cache); /* null is allowed */

/* Writes num_tokens tokens of every sequence behind those that advance has counted. k, v:
 * [batch_size * num_tokens, num_kv_heads, head_dim]. */
KVX_API kvx_status_t kvx_contiguous_append(kvx_contiguous_t cache, uint32_t layer,
                                           uint32_t num_tokens, const kvx_rows_t* k,
                                           const kvx_rows_t* v);
/* Once a step, after all layers have appended just num_tokens; INVALID_ARGUMENT otherwise. */
KVX_API kvx_status_t kvx_contiguous_advance(kvx_contiguous_t cache, uint32_t num_tokens);
/* Forgets all tokens; the memory stays. */
KVX_API kvx_status_t kvx_contiguous_reset(kvx_contiguous_t cache);

typedef struct kvx_contiguous_attend_args_t {
  uint32_t size;
  uint32_t layer;
  uint32_t num_queries;  /* of each sequence: its last tokens */
  uint32_t sees_all;     /* 0: causal; 1: each query sees all tokens, less what a window hides */
  const kvx_rows_t* q;   /* [batch_size * num_queries, num_q_heads, k_head_dim] */
  const kvx_rows_t* out; /* [batch_size * num_queries, num_q_heads, v_head_dim] */
  float softmax_scale;   /* 0: 1 / sqrt(k_head_dim) */
  float softcap;         /* 0: none */
  uint32_t window;       /* 0: the layer's own; on a ring at most that */
  uint32_t precision;    /* kvx_precision_t */
  const float* sinks;    /* [num_q_heads], or null */
  float* lse;            /* [batch_size * num_queries, num_q_heads], or null */
} kvx_contiguous_attend_args_t;

KVX_API kvx_status_t kvx_contiguous_attend(kvx_contiguous_t cache,
                                           const kvx_contiguous_attend_args_t* args);
/* The stored tokens of a layer, oldest first: [batch_size * num_held, num_kv_heads, head_dim].
 * Null: not wanted. */
KVX_API kvx_status_t kvx_contiguous_gather(kvx_contiguous_t cache, uint32_t layer,
                                           const kvx_rows_t* k, const kvx_rows_t* v);

typedef struct kvx_contiguous_facts_t {
  uint32_t size;
  uint32_t seq_len;         /* tokens that advance has counted */
  uint32_t num_held;        /* tokens of a sequence in this layer, uncounted ones too */
  uint32_t capacity;        /* tokens that it has memory for; position p has slot p % capacity */
  uint64_t allocated_bytes; /* of all layers, as the two below */
  uint64_t used_bytes;      /* of the tokens that are held */
  uint64_t read_bytes_per_step; /* what the attention of one new token reads */
} kvx_contiguous_facts_t;

KVX_API kvx_status_t kvx_contiguous_facts(kvx_contiguous_t cache, uint32_t layer,
                                          kvx_contiguous_facts_t* facts);
/* Fills k and v, up to their sizes, with where the rows of a layer lie: the only run of a
 * kvx_layer_t with batch_size blocks of `capacity` tokens. They live as long as the cache.
 * UNSUPPORTED: its heads differ in their formats. */
KVX_API kvx_status_t kvx_contiguous_layer(kvx_contiguous_t cache, uint32_t layer, kvx_side_t* k,
                                          kvx_side_t* v);

/* ---- a full-precision window beside an engine's pages ---- */

/* When a row is written to its page. */
typedef enum kvx_window_unit {
  /* At once, and to the window as well. Every page is complete at any time, so pages may be shared,
   * saved and sent as without a window. */
  KVX_WINDOW_ROWS = 0,
  /* With its block, when its last row is there: the block is quantised whole, once. The open block
   * of a sequence is in the window only: its page is written later, or never. */
  KVX_WINDOW_BLOCKS = 1
} kvx_window_unit_t;

/* A window: copies in 16 bits of the blocks that hold the first sink_tokens of a sequence and at
 * least the recent_tokens before every query. They are blocks of a second layer (BF16 on a GPU)
 * with the pages' block_size, heads, head_dim and transforms; all layers of a model share one
 * window. The state names the copy of each page, so a window follows pages: it needs no name of a
 * sequence, and sequences that share a page share its copy. */
typedef struct kvx_window_t {
  uint32_t size;
  uint32_t block_size;
  uint32_t sink_tokens;   /* rounded up to whole blocks */
  uint32_t recent_tokens; /* rounded up to whole blocks, and the open block is added */
  uint32_t unit;          /* kvx_window_unit_t */
  uint32_t memory;        /* kvx_memory_type_t, of state and all arrays */
  int64_t num_blocks;     /* pages: ids of block_table are below it */
  /* Blocks of the second layer. window_blocks_per_sequence (kvx_window_sizes) for each sequence of
   * a step are enough. With fewer, and for sequences that skip steps while others run, windows are
   * shorter; under KVX_WINDOW_BLOCKS an open block always keeps its copy. */
  int64_t num_window_blocks;
  void*
      state; /* zeros at first, aligned to 4 bytes; the library writes it, in the stream's order */
  uint64_t state_bytes; /* at least kvx_window_sizes' */
  uint64_t* counters;   /* as kvx_layer_t's */
} kvx_window_t;

typedef struct kvx_window_sizes_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  uint64_t state_bytes;
  uint64_t window_blocks_per_sequence;
  uint64_t closing_blocks_per_sequence; /* length of a sequence's row of closing_from */
} kvx_window_sizes_t;

/* Fills at most sizes->size bytes. Of `window`, state, state_bytes, memory and counters are not
 * read. */
KVX_API kvx_status_t kvx_window_sizes(const kvx_window_t* window, kvx_window_sizes_t* sizes);

typedef struct kvx_window_plan_args_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const kvx_window_t* window;
  /* The step, as kvx_attend takes it: lengths include the step's new tokens, whose rows are
   * [q_starts[s], q_starts[s + 1]). */
  const kvx_block_table_t* block_table;
  const kvx_seq_lens_t* seq_lens;
  const int32_t* q_starts; /* [seq_count + 1] */
  int64_t block_table_stride;
  int64_t num_tokens; /* rows of the step, padding included, whose slots are -1 */
  /* For kvx_attend: a PACKED table of S32 ids, and the window of each sequence. */
  int32_t* block_ids;           /* [seq_count, max_blocks_per_seq] */
  int32_t* num_sink_blocks;     /* [seq_count] */
  int32_t* first_recent_blocks; /* [seq_count] */
  /* For kvx_append: to the pages and to the second layer. */
  int64_t* slots;        /* [num_tokens]; may be null under KVX_WINDOW_ROWS */
  int64_t* window_slots; /* [num_tokens] */
  /* For kvx_copy_blocks from the second layer to the pages, behind both appends. Null under
   * KVX_WINDOW_ROWS. Entries without a copy have 0 tokens. */
  int64_t* closing_from;   /* [seq_count, closing_blocks_per_sequence] */
  int64_t* closing_to;     /* [seq_count, closing_blocks_per_sequence] */
  int32_t* closing_tokens; /* [seq_count, closing_blocks_per_sequence] */
  /* Under KVX_WINDOW_BLOCKS, for layers of dual-scale formats, which store no part of a block row
   * by row; all null otherwise. For kvx_copy_blocks in front of both appends: first the evicted
   * ones from the second layer to the pages (unfinished blocks whose copy another page gets), then
   * the reopened ones from the pages to the second layer (blocks that the step continues and that
   * had no copy). The window then has closing_blocks_per_sequence blocks for each sequence of a
   * step. */
  int64_t* evicted_from;    /* [seq_count, closing_blocks_per_sequence] */
  int64_t* evicted_to;      /* [seq_count, closing_blocks_per_sequence] */
  int32_t* evicted_tokens;  /* [seq_count, closing_blocks_per_sequence] */
  int64_t* reopened_from;   /* [seq_count] */
  int64_t* reopened_to;     /* [seq_count] */
  int32_t* reopened_tokens; /* [seq_count] */
} kvx_window_plan_args_t;

/* Plans a step: moves the window, and says where append, copy_blocks and attend write and read in
 * every layer. Every append to the pages is planned; kvx_window_forget is for the rest. A sequence
 * may be cut (the next step's lengths are shorter): as far as its blocks still have copies, the
 * window is what it was. On a GPU it is two launches, neither waits nor allocates, and sequences
 * and pages that do not fit are counted and have no window, and so are window blocks that are
 * missing. INVALID_ARGUMENT and OUT_OF_RANGE on the host: nothing is written. */
KVX_API kvx_status_t kvx_window_plan(const kvx_window_plan_args_t* args, void* stream);

/* blocks: [num_blocks] ids of pages that were written without a plan (read from a file, received,
 * copied), or, under KVX_WINDOW_BLOCKS, of sequences that have ended: their copies are no longer
 * used. OUT_OF_RANGE: an id that no page has; on a GPU it is counted. */
KVX_API kvx_status_t kvx_window_forget(const kvx_window_t* window, const int64_t* blocks,
                                       int64_t num_blocks, void* stream);

/* ---- recipes: how a whole cache stores K and V, as one string ---- */

/* What a recipe means for rows of one k and one v head_dim. Bytes are those of one token of one KV
 * head in one layer, K and V together, scales included. */
typedef struct kvx_recipe_info_t {
  uint32_t size;
  uint32_t k_format;       /* kvx_format_t */
  uint32_t v_format;       /* kvx_format_t */
  uint32_t k_has_hadamard; /* 1: K is rotated before it is quantised */
  uint32_t v_has_hadamard;
  uint32_t window_format;   /* of the full-precision window; 0: the recipe has none */
  uint32_t sink_tokens;     /* the window's first tokens of a sequence, rounded to whole blocks */
  uint32_t recent_tokens;   /* at least so many tokens before every query are in the window: they
                               are rounded up to whole blocks, and the open block is added */
  uint64_t bytes_per_token; /* of a quantised token */
  uint64_t window_bytes_per_token; /* of a token in the window; 0: no window */
} kvx_recipe_info_t;

/* Fills at most info->size bytes and sets size to what was filled. INVALID_ARGUMENT: no recipe (the
 * message names the wrong part), or a head_dim that its formats cannot store. */
KVX_API kvx_status_t kvx_recipe_info(const char* recipe, uint32_t k_head_dim, uint32_t v_head_dim,
                                     kvx_recipe_info_t* info);

/* ---- tuned recipes: a recipe with the tables that it was calibrated with (docs/tune-file.md) ----
 *
 * kvx_cache_config_t.recipe takes "tuned:FILE" too, and "tuned:FILE,recent=128" with another
 * full-precision window. The calls below are for engines that own layers, have the file's bytes in
 * memory, or make the tables. */

/* A tuned recipe. It does not change: several threads and caches may use it at once. */
typedef struct kvx_tables_s* kvx_tables_t;

/* K or V of a layer's tables. A null table is absent. */
typedef struct kvx_side_tables_t {
  uint32_t size;
  uint32_t num_group_scales;
  const float* mean;          /* [num_kv_heads, head_dim] */
  const float* factor;        /* [num_kv_heads, head_dim], positive */
  const float* tensor_scales; /* [num_kv_heads], positive; NVFP4's */
  /* [num_group_scales], positive: for scale_source GIVEN, each head's groups in turn. */
  const float* group_scales;
} kvx_side_tables_t;

/* Which two numbers of a row of K a model's RoPE turns together. */
typedef enum kvx_rope_pairs {
  KVX_ROPE_PAIRS_HALVES = 0,     /* (i, i + num_inv_freq) */
  KVX_ROPE_PAIRS_INTERLEAVED = 1 /* (2 i, 2 i + 1) */
} kvx_rope_pairs_t;

typedef struct kvx_layer_tables_t {
  uint32_t size;
  uint32_t num_inv_freq;      /* 0 without a k_rope_mean; at most k_head_dim / 2 */
  const kvx_side_tables_t* k; /* null: K has no such tables */
  const kvx_side_tables_t* v;
  const float* k_block_offset; /* [num_offset_blocks, num_kv_heads, k_head_dim] */
  int64_t num_offset_blocks;
  /* [num_kv_heads, k_head_dim]: the mean of K before RoPE. The library computes block offsets of
   * any length from it. Either this or k_block_offset. */
  const float* k_rope_mean;
  const double* inv_freq;   /* [num_inv_freq]: radians per position, 0 to pi */
  double attention_scaling; /* of the numbers that turn; 0: 1 */
  uint32_t rope_pairs;      /* kvx_rope_pairs_t */
  uint32_t reserved;        /* 0 */
  const float* k_feedback;  /* [num_kv_heads, k_head_dim, k_head_dim], as kvx_side_t.feedback */
} kvx_layer_tables_t;

/* Texts are 0-terminated; null is "". */
typedef struct kvx_tables_config_t {
  uint32_t size;
  uint32_t num_layers;
  uint32_t num_kv_heads;
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  uint32_t block_size; /* that k_block_offset is for; 0: no layer has one */
  uint32_t num_layer_overrides;
  uint32_t num_head_overrides;
  const char* recipe;
  const char* const* layer_overrides;      /* "0,1=bf16", "4-7=int8/int4" */
  const char* const* head_overrides;       /* layer:head, "2:0,2:1=int8" */
  const kvx_layer_tables_t* const* layers; /* [num_layers]; null, or a null entry: no tables */
  const char* model_name;
  const char* model_architecture;
  const char* model_hash;
  const char* text_hash; /* of the calibration text */
  const char* date;
  const char* measured; /* figures, as a JSON object; null: none */
} kvx_tables_config_t;

/* Reads a tuned recipe's file. INVALID_ARGUMENT: it cannot be read, or is damaged; the message
 * names what. INCOMPATIBLE: it is of a newer version. */
KVX_API kvx_status_t kvx_tables_load(const char* path, kvx_tables_t* tables);
/* The same from the bytes of such a file. */
KVX_API kvx_status_t kvx_tables_load_bytes(const void* bytes, uint64_t num_bytes,
                                           kvx_tables_t* tables);
/* Makes a tuned recipe of a caller's tables, which are copied. INVALID_ARGUMENT names the table of
 * another length, or with a number that is not finite or not positive. */
KVX_API kvx_status_t kvx_tables_create(const kvx_tables_config_t* config, kvx_tables_t* tables);
/* Writes the file. When it fails, a file that was at `path` before is unchanged. */
KVX_API kvx_status_t kvx_tables_save(kvx_tables_t tables, const char* path);
/* Frees a tuned recipe. Caches that were created with it have copies. Null is allowed. */
KVX_API void kvx_tables_free(kvx_tables_t tables);

/* The texts live until kvx_tables_free. */
typedef struct kvx_tables_info_t {
  uint32_t size;
  uint32_t num_layers;
  uint32_t num_kv_heads;
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  uint32_t block_size;      /* as in kvx_tables_config_t */
  uint32_t needs_positions; /* 1: K has block offsets, so that kvx_append needs positions */
  uint32_t reserved;
  const char* recipe;
  const char* model_name;
  const char* model_architecture;
  const char* model_hash;
  const char* text_hash;
  const char* date;
  const char* measured;
} kvx_tables_info_t;

/* Fills info, up to its size, and sets its size to the bytes filled. */
KVX_API kvx_status_t kvx_tables_info(kvx_tables_t tables, kvx_tables_info_t* info);

/* A layer in the caller's memory that is stored by a tuned recipe. */
typedef struct kvx_tables_layer_args_t {
  uint32_t size;
  uint32_t layer;      /* of the model */
  uint32_t block_size; /* tokens */
  uint32_t memory;     /* kvx_memory_type_t of the layer: 0 or HOST, or DEVICE */
  uint32_t device;     /* with DEVICE: the device's index */
  uint32_t reserved;   /* 0 */
  int64_t max_tokens;  /* of a sequence; read where K has block offsets */
} kvx_tables_layer_args_t;

/* Fills k and v, up to their sizes, for kvx_layer_t.k_transform and v_transform. What they name
 * lies in the layer's memory and lives until kvx_tables_free; equal arguments give the same
 * addresses. UNSUPPORTED: the recipe has a full-precision window, which these layers lack. v is
 * null where no V is stored. */
KVX_API kvx_status_t kvx_tables_layer(kvx_tables_t tables, const kvx_tables_layer_args_t* args,
                                      kvx_transform_t* k, kvx_transform_t* v);
/* A run of heads of that layer which begins at head `first_head`. num_heads: how many heads it has.
 * Of k and v, which the caller has zeroed and sized or filled (kvx_describe_pages), head_dim, spec,
 * tensor_scales and feedback are set, and for given scales their address and strides. OUT_OF_RANGE:
 * no run begins at first_head. */
KVX_API kvx_status_t kvx_tables_run(kvx_tables_t tables, const kvx_tables_layer_args_t* args,
                                    uint32_t first_head, uint32_t* num_heads, kvx_side_t* k,
                                    kvx_side_t* v);

/* ---- statistics: what tables are fitted from (docs/tune.md) ---- */

/* What K, V and queries of a model look like where a cache meets them. An engine feeds the rows
 * that it appends, and fits a tuned recipe's tables from them. Calls for different layers may come
 * from different threads at once. */
typedef struct kvx_statistics_s* kvx_statistics_t;

typedef struct kvx_statistics_config_t {
  uint32_t size;
  uint32_t num_layers;
  uint32_t num_q_heads; /* a multiple of num_kv_heads */
  uint32_t num_kv_heads;
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  /* The model's RoPE, with which K's mean before it is collected too, as in kvx_layer_tables_t. 0:
   * it is not known, and KVX_FIT_K_BLOCK_OFFSET cannot be fitted. */
  uint32_t num_inv_freq;
  uint32_t rope_pairs; /* kvx_rope_pairs_t */
  const double* inv_freq;
  double attention_scaling; /* 0: 1 */
} kvx_statistics_config_t;

KVX_API kvx_status_t kvx_statistics_create(const kvx_statistics_config_t* config,
                                           kvx_statistics_t* statistics);
/* Null is allowed. */
KVX_API void kvx_statistics_free(kvx_statistics_t statistics);

/* Rows of consecutive positions of one sequence in one layer, after RoPE. */
typedef struct kvx_statistics_rows_t {
  uint32_t size;
  uint32_t layer;
  int64_t first_position;
  int64_t num_rows;               /* 1 to 65536 */
  const kvx_rows_t* k;            /* [num_rows, num_kv_heads, k_head_dim]; null with v */
  const kvx_rows_t* v;            /* [num_rows, num_kv_heads, v_head_dim]; null with k */
  const kvx_rows_t* q;            /* [num_rows, num_q_heads, k_head_dim]; null: no queries come */
  const kvx_executor_t* executor; /* null: the calling thread */
  /* Where k, v and q lie: KVX_MEMORY_HOST (or 0), or KVX_MEMORY_DEVICE, all on one GPU. They are
   * counted there then, behind what `stream` (a cudaStream_t) was given before; the call waits for
   * nothing, and the rows must stay until the stream has passed. */
  uint32_t memory;
  uint32_t reserved; /* 0 */
  void* stream;
} kvx_statistics_rows_t;

/* INVALID_ARGUMENT: a NaN or an infinity, named by layer, position, head and channel; of these rows
 * nothing is counted then. On a GPU every later call that reads, merges or fits these statistics
 * returns that error; such a call waits for the rows that were fed. */
KVX_API kvx_status_t kvx_statistics_feed(kvx_statistics_t statistics,
                                         const kvx_statistics_rows_t* rows);
/* Adds what `from` has collected, in another thread perhaps, to `to`: then `to` is what one
 * object that was fed all rows would be. INVALID_ARGUMENT: they have other configurations. */
KVX_API kvx_status_t kvx_statistics_merge(kvx_statistics_t to, kvx_statistics_t from);

/* One layer's statistics: each array that is not null is filled. The first four tokens of a
 * sequence count in maxima and percentiles, not in means. */
typedef struct kvx_statistics_layer_t {
  uint32_t size;
  uint32_t reserved;    /* 0 */
  int64_t num_rows;     /* out: that were fed */
  float* k_mean;        /* [num_kv_heads, k_head_dim] */
  float* v_mean;        /* [num_kv_heads, v_head_dim] */
  float* k_largest;     /* [num_kv_heads, k_head_dim], magnitudes */
  float* v_largest;     /* [num_kv_heads, v_head_dim] */
  float* k_rope_mean;   /* [num_kv_heads, k_head_dim]: K's mean before RoPE; needs the RoPE */
  float* query_moments; /* [num_kv_heads, k_head_dim, k_head_dim]: E[q q^T] */
} kvx_statistics_layer_t;

/* Sets values->num_rows and fills the arrays. OUT_OF_RANGE: no such layer. INVALID_ARGUMENT: a mean
 * or moments of a layer that was fed too little. */
KVX_API kvx_status_t kvx_statistics_layer(kvx_statistics_t statistics, uint32_t layer,
                                          kvx_statistics_layer_t* values);
/* percentiles: [num_kv_heads, head_dim / group_size], the magnitudes that `percent` of a group's
 * numbers do not exceed, within 1/64 of them; 100 is exact. is_v: 0 for K, 1 for V. group_size
 * divides the head_dim. */
KVX_API kvx_status_t kvx_statistics_percentiles(kvx_statistics_t statistics, uint32_t layer,
                                                uint32_t is_v, uint32_t group_size, double percent,
                                                float* percentiles);

/* Tables that kvx_statistics_fit makes; docs/tune.md says what each is worth. */
typedef enum kvx_fit_tables {
  KVX_FIT_K_MEAN = 1,
  KVX_FIT_V_MEAN = 2,
  KVX_FIT_K_BLOCK_OFFSET = 4,
  KVX_FIT_K_FACTOR = 8,
  KVX_FIT_K_FEEDBACK = 16
} kvx_fit_tables_t;

typedef struct kvx_fit_config_t {
  uint32_t size;
  uint32_t tables;    /* kvx_fit_tables_t, at least one */
  const char* recipe; /* that they are for, "nvfp4:auto,immediate" */
  const char* model_name;
} kvx_fit_config_t;

/* Makes a tuned recipe, which kvx_tables_free frees, of every layer's statistics. INVALID_ARGUMENT
 * names the first layer that was fed too little. */
KVX_API kvx_status_t kvx_statistics_fit(kvx_statistics_t statistics, const kvx_fit_config_t* config,
                                        kvx_tables_t* tables);

/* ---- caches that own their memory ---- */

/* A cache of all layers of a model: pools of blocks, block tables and sequences. One thread at a
 * time may use it.
 *
 * Lifecycle: kvx_cache_create; for every sequence kvx_sequence_create, then steps, then
 * kvx_sequence_free; kvx_cache_free. A step is kvx_step_begin, kvx_step_layer once per layer,
 * kvx_step_end.
 *
 * With a cache on a GPU (kvx_cache_options_t.memory) the rows and sinks of a call are in memory
 * that the GPU reads, and a call returns when its work is enqueued on the cache's stream. */
typedef struct kvx_cache_s* kvx_cache_t;

/* The caller's allocator of host memory for a cache's pools. */
typedef struct kvx_allocator_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  void* user;
  /* Returns `bytes` bytes with any content at a multiple of alignment (a power of two), or null
   * when there are none. */
  void* (*allocate)(void* user, uint64_t bytes, uint64_t alignment);
  void (*free)(void* user, void* data, uint64_t bytes);
} kvx_allocator_t;

typedef struct kvx_cache_config_t {
  uint32_t size;
  uint32_t num_layers;
  uint32_t num_kv_heads;
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  uint32_t block_size; /* tokens; 0: 64 */
  uint32_t max_sequences;
  uint32_t num_threads; /* of the cache's own pool; 0 or 1: the calling thread; see executor */
  int64_t max_tokens_per_sequence;
  int64_t memory_budget_bytes;    /* 0: enough for max_sequences full sequences */
  const char* recipe;             /* "int8", "int4:k.hadamard,sink=16,recent=64", "tuned:FILE" */
  const int32_t* layer_windows;   /* [num_layers], tokens, 0: no window; or null */
  const kvx_executor_t* executor; /* used instead, until kvx_cache_free; or null */
  /* Allocates all K and V. Called by kvx_cache_create and kvx_cache_free, and kept until then.
   * Null: the system's memory. */
  const kvx_allocator_t* allocator;
} kvx_cache_config_t;

/* Creates a cache, which the caller frees with kvx_cache_free. */
KVX_API kvx_status_t kvx_cache_create(const kvx_cache_config_t* config, kvx_cache_t* cache);
/* Frees a cache, its sequences and its memory. Null is allowed. */
KVX_API void kvx_cache_free(kvx_cache_t cache);

/* Creates an empty sequence. OUT_OF_RANGE: max_sequences are in use. */
KVX_API kvx_status_t kvx_sequence_create(kvx_cache_t cache, int32_t* sequence);
/* Ends a sequence and releases its blocks. */
KVX_API kvx_status_t kvx_sequence_free(kvx_cache_t cache, int32_t sequence);
/* num_tokens: the tokens that the sequence has. max_step: the most tokens that one step may add to
 * it; may be null. */
KVX_API kvx_status_t kvx_sequence_tokens(kvx_cache_t cache, int32_t sequence, int64_t* num_tokens,
                                         int64_t* max_step);

/* Begins a step, one forward pass of a model: entry i adds num_tokens[i] tokens to sequence
 * sequences[i]; a sequence occurs once. kvx_step_layer follows once for every layer, then
 * kvx_step_end. OUT_OF_RANGE: there are not enough free blocks. */
KVX_API kvx_status_t kvx_step_begin(kvx_cache_t cache, uint32_t num_entries,
                                    const int32_t* sequences, const int32_t* num_tokens);

/* The rows of q, k, v and out are the tokens of entry 0, then those of entry 1, and so on. */
typedef struct kvx_step_layer_args_t {
  uint32_t size;
  uint32_t layer;
  uint32_t num_q_heads;
  float softmax_scale;   /* 0: 1 / sqrt(k head_dim) */
  float softcap;         /* 0: none */
  uint32_t reserved;     /* 0 */
  const kvx_rows_t* q;   /* [tokens, num_q_heads, k head_dim] */
  const kvx_rows_t* k;   /* [tokens, num_kv_heads, k head_dim] */
  const kvx_rows_t* v;   /* [tokens, num_kv_heads, v head_dim]; null with KVX_CACHE_LATENT */
  const kvx_rows_t* out; /* [tokens, num_q_heads, v head_dim] */
  const float* sinks;    /* [num_q_heads], or null */
  uint32_t precision;    /* kvx_precision_t */
  uint32_t reserved_2;   /* 0 */
  /* [tokens, tree_mask_stride], where q lies: entry (i, j) is other than 0 where token i of the
   * step sees the j-th token of its entry; it sees all earlier tokens within the window. Null:
   * causal. UNSUPPORTED: an entry that goes over a block's end in a cache with a full-precision
   * window. */
  const uint8_t* tree_mask;
  int64_t tree_mask_stride; /* bytes, at least the tokens of an entry */
} kvx_step_layer_args_t;

/* Appends the step's K and V to a layer and computes attention of q over it. */
KVX_API kvx_status_t kvx_step_layer(kvx_cache_t cache, const kvx_step_layer_args_t* args);
/* Ends the step: its tokens belong to the sequences from now on. */
KVX_API kvx_status_t kvx_step_end(kvx_cache_t cache);

/* Decodes the stored rows of tokens [first_token, first_token + num_tokens) to floats. k or v may
 * be null. */
KVX_API kvx_status_t kvx_sequence_gather(kvx_cache_t cache, int32_t sequence, uint32_t layer,
                                         int64_t first_token, int64_t num_tokens,
                                         const kvx_rows_t* k, const kvx_rows_t* v);

/* ---- caches that own their memory: prefixes, forks, truncation, files, facts ----
 *
 * A sequence's number is its handle. After kvx_sequence_free the number is INVALID_ARGUMENT, like
 * one that never existed, even when a new sequence uses the same place. A kvx_cache_t after
 * kvx_cache_free is INVALID_ARGUMENT in the same way. */

enum {
  KVX_CACHE_PREFIXES = 1 << 0,       /* full blocks of recorded tokens are kept for reuse */
  KVX_CACHE_ZEROES_ON_FREE = 1 << 1, /* a freed block's bytes are overwritten with zeros */
  /* A latent cache (MLA): V is the first v_head_dim numbers of K's rows, which are stored once.
   * Steps take no v. The recipe has one format for both, or "nvfp4+bf16": one for V's numbers and
   * one for the rotary numbers behind them. A rotation turns V's numbers only. */
  KVX_CACHE_LATENT = 1 << 2
};

typedef enum kvx_prefix_hash {
  KVX_PREFIX_HASH_DEFAULT = 0, /* XXH3 */
  KVX_PREFIX_HASH_XXH3 = 1,
  KVX_PREFIX_HASH_SHA256 = 2 /* required where tenants share a cache */
} kvx_prefix_hash_t;

/* Which cached block is evicted first. */
typedef enum kvx_eviction {
  KVX_EVICTION_DEFAULT = 0, /* LRU */
  KVX_EVICTION_LRU = 1,
  KVX_EVICTION_LFU = 2,
  KVX_EVICTION_2Q = 3,
  KVX_EVICTION_AGENTS = 4 /* LRU, but shared blocks stay longer and those of ended sessions go
                           * first: kvx_prefix_keys_t.session */
} kvx_eviction_t;

typedef struct kvx_cache_options_t {
  uint32_t size;
  uint32_t flags;       /* KVX_CACHE_* */
  uint32_t prefix_hash; /* kvx_prefix_hash_t */
  uint32_t eviction;    /* kvx_eviction_t */
  const char* model;    /* name or hash of the model that computes K and V; null: "" */
  /* [num_layers]: in a layer with a window, how many of a sequence's first tokens every query sees
   * in addition (attention sinks); 0 in other layers. Null: none. */
  const int32_t* layer_sinks;
  /* Bytes of host memory, or of files in host_tier_folder, for copies of reusable blocks. A block
   * that the pool has evicted is loaded back from there. 0: no host tier. Others need
   * KVX_CACHE_PREFIXES. */
  int64_t host_tier_bytes;
  uint32_t host_tier_eviction; /* kvx_eviction_t */
  uint32_t reserved;           /* 0 */
  /* The most tokens that a sequence may have in speculative steps (kvx_step_begin_with) at once.
   * With page-shared scales a sequence can be truncated exactly to any of these tokens; other
   * formats do not need it for that. 0: none. */
  uint32_t max_speculative_tokens;
  /* kvx_memory_type_t of the pools: 0 or KVX_MEMORY_HOST, or KVX_MEMORY_DEVICE, with which
   * config.allocator must be null. UNSUPPORTED names an option that a cache on a GPU does not
   * support. */
  uint32_t memory;
  uint32_t device;          /* with KVX_MEMORY_DEVICE: the device's index */
  uint32_t max_step_tokens; /* with it: the most tokens of all entries of a step; 0: 4096 */
  void* stream;             /* with it: a cudaStream_t that outlives the cache; null: the default */
  /* The folder of the host tier's blocks. They lie in unnamed files, which are allocated at once
   * and disappear with the process. Null or "": the host tier is in host memory. */
  const char* host_tier_folder;
  /* A tuned recipe, of the cache's geometry; the cache copies it. config.recipe is null then, or
   * "tuned" with options, as "tuned,recent=128". Null: config.recipe says all. */
  kvx_tables_t tables;
  /* Other recipes for some layers, "0,1=bf16", and for some heads, layer:head, "2:0,2:1=int8". They
   * have no full-precision window. Of two for one place the later one holds, and heads come after
   * layers. */
  const char* const* layer_overrides; /* [num_layer_overrides] */
  const char* const* head_overrides;  /* [num_head_overrides] */
  uint32_t num_layer_overrides;
  uint32_t num_head_overrides;
  /* The tiers behind the pool, nearest first: "host(8GiB), disk(/folder, 200GiB), redis(URL)",
   * "store(NAME)" of kvx_store_register (docs/tiers.md). Null or "": none, or the one that
   * host_tier_bytes asks for; others need KVX_CACHE_PREFIXES and host_tier_bytes 0. */
  const char* tiers;
} kvx_cache_options_t;

/* kvx_cache_create with options. Null options: as kvx_cache_create. */
KVX_API kvx_status_t kvx_cache_create_with(const kvx_cache_config_t* config,
                                           const kvx_cache_options_t* options, kvx_cache_t* cache);

/* Blocks of equal tokens are shared only where these keys are equal. Null and "" are the same. */
typedef struct kvx_prefix_keys_t {
  uint32_t size;
  uint32_t reserved;   /* 0 */
  const char* adapter; /* for example the name of a LoRA */
  const char* image;   /* hashes of the images behind placeholder tokens */
  const char* tenant;  /* a salt: blocks are never shared across tenants */
  /* The conversation that the sequence belongs to, for kvx_session_end and kvx_session_delete. It
   * is no key: blocks of equal tokens are shared between sessions. */
  const char* session;
} kvx_prefix_keys_t;

/* Creates a sequence that begins with the longest cached prefix of `tokens`, num_found of them (may
 * be null), at most all but the last. keys may be null. UNSUPPORTED: the cache lacks
 * KVX_CACHE_PREFIXES, or keys has a tenant and the hash is not SHA256. */
KVX_API kvx_status_t kvx_sequence_create_from(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                              const int32_t* tokens, int64_t num_tokens,
                                              int32_t* sequence, int64_t* num_found);
/* Records which tokens the sequence's next rows belong to, after the steps that added them. It does
 * nothing without KVX_CACHE_PREFIXES. INVALID_ARGUMENT: the tokens differ from those that a fork
 * has recorded for a block of both. */
KVX_API kvx_status_t kvx_sequence_record(kvx_cache_t cache, int32_t sequence, const int32_t* tokens,
                                         int64_t num_tokens);
/* Copies at most `capacity` recorded tokens to `tokens`. num_tokens: how many are recorded. */
KVX_API kvx_status_t kvx_sequence_recorded(kvx_cache_t cache, int32_t sequence, int32_t* tokens,
                                           int64_t capacity, int64_t* num_tokens);

/* Creates a sequence, `fork`, with the same tokens in the same blocks. Whichever of the two appends
 * first copies the block that is not full. */
KVX_API kvx_status_t kvx_sequence_fork(kvx_cache_t cache, int32_t sequence, int32_t* fork);
/* Removes the tokens from num_tokens on. OUT_OF_RANGE: num_tokens is above the sequence's. */
KVX_API kvx_status_t kvx_sequence_truncate(kvx_cache_t cache, int32_t sequence, int64_t num_tokens);

/* kvx_step_begin with is_speculative, [num_entries]: other than 0 where the entry's tokens may be
 * removed again (kvx_cache_options_t.max_speculative_tokens). Null: nowhere. */
KVX_API kvx_status_t kvx_step_begin_with(kvx_cache_t cache, uint32_t num_entries,
                                         const int32_t* sequences, const int32_t* num_tokens,
                                         const uint8_t* is_speculative);
/* Ends a verification step: the sequence of entry i keeps the first kept_tokens[i] of its tokens.
 */
KVX_API kvx_status_t kvx_step_end_kept(kvx_cache_t cache, uint32_t num_entries,
                                       const int32_t* kept_tokens);
/* Cancels the open step: no sequence gets its tokens. */
KVX_API kvx_status_t kvx_step_cancel(kvx_cache_t cache);
/* Waits until the work of the cache's calls on a GPU is done; returns at once for a cache on the
 * host. INTERNAL_ERROR: some of that work failed. */
KVX_API kvx_status_t kvx_cache_synchronize(kvx_cache_t cache);

/* Evicts up to num_blocks cached blocks of every class, in the order of the eviction policy.
 * num_evicted (may be null): how many were evicted in all classes. */
KVX_API kvx_status_t kvx_cache_evict(kvx_cache_t cache, int64_t num_blocks, int64_t* num_evicted);
/* Evicts all cached blocks. Blocks in use become free when their last sequence ends. */
KVX_API kvx_status_t kvx_cache_clear_prefixes(kvx_cache_t cache);

/* The blocks of a sequence in a cache whose recipe has order=turbomind, as TurboMind's kernels take
 * them: addresses in the cache's memory, valid until the sequence's next call that appends,
 * truncates or frees. At most `capacity` entries are written to each table; scale_block_ptrs may be
 * null. num_blocks: how many the sequence has. With layer_windows, layer_group says of which
 * layers. INVALID_ARGUMENT: no such sequence, or another order. UNSUPPORTED: scale_block_ptrs of a
 * recipe without a scale pool, or a full-precision window. */
KVX_API kvx_status_t kvx_turbomind_sequence_blocks(kvx_cache_t cache, int32_t sequence,
                                                   uint32_t layer_group, void** block_ptrs,
                                                   void** scale_block_ptrs, int64_t capacity,
                                                   int64_t* num_blocks);

/* -- retention: how long blocks stay that no sequence uses. A block of which nothing was said has
 * the priority 35; those of a lower one are evicted before it, those of a higher one after it. */

enum {
  KVX_RETENTION_PIN = 1 << 0 /* never evicted, like all tokens before the range */
};

/* Blocks of the tokens [first_token, first_token + num_tokens) of a sequence. */
typedef struct kvx_retention_range_t {
  uint32_t size;
  uint32_t flags; /* KVX_RETENTION_* */
  int64_t first_token;
  int64_t num_tokens;  /* 0: to the sequence's end, tokens that are still to come included */
  uint32_t priority;   /* 0 to 100; ignored with KVX_RETENTION_PIN */
  uint32_t reserved;   /* 0 */
  int64_t duration_ms; /* nothing is said of the blocks any more after this time; 0: never */
} kvx_retention_range_t;

/* Sets the retention of a sequence's reusable blocks, in the pool. Of two ranges, and of two calls,
 * the later one counts. A range of priority 35 without a pin takes back what was said.
 * OUT_OF_RANGE: half of a class's blocks are pinned already; all else of the ranges holds.
 * UNSUPPORTED: no KVX_CACHE_PREFIXES. */
KVX_API kvx_status_t kvx_sequence_retain(kvx_cache_t cache, int32_t sequence,
                                         const kvx_retention_range_t* ranges, uint32_t num_ranges);
/* The session is over: blocks that it alone used are evicted before all others. num_blocks (may be
 * null): how many blocks of tokens. INVALID_ARGUMENT: a sequence of the session exists. A session
 * that nobody named has no blocks. */
KVX_API kvx_status_t kvx_session_end(kvx_cache_t cache, const char* session, int64_t* num_blocks);
/* The same, and the blocks are deleted at once from every tier, and their bytes
 * overwritten with zeros. Blocks that others used as well stay, and so does what
 * stores that engines share hold. */
KVX_API kvx_status_t kvx_session_delete(kvx_cache_t cache, const char* session,
                                        int64_t* num_blocks);

/* -- files (docs/cache-file.md). A path is 0-terminated, in the encoding of the operating system.
 */

typedef struct kvx_save_options_t {
  uint32_t size;
  int32_t zstd_level; /* 1 to 22; 0: no compression */
} kvx_save_options_t;

/* Saves a sequence, all of whose tokens were recorded, to a file. When it fails, a file that was at
 * `path` before is unchanged. options may be null. */
KVX_API kvx_status_t kvx_sequence_save(kvx_cache_t cache, int32_t sequence, const char* path,
                                       const kvx_save_options_t* options);
/* Saves all blocks that a new sequence could begin with. */
KVX_API kvx_status_t kvx_cache_save_prefixes(kvx_cache_t cache, const char* path,
                                             const kvx_save_options_t* options);

enum {
  /* The rows of a file with another format or block size, or with more blocks in its full-precision
   * window, are decoded and appended again. Without this flag such a file is INVALID_ARGUMENT. */
  KVX_LOAD_TRANSCODE = 1 << 0
};

typedef struct kvx_load_options_t {
  uint32_t size;
  uint32_t flags; /* KVX_LOAD_* */
} kvx_load_options_t;

/* Creates a sequence from a file. INVALID_ARGUMENT: the file is damaged, or was saved by a cache
 * that differs; the message names the difference. A full-precision window with fewer recent tokens
 * is no difference: blocks that were packed stay packed, and the window grows again. options may
 * be null. */
KVX_API kvx_status_t kvx_sequence_load(kvx_cache_t cache, const char* path,
                                       const kvx_load_options_t* options, int32_t* sequence);

typedef struct kvx_load_report_t {
  uint32_t size;
  uint32_t reserved;
  int64_t num_blocks;  /* in the file */
  int64_t num_loaded;  /* added to the cache */
  int64_t num_known;   /* already in the cache */
  int64_t num_bad;     /* damaged, and not loaded */
  int64_t num_no_room; /* not loaded, because no block was free */
} kvx_load_report_t;

/* Loads the blocks of a file, so that new sequences can begin with them. options and report may be
 * null. */
KVX_API kvx_status_t kvx_cache_load_prefixes(kvx_cache_t cache, const char* path,
                                             const kvx_load_options_t* options,
                                             kvx_load_report_t* report);

typedef struct kvx_file_info_t {
  uint32_t size;
  uint32_t version;
  uint32_t block_size; /* tokens */
  uint32_t num_scopes; /* distinct keys: adapter, image and tenant */
  uint32_t num_sequences;
  uint32_t reserved;
  int64_t num_blocks;
  int64_t num_tokens;       /* of the first sequence; 0: the file has none */
  int64_t num_block_copies; /* a block of one layer group, packed or full precision */
  int64_t file_bytes;
  int64_t stored_bytes; /* of all block copies in the file */
  int64_t memory_bytes; /* of all block copies in a cache */
} kvx_file_info_t;

/* Fills info, up to its size, from the file's index. */
KVX_API kvx_status_t kvx_file_inspect(const char* path, kvx_file_info_t* info);
/* Reads every block copy. INVALID_ARGUMENT: some are damaged; the message contains their number and
 * the first. */
KVX_API kvx_status_t kvx_file_verify(const char* path);
/* Writes the properties that must be equal in a file and a cache for its blocks to be loaded, one
 * per line. At most capacity bytes of text are written, the last of them 0. bytes: the size of the
 * whole text with its 0. */
KVX_API kvx_status_t kvx_file_fingerprint(const char* path, char* text, uint64_t capacity,
                                          uint64_t* bytes);
KVX_API kvx_status_t kvx_cache_fingerprint(kvx_cache_t cache, char* text, uint64_t capacity,
                                           uint64_t* bytes);

/* -- the tiers. A thread of the cache copies reusable blocks there. kvx_sequence_create_from
 * loads the blocks that it needs and waits for them. */

/* kvx_sequence_create_from that does not wait for blocks of host memory and disks: they come layer
 * by layer, and each layer of the sequence's first step waits for its own part. Full-precision
 * blocks behind the head and what comes from stores are waited for. Until that step has ended, or
 * kvx_sequence_end_loading, other calls on the sequence are INVALID_ARGUMENT, but for
 * kvx_sequence_tokens and kvx_sequence_free, which waits. Errors as kvx_sequence_create_from. */
KVX_API kvx_status_t kvx_sequence_create_loading(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                                 const int32_t* tokens, int64_t num_tokens,
                                                 int32_t* sequence, int64_t* num_found);
/* Waits until the beginning of the sequence is there in layers [0, layer], for callers who read the
 * pool themselves; kvx_step_layer does it. INTERNAL_ERROR, there too: a block did not come back as
 * it went to its tier. Cancel the step and call kvx_sequence_end_loading. */
KVX_API kvx_status_t kvx_sequence_wait_for_layer(kvx_cache_t cache, int32_t sequence,
                                                 uint32_t layer);
/* Waits for all layers. num_tokens (may be null): what the sequence has then, less than num_found
 * where a block did not come back. Nothing happens to a sequence that does not load.
 * INVALID_ARGUMENT: the sequence is in an open step. */
KVX_API kvx_status_t kvx_sequence_end_loading(kvx_cache_t cache, int32_t sequence,
                                              int64_t* num_tokens);

/* A hint that a sequence of these tokens will be created. Starts to load their blocks from the
 * tiers into free blocks of the pool, which keeps them until kvx_prefetch_end, and does not wait.
 * prefetch: a number for the calls below. UNSUPPORTED: there is no tier, or as
 * kvx_sequence_create_from. */
KVX_API kvx_status_t kvx_cache_prefetch(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                        const int32_t* tokens, int64_t num_tokens,
                                        uint64_t* prefetch);
/* is_done: 1 when all blocks of the prefetch are in the pool, 0 before. */
KVX_API kvx_status_t kvx_prefetch_is_done(kvx_cache_t cache, uint64_t prefetch, uint32_t* is_done);
/* Waits for the prefetch's blocks and releases them: they are cached and may be evicted. */
KVX_API kvx_status_t kvx_prefetch_end(kvx_cache_t cache, uint64_t prefetch);
/* Waits until no block is being copied between the tiers. */
KVX_API kvx_status_t kvx_cache_wait_for_tiers(kvx_cache_t cache);

/* Erases every cached block of a tenant (kvx_prefix_keys_t) from the pool, the tiers and their
 * stores, in the stores those of other caches and models too. What blocks leave behind is
 * overwritten with zeros: their own bytes, and all free blocks that were used before. num_erased:
 * blocks of the pool and of this process's tiers; may be null. Waits for what is under way.
 * INVALID_ARGUMENT: an empty tenant, or one of whom a sequence is in use; nothing is erased.
 * INTERNAL_ERROR: a store did not remove its records: all else is erased; call again. UNSUPPORTED:
 * without KVX_CACHE_PREFIXES. */
KVX_API kvx_status_t kvx_cache_erase_tenant(kvx_cache_t cache, const char* tenant,
                                            int64_t* num_erased);
/* The same for a session, a conversation of these tokens under these keys: every block from the one
 * with first_token on, and all that was computed after it. Blocks before it, which other sessions
 * may share, stay. INVALID_ARGUMENT: a sequence in use has one of the blocks, or OUT_OF_RANGE:
 * first_token is not in [0, num_tokens]; nothing is erased. */
KVX_API kvx_status_t kvx_cache_erase_session(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                             const int32_t* tokens, int64_t num_tokens,
                                             int64_t first_token, int64_t* num_erased);

/* A store of the caller's own, as a tier of any cache: "store(NAME)" in kvx_cache_options_t.tiers.
 * It keeps values under keys, which are texts of letters, digits and "/-._:", at most 255 bytes.
 *
 * Each call is made by a thread of its own, several at once, on arrays of num_items. Whoever waits
 * for one waits for the tier's timeout at most: a call that returns later, that returns anything
 * but KVX_STATUS_OK, or that throws, has failed; the store is then left alone for a while. Its
 * answers are not trusted: a value is a record with a checksum, and anything else is a miss. */
typedef struct kvx_store_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  void* user;
  /* Keeps the values [num_items][value_bytes]. is_stored: 1 where it was kept, 0 (as it comes)
   * where there was no room. A value under a key that has one replaces it, or is left out. */
  kvx_status_t (*put)(void* user, uint64_t num_items, const char* const* keys,
                      const uint8_t* const* values, const uint64_t* value_bytes,
                      uint8_t* is_stored);
  /* Fills the buffers [num_items][buffer_bytes]. value_bytes: the value's, -1 (as it comes) where
   * there is none, or none that fits. */
  kvx_status_t (*get)(void* user, uint64_t num_items, const char* const* keys,
                      uint8_t* const* buffers, const uint64_t* buffer_bytes, int64_t* value_bytes);
  /* has: 1 where there is a value, 0 (as it comes) where there is none. */
  kvx_status_t (*exists)(void* user, uint64_t num_items, const char* const* keys, uint8_t* has);
  /* Forgets the values, also where there are none. */
  kvx_status_t (*remove)(void* user, uint64_t num_items, const char* const* keys);
  /* Forgets all keys that begin with these whole parts: "a/b" removes "a/b/c", not "a/bc". */
  kvx_status_t (*remove_all)(void* user, const char* parts);
  /* Called once, by any thread, when nobody calls the store any more: its name is unregistered, its
   * caches are freed, its last call has returned. Null: nothing is called. */
  void (*release)(void* user);
} kvx_store_t;

/* Gives the store a name, of 1 to 64 letters, digits, '-' and '_'. INVALID_ARGUMENT: another name,
 * one that is registered, or a null call. */
KVX_API kvx_status_t kvx_store_register(const char* name, const kvx_store_t* store);
/* Takes the name back. Caches that have the store keep it. INVALID_ARGUMENT: no such name. */
KVX_API kvx_status_t kvx_store_unregister(const char* name);

/* -- sequences of another process (docs/transfer.md). Needs libkvx_transfer.so beside this library;
 * without it a call is UNSUPPORTED, and its message says where the file was looked for. */

/* A sequence on offer. It does not need the cache that it came from. */
typedef struct kvx_export_s* kvx_export_t;

/* Offers a sequence, all of whose tokens were recorded, to other processes. Its bytes are copied to
 * shared memory; the sequence may end from then on. endpoint: bound, tcp://ADDRESS:PORT (port *:
 * any) or ipc://PATH; null is "tcp://127.0.0.1:*". Errors as kvx_sequence_save. */
KVX_API kvx_status_t kvx_sequence_export(kvx_cache_t cache, int32_t sequence, const char* endpoint,
                                         kvx_export_t* offer);
/* Offers a sequence layer by layer, before the step that completes it: importers get each layer
 * while that step computes the next ones. tokens: all that the sequence will have then, those that
 * it has included. The step copies layers to memory of the offer, which needs neither the sequence
 * nor the cache once the step has ended. A step that is cancelled, or goes beyond num_tokens, ends
 * the offer: importers are refused with the reason. Errors as kvx_sequence_export;
 * INVALID_ARGUMENT: tokens that the sequence has are not recorded, or other ones; OUT_OF_RANGE:
 * more than max_tokens_per_sequence; UNSUPPORTED: blocks in an order in which a layer is no run of
 * bytes. */
KVX_API kvx_status_t kvx_sequence_export_layers(kvx_cache_t cache, int32_t sequence,
                                                const int32_t* tokens, int64_t num_tokens,
                                                const char* endpoint, kvx_export_t* offer);
typedef struct kvx_export_info_t {
  uint32_t size;
  uint32_t reserved;
  const char* endpoint; /* where it is bound; lives as long as the offer */
  int64_t bytes;        /* of the offer; of layers, 0 before the step that computes them */
  int64_t bytes_sent;   /* to all importers */
  int64_t num_taken;    /* importers that have a sequence of it */
  int64_t num_refused;  /* importers whose cache cannot have it */
  int32_t num_layers;   /* of an offer layer by layer; 0: the sequence is offered as a whole */
  int32_t num_layers_there;
  uint32_t is_broken; /* 1: the other layers will not come */
  uint32_t reserved2;
} kvx_export_info_t;
/* Fills info, up to its size. */
KVX_API kvx_status_t kvx_export_info(kvx_export_t offer, kvx_export_info_t* info);
/* Waits until an importer has taken it, at most so long. is_taken: 1 when one has. */
KVX_API kvx_status_t kvx_export_wait(kvx_export_t offer, int64_t timeout_ms, uint32_t* is_taken);
/* Ends the offer. Importers that are not done find nobody any more. Null is allowed. */
KVX_API void kvx_export_free(kvx_export_t offer);

typedef struct kvx_import_options_t {
  uint32_t size;
  uint32_t flags;       /* KVX_LOAD_* */
  const char* endpoint; /* the exporter's */
  int64_t timeout_ms;   /* without any progress; 0: 30,000 */
  /* Tensor parallelism: this cache's KV heads are those from first_kv_head on of an exporter's
   * cache that has num_kv_heads. The sequence has to be offered layer by layer. 0, 0: all heads. */
  int32_t first_kv_head;
  int32_t num_kv_heads;
} kvx_import_options_t;
typedef struct kvx_import_report_t {
  uint32_t size;
  uint32_t is_shared;      /* 1: read from the exporter's shared memory */
  int64_t bytes;           /* that came over the endpoint */
  int64_t num_asked_again; /* requests without an answer in time */
} kvx_import_report_t;
/* Creates a sequence as another process exported it, all or nothing. report may be null. Of one
 * that is offered layer by layer it takes each layer when it is there, and returns when all are.
 * INVALID_ARGUMENT: caches that differ (the message names both sides, and the exporter is told), or
 * damaged bytes; UNSUPPORTED: nobody answers; INCOMPATIBLE: an exporter of another version. */
KVX_API kvx_status_t kvx_sequence_import(kvx_cache_t cache, const kvx_import_options_t* options,
                                         int32_t* sequence, kvx_import_report_t* report);

/* -- facts and events. An out struct is filled up to its caller's size, and its size is set to the
 * bytes filled. */

typedef struct kvx_cache_snapshot_t {
  uint32_t size;
  uint32_t num_classes; /* for kvx_cache_block_class */
  int64_t num_sequences;
  int64_t allocated_bytes; /* of all blocks */
  int64_t metadata_bytes;  /* of the prefix index */
  int64_t nonfinite_inputs;
  int64_t prefix_queries;     /* these counters count since the cache's creation */
  int64_t prefix_hit_blocks;  /* full blocks that were found */
  int64_t prefix_miss_blocks; /* full blocks that were not found */
  int64_t prefix_stored;
  int64_t prefix_removed;
  int64_t prefix_refused;       /* not stored, because there was no room */
  int64_t prefix_nodes;         /* at present */
  int64_t host_allocated_bytes; /* bytes of all its blocks; host_*: of all tiers together */
  int64_t host_held_bytes;      /* of blocks that are stored there or being stored */
  int64_t host_metadata_bytes;  /* index and checksums */
  int64_t host_stored;          /* blocks stored */
  int64_t host_loaded;          /* blocks loaded back into the pool */
  int64_t host_bad;             /* blocks with a wrong checksum, not loaded */
  int64_t host_dropped;         /* blocks not stored, because there was no room */
  int64_t host_stores_queued;   /* at present */
  int64_t host_loads_queued;    /* at present */
  int64_t saturated_inputs;     /* of all heads, see below; -1 where a GPU's launches failed */
  uint32_t num_tiers;           /* behind the pool, for kvx_cache_tier_facts */
  uint32_t reserved;            /* 0 */
} kvx_cache_snapshot_t;

/* Fills the counters of a cache at this moment. */
KVX_API kvx_status_t kvx_cache_snapshot(kvx_cache_t cache, kvx_cache_snapshot_t* snapshot);

/* What one KV head of one layer could not store as it came, since the cache's creation. A saturated
 * input is finite and lies further beyond the largest code than half the distance of the largest
 * two codes: a static scale clips it. nonfinite as nonfinite_inputs above. */
typedef struct kvx_head_counts_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  int64_t k_saturated;
  int64_t k_nonfinite;
  int64_t v_saturated;
  int64_t v_nonfinite;
} kvx_head_counts_t;

/* Fills the counts of one head. OUT_OF_RANGE: a layer or kv_head that the cache does not have.
 * On a GPU it waits for the stream. */
KVX_API kvx_status_t kvx_cache_head_counts(kvx_cache_t cache, uint32_t layer, uint32_t kv_head,
                                           kvx_head_counts_t* counts);

/* One tier behind the pool. Counters count since the cache's creation; microseconds are upper
 * bounds within a factor of 2, from the moment that a block was queued. */
typedef struct kvx_cache_tier_facts_t {
  uint32_t size;
  uint32_t tier;           /* kvx_cache_tier_t */
  int64_t allocated_bytes; /* of all its blocks */
  int64_t held_bytes;      /* of blocks that are stored there or being stored */
  int64_t metadata_bytes;  /* index and checksums */
  int64_t num_stored;      /* blocks that came, from the pool or the tier above */
  int64_t num_loaded;      /* blocks loaded into the pool */
  int64_t num_moved_down;  /* blocks that left for the tier below */
  int64_t num_evicted;     /* blocks that made room without a copy below */
  int64_t num_dropped;     /* blocks not stored, because there was no room or the disk refused */
  int64_t num_bad;         /* blocks with a wrong checksum, not loaded */
  int64_t stores_queued;   /* at present */
  int64_t loads_queued;    /* at present */
  int64_t hit_blocks;      /* of prefixes that were looked up: blocks that this tier had */
  int64_t miss_blocks;
  int64_t store_median_us;
  int64_t store_p99_us;
  int64_t load_median_us;
  int64_t load_p99_us;
  int64_t num_failed_calls; /* of a store that could not be reached or made no sense */
} kvx_cache_tier_facts_t;

/* Fills the facts of one tier, nearest first. OUT_OF_RANGE: index is not below num_tiers. */
KVX_API kvx_status_t kvx_cache_tier_facts(kvx_cache_t cache, uint32_t index,
                                          kvx_cache_tier_facts_t* facts);

/* A class: the blocks of one layer group, either packed or of the full-precision window. */
typedef struct kvx_block_class_t {
  uint32_t size;
  uint32_t layer_group;
  const char* name; /* lives as long as the cache */
  uint32_t is_full_precision;
  uint32_t block_size; /* tokens */
  int64_t window;      /* sliding window of the layers, in tokens; 0: none */
  int64_t sinks;       /* attention sinks in addition to the window, in tokens */
  int64_t block_bytes; /* codes and scales of all layers of the group */
  int64_t num_blocks;  /* active + cached + free */
  int64_t num_active;  /* used by sequences */
  int64_t num_cached;  /* not used, with content that can be reused */
  int64_t num_free;
  int64_t num_evicted;
  int64_t num_revived; /* cached blocks that were used again */
} kvx_block_class_t;

/* Fills the facts of one class. OUT_OF_RANGE: index is not below num_classes. */
KVX_API kvx_status_t kvx_cache_block_class(kvx_cache_t cache, uint32_t index,
                                           kvx_block_class_t* block_class);

typedef enum kvx_cache_event_kind {
  KVX_CACHE_EVENT_STORED = 1,
  KVX_CACHE_EVENT_REMOVED = 2,
  KVX_CACHE_EVENT_ALL_CLEARED = 3 /* concerns no block: the other fields are zero */
} kvx_cache_event_kind_t;

typedef enum kvx_cache_tier {
  KVX_CACHE_TIER_POOL = 0,
  KVX_CACHE_TIER_HOST = 1, /* host memory */
  KVX_CACHE_TIER_DISK = 2, /* files of this process */
  KVX_CACHE_TIER_STORE = 3 /* what outlives it: a folder, Redis, a caller's store */
} kvx_cache_tier_t;

typedef struct kvx_cache_event_t {
  uint32_t size;
  uint32_t kind;         /* kvx_cache_event_kind_t */
  const uint8_t* hash;   /* [16] */
  const uint8_t* parent; /* [16]; for a first block: the hash of its keys */
  const int32_t* tokens; /* [num_tokens], the block's own */
  int64_t num_tokens;
  uint32_t tier;     /* kvx_cache_tier_t that stored or removed the block */
  uint32_t reserved; /* 0 */
} kvx_cache_event_t;

/* The cache calls on_event for every reusable block that is stored or removed, in the thread of the
 * call that did it. The event is valid until on_event returns. Calls with this cache from inside
 * on_event are INVALID_ARGUMENT. */
typedef struct kvx_cache_listener_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  void* user;
  void (*on_event)(void* user, const kvx_cache_event_t* event);
} kvx_cache_listener_t;

/* Sets the cache's only listener; the struct is copied. Null removes it. */
KVX_API kvx_status_t kvx_cache_set_listener(kvx_cache_t cache,
                                            const kvx_cache_listener_t* listener);

/* -- seen from outside (docs/kv-events.md). Needs libkvx_observe.so beside this library; without it
 * a call is UNSUPPORTED, and its message says where the file was looked for. */

enum {
  KVX_EVENTS_INTEGER_HASHES = 1 << 0 /* hashes are their low 64 bits, not 16 bytes */
};

/* How a cache's events are sent to other processes: over ZeroMQ, in the schema of vLLM. A field
 * that is 0 or null has its default. */
typedef struct kvx_event_publisher_t {
  uint32_t size;
  uint32_t flags;              /* KVX_EVENTS_* */
  const char* endpoint;        /* bound, with a PUB socket; null: "tcp://127.0.0.1:5557" */
  const char* replay_endpoint; /* bound, with a ROUTER socket; null: batches are not sent again */
  const char* topic;           /* null: "" */
  uint32_t buffer_batches;     /* batches that are kept for replay; 0: 10,000 */
  uint32_t high_water_mark;    /* batches that wait for a slow listener; 0: 100,000 */
  uint32_t queue_events;       /* events that wait for the sending thread; 0: 16,384 */
  uint32_t data_parallel_rank;
} kvx_event_publisher_t;

/* Sends an event for every reusable block that the cache has now, and from then on for every one
 * that is stored or removed, from a thread of its own: no listener, however slow, delays a call. An
 * event that finds no room in the queue is dropped and counted, and a sequence number is left out
 * for it. The struct is copied. Null: no more events are sent. UNSUPPORTED: no KVX_CACHE_PREFIXES,
 * or no libkvx_observe.so; INVALID_ARGUMENT: an endpoint that cannot be bound. */
KVX_API kvx_status_t kvx_cache_publish_events(kvx_cache_t cache,
                                              const kvx_event_publisher_t* publisher);

typedef struct kvx_event_publisher_info_t {
  uint32_t size;
  uint32_t reserved;
  const char* endpoint;        /* where it is bound, with the port that "tcp://127.0.0.1:*" got */
  const char* replay_endpoint; /* ""; both live until the publisher ends */
  int64_t num_events;          /* sent, since the publisher began, like those that follow */
  int64_t num_batches;
  int64_t num_dropped; /* events that found the queue full */
  int64_t num_replays; /* requests that were answered */
} kvx_event_publisher_info_t;

/* Fills info, up to its size. INVALID_ARGUMENT: no events are published. */
KVX_API kvx_status_t kvx_cache_event_publisher(kvx_cache_t cache, kvx_event_publisher_info_t* info);

/* Metrics of all caches of this process, in Prometheus' text format (docs/metrics.md), from threads
 * of the library's own. A cache is shown as long as it lives, with its name as the label `cache`.
 *
 * Serves them at http://address:port/metrics until kvx_metrics_stop, instead of where they were
 * served before. address: null is "127.0.0.1". port: 0 is any free one. bound_port (may be null):
 * the port. INVALID_ARGUMENT: it cannot be bound; UNSUPPORTED: no libkvx_observe.so. */
KVX_API kvx_status_t kvx_metrics_serve(const char* address, uint32_t port, uint32_t* bound_port);
/* Serves them no more; allowed where nothing is served. */
KVX_API kvx_status_t kvx_metrics_stop(void);
/* Writes the same text. At most capacity bytes are written, the last of them 0. bytes: the size of
 * the whole text with its 0. Two calls give two texts, which may differ in size. */
KVX_API kvx_status_t kvx_metrics_text(char* text, uint64_t capacity, uint64_t* bytes);
/* Names a cache in its metrics. Null or "": a number of its own, which it has from the beginning. A
 * name that another cache has gets a number behind it. */
KVX_API kvx_status_t kvx_cache_set_name(kvx_cache_t cache, const char* name);

#ifdef __cplusplus
}
#endif

#endif /* KVX_KVX_ABI_H */
