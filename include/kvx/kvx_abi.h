/* kvx_abi.h: the KVX C ABI. Part 1 is KVX v1 (1.1) as its specification fixes it; part 2 is what
 * 1.2 adds. docs/abi.md is the manual.
 *
 * The door grows additively: numbers, names, field order and offsets that stand here never change.
 * Every struct begins with `size`, which its caller writes; a struct is zeroed first, and zero in a
 * field means "as before" or "the default". Every function returns a status and throws nothing; on
 * an error nothing has been written, and kvx_last_error() says what was wrong. No call keeps a
 * pointer after it returns, but for the handles at the end.
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
#define KVX_ABI_VERSION_MINOR 2
#define KVX_ABI_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* ======================================== 1. KVX v1 ========================================== */

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
  KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 << 0, /* KV_OFFSETS: bit 31 names the secondary pool */
  KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES = 1 << 1  /* since 1.2; RAGGED: an index per page, not token */
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

/* ================================= 2. What version 1.2 adds ================================== */

/* The calling thread's most recent failure in words: the field, its value, what was expected. ""
 * when no call of this thread has failed. Valid until the thread's next failing call. */
KVX_API const char* kvx_last_error(void);

/* "OK", "INVALID_ARGUMENT", ...; "UNKNOWN" for a number that is no status. Never null. */
KVX_API const char* kvx_status_name(kvx_status_t status);

/* What the v1 calls of this library can do on this machine. Bit n of a mask stands for the value n
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
} kvx_features_t;

enum {
  KVX_TRAIT_STRIDED_CACHE = 1 << 0,        /* non-canonical strides of a multiple of 16 bytes */
  KVX_TRAIT_MIXED_KV_DTYPES = 1 << 1,      /* K and V of different dtypes */
  KVX_TRAIT_CONVERTS_DTYPES = 1 << 2,      /* IO and cache of different float dtypes */
  KVX_TRAIT_SECONDARY_POOL = 1 << 3,       /* KV_OFFSETS: bit 31 */
  KVX_TRAIT_BEAMS = 1 << 4,                /* KV_OFFSETS: beam_width above 1 */
  KVX_TRAIT_PADDED_WRITE_IO = 1 << 5,      /* 4-D IO in writes */
  KVX_TRAIT_DENSE_GATHER_IO = 1 << 6,      /* 3-D IO in gathers */
  KVX_TRAIT_STRIDED_IO = 1 << 7,           /* IO rows with gaps between them */
  KVX_TRAIT_REPORTS_OUT_OF_RANGE = 1 << 8, /* host calls return OUT_OF_RANGE and write nothing */
  KVX_TRAIT_LAUNCH_ON_HOST = 1 << 9,       /* kvx_launch_* serve host memory */
  KVX_TRAIT_FRAGMENTED_ROWS = 1 << 10,     /* 1.2's verbs: HND_PACKED, code_fragment_bytes */
  KVX_TRAIT_V_IN_K = 1 << 11               /* 1.2's verbs: KVX_SIDE_PREFIX_OF_K */
};

/* Fills at most features->size bytes and sets size to what was filled. INVALID_ARGUMENT: null, or a
 * size below 8. */
KVX_API kvx_status_t kvx_query_features(kvx_features_t* features);

/* ---- what the library tells ---- */

enum { KVX_LOG_DEBUG = 1, KVX_LOG_INFO = 2, KVX_LOG_WARNING = 3 };

/* write is called by whichever thread has something to say, one call at a time, inside the call
 * that it happens in; text lives until write returns. It must not call this library. */
typedef struct kvx_log_t {
  uint32_t size;
  uint32_t least; /* KVX_LOG_*: nothing below is told; 0: everything */
  void* user;
  void (*write)(void* user, uint32_t level, const char* text);
} kvx_log_t;

/* One hook for the process; null: silence, as at the start. The hook that was there is not called
 * any more when this returns. Two threads must not set hooks at the same time. Errors are no log
 * lines: see kvx_last_error. INVALID_ARGUMENT: no write, or called by a hook. */
KVX_API kvx_status_t kvx_set_log(const kvx_log_t* log);

/* ---- formats: how a row of K or V is stored ----
 *
 * The structs from here on hold each other by pointer and may be shorter than the library's: what a
 * caller's struct has not counts as zero. */

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
  KVX_FORMAT_INT4_ROW = 14
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
  KVX_SCALE_RULE_AFFINE = 4
} kvx_scale_rule_t;

typedef enum kvx_scale_source {
  KVX_SCALE_SOURCE_DEFAULT = 0,
  KVX_SCALE_SOURCE_COMPUTED = 1,   /* by append, one per group of a row */
  KVX_SCALE_SOURCE_GIVEN = 2,      /* by the caller; append reads it */
  KVX_SCALE_SOURCE_PAGE_SHARED = 3 /* by append, one per group of a block */
} kvx_scale_source_t;

