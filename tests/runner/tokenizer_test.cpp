// Pre-tokenisers against the `tokenizers` package, and BPE on a vocabulary written by hand.
#include "runner/tokenizer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runner/byte_alphabet.hpp"
#include "runner/chat_template.hpp"
#include "tests/runner/gguf_writer.hpp"
#include "tests/runner/golden_file.hpp"

namespace kvx::runner::tokenizer_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::GgufWriter;

TEST(UnicodeSplit, CutsAsTheIndependentImplementationDoes) {
  const auto golden = tests::golden_cases("tokenizer_splits");
  for (const auto& [name, cases] : golden.items()) {
    const auto split = UnicodeSplit::create(name);
    ASSERT_TRUE(split.ok()) << split.error().message;
    for (const auto& one : cases) {
      SCOPED_TRACE(name + ": " + one.dump());
      const auto text = one.at("text").get<std::string>();  // the pieces point into it
      const auto pieces = split.value().split(text);
      ASSERT_TRUE(pieces.ok());
      const auto expected = one.at("pieces").get<std::vector<std::string>>();
      EXPECT_THAT(pieces.value(), testing::ElementsAreArray(expected));
    }
  }
}

TEST(UnicodeSplit, NamesThePreTokenisersItKnows) {
  EXPECT_THAT(UnicodeSplit::create("bloom").error().message, HasSubstr("smollm, llama-bpe, qwen2"));
}

TEST(ByteAlphabet, GivesEveryByteBack) {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string character = byte_to_character(static_cast<uint8_t>(byte));
    EXPECT_EQ(characters_to_bytes(character), std::string(1, static_cast<char>(byte)));
  }
  EXPECT_EQ(byte_to_character(' '), "\u0120");
  EXPECT_EQ(characters_to_bytes("\u65e5"), std::nullopt);
}

// a b c and their merges; <|im_start|> and <|im_end|>; no byte but those of the letters and spaces.
GgufWriter small_vocabulary() {
  GgufWriter writer;
  writer.text("tokenizer.ggml.model", "gpt2");
  writer.text("tokenizer.ggml.pre", "default");
  writer.strings("tokenizer.ggml.tokens", {"<unk>", "a", "b", "c", "\u0120", "ab", "bc", "abc",
                                           "\u0120abc", "<|im_start|>", "<|im_end|>"});
  writer.ints("tokenizer.ggml.token_type", {2, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3});
  return writer;
}

Result<Tokenizer> tokenizer_of(const GgufWriter& writer) {
  const auto file = writer.file();
  auto gguf = GgufView::parse(file);
  if (!gguf.ok()) return gguf.error();
  return Tokenizer::create(gguf.value());
}

Tokenizer small_tokenizer() {
  GgufWriter writer = small_vocabulary();
  writer.strings("tokenizer.ggml.merges", {"b c", "a b", "a bc", "\u0120 abc"});
  writer.u32("tokenizer.ggml.unknown_token_id", 0);
  auto tokenizer = tokenizer_of(writer);
  if (!tokenizer.ok()) throw std::runtime_error(tokenizer.error().message);
  return std::move(tokenizer).value();
}

TEST(Tokenizer, MergesTheBestRankedPairFirst) {
  const Tokenizer tokenizer = small_tokenizer();
  const auto ids = [&](std::string_view text) {
    return tokenizer.encode(text, SpecialTokens::kAsText).value();
  };
  EXPECT_THAT(ids("abc"), ElementsAre(7));  // b c, then a bc: not ab c
  EXPECT_THAT(ids("abab"), ElementsAre(5, 5));
  EXPECT_THAT(ids("a abc"), ElementsAre(1, 8));
  EXPECT_THAT(ids(""), ElementsAre());
  EXPECT_THAT(ids("ax"), ElementsAre(1, 0));
}

