// The program from outside, without a model: help, pages, bench's files, and bad input.
#include <gmock/gmock.h>

#include "tests/tools/cli_runner.hpp"

namespace kvx::tool {
namespace {

using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(Cli, TellsItsVersion) {
  const Outcome outcome = kvx("--version");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.out, ContainsRegex("^kvx [0-9]+\\.[0-9]+\\.[0-9]+\n$"));
}

TEST_F(Cli, HelpsWithExamplesForEveryCommand) {
  EXPECT_EQ(kvx("--help").exit_code, 0);
  for (const char* command : {"run", "compare", "bench", "formats", "info"}) {
    const Outcome outcome = kvx(fmt::format("{} --help", command));
    EXPECT_EQ(outcome.exit_code, 0) << command;
    EXPECT_THAT(outcome.out, HasSubstr("Examples:")) << command;
    EXPECT_THAT(outcome.out, HasSubstr(fmt::format("kvx {}", command)));
  }
}

TEST_F(Cli, PrintsThePagesThatDocsHolds) {
  const auto doc = [](const char* name) {
    return read_file("page", fmt::format("{}/docs/{}", KVX_SOURCE_DIR, name)).value();
  };
  EXPECT_EQ(kvx("formats --markdown").out, doc("formats.md"));
  EXPECT_EQ(kvx("info --status --markdown").out, doc("status.md"));
}

TEST_F(Cli, ListsFormatsAndTheMachineWithoutColourWhereNobodyLooks) {
  const Outcome formats = kvx("formats", "TERM=xterm");
  EXPECT_EQ(formats.exit_code, 0);
  EXPECT_THAT(formats.out, HasSubstr("nvfp4"));
  EXPECT_THAT(formats.out, Not(HasSubstr("\x1b")));
  const Outcome info = kvx("info", "KVX_CPU=scalar");
  EXPECT_EQ(info.exit_code, 0);
  EXPECT_THAT(info.out, HasSubstr("cpu level  scalar"));
}

TEST_F(Cli, NamesTheOptionsOfARecipe) {
  EXPECT_THAT(kvx("formats --help").out, HasSubstr("sink=N"));
}

TEST_F(Cli, WritesWhatBenchMeasured) {
  const Outcome outcome =
      kvx("bench --formats int8,nvfp4 --lengths 64 --sequences 2 --heads 1 --q-heads 1 "
          "--head-dim 64 --min-seconds 0 --threads 2 --json b.json --csv b.csv");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("attend decode"));
  EXPECT_THAT(read_file("json", work() / "b.json").value(), StartsWith("{"));
  EXPECT_THAT(read_file("csv", work() / "b.csv").value(), StartsWith("format,verb"));
  EXPECT_EQ(num_files(), 2);
}

TEST_F(Cli, BenchMeasuresTheAttentionOfARecommendedRecipe) {
  const Outcome outcome =
      kvx("bench --formats int8:auto --lengths 128 --sequences 1 --heads 1 --q-heads 1 "
          "--head-dim 64 --block-size 16 --min-seconds 0 --threads 1");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("int8:auto"));
  EXPECT_THAT(outcome.out, HasSubstr("attend decode"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("append")));
}

TEST_F(Cli, BenchMeasuresLatentRows) {
  const Outcome outcome =
      kvx("bench --shapes mla2x48h3,mla1x48h1 --formats bf16,nvfp4+bf16 --block-size 16 "
          "--prefill 2 --min-seconds 0 --threads 1 --csv b.csv");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("mla2x48h3"));
  const std::string csv = read_file("csv", work() / "b.csv").value();
  // Codes and scales of 512 numbers, 64 in bf16; K and V are one row.
  EXPECT_THAT(csv, HasSubstr("\"nvfp4+bf16\",\"attend decode\",2,48,1,3,576,512,true,16,"));
  EXPECT_THAT(csv, HasSubstr(fmt::format(",2,{},", 96 * (256 + 32 + 128))));
}