/* How the encoder picks a scale; readers need not know. */
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

/* A format for rows of one head_dim, all defaults filled in. */
typedef struct kvx_format_info_t {
  uint32_t size;
  uint32_t head_dim_multiple; /* head_dim must be a multiple of this */
  const char* name;           /* "int8"; lives as long as the library */
  const char* summary;        /* one line */
  uint32_t group_size;        /* numbers that share a scale; head_dim for a whole row */
  uint32_t groups_per_row;    /* 0: no scale */
  uint32_t code_bytes_per_row;
  uint32_t scale_bytes_per_row;   /* wherever they lie */
  uint32_t scale_bytes_per_group; /* an affine format's scale and zero together */
  uint32_t scale_type;            /* kvx_scale_type_t; 0: none */
  uint32_t scale_rule;            /* kvx_scale_rule_t; 0: none */
  uint32_t scale_source;          /* kvx_scale_source_t */
  uint32_t has_tensor_scale;      /* 1: a second, f32 scale per head */
  uint32_t reserved;
} kvx_format_info_t;

/* INVALID_ARGUMENT: no such format, an option that it has not, a head_dim that it cannot store. */
KVX_API kvx_status_t kvx_format_info(const kvx_format_spec_t* spec, uint32_t head_dim,
                                     kvx_format_info_t* info);

/* ---- a layer of a cache in the caller's memory ---- */

enum {
  /* A V that is the first head_dim numbers of K's rows, as latent caches (MLA) keep it: its other
   * fields are zero, append takes no v, and no layer of it has transforms. */
  KVX_SIDE_PREFIX_OF_K = 1 << 0,
  /* Codes of NVFP4, MXFP4 or MXFP4_G16 in interleaved order: the same bytes a row, their bits in an
   * order that a Hopper GPU decodes with fewer instructions (docs/cuda). For layers on a GPU
   * that only kvx reads and writes; computed or given scales, rows in one fragment. */
  KVX_SIDE_INTERLEAVED_ORDER = 1 << 1
};

/* K or V of a run of heads that are stored alike. Strides are bytes; codes of a row are contiguous
 * but for code_fragment_bytes. A scale's stride of 0 shares it: only the head's set is a scale per
 * head. */
typedef struct kvx_side_t {
  uint32_t size;
  uint32_t head_dim;
  const kvx_format_spec_t* spec;
  void* codes; /* of block 0, token 0, the run's first head */
  int64_t code_block_stride;
  int64_t code_token_stride;
  int64_t code_head_stride;
  void* scales; /* likewise, group 0; null: the format has none */
  int64_t scale_block_stride;
  int64_t scale_token_stride;
  int64_t scale_head_stride;
  int64_t scale_group_stride;
  const float* tensor_scales; /* [heads of the run]; null: 1 */
  uint32_t flags;             /* KVX_SIDE_* */
  /* 0: contiguous. Otherwise a row's codes lie in fragments of this many bytes,
   * code_fragment_stride apart, as in HND_PACKED; not with page-shared scales. */
  uint32_t code_fragment_bytes;
  int64_t code_fragment_stride;
} kvx_side_t;

typedef struct kvx_head_run_t {
  uint32_t size;
  uint32_t num_heads;
  const kvx_side_t* k;
  const kvx_side_t* v; /* null: not stored */
} kvx_head_run_t;

enum { KVX_TRANSFORM_HADAMARD = 1 << 0 };

/* y = H((x - mean - block_offset) * factor): applied by append, undone by gather, folded into q and
 * the output by attend. Null: an absent term. */
typedef struct kvx_transform_t {
  uint32_t size;
  uint32_t flags;            /* KVX_TRANSFORM_* */
  const float* mean;         /* [num_kv_heads, head_dim] */
  const float* factor;       /* [num_kv_heads, head_dim], positive */
  const float* block_offset; /* [num_offset_blocks, num_kv_heads, head_dim]; K only */
  int64_t num_offset_blocks; /* a token's is that of its position / block_size */
} kvx_transform_t;

/* Either `cache`, a v1 descriptor of F16, BF16 or F32, and nothing else but transforms; or runs, in
 * head order, with the four counts. */
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
  /* Where everything lies that a call with this layer names by address: codes, scales, transforms,
   * rows, slots, tables, lengths, lists of ranges or blocks. 0: where `cache` says, or the host.
   * DEVICE and UNIFIED: the call is a launch on `stream` that allocates nothing and waits for
   * nothing; what the host cannot look at (slots, ids, lengths) is skipped there where it leads
   * nowhere. */
  uint32_t memory; /* kvx_memory_type_t */
  uint32_t reserved;
  /* Of a GPU's layer, in its memory: [2], slots, ids and lengths that were out of range, and
   * non-finite inputs as in kvx_append. Every call adds to them. Null: not counted. */
  uint64_t* counters;
} kvx_layer_t;

