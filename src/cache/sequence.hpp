// Sequence: the tokens of one sequence, as blocks of each layer group; it takes blocks from a pool
// and gives them back, and touches no bytes.
//
// To append n tokens:
//
//   release_expired(pool)             sliding windows let go of what no later query reads
//   acquire_moves(pool, n, moves)        blocks that leave the full-precision window get a packed
//   block each
//   ... copy every move's bytes from full_precision_id to packed_id (ops::copy_blocks) ...
//   finish_moves(pool, moves)         the tables name the packed blocks, the full-precision ones
//   are free reserve(pool, n)                  blocks for the new tokens
//   ... append to slots(group, ...), attend ...
//   advance(n)
//
// Without full-precision window and windows reserve() and advance() are enough.
//
// Sequences may share blocks: forks, and those that begin with the same cached prefix. A shared
// block, and one that the prefix index keeps, is never written: before an append
//
//   drain_copies(pool, copies)         the open block, where it is shared, gets one of its own
//   ... copy every copy's tokens from from_id to to_id, blocks of one class ...
//   finish_copies(pool, copies)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/block_table.hpp"
#include "cache/full_precision_window.hpp"
#include "cache/pool/block_pool.hpp"
#include "core/result.hpp"

namespace kvx::cache {

// Layers that share block ids, and the pool's classes that they take blocks from.
struct LayerGroup {
  int packed_class = 0;
  int full_precision_class = 0;  // used only with full-precision window
  FullPrecisionWindow full_precision_window;
  int64_t window = 0;  // of a sliding-window group, in tokens; 0: every token is read
  // With a window: its first blocks, which every query reads (attention sinks). They stay, and with
  // full-precision window they are full-precision: at most head_blocks.
  int64_t sink_blocks = 0;
};

struct SequenceShape {
  int64_t block_size = 0;
  int64_t max_tokens = 0;
  std::vector<LayerGroup> groups;
};

// A block that leaves the full-precision window: its bytes go from a full-precision block to a
// packed one.
struct BlockMove {
  int group = 0;
  int64_t block = 0;  // of the sequence
  int32_t full_precision_id = kNoBlock;
  int32_t packed_id = kNoBlock;
};

// An open block that others still need as it is: its first num_tokens go to a block of the
// sequence's own.
struct OpenBlockCopy {
  int group = 0;
  int64_t block = 0;  // of the sequence
  int block_class = 0;
  int32_t from_id = kNoBlock;
  int32_t to_id = kNoBlock;
  int num_tokens = 0;
};

// Blocks that a sequence begins with: ids of a group's blocks [first_block, ids.size()) and of its
// sink blocks, of the full-precision class in its head and from first_recent_block on. Other
// entries are not read.
struct GroupPrefix {
  std::span<const int32_t> ids;
  int64_t first_block = 0;
  int64_t first_recent_block = 0;  // ignored without full-precision window
};

class Sequence {
 public:
  // INVALID_ARGUMENT names the field: block_size or max_tokens < 1, no group, a negative number, a
  // sink without a window, a class of both packed and full-precision blocks.
  static Result<Sequence> create(const SequenceShape& shape);
  Sequence(Sequence&&) = default;
  Sequence& operator=(Sequence&&) = default;

  int64_t num_tokens() const { return num_tokens_; }
  int64_t max_tokens() const { return shape_.max_tokens; }
  int64_t block_size() const { return shape_.block_size; }
  int num_groups() const { return static_cast<int>(groups_.size()); }
  const BlockTable& table(int group) const { return groups_[group].table; }

  // Blocks [0, num_sink_blocks) and [first_recent_block, end) of a group's table are ids of its
  // full-precision class, the others of its packed class. Without full-precision window: 0 and the
  // end.
  int64_t num_sink_blocks(int group) const {
    return shape_.groups[group].full_precision_window.head_blocks;
  }
  int64_t first_recent_block(int group) const;

  // Tokens until the open block is full; a whole block when none is open.
  int64_t tokens_left_in_block() const { return block_size() - num_tokens_ % block_size(); }
  // The most tokens that one reserve() takes: with full-precision window the rest of one block,
  // since a block must be written before it leaves the window.
  int64_t most_tokens_at_once() const;

  // Adds to needed, [classes of the pool], the blocks that drain_copies(), acquire_moves() and
  // reserve() will take, less the full-precision ones that come back between them. A batch of
  // sequences fits when the sums do. Requires: 1 <= num_tokens <= most_tokens_at_once().
  void add_needed_blocks(const BlockPool& pool, int64_t num_tokens,
                         std::span<int64_t> needed) const;