TEST_F(Cli, WritesWhatBenchMeasuredOfTheAbiInTheColumnsOfItsOwnBenchmark) {
  const Outcome outcome =
      kvx("bench abi --sequences 1,2 --lengths 32 --heads 1 --head-dim 16 --tokens-per-seq 4 "
          "--iters 2 --warmup 1 --csv b.csv");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("% of memcpy"));
  const std::string csv = read_file("csv", work() / "b.csv").value();
  EXPECT_THAT(csv, StartsWith("kernel,seq_count,seq_len,block_size,num_heads,head_dim,num_blocks,"
                              "iters,warmup,ms_per,tokens_per_s,gb_per_s,tokens_per_seq\n"));
  EXPECT_THAT(csv, HasSubstr("\nwrite_nhd,1,32,16,1,16,2,2,1,"));
  EXPECT_THAT(csv, HasSubstr("\ngather_hnd_packed,2,32,16,1,16,4,2,1,"));
  EXPECT_THAT(csv, HasSubstr("\nmemcpy_write_hnd,"));
}

TEST_F(Cli, SaysThatItsOutputWentNowhere) {
  const std::string err = (work() / "err").string();
  for (const char* command : {"formats", "formats --markdown"}) {  // a part of a buffer, and more
    const int status =
        std::system(fmt::format("'{}' {} > /dev/full 2> '{}'", KVX_TOOL, command, err).c_str());
    ASSERT_TRUE(WIFEXITED(status)) << command;
    EXPECT_EQ(WEXITSTATUS(status), 2) << command;
    const std::string said = read_file("err", err).value();
    EXPECT_THAT(said, StartsWith("kvx: stdout cannot be written (")) << command;
    EXPECT_THAT(said, EndsWith("No space left on device)\n")) << command;
  }
}

TEST_F(Cli, RefusesCommandsAndOptionsThatItDoesNotKnow) {
  expect_refused("", "command is missing");
  expect_refused("fly", "fly");
  expect_refused("info --colour", "--colour");
  expect_refused("info --markdown", "--status");
}

TEST_F(Cli, SuggestsTheNearestWordForAMistypedOne) {
  expect_refused("compare -m m -f t --cahce int8", "unknown option --cahce; 'kvx compare --help'");
  expect_refused("run -m m --cahce int8", "unknown option --cahce; did you mean --cache?");
  expect_refused("run --modle=m -p x", "unknown option --modle; did you mean --model?");
  expect_refused("cache save -m m --promtp x -o c", "--promtp; did you mean --prompt?");
  expect_refused("comapre", "unknown command comapre; did you mean compare?");
  expect_refused("cache inspct c.kvx", "unknown command inspct; did you mean inspect?");
  expect_refused("fly", "unknown command fly; 'kvx --help' lists them all");
  expect_refused("info now", "argument 'now' was not expected");
}

// What a script's variable that is not set leaves of an option.
TEST_F(Cli, RefusesOptionsThatAreEmpty) {
  for (const char* option : {"--prefix-cache", "--host-tier", "--memory", "--cache"}) {
    expect_refused(fmt::format("run -m m -p x {} ''", option), fmt::format("{}: is ''", option));
  }
  expect_refused("run -m m -p x --host-tier 1GiB --host-tier-folder ''",
                 "--host-tier-folder: is ''");
  expect_refused("compare -m m -f t --json ''", "--json: is ''");
  expect_refused("bench --csv ''", "--csv: is ''");
  expect_refused("replay --generate 10 --html ''", "--html: is ''");
  expect_refused("cache save -m m -f '' -o c.kvx", "--file: is ''");
}