/* Opaque pages, as an engine that knows nothing of formats hands them over: [num_blocks,
 * num_kv_heads, block_size * bytes_per_token], uint8. The order inside a page is the library's; a
 * page of zeros is legal and decodes to zeros. */
typedef struct kvx_page_desc_t {
  uint32_t size;
  uint32_t block_size; /* a multiple of 4 */
  uint32_t k_head_dim;
  uint32_t v_head_dim;             /* 0: no V */
  const kvx_format_spec_t* k_spec; /* computed scales, or none */
  const kvx_format_spec_t* v_spec;
} kvx_page_desc_t;

/* Bytes of one token of one KV head, K and V together. */
KVX_API kvx_status_t kvx_page_bytes_per_token(const kvx_page_desc_t* page, uint64_t* bytes);

/* Fills k and v (ignored when v_head_dim is 0) for pages that begin at `pages`; their spec pointers
 * are page's. */
KVX_API kvx_status_t kvx_describe_pages(const kvx_page_desc_t* page, void* pages,
                                        uint32_t num_kv_heads, kvx_side_t* k, kvx_side_t* v);

/* ---- the verbs ---- */

/* Threads of the caller. parallel_for calls task(context, i) once for every i below num_tasks, in
 * any threads, and returns when all have returned. Results do not depend on the number of threads.
 */
typedef struct kvx_executor_t {
  uint32_t size;
  uint32_t num_threads;
  void* user;
  void (*parallel_for)(void* user, uint32_t num_tasks, void (*task)(void* context, uint32_t i),
                       void* context);
} kvx_executor_t;

/* Floats [tokens, heads, head_dim]; rows are contiguous. */
typedef struct kvx_rows_t {
  uint32_t size;
  uint32_t dtype; /* KVX_DTYPE_F16, BF16 or F32 */
  void* data;
  int64_t token_stride; /* elements; 0: num_heads * head_stride */
  int64_t head_stride;  /* 0: head_dim */
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
  /* Null: a slot beyond the cache is OUT_OF_RANGE and nothing is written. Otherwise such tokens are
   * not written, and their number is added here. */
  uint64_t* out_of_range_slots;
  uint64_t* nonfinite_inputs; /* added: NaN and infinities that the codes cannot say; may be null */
  const kvx_executor_t* executor; /* null: the calling thread */
} kvx_append_args_t;

/* Rows to slots, transformed and quantised on the way. Of equal slots the later token stays. */
KVX_API kvx_status_t kvx_append(const kvx_append_args_t* args, void* stream);

/* Range i is tokens [first_tokens[i], first_tokens[i] + num_tokens[i]) of sequence sequences[i], to
 * rows first_rows[i], ... of k and v. Null arrays: range i is the whole of sequence i, one after
 * the other, and num_ranges is the table's seq_count. */
typedef struct kvx_gather_args_t {
  uint32_t size;
  uint32_t num_ranges;
  const kvx_layer_t* layer;
  const kvx_block_table_t* block_table; /* PACKED or RAGGED */
  const kvx_seq_lens_t* seq_lens;
  const int32_t* sequences;
  const int64_t* first_tokens;
  const int64_t* num_tokens;
  const int64_t* first_rows;
  const kvx_rows_t* k; /* null: not wanted */
  const kvx_rows_t* v;
  const kvx_executor_t* executor;
  int64_t num_rows; /* of k and v: ranges beyond are OUT_OF_RANGE, on a GPU left out and counted.
                     * 0: what the ranges name is there */
} kvx_gather_args_t;

/* Stored rows to floats, transforms undone. */
KVX_API kvx_status_t kvx_gather(const kvx_gather_args_t* args, void* stream);

/* How exact attention has to be: its root mean square error against double precision over the
 * stored numbers, relative to the output, before that is rounded to its type. On a GPU, whose
 * tensor cores take 16-bit numbers: 3e-4, with a rotation 4e-4, with means or factors 1.2e-3, and
 * 3.5e-3 where the cache or the queries are bf16. There, with many bf16 queries a sequence,
 * integers become f16 numbers: a group whose largest is above 65504 is infinite. */
typedef enum kvx_precision {
  KVX_PRECISION_ACCURATE = 0, /* CPU: 1e-5 where K and V have 16 bits and more, else 3e-4 */
  KVX_PRECISION_FAST = 1      /* 8e-3, where that saves time; a GPU makes no difference */
} kvx_precision_t;

