// BlockLayout: where each layer, head, row and scale lies inside a block record. Pure numbers; what
// the bytes mean is the formats' business.
//
// A block holds block_size tokens of all layers of one layer group. BlockOrder::kHeads:
//
//   block   [layer 0][layer 1] ...                     block_bytes, a multiple of 64
//   layer   [head 0][head 1] ...                       heads in order, run after run
//   head    [K codes:  block_size rows of row_code_bytes ]   each section begins on 4 bytes
//           [K scales: block_size rows of row_scale_bytes]   or page_scale_bytes, once a block
//           [K's second segment, codes and scales likewise]  where rows are stored in two segments
//           [K channels: channel_bytes, once a block]        each of these where it is not empty
//           [V codes:  block_size rows of row_code_bytes ]
//           [V scales: block_size rows of row_scale_bytes]   or page_scale_bytes, once a block
//           [V channels: channel_bytes, once a block]
//
// A head's K and V are contiguous, and a layer's heads lie together: attention walks
// addresses that only grow. Data and scales share the record, so a block id cannot name one without
// the other.
//
// BlockOrder::kTurbomind is what TurboMind's kernels read (src/engines/turbomind/layout.hpp). Its
// data block and its scale block lie one after the other in a record, so that they have one id:
//
//   record  [data block][scale block]                  each begins on 64 bytes
//   data    [layer 0][layer 1] ...
//   layer   head 0: [K codes: block_size rows][V codes: block_size rows] | head 1: ...
//           head 0: [K: block_size x {scale, zero}][V: likewise] | head 1: ...   scales with zeros
//   scale   [layer][head][token][K scales][V scales]                             other scales
#pragma once

#include <cstdint>
#include <vector>

#include "core/result.hpp"

namespace kvx::cache {

inline constexpr int kMaxBlockSize = 1024;
inline constexpr int64_t kBlockAlignment = 64;   // a cache line
inline constexpr int64_t kSectionAlignment = 4;  // the largest scale type

// In which order the sections of a block lie.
enum class BlockOrder : uint8_t { kHeads, kTurbomind };

// What K or V of one head takes. All zero: this side is not stored.
struct SideBytes {
  int64_t row_code_bytes = 0;    // codes of one token
  int64_t row_scale_bytes = 0;   // scales of one token; 0: given, page-shared or none
  int64_t page_scale_bytes = 0;  // scales shared by the block's tokens; 0: none such
  int64_t channel_bytes = 0;     // the block's own numbers of each channel; 0: none such
  bool has_zeros = false;        // row scales have zeros beside them
};

// num_heads neighbouring heads that are stored alike.
struct HeadRunBytes {
  int num_heads = 0;
  SideBytes k;
  SideBytes v;
  SideBytes k_more = {};  // the second segment of K's rows; all zero: they are one segment
};

struct LayerBytes {
  std::vector<HeadRunBytes> runs;  // in head order
};

// A layer group: layers that share block ids.
struct GroupBytes {
  int64_t block_size = 0;  // tokens
  std::vector<LayerBytes> layers;
  BlockOrder order = BlockOrder::kHeads;
};

// Offsets count from the block's first byte and name the run's first head, token 0.
struct SidePlace {
  bool is_stored = false;
  int64_t codes_offset = 0;
  int64_t code_token_stride = 0;
  bool has_scales = false;  // in the record; scales that are given lie elsewhere
  int64_t scales_offset = 0;
  int64_t scale_token_stride = 0;  // 0: shared by the block's tokens
  int64_t channels_offset = 0;     // of numbers of each channel, where the side has them
  int64_t scale_head_stride = 0;
};

struct RunPlace {
  int first_head = 0;
  int num_heads = 0;
  int64_t head_stride = 0;  // of codes, K and V
  SidePlace k;
  SidePlace v;
  SidePlace k_more;
};

struct LayerPlace {
  int64_t offset = 0;
  int64_t bytes = 0;
  int num_heads = 0;
  std::vector<RunPlace> runs;
};

struct BlockLayout {
  BlockOrder order = BlockOrder::kHeads;
  int64_t block_size = 0;   // tokens
  int64_t block_bytes = 0;  // the stride from block to block
  // What the record holds, all layers and heads together:
  int64_t token_code_bytes = 0;   // a token
  int64_t token_scale_bytes = 0;  // a token
  int64_t page_scale_bytes = 0;   // a block, numbers of each channel with them
  // kTurbomind: where a record's scale block begins, and its bytes; 0 bytes: there is none.
  int64_t scale_block_offset = 0;
  int64_t scale_block_bytes = 0;
  std::vector<LayerPlace> layers;

  int64_t code_bytes() const { return block_size * token_code_bytes; }
  int64_t scale_bytes() const { return block_size * token_scale_bytes + page_scale_bytes; }
  int64_t padding_bytes() const { return block_bytes - code_bytes() - scale_bytes(); }
};

// The record of a paged cache: block_size is 1 .. kMaxBlockSize. INVALID_ARGUMENT names the layer,
// the run and the field: a count or size that is zero, negative or whose product overflows, scales
Result<BlockLayout> layout_block(const GroupBytes& group);

// The record of a contiguous cache, where a sequence is one block of max_seq_len tokens: the same
// order, without the upper limit on block_size.
Result<BlockLayout> layout_whole_sequence(const GroupBytes& group);

}  // namespace kvx::cache
