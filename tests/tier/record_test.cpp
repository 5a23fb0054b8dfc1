// Records: what was sealed comes back, and nothing else does.
#include "tier/store/record.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace kvx::tier {
namespace {

using testing::HasSubstr;

const std::string kKeyDigits(64, 'a');

struct Block {
  std::vector<int32_t> tokens = {7, 8, 9};
  std::vector<uint8_t> payload = std::vector<uint8_t>(1000);
  RecordFacts facts;

  Block() {
    for (size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<uint8_t>(i * 7);
    facts.scope.bytes.fill(1);
    facts.parent.bytes.fill(2);
    facts.hash.bytes.fill(3);
    facts.group = 4;
    facts.kind = cache::BlockKind::kFullPrecision;
    facts.tokens = tokens;
    facts.payload_bytes = std::ssize(payload);
  }
  std::vector<uint8_t> sealed(const RecordKey* key) const {
    std::vector<uint8_t> record(record_bytes(std::ssize(tokens), std::ssize(payload)));
    std::ranges::copy(payload, record.begin() + record_payload_offset(std::ssize(tokens)));
    EXPECT_TRUE(seal_record(facts, key, record).ok());
    return record;
  }
};

class Record : public testing::TestWithParam<bool> {  // enciphered?
 protected:
  const RecordKey key_ = parse_record_key(kKeyDigits).value();
  const RecordKey* key() const { return GetParam() ? &key_ : nullptr; }
  Block block_;
};
INSTANTIATE_TEST_SUITE_P(PlainAndEnciphered, Record, testing::Bool(),
                         [](const auto& one) { return one.param ? "Enciphered" : "Plain"; });

TEST_P(Record, GivesItsPayloadBack) {
  std::vector<uint8_t> record = block_.sealed(key());
  const auto payload = open_record(block_.facts, key(), record);
  ASSERT_TRUE(payload.ok()) << payload.error().message;
  EXPECT_TRUE(std::ranges::equal(payload.value(), block_.payload));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(payload.value().data()) % 8, 0u);
}

TEST_P(Record, AFlippedBitAnywhereIsRefused) {
  const std::vector<uint8_t> record = block_.sealed(key());
  for (size_t at = 0; at < record.size(); ++at) {
    std::vector<uint8_t> damaged = record;
    damaged[at] ^= static_cast<uint8_t>(1u << (at % 8));
    EXPECT_FALSE(open_record(block_.facts, key(), damaged).ok()) << "byte " << at;
  }
}

TEST_P(Record, CutShortAnywhereIsRefused) {
  const std::vector<uint8_t> record = block_.sealed(key());
  for (size_t bytes = 0; bytes < record.size(); ++bytes) {
    std::vector<uint8_t> cut(record.begin(), record.begin() + static_cast<int64_t>(bytes));
    EXPECT_FALSE(open_record(block_.facts, key(), cut).ok()) << bytes << " bytes";
  }
}

TEST_P(Record, OfAnotherBlockIsRefused) {
  const std::vector<int32_t> other_tokens = {7, 8, 10};
  const auto refuses = [&](auto change) {
    RecordFacts other = block_.facts;
    change(other);
    std::vector<uint8_t> record = block_.sealed(key());
    const auto payload = open_record(other, key(), record);
    EXPECT_FALSE(payload.ok());
    if (payload.ok()) return;
    EXPECT_THAT(payload.error().message, HasSubstr("another block's"));
  };
  refuses([](RecordFacts& facts) { facts.scope.bytes[0] ^= 1; });
  refuses([](RecordFacts& facts) { facts.parent.bytes[15] ^= 1; });
  refuses([](RecordFacts& facts) { facts.hash.bytes[7] ^= 1; });
  refuses([](RecordFacts& facts) { facts.group = 5; });
  refuses([](RecordFacts& facts) { facts.kind = cache::BlockKind::kPacked; });
  refuses([](RecordFacts& facts) { facts.payload_bytes -= 1; });
  refuses([&](RecordFacts& facts) { facts.tokens = other_tokens; });
}

TEST(RecordCipher, HidesTokensAndPayloadAndNeverRepeatsItself) {
  const Block block;
  const RecordKey key = parse_record_key(kKeyDigits).value();
  const std::vector<uint8_t> record = block.sealed(&key);
  EXPECT_EQ(std::search(record.begin(), record.end(), block.payload.begin() + 100,
                        block.payload.begin() + 132),
            record.end());
  EXPECT_NE(record, block.sealed(&key)) << "another nonce";
}

TEST(RecordCipher, TakesNoOtherKeyAndNothingPlain) {
  const Block block;
  const RecordKey key = parse_record_key(kKeyDigits).value();
  const RecordKey other = parse_record_key(std::string(64, 'b')).value();
  const auto problem = [&](const RecordKey* writer, const RecordKey* reader) {
    std::vector<uint8_t> record = block.sealed(writer);
    return open_record(block.facts, reader, record).error().message;
  };
  EXPECT_THAT(problem(&key, &other), HasSubstr("another key"));
  EXPECT_THAT(problem(nullptr, &key), HasSubstr("cipher 0; expected 1"));
  EXPECT_THAT(problem(&key, nullptr), HasSubstr("cipher 1; expected 0"));
}

TEST(RecordCipher, AKeyIs64HexadecimalDigitsAndIsNotRepeated) {
  for (const std::string& digits : {std::string("abc"), std::string(63, 'a') + "x"}) {
    const auto key = parse_record_key(digits);
    ASSERT_FALSE(key.ok());
    EXPECT_THAT(key.error().message, HasSubstr("64"));
    EXPECT_EQ(key.error().message.find(digits), std::string::npos);
  }
}

}  // namespace
}  // namespace kvx::tier