typedef struct kvx_attend_args_t {
  uint32_t size;
  uint32_t num_q_heads; /* a multiple of num_kv_heads */
  const kvx_layer_t* layer;
  const kvx_block_table_t* block_table; /* PACKED or RAGGED */
  const kvx_seq_lens_t* seq_lens;       /* tokens in the cache, the queries' own included */
  /* [seq_count + 1]: queries of sequence s are rows q_starts[s] .. q_starts[s + 1], its last tokens
   * (causal). Null: one query a sequence (on a GPU they must be given). */
  const int32_t* q_starts;
  const kvx_rows_t* q;   /* [queries, num_q_heads, k head_dim] */
  const kvx_rows_t* out; /* [queries, num_q_heads, v head_dim] */
  float* lse;            /* [queries, num_q_heads], natural log, or null */
  float softmax_scale;   /* 0: 1 / sqrt(k head_dim) */
  float softcap;         /* 0: none */
  uint32_t window;       /* a query sees its own and window - 1 tokens before it; 0: all */
  uint32_t reserved;     /* 0 */
  const float* sinks;    /* [num_q_heads] logits that take probability, or null */
  const uint8_t*
      tree_mask; /* [queries, tree_mask_stride]: which new tokens a query sees; or null */
  int64_t tree_mask_stride;
  /* Full-precision window: blocks [0, num_sink_blocks[s]) and [first_recent_blocks[s], end) of
   * sequence s lie in `full_precision`. All null: none. */
  const kvx_layer_t* full_precision;
  const int32_t* num_sink_blocks;
  const int32_t* first_recent_blocks;
  void* workspace; /* at least kvx_attend_workspace's bytes; on a GPU on 256 bytes, in its memory */
  uint64_t workspace_bytes;
  const kvx_executor_t* executor;
  /* What the host must know of arrays that it cannot read; on the host all three are not looked at.
   * A captured call serves every batch within them. */
  int64_t num_queries;   /* rows of q and out */
  int64_t max_tokens;    /* of a sequence; 0: what a row of the table holds */
  uint32_t max_q_len;    /* queries of a sequence */
  uint32_t reserved_end; /* 0 */
  uint32_t precision;    /* kvx_precision_t */
  uint32_t reserved_2;   /* 0 */
} kvx_attend_args_t;

/* What kvx_attend needs as workspace for these arguments; 0 on the CPU today. On a GPU it depends
 * on shapes, types and maxima alone. */
KVX_API kvx_status_t kvx_attend_workspace(const kvx_attend_args_t* args, uint64_t* bytes);
/* prefers: 1 where kvx_attend is faster if K and V of every run have KVX_SIDE_INTERLEAVED_ORDER, 0
 * otherwise. To be asked once, with the layer's addresses, before the first kvx_append.
 * UNSUPPORTED: a layer on the host. */
KVX_API kvx_status_t kvx_attend_prefers_interleaved_order(const kvx_layer_t* layer,
                                                          uint32_t* prefers);

/* Attention straight from the stored bytes, decode and prefill. */
KVX_API kvx_status_t kvx_attend(const kvx_attend_args_t* args, void* stream);

typedef struct kvx_copy_args_t {
  uint32_t size;
  uint32_t num_copies;
  const kvx_layer_t* from;
  const kvx_layer_t* to;
  const int64_t* from_blocks; /* [num_copies] */
  const int64_t* to_blocks;
  const int32_t* num_tokens;  /* the first tokens of the block; null: all */
  uint64_t* nonfinite_inputs; /* added, as in kvx_append; may be null */
  const kvx_executor_t* executor;
} kvx_copy_args_t;

/* Blocks as they are stored where both layers store alike, decoded and encoded again where not.
 * Transforms are not looked at: both layers hold transformed rows. Pairs are copied at once, in any
 * order: no block is the target of two, or of one and the source of another. */
KVX_API kvx_status_t kvx_copy_blocks(const kvx_copy_args_t* args, void* stream);

typedef struct kvx_transcode_args_t {
  uint32_t size;
  uint32_t slot_dtype; /* KVX_DTYPE_S32 or S64, of both lists */
  const kvx_layer_t* from;
  const kvx_layer_t* to;
  int64_t num_tokens;
  const void* from_slots; /* [num_tokens] */
  const void* to_slots;   /* [num_tokens]; a negative slot in either list: not copied */
  uint64_t* nonfinite_inputs;
  const kvx_executor_t* executor;
} kvx_transcode_args_t;

/* Tokens from slots to slots, any format, layout, block size and transform to any other (but no
 * block_offset). The layers lie in different memory. */
KVX_API kvx_status_t kvx_transcode(const kvx_transcode_args_t* args, void* stream);

/* ---- caches that own their memory ---- */

