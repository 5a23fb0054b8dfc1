// Sequence: blocks for the next tokens, in every group or in none.
#include "cache/sequence.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace kvx::cache {
namespace {

using testing::Each;
using testing::ElementsAre;

constexpr int kPacked = 0;
constexpr int kFullPrecision = 1;
constexpr int kWindowed = 2;

BlockPool make_pool(std::array<int64_t, 3> num_blocks) {
  const std::array<BlockClassSpec, 3> classes = {
      BlockClassSpec{"packed", num_blocks[0], {64}},
      BlockClassSpec{"full_precision", num_blocks[1], {64}},
      BlockClassSpec{"windowed", num_blocks[2], {64}}};
  return BlockPool::create(host_memory(), classes).value();
}

Sequence make_sequence(std::vector<LayerGroup> groups, int64_t max_tokens = 64) {
  return Sequence::create({4, max_tokens, std::move(groups)}).value();
}

LayerGroup full_group() {
  return {kPacked, kFullPrecision, {}, 0};
}
LayerGroup full_precision_ended_group(int64_t head_blocks, int64_t recent_blocks) {
  return {kPacked, kFullPrecision, {head_blocks, recent_blocks}, 0};
}
LayerGroup window_group(int64_t window) {
  return {kWindowed, kWindowed, {}, window};
}

std::string message_of(const Status& status) {
  return status.ok() ? "ok" : status.error().message;
}

// The whole way of a step; returns what moved.
std::vector<BlockMove> append(Sequence& sequence, BlockPool& pool, int64_t num_tokens) {
  std::vector<BlockMove> moves;
  EXPECT_EQ(message_of(sequence.release_expired(pool)), "ok");
  EXPECT_EQ(message_of(sequence.acquire_moves(pool, num_tokens, moves)), "ok");
  EXPECT_EQ(message_of(sequence.finish_moves(pool, moves)), "ok");
  EXPECT_EQ(message_of(sequence.reserve(pool, num_tokens)), "ok");
  sequence.advance(num_tokens);
  return moves;
}

std::vector<int32_t> ids_of(const Sequence& sequence, int group) {
  const BlockTable& table = sequence.table(group);
  return {table.data(), table.data() + table.size()};
}

TEST(Sequence, TakesABlockOnlyWhenTokensNeedIt) {
  BlockPool pool = make_pool({4, 0, 0});
  Sequence sequence = make_sequence({full_group()});
  append(sequence, pool, 3);
  EXPECT_EQ(sequence.tokens_left_in_block(), 1);
  append(sequence, pool, 1);
  EXPECT_EQ(pool.num_used(kPacked), 1);
  EXPECT_EQ(sequence.tokens_left_in_block(), 4);
  append(sequence, pool, 5);
  EXPECT_EQ(pool.num_used(kPacked), 3);
  EXPECT_EQ(sequence.num_tokens(), 9);
}

TEST(Sequence, NamesTheSlotOfEachToken) {
  BlockPool pool = make_pool({4, 0, 0});
  int32_t other;  // block 0 belongs to someone else
  ASSERT_TRUE(pool.allocate(kPacked, std::span(&other, 1)).ok());
  Sequence sequence = make_sequence({full_group()});
  append(sequence, pool, 6);
  std::array<int64_t, 4> slots;
  sequence.slots(0, 2, slots);
  EXPECT_THAT(slots, ElementsAre(1 * 4 + 2, 1 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1));
}

TEST(Sequence, KeepsItsTableWhereItIsAndFillsItWithNoBlock) {
  BlockPool pool = make_pool({16, 0, 0});
  Sequence sequence = make_sequence({full_group()});
  const int32_t* data = sequence.table(0).data();
  append(sequence, pool, 60);
  EXPECT_EQ(sequence.table(0).data(), data);
  EXPECT_EQ(sequence.table(0).max_blocks(), 16);
  EXPECT_EQ(data[15], kNoBlock);
}

TEST(Sequence, ReservesInAllGroupsOrInNone) {
  BlockPool pool = make_pool({4, 0, 1});
  Sequence sequence = make_sequence({full_group(), window_group(8)});
  const Status status = sequence.reserve(pool, 5);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(status.error().message, "class 'windowed' has 1 free blocks of 1; 2 are wanted");
  EXPECT_EQ(pool.num_used(kPacked), 0);
  EXPECT_EQ(sequence.table(0).size(), 0);
  EXPECT_TRUE(sequence.reserve(pool, 4).ok());
}

TEST(Sequence, AddsUpTheGroupsThatShareAClass) {
  BlockPool pool = make_pool({3, 0, 0});
  Sequence sequence = make_sequence({full_group(), full_group()});
  EXPECT_EQ(message_of(sequence.reserve(pool, 5)),
            "class 'packed' has 3 free blocks of 3; 4 are wanted");
  EXPECT_EQ(pool.num_used(kPacked), 0);
}

TEST(Sequence, UsesBlocksThatWereReservedBefore) {
  BlockPool pool = make_pool({4, 0, 0});
  Sequence sequence = make_sequence({full_group()});
  ASSERT_TRUE(sequence.reserve(pool, 8).ok());
  ASSERT_TRUE(sequence.reserve(pool, 5).ok());
  EXPECT_EQ(pool.num_used(kPacked), 2);
}

TEST(Sequence, RefusesTokensBeyondItsMost) {
  BlockPool pool = make_pool({4, 0, 0});
  Sequence sequence = make_sequence({full_group()}, /*max_tokens=*/10);
  append(sequence, pool, 8);
  const Status status = sequence.reserve(pool, 3);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(status.error().message, "3 tokens after 8 go beyond max_tokens 10");
  EXPECT_EQ(message_of(sequence.reserve(pool, 0)), "num_tokens is 0; expected 1 or more");
  append(sequence, pool, 2);
}

TEST(Sequence, MovesABlockThatLeavesTheWindowToAPackedOne) {
  BlockPool pool = make_pool({4, 3, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(/*head=*/1, /*recent=*/2)});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(append(sequence, pool, 4).empty());
  const int32_t leaving = sequence.table(0)[1];

  const std::vector<BlockMove> moves = append(sequence, pool, 1);
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(moves[0].group, 0);
  EXPECT_EQ(moves[0].block, 1);
  EXPECT_EQ(moves[0].full_precision_id, leaving);
  EXPECT_EQ(sequence.table(0)[1], moves[0].packed_id);
  EXPECT_EQ(sequence.num_sink_blocks(0), 1);
  EXPECT_EQ(sequence.first_recent_block(0), 2);
  // Three full-precision blocks were enough: the new block is the one that was moved.
  EXPECT_EQ(sequence.table(0)[3], leaving);
  EXPECT_EQ(pool.num_used(kFullPrecision), 3);
  EXPECT_EQ(pool.num_used(kPacked), 1);
}

TEST(Sequence, LeavesAFullPrecisionBlockToItsOtherUser) {
  BlockPool pool = make_pool({4, 2, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(0, 1)});
  append(sequence, pool, 4);
  const int32_t shared = sequence.table(0)[0];
  ASSERT_TRUE(pool.retain(kFullPrecision, shared).ok());
  append(sequence, pool, 1);
  EXPECT_EQ(pool.use_count(kFullPrecision, shared), 1);
  EXPECT_NE(sequence.table(0)[1], shared);
}

TEST(Sequence, CountsASharedFullPrecisionBlockAsNotComingBack) {
  BlockPool pool = make_pool({4, 1, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(0, 1)});
  append(sequence, pool, 4);
  ASSERT_TRUE(pool.retain(kFullPrecision, sequence.table(0)[0]).ok());
  std::vector<BlockMove> moves;
  EXPECT_EQ(message_of(sequence.acquire_moves(pool, 1, moves)),
            "class 'full_precision' has 0 free blocks of 1; 1 are wanted");
  EXPECT_TRUE(moves.empty());
  EXPECT_EQ(pool.num_used(kPacked), 0);
}

TEST(Sequence, SaysWhatABatchWillTake) {
  BlockPool pool = make_pool({8, 8, 8});
  Sequence first = make_sequence({full_precision_ended_group(0, 1), window_group(5)});
  Sequence second = make_sequence({full_precision_ended_group(0, 1), window_group(5)});
  append(first, pool, 4);
  std::array<int64_t, 3> needed = {};
  first.add_needed_blocks(pool, 1, needed);   // one full-precision block is packed, and comes back
  second.add_needed_blocks(pool, 4, needed);  // its first block
  EXPECT_THAT(needed, ElementsAre(1, 1, 2));
}

TEST(Sequence, MovesNothingWhenThePoolIsShort) {
  BlockPool pool = make_pool({0, 3, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(0, 1)});
  append(sequence, pool, 4);
  std::vector<BlockMove> moves;
  EXPECT_EQ(message_of(sequence.acquire_moves(pool, 1, moves)),
            "class 'packed' has 0 free blocks of 0; 1 are wanted");
  EXPECT_TRUE(moves.empty());
  EXPECT_EQ(pool.num_used(kFullPrecision), 1);
  EXPECT_EQ(sequence.num_tokens(), 4);
}

TEST(Sequence, WithFullPrecisionWindowTakesAtMostTheRestOfABlock) {
  BlockPool pool = make_pool({4, 3, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(0, 1)});
  EXPECT_EQ(sequence.most_tokens_at_once(), 4);
  append(sequence, pool, 3);
  EXPECT_EQ(sequence.most_tokens_at_once(), 1);
  EXPECT_EQ(message_of(sequence.reserve(pool, 2)),
            "num_tokens is 2; expected at most 1, the rest of the open block: with full-precision "
            "window a "
            "block is written before it is packed");
}

TEST(Sequence, RefusesToReserveBeforeABlockHasMoved) {
  BlockPool pool = make_pool({4, 3, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(0, 1)});
  append(sequence, pool, 4);
  EXPECT_EQ(
      message_of(sequence.reserve(pool, 1)),
      "block 0 of layer group 0 leaves the full-precision window; expected acquire_moves() before "
      "reserve()");
  EXPECT_EQ(pool.num_used(kFullPrecision), 1);
}

TEST(Sequence, ASlidingWindowLetsGoOfBlocksOutOfSight) {
  BlockPool pool = make_pool({8, 0, 3});
  Sequence sequence = make_sequence({full_group(), window_group(5)});
  for (int i = 0; i < 30; ++i) append(sequence, pool, 1);
  // The query at 29 came with tokens 25..29, of blocks 6 and 7.
  EXPECT_EQ(pool.num_used(kWindowed), 2);
  EXPECT_EQ(pool.num_used(kPacked), 8);
  const std::vector<int32_t> ids = ids_of(sequence, 1);
  EXPECT_THAT(std::vector(ids.begin(), ids.begin() + 6), Each(kNoBlock));
  EXPECT_NE(ids[6], kNoBlock);
  EXPECT_NE(ids[7], kNoBlock);
}

TEST(Sequence, TruncatesInsideABlockAndAcrossBlocks) {
  BlockPool pool = make_pool({8, 0, 0});
  Sequence sequence = make_sequence({full_group()});
  append(sequence, pool, 18);
  ASSERT_TRUE(sequence.truncate(pool, 17).ok());
  EXPECT_EQ(pool.num_used(kPacked), 5);
  ASSERT_TRUE(sequence.truncate(pool, 6).ok());
  EXPECT_EQ(pool.num_used(kPacked), 2);
  EXPECT_EQ(sequence.num_tokens(), 6);
  ASSERT_TRUE(sequence.truncate(pool, 0).ok());
  EXPECT_EQ(pool.num_used(kPacked), 0);
}

TEST(Sequence, TruncatingToItsLengthGivesReservedBlocksBack) {
  BlockPool pool = make_pool({8, 0, 0});
  Sequence sequence = make_sequence({full_group()});
  append(sequence, pool, 3);
  ASSERT_TRUE(sequence.reserve(pool, 20).ok());
  ASSERT_TRUE(sequence.truncate(pool, 3).ok());
  EXPECT_EQ(pool.num_used(kPacked), 1);
  EXPECT_EQ(sequence.table(0).size(), 1);
}

TEST(Sequence, RefusesToTruncateToMoreTokensThanThereAre) {
  BlockPool pool = make_pool({8, 0, 0});
  Sequence sequence = make_sequence({full_group()});
  append(sequence, pool, 3);
  EXPECT_EQ(message_of(sequence.truncate(pool, 4)), "num_tokens is 4; expected 0 to 3");
  EXPECT_EQ(message_of(sequence.truncate(pool, -1)), "num_tokens is -1; expected 0 to 3");
}

TEST(Sequence, RefusesToCutAPackedBlockUnderFullPrecisionWindow) {
  BlockPool pool = make_pool({8, 8, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(1, 1)});
  for (int i = 0; i < 4; ++i)
    append(sequence, pool, 4);  // block 0 and 3 full-precision, 1 and 2 packed
  const Status status = sequence.truncate(pool, 10);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(status.error().message,
            "num_tokens is 10; it cuts block 2 of layer group 0, which has left the full-precision "
            "window "
            "(expected a multiple of block_size 4 or at least 12)");
  EXPECT_EQ(sequence.num_tokens(), 16);
  EXPECT_TRUE(sequence.truncate(pool, 13).ok());  // inside the window
  EXPECT_TRUE(sequence.truncate(pool, 8).ok());   // between blocks
  EXPECT_EQ(sequence.first_recent_block(0), 2);
  EXPECT_TRUE(append(sequence, pool, 4).empty());  // block 1 is packed already
  EXPECT_TRUE(sequence.truncate(pool, 2).ok());    // inside the sink
  EXPECT_EQ(pool.num_used(kPacked), 0);
  EXPECT_EQ(pool.num_used(kFullPrecision), 1);
}

TEST(Sequence, RefusesALengthThatReadsWhatAWindowLeftBehind) {
  BlockPool pool = make_pool({0, 0, 8});
  Sequence sequence = make_sequence({window_group(5)});
  append(sequence, pool, 12);
  ASSERT_TRUE(sequence.release_expired(pool).ok());  // tokens 0..7
  const Status status = sequence.truncate(pool, 11);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(status.error().message,
            "num_tokens is 11; the window of layer group 0 has left tokens 0 to 7 behind, and a "
            "sequence of that length reads or writes beside some");
  EXPECT_EQ(sequence.num_tokens(), 12);
  EXPECT_TRUE(sequence.truncate(pool, 0).ok());
  EXPECT_EQ(pool.num_used(kWindowed), 0);
}

TEST(Sequence, ClearGivesEverythingBackAndStartsAnew) {
  BlockPool pool = make_pool({8, 4, 8});
  Sequence sequence = make_sequence({full_precision_ended_group(1, 1), window_group(5)});
  for (int i = 0; i < 5; ++i) append(sequence, pool, 4);
  ASSERT_TRUE(sequence.clear(pool).ok());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(pool.num_used(i), 0);
  EXPECT_EQ(sequence.num_tokens(), 0);
  append(sequence, pool, 4);
  EXPECT_EQ(pool.num_used(kFullPrecision), 1);
  EXPECT_EQ(pool.num_used(kWindowed), 1);
}

TEST(Sequence, NamesTheFieldThatIsWrong) {
  const auto refusal = [](const SequenceShape& shape) {
    const auto sequence = Sequence::create(shape);
    return sequence.ok() ? "accepted" : sequence.error().message;
  };
  EXPECT_EQ(refusal({0, 64, {full_group()}}), "block_size is 0; expected 1 or more");
  EXPECT_EQ(refusal({4, 0, {full_group()}}), "max_tokens is 0; expected 1 or more");
  EXPECT_EQ(refusal({4, 64, {}}), "num_groups is 0; expected 1 or more");
  EXPECT_EQ(refusal({4, 64, {window_group(-1)}}),
            "window of layer group 0 is -1; expected 0 or more");
  EXPECT_EQ(refusal({4, 64, {LayerGroup{-1, 0, {}, 0}}}),
            "layer group 0 takes blocks of classes -1 and 0; expected 0 or more");
  EXPECT_EQ(refusal({4, 64, {full_precision_ended_group(0, -1)}}),
            "full-precision window of layer group 0 are 0 and -1 blocks; expected 0 or more");
  EXPECT_EQ(refusal({4, 64, {full_precision_ended_group(1, 0)}}),
            "recent_blocks of layer group 0 is 0 with head_blocks 1; expected 1 or more: the open "
            "block is full_precision");
  EXPECT_EQ(refusal({4, 64, {LayerGroup{0, 0, {0, 1}, 0}}}),
            "class 0 holds full_precision and packed blocks; expected two classes");
}

TEST(Sequence, RefusesAPoolWithoutItsClasses) {
  const BlockClassSpec only{"packed", 4, {64}};
  BlockPool pool = BlockPool::create(host_memory(), std::span(&only, 1)).value();
  Sequence sequence = make_sequence({full_group(), window_group(4)});
  EXPECT_EQ(message_of(sequence.reserve(pool, 1)),
            "the pool has 1 classes; the sequence takes blocks of 3");
}

}  // namespace
}  // namespace kvx::cache
