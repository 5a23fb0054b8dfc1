/* The faults that the slow provider can be compiled with: -DFAULT=SCALE_INVERTED and so on. Each
 * makes a provider that is wrong in one way, as real ones are. */
#ifndef KVX_TESTS_ABI_PROVIDERS_FAULT_H
#define KVX_TESTS_ABI_PROVIDERS_FAULT_H

enum fault {
  NO_FAULT,
  MOVES_NOTHING,              /* checks everything and copies no byte */
  IGNORES_STRIDES,            /* computes the canonical ones instead */
  HND_AS_NHD,                 /* tokens and heads change places */
  V_PACK_OF_K,                /* takes K's pack for V */
  SLOT_OFF_BY_ONE,            /* the next token of the block; the last one's is the first */
  BLOCK_SIZE_OFF,             /* slot / (block_size + 1) */
  WRITES_INVALID_SLOT,        /* only negative slots are skipped */
  WRITES_NEGATIVE_SLOT,       /* only invalid_slot is skipped: -2 becomes slot 0 */
  OUT_OF_RANGE_IS_SILENT,     /* a slot beyond the cache is skipped and the call returns OK */
  WRITES_BEFORE_IT_CHECKS,    /* OUT_OF_RANGE comes when the slots before it are written */
  SLOTS_IN_32_BITS,           /* reads the low half of S64 slots */
  NULL_INDEX_IS_NEGATIVE,     /* KV_OFFSETS: every index below 0 is taken for null */
  SECONDARY_IGNORED,          /* KV_OFFSETS: bit 31 is dropped */
  V_INDEX_OF_K,               /* KV_OFFSETS: V's blocks are K's */
  BEAM_IGNORED,               /* KV_OFFSETS: every beam gets the first one's blocks */
  READS_BEHIND_THE_TABLE,     /* reads the entry behind a sequence's last block */
  READS_BLOCKS_OUTSIDE,       /* no look at num_blocks */
  RAGGED_AS_PAGES,            /* RAGGED: an index a page, flag or not */
  LENGTHS_IGNORED,            /* copies max_seq_len tokens of every sequence */
  MAX_SEQ_LEN_IGNORED,        /* copies as many tokens as a sequence has */
  UNMAPPED_IS_BLOCK_ZERO,     /* a negative entry reads block 0 */
  SCALE_INVERTED,             /* code = value * scale */
  SCALE_OF_K_FOR_V,           /* one pair of scales for both */
  SCALE_PER_HEAD_BY_BLOCK,    /* PER_HEAD's scales are looked up by block */
  FALLBACK_SCALE_IGNORED,     /* k_scale and v_scale are not read */
  BAD_SCALES_TAKEN,           /* zero, negative and NaN */
  ROUNDS_TOWARDS_ZERO,        /* in every conversion */
  VERSION_WRITES_16_BYTES,    /* whatever room the caller has */
  SIZES_UNCHECKED,            /* of nested structs */
  COUNTS_IN_32_BITS,          /* products of counts wrap around */
  UNSUPPORTED_BEFORE_INVALID, /* the first error is returned */
  PLAN_IS_STATIC,             /* a call's plan lies in memory that all threads share */
  KEEPS_POINTERS,             /* reads the slots of the previous call */
  K_AND_V_CHANGE_PLACES,      /* a gather's key comes from V */
  ENDS_THE_PROCESS,           /* exit(0) in the first call that moves something */
  WRITES_ONE_TOO_MANY         /* an element behind every row */
};

#ifndef FAULT
#define FAULT NO_FAULT
#endif

#endif