/* A cache of all layers: pools, block tables and sequences. One thread at a time uses it. On a GPU
 * (kvx_cache_options_t.memory) rows and sinks are in memory that it reads, and calls return when
 * their work is on its way in the cache's stream. */
typedef struct kvx_cache_s* kvx_cache_t;

/* The caller's memory for a cache's pools. */
typedef struct kvx_allocator_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  void* user;
  /* Host memory, of any content, on a multiple of alignment (a power of two); null: none left. */
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
  uint32_t num_threads; /* of a pool of our own; 0 or 1: the calling thread. Unused with executor */
  int64_t max_tokens_per_sequence;
  int64_t memory_budget_bytes;    /* 0: what max_sequences full sequences need */
  const char* recipe;             /* "int8", "int4:k.hadamard,sink=16,recent=64", "int4:auto" */
  const int32_t* layer_windows;   /* [num_layers], 0: none; or null */
  const kvx_executor_t* executor; /* kept until kvx_cache_free; or null */
  /* Of all K and V; called by kvx_cache_create and kvx_cache_free. Null: the system's memory. */
  const kvx_allocator_t* allocator;
} kvx_cache_config_t;

KVX_API kvx_status_t kvx_cache_create(const kvx_cache_config_t* config, kvx_cache_t* cache);
/* Null is allowed. */
KVX_API void kvx_cache_free(kvx_cache_t cache);

/* OUT_OF_RANGE: max_sequences are in use. */
KVX_API kvx_status_t kvx_sequence_create(kvx_cache_t cache, int32_t* sequence);
KVX_API kvx_status_t kvx_sequence_free(kvx_cache_t cache, int32_t sequence);
/* max_step: the most tokens that one step takes of this sequence; may be null. */
KVX_API kvx_status_t kvx_sequence_tokens(kvx_cache_t cache, int32_t sequence, int64_t* num_tokens,
                                         int64_t* max_step);

/* A step adds tokens to some sequences, each named once: begin, then kvx_step_layer once for every
 * layer, then end. */
KVX_API kvx_status_t kvx_step_begin(kvx_cache_t cache, uint32_t num_entries,
                                    const int32_t* sequences, const int32_t* num_tokens);

/* Rows are the entries' tokens, one entry after the other. */
typedef struct kvx_step_layer_args_t {
  uint32_t size;
  uint32_t layer;
  uint32_t num_q_heads;
  float softmax_scale;   /* 0: 1 / sqrt(k head_dim) */
  float softcap;         /* 0: none */
  uint32_t reserved;     /* 0 */
  const kvx_rows_t* q;   /* [tokens, num_q_heads, k head_dim] */
  const kvx_rows_t* k;   /* [tokens, num_kv_heads, k head_dim] */
  const kvx_rows_t* v;   /* [tokens, num_kv_heads, v head_dim] */
  const kvx_rows_t* out; /* [tokens, num_q_heads, v head_dim] */
  const float* sinks;    /* [num_q_heads], or null */
  uint32_t precision;    /* kvx_precision_t */
  uint32_t reserved_2;   /* 0 */
} kvx_step_layer_args_t;

/* Appends the step's K and V to a layer and attends. */
KVX_API kvx_status_t kvx_step_layer(kvx_cache_t cache, const kvx_step_layer_args_t* args);
KVX_API kvx_status_t kvx_step_end(kvx_cache_t cache);

/* Stored rows of tokens [first_token, first_token + num_tokens) as floats; k or v null: not wanted.
 */
KVX_API kvx_status_t kvx_sequence_gather(kvx_cache_t cache, int32_t sequence, uint32_t layer,
                                         int64_t first_token, int64_t num_tokens,
                                         const kvx_rows_t* k, const kvx_rows_t* v);

/* ---- caches that own their memory: prefixes, forks, cuts, files, facts ----
 *
 * A sequence's number is its handle: kvx_sequence_free ends it, and a number that was freed is
 * refused like one that never was, though another sequence may live in the same place. Likewise a
 * kvx_cache_t after kvx_cache_free. */

enum {
  KVX_CACHE_PREFIXES = 1 << 0,      /* full blocks of recorded tokens can be found again */
  KVX_CACHE_ZEROES_ON_FREE = 1 << 1 /* a freed block's bytes are overwritten with zeros */
};

typedef enum kvx_prefix_hash {
  KVX_PREFIX_HASH_DEFAULT = 0, /* XXH3 */
  KVX_PREFIX_HASH_XXH3 = 1,
  KVX_PREFIX_HASH_SHA256 = 2 /* needed where tenants share a cache */
} kvx_prefix_hash_t;

