// Messages: what is written is read back, and nothing else is read.
#include "transfer/messages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace kvx::transfer {
namespace {

using testing::HasSubstr;

TEST(Messages, RequestsAreReadBack) {
  for (const Kind kind : {Kind::kHello, Kind::kRead, Kind::kDone, Kind::kLayers, Kind::kPages}) {
    Request request;
    request.kind = kind;
    if (kind != Kind::kHello) request.export_id = 0x123456789abcdef0;
    if (kind == Kind::kRead) request.offset = uint64_t{1} << 40;
    if (kind == Kind::kRead) request.bytes = 4096;
    const bool has_heads = kind == Kind::kLayers || kind == Kind::kPages;
    if (has_heads) request.record = 31;
    if (has_heads) request.heads = {2, 4, 8};
    if (kind == Kind::kPages) request.first_page = 5;
    if (kind == Kind::kPages) request.end_page = uint64_t{1} << 33;
    if (kind == Kind::kPages) request.is_mapped = true;
    if (kind != Kind::kRead && kind != Kind::kPages) request.text = "facts";
    if (kind == Kind::kDone) request.is_taken = true;
    const Result<Request> read = parse_request(encode(request));
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(read.value().kind, kind);
    EXPECT_EQ(read.value().export_id, request.export_id);
    EXPECT_EQ(read.value().offset, request.offset);
    EXPECT_EQ(read.value().bytes, request.bytes);
    EXPECT_EQ(read.value().record, request.record);
    EXPECT_EQ(read.value().heads, request.heads);
    EXPECT_EQ(read.value().first_page, request.first_page);
    EXPECT_EQ(read.value().end_page, request.end_page);
    EXPECT_EQ(read.value().is_mapped, request.is_mapped);
    EXPECT_EQ(read.value().is_taken, request.is_taken);
    EXPECT_EQ(read.value().text, request.text);
  }
}

TEST(Messages, AnswersAreReadBack) {
  for (const Kind kind :
       {Kind::kHello, Kind::kRead, Kind::kDone, Kind::kRefused, Kind::kLayers, Kind::kPages}) {
    Answer answer;
    answer.kind = kind;
    const bool has_parts = kind == Kind::kLayers || kind == Kind::kPages;
    const bool has_data = kind == Kind::kRead || has_parts;
    if (kind != Kind::kRefused) answer.export_id = 7;
    if (kind == Kind::kHello) answer.bytes = 99;
    if (kind == Kind::kHello) answer.path = "/dev/shm/x";
    if (kind == Kind::kRead) answer.offset = 5;
    if (has_parts) answer.record = 3;
    if (has_parts) answer.num_parts = 2;
    if (kind == Kind::kPages) answer.first_page = 9;
    if (kind == Kind::kHello) {
      answer.num_layers = 30;
      answer.ipc_handle = std::string("\0\1", 2);
      answer.pool_order = "plain";
      answer.process = 77;
    }
    if (kind == Kind::kHello || kind == Kind::kRefused) answer.text = "words";
    std::vector<uint8_t> bytes = encode(answer);
    if (has_data) bytes.insert(bytes.end(), {1, 2, 3});
    const Result<Answer> read = parse_answer(bytes);
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(read.value().kind, kind);
    EXPECT_EQ(read.value().export_id, answer.export_id);
    EXPECT_EQ(read.value().bytes, answer.bytes);
    EXPECT_EQ(read.value().record, answer.record);
    EXPECT_EQ(read.value().num_parts, answer.num_parts);
    EXPECT_EQ(read.value().first_page, answer.first_page);
    EXPECT_EQ(read.value().num_layers, answer.num_layers);
    EXPECT_EQ(read.value().ipc_handle, answer.ipc_handle);
    EXPECT_EQ(read.value().pool_order, answer.pool_order);
    EXPECT_EQ(read.value().process, answer.process);
    EXPECT_EQ(read.value().path, answer.path);
    EXPECT_EQ(read.value().text, answer.text);
    EXPECT_EQ(read.value().data.size(), has_data ? 3u : 0u);
  }
}

TEST(Messages, OfAnotherVersionSaySo) {
  std::vector<uint8_t> bytes = encode(Request{});
  bytes[4] = 4;
  const Result<Request> read = parse_request(bytes);
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.error().code, ErrorCode::kIncompatible);
  EXPECT_THAT(read.error().message, HasSubstr("version 4; expected 3"));
}

TEST(Messages, CutShortAreRefused) {
  Answer hello;
  hello.path = "/dev/shm/x";
  const std::vector<uint8_t> bytes = encode(hello);
  for (size_t length = 0; length + 1 < bytes.size(); ++length) {
    EXPECT_FALSE(parse_answer({bytes.data(), length}).ok()) << length;
  }
}

RC_GTEST_PROP(Messages, AnyBytesAreReadOrRefused, (std::vector<uint8_t> tail)) {
  std::vector<uint8_t> bytes = encode(Request{});
  bytes[8] = static_cast<uint8_t>(*rc::gen::inRange(0, 7));
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  (void)parse_request(bytes);
  (void)parse_answer(bytes);
  (void)parse_answer(tail);
}

}  // namespace
}  // namespace kvx::transfer
