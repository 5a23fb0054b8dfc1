// The GGUF header: what is read, and that every lie in it is one clear error.
#include "runner/gguf.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/runner/gguf_writer.hpp"

namespace kvx::runner {
namespace {

using testing::HasSubstr;
using tests::GgufWriter;

GgufWriter small_file() {
  GgufWriter writer;
  writer.text("general.architecture", "llama");
  writer.u32("llama.block_count", 7);
  writer.f32("llama.rope.freq_base", 0.5f);
  writer.strings("words", {"a", "", "long word"});
  writer.ints("numbers", {-1, 2});
  writer.value<uint8_t>("flag", tests::kGgufBool, 1);
  writer.f32_tensor("matrix", {2, 3}, {1, 2, 3, 4, 5, 6});
  return writer;
}

TEST(Gguf, ReadsValuesAndTensors) {
  const auto file = small_file().file();
  const auto gguf = GgufView::parse(file);
  ASSERT_TRUE(gguf.ok()) << gguf.error().message;
  const GgufView& view = gguf.value();
  EXPECT_EQ(view.string("general.architecture").value(), "llama");
  EXPECT_EQ(view.integer("llama.block_count", 1, 100).value(), 7);
  EXPECT_EQ(view.number_or("llama.rope.freq_base", 1).value(), 0.5);
  EXPECT_EQ(view.strings("words").value(), (std::vector<std::string_view>{"a", "", "long word"}));
  EXPECT_EQ(view.integers("numbers").value(), (std::vector<int64_t>{-1, 2}));
  EXPECT_TRUE(view.flag_or("flag", false).value());

  const GgufTensor* matrix = view.find_tensor("matrix");
  ASSERT_NE(matrix, nullptr);
  EXPECT_EQ(matrix->dims, (std::vector<int64_t>{2, 3}));
  float last_row[2];
  dequantize(matrix->type, matrix->row(2), 2, last_row);
  EXPECT_EQ(last_row[0], 5);
  EXPECT_EQ(last_row[1], 6);
}

TEST(Gguf, RefusesEveryTruncation) {
  const auto file = small_file().file();
  const size_t data_bytes = 6 * sizeof(float);
  const size_t needed = file.size() - 32 + data_bytes;  // the last padding may go
  for (size_t size = 0; size < needed; ++size) {
    const auto gguf = GgufView::parse(std::span(file).first(size));
    ASSERT_FALSE(gguf.ok()) << size << " of " << needed << " bytes were accepted";
    ASSERT_THAT(gguf.error().message, HasSubstr("trunc")) << size;
  }
  EXPECT_TRUE(GgufView::parse(std::span(file).first(needed)).ok());
}

struct Lie {
  const char* what;
  std::function<void(GgufWriter&)> tell;
  const char* message;
};

TEST(Gguf, RefusesLiesInTheHeader) {
  constexpr uint64_t kHuge = 0xFFFFFFFFFFFFFFF0u;
  const Lie lies[] = {
      {"more values than bytes", [](auto& w) { w.extra_values = kHuge; }, "truncated"},
      {"more tensors than bytes", [](auto& w) { w.extra_tensors = kHuge; }, "tensor "},
      {"version 1", [](auto& w) { w.version = 1; }, "GGUF version is 1; 2 and 3"},
      {"big-endian", [](auto& w) { w.version = 0x03000000; }, "little-endian"},
      {"no dimensions", [](auto& w) { w.tensor_at("t", 0, {}, 0); }, "has 0 dimensions"},
      {"five dimensions",
       [](auto& w) {
         w.tensor_at("t", 0, {1, 1, 1, 1, 1}, 0);
       },
       "has 5 dimensions"},
      {"a zero dimension",
       [](auto& w) {
         w.tensor_at("t", 0, {4, 0}, 0);
       },
       "dimension 1 is 0"},
      {"a product that overflows",
       [](auto& w) {
         w.tensor_at("t", 0, {1u << 30, 1u << 30, 1u << 30}, 0);
       },
       "overflows"},
      {"a dimension beyond 2^31", [](auto& w) { w.tensor_at("t", 0, {kHuge}, 0); }, "dimension 0"},
      {"an unknown type", [](auto& w) { w.tensor_at("t", 99, {32}, 0); }, "has type 99"},
      {"half a block", [](auto& w) { w.tensor_at("t", 2, {48}, 0); }, "multiple of 32"},
      {"an offset beyond the file", [](auto& w) { w.tensor_at("t", 0, {4}, 1 << 20); },
       "truncated"},
      {"an offset beyond 2^63", [](auto& w) { w.tensor_at("t", 0, {4}, kHuge); }, "beyond any"},
      {"an offset off the grid", [](auto& w) { w.tensor_at("t", 0, {4}, 4); }, "multiple of 32"},
      {"data beyond the file",
       [](auto& w) {
         w.tensor_at("t", 0, {1u << 30, 1u << 10}, 0);
       },
       "truncated"},
      {"a tensor twice", [](auto& w) { w.tensor_at("matrix", 0, {1}, 0); }, "appears twice"},
      {"a key twice", [](auto& w) { w.u32("llama.block_count", 7); }, "appears twice"},
      {"an unknown value type",
       [](auto& w) {
         w.u32("x", 0);
         w.begin_value("y", 77);
       },
       "value y has type 77"},
      {"an array of arrays",
       [](auto& w) {
         w.begin_value("nested", tests::kGgufArray);
         GgufWriter::put<uint32_t>(w.raw_values(), tests::kGgufArray);
         GgufWriter::put<uint64_t>(w.raw_values(), 1);
       },
       "array nested has element type 9"},
      {"an endless string",
       [](auto& w) {
         w.begin_value("s", tests::kGgufString);
         GgufWriter::put<uint64_t>(w.raw_values(), kHuge);
       },
       "truncated: s"},
      {"an endless array",
       [](auto& w) {
         w.begin_value("a", tests::kGgufArray);
         GgufWriter::put<uint32_t>(w.raw_values(), tests::kGgufString);
         GgufWriter::put<uint64_t>(w.raw_values(), uint64_t{1} << 60);
       },
       "truncated: array a"},
      {"alignment 0", [](auto& w) { w.u32("general.alignment", 0); }, "general.alignment is 0"},
  };
  for (const Lie& lie : lies) {
    SCOPED_TRACE(lie.what);
    GgufWriter writer = small_file();
    lie.tell(writer);
    const auto file = writer.file();
    const auto gguf = GgufView::parse(file);
    ASSERT_FALSE(gguf.ok());
    EXPECT_THAT(gguf.error().message, HasSubstr(lie.message));
    EXPECT_EQ(gguf.error().message.find('\n'), std::string::npos);
  }
}

TEST(Gguf, SaysWhatAForeignFileStartsWith) {
  const std::vector<uint8_t> file{'P', 'K', 3, 4, 0, 0, 0, 0};
  EXPECT_THAT(GgufView::parse(file).error().message, HasSubstr("not a GGUF file"));
}

TEST(Gguf, NamesTheValueThatIsMissingOrOfAnotherType) {
  const auto file = small_file().file();
  const auto gguf = GgufView::parse(file);
  ASSERT_TRUE(gguf.ok());
  const GgufView& view = gguf.value();
  EXPECT_THAT(view.integer("absent", 0, 1).error().message, HasSubstr("absent is missing"));
  EXPECT_THAT(view.integer("words", 0, 1).error().message, HasSubstr("words is not an integer"));
  EXPECT_THAT(view.integer("llama.block_count", 8, 9).error().message,
              HasSubstr("llama.block_count is 7; 8 to 9"));
  EXPECT_THAT(view.string("numbers").error().message, HasSubstr("numbers is not a string"));
}

}  // namespace
}  // namespace kvx::runner
