// kvx run, compare and tune with a model of latent attention ("deepseek2").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/tools/cli_with_model.hpp"

namespace kvx::tool::cli_latent_test {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class CliLatent : public CliWithModel {
 protected:
  void SetUp() override {
    CliWithModel::SetUp();
    const auto file = tests::with_tiny_tokenizer(tests::tiny_deepseek(true)).file();
    write("latent.gguf", {reinterpret_cast<const char*>(file.data()), file.size()});
  }
};

TEST_F(CliLatent, ComparesFormatsOfItsRows) {
  const Outcome outcome =
      kvx("compare -m latent.gguf -f text.txt --formats int8,int8+bf16,int4+bf16:sink=4,recent=8 "
          "--ctx 32 --chunks 2 --block-size 4 --json r.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(read_file("json", work() / "r.json").value());
  ASSERT_EQ(json["caches"].size(), 4u);
  EXPECT_EQ(json["caches"][2]["name"], "int8+bf16");
  const auto error = [&](size_t cache) -> double {
    return json["caches"][cache]["attention_by_layer"][1]["relative_error"];
  };
  EXPECT_GT(error(2), 0);
  EXPECT_GT(error(3), error(2));
}

TEST_F(CliLatent, WritesTheSameTextByAnyNumberOfThreads) {
  const std::string command = "run -m latent.gguf -p hello -n 12 --cache int8+bf16 --raw";
  const Outcome first = kvx(command + " --threads 1");
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.out, Not(IsEmpty()));
  EXPECT_EQ(kvx(command + " --threads 2").out, first.out);
}

TEST_F(CliLatent, RefusesTablesAndTwoRows) {
  EXPECT_THAT(
      kvx("tune -m latent.gguf -f text.txt --num-prompts 3 --chunks 1 --ctx 32 --out t.kvxtune")
          .err,
      HasSubstr("latent rows"));
  EXPECT_THAT(kvx("run -m latent.gguf -p hello -n 1 --cache int8/int4").err,
              HasSubstr("one row for both"));
  EXPECT_THAT(kvx("run -m model.gguf -p hello -n 1 --cache int8+bf16").err,
              HasSubstr("only a latent cache's rows"));
}

}  // namespace
}  // namespace kvx::tool::cli_latent_test