/* Which cached block goes first. */
typedef enum kvx_eviction {
  KVX_EVICTION_DEFAULT = 0, /* LRU */
  KVX_EVICTION_LRU = 1,
  KVX_EVICTION_LFU = 2,
  KVX_EVICTION_2Q = 3
} kvx_eviction_t;

typedef struct kvx_cache_options_t {
  uint32_t size;
  uint32_t flags;       /* KVX_CACHE_* */
  uint32_t prefix_hash; /* kvx_prefix_hash_t */
  uint32_t eviction;    /* kvx_eviction_t */
  const char* model;    /* names or hashes what computes K and V; null: "" */
  /* [num_layers]: in a layer with a window, the sequence's first tokens that every query sees too
   * (attention sinks), 0 in others; or null. */
  const int32_t* layer_sinks;
  /* Of host memory, or files (host_tier_folder), for copies of blocks that can be found: what the
   * pool evicts comes back from there. 0: no host tier; others need KVX_CACHE_PREFIXES. */
  int64_t host_tier_bytes;
  uint32_t host_tier_eviction; /* kvx_eviction_t */
  uint32_t reserved;           /* 0 */
  /* Tokens of a sequence in speculative steps (kvx_step_begin_with), since the last that stayed for
   * sure: a cut reaches back to any of them also where pages share scales; elsewhere cuts are exact
   * without it. 0: none. */
  uint32_t max_speculative_tokens;
  /* kvx_memory_type_t of the pools: 0 or KVX_MEMORY_HOST, or KVX_MEMORY_DEVICE, which excludes the
   * allocator. UNSUPPORTED, by its name: what a GPU's cache does not do yet. */
  uint32_t memory;
  /* With KVX_MEMORY_DEVICE: the device's index; the most tokens of all entries of a step together,
   * 0: 4096; a cudaStream_t for all work, which outlives the cache, null: the default stream. */
  uint32_t device;
  uint32_t max_step_tokens;
  void* stream;
  /* With host_tier_bytes: the host tier's blocks lie in this folder, in files without names that
   * are gone with the process, and their room is taken at once. null or "": in host memory. */
  const char* host_tier_folder;
} kvx_cache_options_t;

/* kvx_cache_create with options; null: as it. */
KVX_API kvx_status_t kvx_cache_create_with(const kvx_cache_config_t* config,
                                           const kvx_cache_options_t* options, kvx_cache_t* cache);

/* What sets blocks of equal tokens apart. Null and "" are the same. */
typedef struct kvx_prefix_keys_t {
  uint32_t size;
  uint32_t reserved;   /* 0 */
  const char* adapter; /* a LoRA's name, say */
  const char* image;   /* hashes of what stands behind placeholder tokens */
  const char* tenant;  /* a salt: blocks are never shared across tenants */
} kvx_prefix_keys_t;

/* A new sequence that begins with the longest cached prefix of tokens: num_found of them, at most
 * all but the last. UNSUPPORTED: without KVX_CACHE_PREFIXES, or a tenant without SHA256. */
KVX_API kvx_status_t kvx_sequence_create_from(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                              const int32_t* tokens, int64_t num_tokens,
                                              int32_t* sequence, int64_t* num_found);
/* Says which tokens the sequence holds next, after the steps that added them. Nothing without
 * KVX_CACHE_PREFIXES. INVALID_ARGUMENT: others than a fork recorded for a block of both. */
KVX_API kvx_status_t kvx_sequence_record(kvx_cache_t cache, int32_t sequence, const int32_t* tokens,
                                         int64_t num_tokens);
/* Copies the first `capacity` recorded tokens; num_tokens: how many there are. */
KVX_API kvx_status_t kvx_sequence_recorded(kvx_cache_t cache, int32_t sequence, int32_t* tokens,
                                           int64_t capacity, int64_t* num_tokens);

/* A fork with the same tokens in the same blocks; whoever writes first copies the open block. */
KVX_API kvx_status_t kvx_sequence_fork(kvx_cache_t cache, int32_t sequence, int32_t* fork);
/* Forgets the tokens from num_tokens on. */
KVX_API kvx_status_t kvx_sequence_truncate(kvx_cache_t cache, int32_t sequence, int64_t num_tokens);

/* kvx_step_begin; is_speculative: [num_entries], other than 0 where tokens may go again
 * (kvx_cache_options_t.max_speculative_tokens). Null: none. */
KVX_API kvx_status_t kvx_step_begin_with(kvx_cache_t cache, uint32_t num_entries,
                                         const int32_t* sequences, const int32_t* num_tokens,
                                         const uint8_t* is_speculative);
/* Ends a verification step: of entry i's tokens the first kept_tokens[i] stay. */
KVX_API kvx_status_t kvx_step_end_kept(kvx_cache_t cache, uint32_t num_entries,
                                       const int32_t* kept_tokens);