TEST_F(Cli, RefusesNumbersOutOfRange) {
  expect_refused("compare -m m -f t --ctx 0", "--ctx: is '0'; expected a whole number from 4");
  expect_refused("compare -m m -f t --ctx two", "--ctx: is 'two'");
  expect_refused("compare -m m -f t --chunks 0", "--chunks: is '0'");
  expect_refused("run -m m -p x -n -1", "--tokens: is '-1'");
  expect_refused("bench --heads 0", "--heads: is '0'");
  expect_refused("bench --block-size 1025", "--block-size: is '1025'");
  expect_refused("bench --lengths 64,x", "--lengths: is 'x'");
  expect_refused("bench --min-seconds nan", "--min-seconds: is 'nan'; expected a number from 0 to");
  expect_refused("bench abi --tokens-per-seq 0", "--tokens-per-seq: is '0'");
  expect_refused("bench abi --lengths 8 --tokens-per-seq 16", "tokens-per-seq is 16");
  expect_refused("bench abi --head-dim 12", "head-dim is 12");
  expect_refused("bench abi --layouts nhd,dhn", "dhn");
  expect_refused("bench abi --iters -1", "--iters");
}

TEST_F(Cli, RefusesCachesThatDoNotExist) {
  expect_refused("compare -m m -f t --formats bf16,int9", "format is 'int9'; expected one of f32");
  expect_refused("compare -m m -f t --formats nvfp4:serach", "option is 'serach'");
  expect_refused("compare -m m -f t --layers 0=int9", "int9");
  expect_refused("compare -m m -f t --heads 0=int8", "layer:head");
  expect_refused("run -m m -p x --cache int8/int4/int4", "int8/int4/int4");
  expect_refused("bench --formats nvfp4 --head-dim 40 --csv b.csv", "head_dim is 40; nvfp4");
}

TEST_F(Cli, RefusesFilesThatAreNotThere) {
  expect_refused("compare -f t", "--model");
  expect_refused("compare -m missing.gguf -f /dev/null --json r.json", "missing.gguf");
  expect_refused("run -m missing.gguf -p x", "missing.gguf");
  expect_refused("run -m . -p x", "'.'");
}

TEST_F(Cli, RefusesTargetsBeforeItBeginsToWork) {
  expect_refused("compare -m m -f t --json missing/r.json", "json is 'missing/r.json'");
  expect_refused("compare -m m -f t --html .", "html is '.'");
  expect_refused("bench --csv missing/b.csv", "csv is 'missing/b.csv'");
}

TEST_F(Cli, RefusesTwoReportsInOneFile) {
  expect_refused("compare -m m -f t --json r --html ./r", "json and html are both './r'");
  expect_refused("bench --json b --csv b", "json and csv are both 'b'");
  expect_refused("replay --generate 10 --json r --save-trace r", "json and save-trace are both");
}

TEST_F(Cli, RefusesOptionsOfTheOtherDevice) {
  expect_refused("bench --shapes a", "shapes has 'a'; on a CPU expected mlaSEQUENCESxTOKENS");
  expect_refused("bench --shapes mlamixed", "shapes has 'mlamixed'; on a CPU");
  expect_refused("bench --shapes mla1x8h129", "shapes has 'mla1x8h129'; on a CPU");
  expect_refused("bench --shapes ''", "--shapes: is ''");
  expect_refused("bench --shapes mla1x8 --heads 2", "heads and shapes are given");
  expect_refused("bench --formats int8+bf16", "only a latent cache's rows have such");
  expect_refused("bench --shapes mla1x8 --formats int8/int4", "one row for both");
  expect_refused("bench --queries bf16", "queries is given; it needs --device cuda");
  expect_refused("bench --only-attend", "only-attend is given; it needs --device cuda");
  expect_refused("bench --device cuda --lengths 64", "lengths is given; it needs --device cpu");
  expect_refused("bench --device cuda --csv b.csv", "csv is given; it needs --device cpu");
}

TEST_F(Cli, RefusesACpuLevelThatDoesNotExist) {
  const Outcome outcome = kvx("bench", "KVX_CPU=mmx");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("KVX_CPU is mmx"));
}

}  // namespace
}  // namespace kvx::tool