  // OUT_OF_RANGE, nothing changed: blocks are short, or num_tokens goes beyond max_tokens.
  // INVALID_ARGUMENT, nothing changed: num_tokens < 1 or > most_tokens_at_once(). Moves are added
  // to `moves`; nothing is added when no block leaves. The blocks that the following reserve()
  // needs are counted too, those that finish_moves() frees included.
  Status acquire_moves(BlockPool& pool, int64_t num_tokens, std::vector<BlockMove>& moves);
  // Requires: acquire_moves() of this sequence gave these moves.
  Status finish_moves(BlockPool& pool, std::span<const BlockMove> moves);

  // Blocks for the next num_tokens in every group, all or none; blocks reserved before are used
  // first. Errors as acquire_moves(); INVALID_ARGUMENT also when a block had to leave the window
  // first.
  Status reserve(BlockPool& pool, int64_t num_tokens);

  // The slots of tokens [first_token, first_token + slots.size()): id * block_size + offset. The
  // ids are of the class of each token's block. Requires: those blocks are reserved.
  void slots(int group, int64_t first_token, std::span<int64_t> slots) const;

  // The reserved tokens are written. Requires: reserve() of at least num_tokens.
  void advance(int64_t num_tokens);

  // Frees blocks of sliding-window groups that no query at num_tokens() or later reads, sinks
  // apart. Their entries become kNoBlock.
  Status release_expired(BlockPool& pool);

  // Forgets the tokens from num_tokens on and frees blocks without tokens. OUT_OF_RANGE, nothing
  // changed: num_tokens is negative or more than there are, or a window has left tokens behind that
  // the shorter sequence reads. UNSUPPORTED, nothing changed: it would cut a block that has left
  // the full-precision window (whole blocks may go).
  Status truncate(BlockPool& pool, int64_t num_tokens);

  // The open block where it is shared or kept: one a group at most. Errors as acquire_moves();
  // nothing is added when the sequence owns its open blocks.
  Status drain_copies(BlockPool& pool, std::vector<OpenBlockCopy>& copies);
  // Requires: drain_copies() of this sequence gave these copies.
  Status finish_copies(BlockPool& pool, std::span<const OpenBlockCopy> copies);

  // Becomes the other's fork: the same tokens in the same blocks, each with one more user.
  // INVALID_ARGUMENT, nothing changed: this one has tokens or blocks. Requires: equal shapes.
  Status share(BlockPool& pool, const Sequence& other);

  // Begins with num_tokens in these blocks, one prefix a group, each block with one more user; the
  // window of full-precision blocks grows again from first_recent_block on. INVALID_ARGUMENT,
  // nothing changed: this one has tokens or blocks, or the prefixes do not hold num_tokens;
  // retain()'s errors.
  Status adopt(BlockPool& pool, int64_t num_tokens, std::span<const GroupPrefix> prefixes);

  // Gives all blocks back. A sequence that still has blocks when it dies leaks them.
  Status clear(BlockPool& pool);

 private:
  struct GroupState {
    BlockTable table;
    int64_t first_recent_block = 0;  // with full-precision window: the first block of the window
    int64_t first_block = 0;         // blocks before it are released, sinks apart
  };

  explicit Sequence(const SequenceShape& shape);
  Status check_append(const BlockPool& pool, int64_t num_tokens) const;
  Status check_truncate(int group, int64_t num_tokens) const;
  Status check_free_blocks(const BlockPool& pool, int64_t num_tokens);
  Status check_needed(const BlockPool& pool) const;
  GroupState empty_state(int group) const;
  int class_of(int group, int64_t block) const;
  Status check_empty() const;
  Status retain_blocks(BlockPool& pool, int group);
  bool must_copy_open_block(const BlockPool& pool, int group) const;
  bool leaves_window(int group, int64_t num_tokens) const;
  bool is_released(int group, int64_t block) const;
  int64_t num_new_blocks(int group, int64_t num_tokens) const;
  Status drop_blocks(BlockPool& pool, int group, int64_t num_blocks);

  SequenceShape shape_;
  std::vector<GroupState> groups_;
  std::vector<int64_t> needed_;  // [classes], scratch of the all-or-nothing check
  int64_t num_tokens_ = 0;
};

}  // namespace kvx::cache