/* Leaves the open step without its tokens. */
KVX_API kvx_status_t kvx_step_cancel(kvx_cache_t cache);
/* Waits for what the cache's calls have launched on a GPU; nothing on the host. INTERNAL_ERROR:
 * some of it failed. */
KVX_API kvx_status_t kvx_cache_synchronize(kvx_cache_t cache);

/* Forgets up to num_blocks cached blocks of every class, in the policy's order; num_evicted: of all
 * classes. */
KVX_API kvx_status_t kvx_cache_evict(kvx_cache_t cache, int64_t num_blocks, int64_t* num_evicted);
/* Forgets all cached blocks; those in use are free with their last sequence. */
KVX_API kvx_status_t kvx_cache_clear_prefixes(kvx_cache_t cache);

/* -- files (docs/cache-file.md). Paths are the system's own; 0-terminated. */

typedef struct kvx_save_options_t {
  uint32_t size;
  int32_t zstd_level; /* 0: blocks as they lie in memory; 1 to 22 */
} kvx_save_options_t;

/* A sequence all of whose tokens were recorded. Whatever fails, what was at path stays there.
 * options may be null. */
KVX_API kvx_status_t kvx_sequence_save(kvx_cache_t cache, int32_t sequence, const char* path,
                                       const kvx_save_options_t* options);
/* All blocks that a new sequence could begin with. */
KVX_API kvx_status_t kvx_cache_save_prefixes(kvx_cache_t cache, const char* path,
                                             const kvx_save_options_t* options);

enum {
  /* A file of another format, block size or other full-precision window is decoded and appended
   * anew; without this it is refused. */
  KVX_LOAD_TRANSCODE = 1 << 0
};

typedef struct kvx_load_options_t {
  uint32_t size;
  uint32_t flags; /* KVX_LOAD_* */
} kvx_load_options_t;

/* A new sequence as it was saved. INVALID_ARGUMENT: a damaged file, or one of another cache; the
 * message says in what they differ. options may be null. */
KVX_API kvx_status_t kvx_sequence_load(kvx_cache_t cache, const char* path,
                                       const kvx_load_options_t* options, int32_t* sequence);

typedef struct kvx_load_report_t {
  uint32_t size;
  uint32_t reserved;
  int64_t num_blocks; /* in the file */
  int64_t num_loaded;
  int64_t num_known; /* were there already */
  int64_t num_bad;   /* damaged: a miss, never data */
  int64_t num_no_room;
} kvx_load_report_t;

/* Blocks of the file that new sequences can begin with from now on; report may be null. */
KVX_API kvx_status_t kvx_cache_load_prefixes(kvx_cache_t cache, const char* path,
                                             const kvx_load_options_t* options,
                                             kvx_load_report_t* report);

typedef struct kvx_file_info_t {
  uint32_t size;
  uint32_t version;
  uint32_t block_size; /* tokens */
  uint32_t num_scopes; /* adapters, images and tenants apart */
  uint32_t num_sequences;
  uint32_t reserved;
  int64_t num_blocks;
  int64_t num_tokens;       /* of the first sequence; 0: none */
  int64_t num_block_copies; /* a block of one layer group, packed or full-precision */
  int64_t file_bytes;
  int64_t stored_bytes; /* of block copies, in the file */
  int64_t memory_bytes; /* of block copies, in a cache */
} kvx_file_info_t;

/* What the file's index says. */
KVX_API kvx_status_t kvx_file_inspect(const char* path, kvx_file_info_t* info);
/* Reads every block copy. INVALID_ARGUMENT says how many are damaged, and the first. */
KVX_API kvx_status_t kvx_file_verify(const char* path);
/* What a file's blocks must agree in with a cache's, a fact a line. At most capacity bytes of text
 * are written, a 0 last; bytes: what the whole needs, its 0 included. */
KVX_API kvx_status_t kvx_file_fingerprint(const char* path, char* text, uint64_t capacity,
                                          uint64_t* bytes);
KVX_API kvx_status_t kvx_cache_fingerprint(kvx_cache_t cache, char* text, uint64_t capacity,
                                           uint64_t* bytes);

/* -- the host tier. Copies of blocks that can be found go there by themselves, in a thread of the
 * cache's own; kvx_sequence_create_from brings back what it needs and waits for it. */

/* A hint that a sequence of these tokens will come: what the host tier alone has of them sets out
 * for the pool, as far as there is room, and stays there until kvx_prefetch_end. This does not
 * wait. UNSUPPORTED: no host tier, or as kvx_sequence_create_from. */
KVX_API kvx_status_t kvx_cache_prefetch(kvx_cache_t cache, const kvx_prefix_keys_t* keys,
                                        const int32_t* tokens, int64_t num_tokens,
                                        uint64_t* prefetch);
