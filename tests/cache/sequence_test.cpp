// Sequence: blocks for the next tokens, in every group or in none.
#include "cache/sequence.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace kvx::cache::sequence_test {
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
LayerGroup full_precision_ended_group(int64_t sink_blocks, int64_t recent_blocks) {
  return {kPacked, kFullPrecision, {sink_blocks, recent_blocks}, 0};
}
LayerGroup window_group(int64_t window) {
  return {kWindowed, kWindowed, {}, window};
}

std::string message_of(const Status& status) {
  return status.ok() ? "ok" : status.error().message;
}

// The whole way of a step; returns what moved.
std::vector<BlockMove> append(Sequence& sequence, BlockPool& pool, int64_t num_tokens) {
  SequenceGrowth growth;
  EXPECT_EQ(message_of(sequence.release_expired(pool)), "ok");
  EXPECT_EQ(message_of(sequence.acquire(pool, num_tokens, growth)), "ok");
  EXPECT_EQ(message_of(sequence.commit_moves(pool, growth)), "ok");
  EXPECT_EQ(message_of(sequence.commit(pool, growth)), "ok");
  return growth.moves;
}

std::string refusal_of(Sequence& sequence, BlockPool& pool, int64_t num_tokens) {
  SequenceGrowth growth;
  return message_of(sequence.acquire(pool, num_tokens, growth));
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

TEST(Sequence, AcquiresInAllGroupsOrInNone) {
  BlockPool pool = make_pool({4, 0, 1});
  Sequence sequence = make_sequence({full_group(), window_group(8)});
  SequenceGrowth growth;
  const Status status = sequence.acquire(pool, 5, growth);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(status.error().message, "class 'windowed' has 1 free blocks of 1; 2 are wanted");
  EXPECT_EQ(pool.num_used(kPacked), 0);
  EXPECT_EQ(sequence.table(0).size(), 0);
  EXPECT_TRUE(sequence.append(pool, 4).ok());
}

TEST(Sequence, AddsUpTheGroupsThatShareAClass) {
  BlockPool pool = make_pool({3, 0, 0});
  Sequence sequence = make_sequence({full_group(), full_group()});
  EXPECT_EQ(refusal_of(sequence, pool, 5), "class 'packed' has 3 free blocks of 3; 4 are wanted");
  EXPECT_EQ(pool.num_used(kPacked), 0);
}

TEST(Sequence, RefusesTokensBeyondItsMost) {
  BlockPool pool = make_pool({4, 0, 0});
  Sequence sequence = make_sequence({full_group()}, /*max_tokens=*/10);
  append(sequence, pool, 8);
  SequenceGrowth growth;
  const Status status = sequence.acquire(pool, 3, growth);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(status.error().message, "3 tokens after 8 go beyond max_tokens 10");
  EXPECT_EQ(refusal_of(sequence, pool, 0), "num_tokens is 0; expected 1 or more");
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
  EXPECT_EQ(refusal_of(sequence, pool, 1),
            "class 'full_precision' has 0 free blocks of 1; 1 are wanted");
  EXPECT_EQ(pool.num_used(kPacked), 0);
}

TEST(Sequence, CountsWhatABatchWillTake) {
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
  EXPECT_EQ(refusal_of(sequence, pool, 1), "class 'packed' has 0 free blocks of 0; 1 are wanted");
  EXPECT_EQ(pool.num_used(kFullPrecision), 1);
  EXPECT_EQ(sequence.num_tokens(), 4);
}

// ---- growths of several blocks

std::vector<int32_t> blocks_at(const Sequence& sequence, const SequenceGrowth& growth,
                               int64_t end_block) {
  std::vector<int32_t> row(static_cast<size_t>(end_block));
  sequence.blocks_at(0, growth, end_block, row);
  return row;
}

TEST(Sequence, GrowsByManyBlocksInTheFullPrecisionBlocksOfItsWindow) {
  BlockPool pool = make_pool({16, 3, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(/*sinks=*/1, /*recent=*/2)});
  append(sequence, pool, 4);
  SequenceGrowth growth;
  ASSERT_TRUE(sequence.acquire(pool, 24, growth).ok());  // blocks 1 to 6
  EXPECT_EQ(pool.num_used(kFullPrecision), 3);
  EXPECT_EQ(pool.num_used(kPacked), 4);
  EXPECT_TRUE(growth.moves.empty());  // a sink does not leave
  ASSERT_TRUE(sequence.commit_moves(pool, growth).ok());
  // Block 3 is written where block 1 was, which is packed before.
  const std::vector<int32_t> before = blocks_at(sequence, growth, 3);
  const std::vector<int32_t> after = blocks_at(sequence, growth, 4);
  EXPECT_EQ(sequence.block_leaving_at(0, growth, 3), std::nullopt);
  EXPECT_EQ(sequence.block_leaving_at(0, growth, 4), 1);
  EXPECT_EQ(after[3], before[1]);
  EXPECT_EQ(after[1], growth.groups[0].packed_id(1));
  EXPECT_EQ(sequence.first_recent_block_at(0, growth, 3), 1);
  EXPECT_EQ(sequence.first_recent_block_at(0, growth, 4), 2);
  ASSERT_TRUE(sequence.commit(pool, growth).ok());
  EXPECT_EQ(ids_of(sequence, 0), blocks_at(sequence, growth, 7));
  EXPECT_EQ(sequence.num_tokens(), 28);
  EXPECT_EQ(sequence.first_recent_block(0), 5);
}

TEST(Sequence, GrowsTheSameInOneStepAndBlockByBlock) {
  for (const int64_t num_before : {0, 3, 8, 14}) {
    BlockPool pool = make_pool({32, 32, 32});
    Sequence at_once = make_sequence({full_precision_ended_group(1, 2)});
    Sequence in_parts = make_sequence({full_precision_ended_group(1, 2)});
    for (int64_t t = 0; t < num_before; ++t) append(at_once, pool, 1);
    append(at_once, pool, 25);
    for (int64_t t = 0; t < num_before + 25; ++t) append(in_parts, pool, 1);
    EXPECT_EQ(at_once.num_tokens(), in_parts.num_tokens());
    EXPECT_EQ(at_once.table(0).size(), in_parts.table(0).size());
    EXPECT_EQ(at_once.first_recent_block(0), in_parts.first_recent_block(0));
    EXPECT_EQ(pool.num_used(kFullPrecision), 2 * 3);
    ASSERT_TRUE(at_once.clear(pool).ok());
    ASSERT_TRUE(in_parts.clear(pool).ok());
    for (int c = 0; c < 3; ++c) EXPECT_EQ(pool.num_used(c), 0);
  }
}

TEST(Sequence, ACancelledGrowthLeavesTheTokensAndReleasesTheRest) {
  for (const bool has_moved : {false, true}) {
    BlockPool pool = make_pool({16, 4, 0});
    Sequence sequence = make_sequence({full_precision_ended_group(1, 2)});
    append(sequence, pool, 12);
    append(sequence, pool, 2);  // blocks 0, 2 and the open 3 are full precision, 1 is packed
    SequenceGrowth growth;
    ASSERT_TRUE(sequence.acquire(pool, 20, growth).ok());
    EXPECT_TRUE(sequence.loses_open_block(0, growth));
    ASSERT_EQ(growth.moves.size(), 1u);  // block 2
    if (has_moved) {
      ASSERT_TRUE(sequence.commit_moves(pool, growth).ok());
    }
    ASSERT_TRUE(sequence.cancel(pool, growth).ok());
    EXPECT_EQ(sequence.num_tokens(), 14);
    EXPECT_EQ(sequence.first_recent_block(0), has_moved ? 3 : 2);
    EXPECT_EQ(pool.num_used(kPacked), has_moved ? 2 : 1);
    EXPECT_EQ(pool.num_used(kFullPrecision), has_moved ? 2 : 3);
    append(sequence, pool, 20);
    ASSERT_TRUE(sequence.clear(pool).ok());
    EXPECT_EQ(pool.num_used(kPacked) + pool.num_used(kFullPrecision), 0);
  }
}

TEST(Sequence, ASharedBlockThatLeavesLaterStaysUntilTheGrowthIsCommitted) {
  BlockPool pool = make_pool({16, 4, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(0, 2)});
  append(sequence, pool, 8);
  const int32_t shared = sequence.table(0)[1];  // leaves for block 3
  ASSERT_TRUE(pool.retain(kFullPrecision, shared).ok());
  SequenceGrowth growth;
  ASSERT_TRUE(sequence.acquire(pool, 12, growth).ok());
  ASSERT_TRUE(sequence.commit_moves(pool, growth).ok());
  EXPECT_EQ(pool.use_count(kFullPrecision, shared), 2);
  EXPECT_EQ(blocks_at(sequence, growth, 3)[1], shared);
  ASSERT_TRUE(sequence.commit(pool, growth).ok());
  EXPECT_EQ(pool.use_count(kFullPrecision, shared), 1);
}

TEST(Sequence, AKeptBlockGivesItsPlaceOnlyWhereNoOtherIsLeft) {
  for (const int64_t num_blocks : {2, 3}) {
    BlockPool pool = make_pool({16, num_blocks, 0});
    Sequence sequence = make_sequence({full_precision_ended_group(0, 2)});
    append(sequence, pool, 8);
    const int32_t kept = sequence.table(0)[0];
    ASSERT_TRUE(pool.keep(kFullPrecision, kept, 1).ok());
    append(sequence, pool, 4);
    EXPECT_EQ(pool.is_kept(kFullPrecision, kept), num_blocks == 3);
    EXPECT_EQ(pool.num_cached(kFullPrecision), num_blocks == 3 ? 1 : 0);
    EXPECT_EQ(pool.num_used(kFullPrecision), 2);
  }
}

TEST(Sequence, ACutOfAGrowthIsRefusedAsThatOfASequence) {
  BlockPool pool = make_pool({16, 4, 0});
  Sequence sequence = make_sequence({full_precision_ended_group(0, 1)});
  append(sequence, pool, 6);
  SequenceGrowth growth;
  ASSERT_TRUE(sequence.acquire(pool, 8, growth).ok());
  ASSERT_TRUE(sequence.commit_moves(pool, growth).ok());
  EXPECT_EQ(message_of(sequence.check_cut(growth, 14)), "ok");
  EXPECT_EQ(message_of(sequence.check_cut(growth, 12)), "ok");
  const std::string refusal = message_of(sequence.check_cut(growth, 7));
  EXPECT_NE(refusal, "ok");
  ASSERT_TRUE(sequence.commit(pool, growth).ok());
  EXPECT_EQ(message_of(sequence.truncate(pool, 7)), refusal);
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
            "window (expected a multiple of block_size 4 or at least 12)");
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
  EXPECT_EQ(
      refusal({4, 64, {full_precision_ended_group(0, -1)}}),
      "the full-precision window of layer group 0 has 0 sink and -1 recent blocks; expected 0 "
      "or more");
  EXPECT_EQ(refusal({4, 64, {full_precision_ended_group(1, 0)}}),
            "recent_blocks of layer group 0 is 0 with sink_blocks 1; expected 1 or more: the open "
            "block is in full precision");
  EXPECT_EQ(refusal({4, 64, {LayerGroup{0, 0, {0, 1}, 0}}}),
            "class 0 holds full-precision and packed blocks; expected two classes");
}

TEST(Sequence, RefusesAPoolWithoutItsClasses) {
  const BlockClassSpec only{"packed", 4, {64}};
  BlockPool pool = BlockPool::create(host_memory(), std::span(&only, 1)).value();
  Sequence sequence = make_sequence({full_group(), window_group(4)});
  EXPECT_EQ(refusal_of(sequence, pool, 1),
            "the pool has 1 classes; the sequence takes blocks of 3");
}

}  // namespace
}  // namespace kvx::cache::sequence_test
