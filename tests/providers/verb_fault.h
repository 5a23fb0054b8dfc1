/* The faults that the wrapper of libkvx.so can be compiled with, -DVERB_FAULT=WINDOW_OFF_BY_ONE and
 * so on: each spoils one thing in the verbs of 1.2. */
#ifndef KVX_TESTS_ABI_PROVIDERS_VERB_FAULT_H
#define KVX_TESTS_ABI_PROVIDERS_VERB_FAULT_H

enum verb_fault {
  NO_VERB_FAULT,
  GIVEN_SCALE_INVERTED,    /* append: codes are value * scale */
  LAST_CODE_DIFFERS,       /* append: the lowest bit of a row's last code */
  NEGATIVE_SLOT_IS_ZERO,   /* append: what is to be skipped is written to slot 0 */
  COUNTED_SLOT_IS_WRITTEN, /* append: a slot beyond the layer is counted, and written to the last */
  WRITES_BEFORE_IT_REFUSES,      /* append: OUT_OF_RANGE comes when the tokens before are written */
  EARLIER_TOKEN_STAYS,           /* append: of equal slots the first row stays */
  TRANSFORM_FORGOTTEN,           /* append: rows are stored as they come */
  NONFINITE_UNCOUNTED,           /* append: NaN and infinities go by unseen */
  TRANSFORM_NOT_UNDONE,          /* gather: rows are given as they are stored */
  RANGE_OFF_BY_ONE,              /* gather: a range begins a token late */
  FIRST_ROW_IGNORED,             /* gather: ranges lie one after the other */
  NUM_ROWS_IGNORED,              /* gather: ranges may leave the output */
  WINDOW_OFF_BY_ONE,             /* attend: a query sees a token more */
  SINKS_IGNORED,                 /* attend */
  SOFTCAP_IGNORED,               /* attend */
  NOT_CAUSAL,                    /* attend: queries see what comes after them */
  TREE_MASK_IGNORED,             /* attend */
  FULL_PRECISION_WINDOW_IGNORED, /* attend: everything is read from the packed layer */
  LSE_IN_BASE_TWO,               /* attend */
  LAST_TOKEN_LOST,               /* attend: of every sequence */
  COPIES_WHOLE_BLOCKS,           /* copy_blocks: num_tokens is ignored */
  SLOTS_CHANGE_PLACES,           /* transcode: to_slots of the next token */
  PAGES_WITHOUT_SCALES           /* page_bytes_per_token: the codes' alone */
};

#endif