/* Whether all blocks of the prefetch have arrived, 0 or 1. */
KVX_API kvx_status_t kvx_prefetch_is_done(kvx_cache_t cache, uint64_t prefetch, uint32_t* is_done);
/* Waits for the blocks and lets them go: cached, and evicted when others need the room. */
KVX_API kvx_status_t kvx_prefetch_end(kvx_cache_t cache, uint64_t prefetch);
/* Waits until no block is under way between the tiers. */
KVX_API kvx_status_t kvx_cache_wait_for_tiers(kvx_cache_t cache);

/* -- facts and events. Out structs are filled up to their caller's size, which is set to that. */

typedef struct kvx_cache_snapshot_t {
  uint32_t size;
  uint32_t num_classes; /* for kvx_cache_block_class */
  int64_t num_sequences;
  int64_t allocated_bytes; /* of all blocks */
  int64_t metadata_bytes;  /* of the prefix index */
  int64_t nonfinite_inputs;
  int64_t prefix_queries;     /* since creation, as all that follow */
  int64_t prefix_hit_blocks;  /* found */
  int64_t prefix_miss_blocks; /* full blocks asked for and not found */
  int64_t prefix_stored;
  int64_t prefix_removed;
  int64_t prefix_refused;       /* found no room */
  int64_t prefix_nodes;         /* now */
  int64_t host_allocated_bytes; /* the host tier's blocks; all that follow are 0 without one */
  int64_t host_held_bytes;      /* of blocks that can be found there or are on their way */
  int64_t host_metadata_bytes;  /* index and checksums */
  int64_t host_stored;          /* blocks that came */
  int64_t host_loaded;          /* blocks that went back */
  int64_t host_bad;             /* blocks whose bytes had changed: misses */
  int64_t host_dropped;         /* blocks that found no room */
  int64_t host_stores_queued;   /* now */
  int64_t host_loads_queued;    /* now */
} kvx_cache_snapshot_t;

KVX_API kvx_status_t kvx_cache_snapshot(kvx_cache_t cache, kvx_cache_snapshot_t* snapshot);

/* A class: the blocks of one layer group, packed, or full-precision at a sequence's ends. */
typedef struct kvx_block_class_t {
  uint32_t size;
  uint32_t layer_group;
  const char* name; /* lives as long as the cache */
  uint32_t is_full_precision;
  uint32_t block_size; /* tokens */
  int64_t window;      /* tokens; 0: every token is read */
  int64_t sinks;       /* tokens that the window does not leave behind */
  int64_t block_bytes; /* codes and scales of all layers of the group */
  int64_t num_blocks;  /* active + cached + free */
  int64_t num_active;  /* sequences use them */
  int64_t num_cached;  /* nobody does, their content is kept */
  int64_t num_free;
  int64_t num_evicted;
  int64_t num_revived; /* cached blocks that were wanted again */
} kvx_block_class_t;

/* OUT_OF_RANGE: index is not below num_classes. */
KVX_API kvx_status_t kvx_cache_block_class(kvx_cache_t cache, uint32_t index,
                                           kvx_block_class_t* block_class);

typedef enum kvx_cache_event_kind {
  KVX_CACHE_EVENT_STORED = 1,
  KVX_CACHE_EVENT_REMOVED = 2,
  KVX_CACHE_EVENT_ALL_CLEARED = 3 /* of no block: the rest is zero */
} kvx_cache_event_kind_t;

typedef enum kvx_cache_tier { KVX_CACHE_TIER_POOL = 0, KVX_CACHE_TIER_HOST = 1 } kvx_cache_tier_t;

typedef struct kvx_cache_event_t {
  uint32_t size;
  uint32_t kind;         /* kvx_cache_event_kind_t */
  const uint8_t* hash;   /* [16] */
  const uint8_t* parent; /* [16]; of a first block: its scope's */
  const int32_t* tokens; /* [num_tokens], the block's own */
  int64_t num_tokens;
  uint32_t tier;     /* kvx_cache_tier_t: where the block came or went */
  uint32_t reserved; /* 0 */
} kvx_cache_event_t;

/* on_event hears of every cached block that comes or goes, in the thread of the call that moved it.
 * It is over when it returns, and the cache refuses calls from inside it. */
typedef struct kvx_cache_listener_t {
  uint32_t size;
  uint32_t reserved; /* 0 */
  void* user;
  void (*on_event)(void* user, const kvx_cache_event_t* event);
} kvx_cache_listener_t;

/* Null: nobody listens any more. */
KVX_API kvx_status_t kvx_cache_set_listener(kvx_cache_t cache,
                                            const kvx_cache_listener_t* listener);

#ifdef __cplusplus
}
#endif

#endif /* KVX_KVX_ABI_H */
