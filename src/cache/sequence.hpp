// Sequence: the tokens of one sequence, as blocks of each layer group. It acquires blocks from a
// pool and releases them, and touches no bytes.
//
// To append n tokens:
//
//   release_expired(pool)         sliding windows release what no later query reads
//   acquire(pool, n, growth)      every block that is written on the way, all or none
//   ... copy the bytes of growth.copies and growth.moves (ops::copy_blocks) ...
//   commit_moves(pool, growth)    the tables name the copies' and moves' targets
//   ... block by block: pack the block that leaves the window, append, attend ...
//   commit(pool, growth)          the tokens and their blocks are the sequence's
//
// cancel(pool, growth) instead of either commit releases what was acquired.
//
// With a full-precision window a block that enters it takes the place of the block that leaves it
// at the same time, so that a growth of any length needs no more full-precision blocks than the
// window has. Tokens are therefore appended and read one block after the other: blocks_at() is the
// table of each moment.
//
// Sequences may share blocks: forks, and those that begin with the same cached prefix. A shared
// block, and one that the prefix index keeps, is never written: an open block of that kind is
// copied first.
#pragma once

#include <cstdint>
#include <optional>
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
  int full_precision_class = 0;  // used only with a full-precision window
  FullPrecisionWindow full_precision_window;
  int64_t window = 0;  // of a sliding-window group, in tokens; 0: every token is read
  // With a sliding window: the sequence's first blocks, which every query reads (attention sinks).
  // They stay. With a full-precision window too they are among its sink blocks.
  int64_t window_sink_blocks = 0;
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

// What one group needs to grow.
struct GroupGrowth {
  // Blocks [first_leaving, end_leaving) leave the full-precision window on the way, each when the
  // block that is recent_blocks after it enters.
  int64_t first_leaving = 0;
  int64_t end_leaving = 0;
  int64_t first_block = 0;  // ids[0] is this block's
  // [blocks from first_block to the end]: where a block's tokens are written. With a full-precision
  // window: of its full-precision class; an id comes again where a block takes another's place.
  std::vector<int32_t> ids;
  std::vector<int32_t> packed_ids;  // [end_leaving - first_leaving]: where they go

  int32_t id(int64_t block) const { return ids[static_cast<size_t>(block - first_block)]; }
  bool leaves(int64_t block) const { return block >= first_leaving && block < end_leaving; }
  // Requires: leaves(block).
  int32_t packed_id(int64_t block) const {
    return packed_ids[static_cast<size_t>(block - first_leaving)];
  }
};

// Blocks for num_tokens more. Used again and again, it allocates nothing.
struct SequenceGrowth {
  int64_t num_tokens = 0;
  std::vector<GroupGrowth> groups;
  std::vector<OpenBlockCopy> copies;  // one a group at most
  std::vector<BlockMove> moves;       // of blocks that were full before; of others packed_id() is
  bool has_moved = false;             // commit_moves() was called
};

// Blocks that a sequence begins with: ids of a group's blocks [first_block, ids.size()) and of its
// sink blocks, of the full-precision class among the sinks and from first_recent_block on. Other
// entries are not read.
struct GroupPrefix {
  std::span<const int32_t> ids;
  int64_t first_block = 0;
  int64_t first_recent_block = 0;  // ignored without a full-precision window
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
  // full-precision class, the others of its packed class. Without a full-precision window: 0 and
  // the end.
  int64_t num_sink_blocks(int group) const {
    return shape_.groups[group].full_precision_window.sink_blocks;
  }
  int64_t first_recent_block(int group) const;

  // Tokens until the open block is full; a whole block when none is open.
  int64_t tokens_left_in_block() const { return block_size() - num_tokens_ % block_size(); }

  // ---- growth

  // Adds to needed, [classes of the pool], the blocks that acquire() will allocate. A batch of
  // sequences fits when the sums do. Requires: 1 <= num_tokens <= max_tokens() - num_tokens().
  void add_needed_blocks(const BlockPool& pool, int64_t num_tokens,
                         std::span<int64_t> needed) const;