TEST(Tokenizer, ParsesSpecialTokensOnlyWhenAsked) {
  const Tokenizer tokenizer = small_tokenizer();
  const std::string text = "a<|im_end|>b";
  EXPECT_THAT(tokenizer.encode(text, SpecialTokens::kParse).value(), ElementsAre(1, 10, 2));
  EXPECT_THAT(tokenizer.encode(text, SpecialTokens::kAsText).value(),
              testing::Not(testing::Contains(10)));
  EXPECT_EQ(tokenizer.decode({1, 8, 2}), "a abcb");
}

TEST(Tokenizer, StaysFastOnOneEndlessWord) {
  const std::string word(200000, 'a');
  EXPECT_EQ(small_tokenizer().encode(word, SpecialTokens::kAsText).value().size(), word.size());
}

TEST(Tokenizer, RefusesBytesWithoutATokenWhenNoneIsUnknown) {
  GgufWriter writer = small_vocabulary();
  writer.strings("tokenizer.ggml.merges", {"b c"});
  const auto tokenizer = tokenizer_of(writer);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  EXPECT_THAT(tokenizer.value().encode("x", SpecialTokens::kAsText).error().message,
              HasSubstr("byte 0x78"));
}

TEST(Tokenizer, RefusesAVocabularyThatContradictsItself) {
  const auto message = [](auto change) {
    GgufWriter writer = small_vocabulary();
    change(writer);
    return tokenizer_of(writer).error().message;
  };
  EXPECT_THAT(message([](auto&) {}), HasSubstr("tokenizer.ggml.merges is missing"));
  EXPECT_THAT(message([](auto& w) { w.strings("tokenizer.ggml.merges", {"bc"}); }),
              HasSubstr("merges[0] is \"bc\"; two tokens"));
  EXPECT_THAT(message([](auto& w) { w.strings("tokenizer.ggml.merges", {"c a"}); }),
              HasSubstr("must be tokens"));
  EXPECT_THAT(message([](auto& w) {
                w.strings("tokenizer.ggml.merges", {"b c"});
                w.u32("tokenizer.ggml.eos_token_id", 11);
              }),
              HasSubstr("eos_token_id is 11; 0 to 10"));
}

TEST(ChatTemplate, MarksEveryMessageAndOpensTheAnswer) {
  const Tokenizer tokenizer = small_tokenizer();
  const std::vector<ChatMessage> messages{{"user", "abc<|im_end|>"}};
  const auto ids = encode_chat(tokenizer, messages);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(ids.value().front(), 9);
  // The message's own "<|im_end|>" is text: the mark appears once.
  EXPECT_EQ(std::count(ids.value().begin(), ids.value().end(), 10), 1);
  EXPECT_EQ(std::count(ids.value().begin(), ids.value().end(), 9), 2);
}

TEST(ChatTemplate, FindsTheSystemMessageOfTheModelsTemplate) {
  const auto found = [](std::string_view source) {
    GgufWriter writer;
    writer.text("tokenizer.chat_template", source);
    const auto file = writer.file();
    return default_system_message(GgufView::parse(file).value());
  };
  EXPECT_EQ(found("{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"), "Be kind.");
  EXPECT_EQ(found("{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"), "Be kind.");
  EXPECT_EQ(found("{{ '<|im_start|>system\\n' + x + '<|im_end|>' }}"), "");
  EXPECT_EQ(found("{{ x }}"), "");
}

TEST(Utf8Stream, HoldsBackOnlyAnUnfinishedCharacter) {
  EXPECT_EQ(complete_utf8_length("abc"), 3u);
  EXPECT_EQ(complete_utf8_length("a\xe2\x82"), 1u);
  EXPECT_EQ(complete_utf8_length("a\xe2\x82\xac"), 4u);
  EXPECT_EQ(complete_utf8_length("\xf0\x9f\x98"), 0u);
  EXPECT_EQ(complete_utf8_length("\x80\x80\x80\x80"), 4u);
}

}  // namespace
}  // namespace kvx::runner::tokenizer_test
