// The tokeniser against Hugging Face's ids on awkward texts, ill-formed UTF-8 among them, and its
// law: what was encoded decodes to the same bytes. make_tokenizer_golden.py made the golden file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>

#include "runner/byte_alphabet.hpp"
#include "runner/tokenizer.hpp"
#include "tests/runner/gguf_writer.hpp"
#include "tests/runner/golden_file.hpp"

namespace kvx::runner::tokenizer_golden_test {
namespace {

using testing::ElementsAre;

constexpr int32_t kNormal = 1;  // tokenizer.ggml.token_type
constexpr int32_t kControl = 3;
constexpr int32_t kUserDefined = 4;

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<std::string> merges;
  int unknown = 0;
};

Tokenizer tokenizer_of(const Vocabulary& vocabulary, const std::string& pre) {
  tests::GgufWriter writer;
  writer.text("tokenizer.ggml.model", "gpt2");
  writer.text("tokenizer.ggml.pre", pre);
  writer.strings("tokenizer.ggml.tokens", vocabulary.tokens);
  writer.ints("tokenizer.ggml.token_type", vocabulary.types);
  writer.strings("tokenizer.ggml.merges", vocabulary.merges);
  writer.u32("tokenizer.ggml.unknown_token_id", static_cast<uint32_t>(vocabulary.unknown));
  const auto file = writer.file();
  const auto gguf = GgufView::parse(file);
  if (!gguf.ok()) throw std::runtime_error(gguf.error().message);
  auto tokenizer = Tokenizer::create(gguf.value());
  if (!tokenizer.ok()) throw std::runtime_error(tokenizer.error().message);
  return std::move(tokenizer).value();
}

Vocabulary golden_vocabulary(const nlohmann::json& golden) {
  Vocabulary vocabulary{golden["tokens"], {}, golden["merges"], golden["unknown"]};
  const std::vector<std::string> control = golden["control_tokens"];
  for (const std::string& token : vocabulary.tokens) {
    const bool is_control = std::count(control.begin(), control.end(), token) > 0;
    vocabulary.types.push_back(is_control ? kControl : kNormal);
  }
  return vocabulary;
}

// Token b is byte b, for every byte; then "ab" and "abab".
Vocabulary byte_vocabulary() {
  Vocabulary vocabulary;
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary.tokens.push_back(byte_to_character(static_cast<uint8_t>(byte)));
  }
  vocabulary.tokens.insert(vocabulary.tokens.end(), {"ab", "abab"});
  vocabulary.types.assign(vocabulary.tokens.size(), kNormal);
  vocabulary.merges = {"a b", "ab ab"};
  return vocabulary;
}

int add_token(Vocabulary& vocabulary, const std::string& token, int32_t type) {
  vocabulary.tokens.push_back(token);
  vocabulary.types.push_back(type);
  return static_cast<int>(vocabulary.tokens.size()) - 1;
}

TEST(Tokenizer, GivesTheIdsOfAnIndependentTokenizer) {
  const nlohmann::json golden = tests::golden_file("tokenizer_bytes");
  const Vocabulary vocabulary = golden_vocabulary(golden);
  std::map<std::string, Tokenizer> tokenizers;
  for (const std::string pre : {"gpt-2", "smollm", "llama-bpe", "qwen2"}) {
    tokenizers.emplace(pre, tokenizer_of(vocabulary, pre));
  }
  ASSERT_GT(golden["cases"].size(), 500u);
  for (const nlohmann::json& one : golden["cases"]) {
    const std::string text = tests::bytes_from_hex(one["hex"]);
    const auto special = one["parse_special"] ? SpecialTokens::kParse : SpecialTokens::kAsText;
    const auto ids = tokenizers.at(one["pre"].get<std::string>()).encode(text, special);
    ASSERT_TRUE(ids.ok()) << ids.error().message;
    EXPECT_EQ(ids.value(), one["ids"].get<std::vector<int>>()) << one["pre"] << ": " << text;
  }
}

TEST(UnicodeSplit, CutsIllFormedBytesAndLeavesThemAsTheyWere) {
  const nlohmann::json golden = tests::golden_file("tokenizer_bytes");
  int num_compared = 0;
  for (const nlohmann::json& one : golden["cases"]) {
    if (!one.contains("word_bytes")) continue;
    const std::string text = tests::bytes_from_hex(one["hex"]);
    const auto split = UnicodeSplit::create(one["pre"].get<std::string>());
    ASSERT_TRUE(split.ok()) << split.error().message;
    const auto pieces = split.value().split(text);
    ASSERT_TRUE(pieces.ok()) << pieces.error().message;
    std::vector<size_t> sizes;
    std::string joined;
    for (const std::string_view piece : pieces.value()) {
      sizes.push_back(piece.size());
      joined += piece;
    }
    EXPECT_EQ(sizes, one["word_bytes"].get<std::vector<size_t>>()) << one["pre"] << ": " << text;
    EXPECT_EQ(joined, text);
    ++num_compared;
  }
  EXPECT_GT(num_compared, 500);
}

RC_GTEST_PROP(Tokenizer, DecodesWhatItEncodedForAnyBytes, ()) {
  // Any bytes, between pieces that meet at the expressions' borders.
  const auto any = rc::gen::arbitrary<std::string>();
  const auto border = rc::gen::element<std::string>("ab", "A", "'s", "1", "\xc2\xbd", " ", "  ",
                                                    "\n", "\r\n", "\xc2\xa0", "\xe4\xbd\xa0",
                                                    "\xf0\x9f", "\xff", "!", "\xcc\x81");
  std::string text;
  for (const auto& piece :
       *rc::gen::container<std::vector<std::string>>(rc::gen::oneOf(any, border))) {
    text += piece;
  }
  for (const std::string pre : {"gpt-2", "default", "smollm", "llama-bpe", "qwen2"}) {
    const Tokenizer tokenizer = tokenizer_of(byte_vocabulary(), pre);
    RC_ASSERT(tokenizer.decode(tokenizer.encode(text, SpecialTokens::kAsText).value()) == text);
  }
}

TEST(Tokenizer, FindsUserDefinedTokensInAnyText) {
  Vocabulary vocabulary = byte_vocabulary();
  const int control = add_token(vocabulary, "<c>", kControl);
  const int word = add_token(vocabulary, "<u>", kUserDefined);
  const Tokenizer tokenizer = tokenizer_of(vocabulary, "gpt-2");
  EXPECT_THAT(tokenizer.encode("<c><u>", SpecialTokens::kParse).value(),
              ElementsAre(control, word));
  EXPECT_THAT(tokenizer.encode("<c><u>", SpecialTokens::kAsText).value(),
              ElementsAre('<', 'c', '>', word));
}

TEST(Tokenizer, TakesTheLongestSpecialToken) {
  Vocabulary vocabulary = byte_vocabulary();
  add_token(vocabulary, "<x", kControl);
  const int longer = add_token(vocabulary, "<x>", kControl);
  add_token(vocabulary, "<x>>>", kControl);
  const Tokenizer tokenizer = tokenizer_of(vocabulary, "gpt-2");
  EXPECT_THAT(tokenizer.encode("<x>>", SpecialTokens::kParse).value(), ElementsAre(longer, '>'));
}

}  // namespace
}  // namespace kvx::runner::tokenizer_golden_test