  // OUT_OF_RANGE, nothing changed: blocks are short, or num_tokens goes beyond max_tokens.
  // INVALID_ARGUMENT, nothing changed: num_tokens < 1, or a pool without the sequence's classes.
  Status acquire(BlockPool& pool, int64_t num_tokens, SequenceGrowth& growth);
  // The same for one sequence of a batch whose needed blocks are available. spare, [classes]: how
  // many more are; from them come places for blocks that need not take that of a cached block.
  Status acquire(BlockPool& pool, int64_t num_tokens, std::span<int64_t> spare,
                 SequenceGrowth& growth);
  // Requires of these: acquire() of this sequence made the growth, and the bytes of its copies and
  // moves are where they belong.
  Status commit_moves(BlockPool& pool, SequenceGrowth& growth);
  // Requires: commit_moves(), and the tokens are written.
  Status commit(BlockPool& pool, const SequenceGrowth& growth);
  // The tokens do not come. Blocks that commit_moves() packed stay packed. Requires: the open
  // block's bytes are as they were, though its place may have been another's (loses_open_block()).
  Status cancel(BlockPool& pool, const SequenceGrowth& growth);

  // acquire() and both commits, for who has no bytes to move.
  Status append(BlockPool& pool, int64_t num_tokens);

  // A group's table while the last of its blocks is end_block - 1, in row, [end_block], and the
  // first block of its full-precision window then. Requires: commit_moves().
  void blocks_at(int group, const SequenceGrowth& growth, int64_t end_block,
                 std::span<int32_t> row) const;
  int64_t first_recent_block_at(int group, const SequenceGrowth& growth, int64_t end_block) const;
  // The block that the append of end_block - 1 packs, since the growth itself wrote to it.
  std::optional<int64_t> block_leaving_at(int group, const SequenceGrowth& growth,
                                          int64_t end_block) const;
  // Whether another block is written where a group's open block has its tokens.
  bool loses_open_block(int group, const SequenceGrowth& growth) const;
  // Could the sequence, grown, be cut to num_tokens? truncate()'s errors.
  Status check_cut(const SequenceGrowth& growth, int64_t num_tokens) const;

  // The slots of tokens [first_token, first_token + slots.size()): id * block_size + offset. The
  // ids are of the class of each token's block. Requires: the sequence has those tokens.
  void slots(int group, int64_t first_token, std::span<int64_t> slots) const;

  // ---- the rest

  // Releases blocks of sliding-window groups that no query at num_tokens() or later reads, sinks
  // apart. Their entries become kNoBlock.
  Status release_expired(BlockPool& pool);

  // Forgets the tokens from num_tokens on and releases blocks without tokens. OUT_OF_RANGE, nothing
  // changed: num_tokens is negative or more than there are, or a window has left tokens behind that
  // the shorter sequence reads. UNSUPPORTED, nothing changed: it would cut a block that has left
  // the full-precision window (whole blocks may go).
  Status truncate(BlockPool& pool, int64_t num_tokens);

  // The open block where it is shared or kept: one a group at most. OUT_OF_RANGE: blocks are short;
  // nothing is added when the sequence owns its open blocks.
  Status acquire_copies(BlockPool& pool, std::vector<OpenBlockCopy>& copies);
  // Requires: acquire_copies() of this sequence made these copies.
  Status commit_copies(BlockPool& pool, std::span<const OpenBlockCopy> copies);

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
    int64_t first_recent_block = 0;  // with a full-precision window: its first block
    int64_t first_block = 0;         // blocks before it are released, sinks apart
  };

  explicit Sequence(const SequenceShape& shape);
  Status check_append(const BlockPool& pool, int64_t num_tokens) const;
  Status check_truncate(int group, int64_t num_tokens, int64_t first_recent_block) const;
  Status check_needed(const BlockPool& pool) const;
  GroupState empty_state(int group) const;
  int class_of(int group, int64_t block) const;
  // Of blocks that a growth adds.
  int entering_class(int group) const;
  Status check_empty() const;
  Status retain_blocks(BlockPool& pool, int group);
  bool must_copy_open_block(const BlockPool& pool, int group) const;
  bool is_released(int group, int64_t block) const;
  Status acquire_group(BlockPool& pool, int group, std::span<int64_t> spare,
                       SequenceGrowth& growth);
  bool acquire_place(BlockPool& pool, int group, int64_t leaving, int32_t id,
                     std::span<int64_t> spare) const;
  bool passes_its_place_on(int group, const GroupGrowth& growth, int64_t block) const;
  bool leaves_first(int group, int64_t block) const;
  void commit_group(int group, const SequenceGrowth& growth);
  Status drop_blocks(BlockPool& pool, int group, int64_t num_blocks);

  SequenceShape shape_;
  std::vector<GroupState> groups_;
  std::vector<int64_t> needed_;  // [classes], scratch of the all-or-nothing check
  std::vector<int64_t> spare_;   // [classes]
  SequenceGrowth growth_;        // append()'s
  int64_t num_tokens_ = 0;
};

}  // namespace kvx::cache
