// The program from outside with a model, a tiny one: run and compare from end to end, and what they
// refuse.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tests/tools/cli_with_model.hpp"

namespace kvx::tool {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using CliModel = CliWithModel;

TEST_F(CliModel, ComparesCachesAndWritesItsReports) {
  const Outcome outcome =
      kvx("compare -m model.gguf -f text.txt --formats int8,int4:sink=4,recent=8 --ctx 32 "
          "--chunks 2 --block-size 4 --layers 0=bf16 --json r.json --html r.html");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("int4:sink=4,recent=8"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
  const auto json = nlohmann::json::parse(read_file("json", work() / "r.json").value());
  ASSERT_EQ(json["caches"].size(), 3u);
  EXPECT_EQ(json["caches"][0]["name"], "bf16");
  EXPECT_EQ(json["num_scored_tokens"], 2 * 15);
  // Layer 0 is stored in bf16, as the base cache's is.
  EXPECT_EQ(json["caches"][1]["attention_by_layer"][0]["relative_error"], 0);
  EXPECT_GT(json["caches"][1]["attention_by_layer"][1]["relative_error"], 0);
  EXPECT_THAT(read_file("html", work() / "r.html").value(), HasSubstr("int4:sink=4,recent=8"));
}

constexpr const char* kCompareInt4 =
    "compare -m model.gguf -f text.txt --formats int4 --ctx 32 --chunks 1 --block-size 4";

TEST_F(CliModel, EndsWith3WhereAGateFailsAndHasWrittenItsReport) {
  const Outcome outcome = kvx(std::string(kCompareInt4) +
                              " --json r.json --fail-if 'kl>100,logit_cosine<1.01,error>0'");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.err, HasSubstr("kvx: int4: logit_cosine is "));
  EXPECT_THAT(outcome.err, HasSubstr(", which --fail-if error>0 does not allow\n"));
  EXPECT_THAT(outcome.err, Not(HasSubstr("kl>100")));
  EXPECT_THAT(outcome.out, HasSubstr("logit error"));
  const auto json = nlohmann::json::parse(read_file("json", work() / "r.json").value());
  EXPECT_EQ(json["failures"].size(), 2u);
}

TEST_F(CliModel, EndsWith0WhereEveryGateIsKept) {
  const Outcome outcome = kvx(std::string(kCompareInt4) + " --fail-if 'ppl>1000%,kl>100,top1<0%'");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, Not(HasSubstr("logit")));
  EXPECT_THAT(kvx(std::string(kCompareInt4) + " --attention").out, HasSubstr("logit cosine"));
}

TEST_F(CliModel, RefusesGatesThatItDoesNotKnow) {
  expect_refused(std::string(kCompareInt4) + " --fail-if 'speed>1'",
                 "fail_if has 'speed>1'; expected a condition on one of ppl, kl");
}

TEST_F(CliModel, ShowsWhatAStaticScaleClipped) {
  const Outcome outcome = kvx("run -m model.gguf -p 'hello' -n 4 --cache fp8_e4m3 --raw --stats");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("clipped by a static scale: 0 inputs; not finite: 0\n"));
}

TEST_F(CliModel, StressesCachesAndWritesItsReports) {
  const std::vector<uint8_t> file = tests::tiny_chat_model(1024).file();
  write("long.gguf", {reinterpret_cast<const char*>(file.data()), file.size()});
  const std::string command =
      "stress -m long.gguf --cache int8 --cache int4:sink=4,recent=8 --lengths 900 --samples 1 "
      "--drift 40 --block-size 4";
  const Outcome outcome = kvx(command + " --json s.json --html s.html");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(read_file("json", work() / "s.json").value());
  ASSERT_EQ(json["caches"].size(), 3u);
  ASSERT_EQ(json["retrieval"].size(), 3u);
  EXPECT_EQ(json["retrieval"][1]["task"], "needles");
  EXPECT_EQ(json["retrieval"][1]["num_questions"], 8);
  EXPECT_EQ(json["retrieval"][1]["scores"][0]["nll_change"]["value"], 0);
  EXPECT_GT(json["retrieval"][1]["scores"][1]["nll"]["value"], 0);
  ASSERT_EQ(json["drift"].size(), 8u);
  EXPECT_EQ(json["drift"][7]["first_token"], 35);
  EXPECT_EQ(json["drift"][7]["kl"][0]["value"], 0);
  EXPECT_GT(json["drift"][7]["kl"][2]["value"], 0);
  EXPECT_EQ(json["caches"][1]["saturation"]["of_heads"], 4);
  EXPECT_THAT(read_file("html", work() / "s.html").value(), HasSubstr("int4:sink=4,recent=8"));
  EXPECT_EQ(kvx(command + " --threads 1 --json t.json").exit_code, 0);
  auto again = nlohmann::json::parse(read_file("json", work() / "t.json").value());
  EXPECT_EQ(again["retrieval"], json["retrieval"]) << "the same for a seed";
  EXPECT_EQ(again["drift"], json["drift"]);

  const Outcome gated = kvx(command + " --fail-if 'drift>0,nonfinite>0'");
  EXPECT_EQ(gated.exit_code, 3) << gated.err;
  EXPECT_THAT(gated.err, HasSubstr("kvx: int4:sink=4,recent=8: drift is "));
  EXPECT_THAT(gated.err, HasSubstr(", which --fail-if drift>0 does not allow"));
  EXPECT_THAT(gated.err, Not(HasSubstr("bf16: ")));
  EXPECT_EQ(kvx(command + " --fail-if 'drift>100,nonfinite>0'").exit_code, 0);
}

TEST_F(CliModel, RefusesAStressThatTheContextCannotHold) {
  expect_refused("stress -m model.gguf --lengths 64,65",
                 "lengths has 65; expected 16 to 64, the model's context");
  expect_refused("stress -m model.gguf --lengths 64 --drift 1",
                 "drift is 1 tokens; expected at most 0");
  expect_refused("stress -m model.gguf --cache int8 --lengths 20 --drift 0",
                 "20 tokens are too few for the fact of the task passkey");
  expect_refused("stress -m model.gguf --cache int5", "int5");
  expect_refused("stress -m model.gguf --fail-if 'kl>0.01'", "fail_if has 'kl>0.01'");
  expect_refused("stress -m model.gguf --drift 0 --fail-if 'drift>0.01'",
                 "fail-if has drift>0.01 and drift is 0");
}

TEST_F(CliModel, TakesExceptionsMoreThanOnce) {
  const Outcome outcome =
      kvx("compare -m model.gguf -f text.txt --formats int8 --ctx 32 --chunks 1 --block-size 4 "
          "--layers 0=bf16 --layers 1=f16 --heads 0:0=int4 --heads 0:1=bf16");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("exceptions: --layers 0=bf16 --layers 1=f16 --heads 0:0=int4 "
                                     "--heads 0:1=bf16\n"));
}

TEST_F(CliModel, WritesTextToStdoutAndSpeedToStderr) {
  const Outcome outcome = kvx("run -m model.gguf -p 'hello' -n 8 --cache int8 --raw");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, Not(IsEmpty()));
  EXPECT_THAT(outcome.err, HasSubstr("prefill 5 tokens"));
  EXPECT_THAT(outcome.err, HasSubstr("cache int8: "));
}

TEST_F(CliModel, StoresAQuantPolicyInTurboMindsBlocks) {
  const Outcome none = kvx("run -m model.gguf -p 'hello' -n 8 --raw --quant-policy 0");
  ASSERT_EQ(none.exit_code, 0) << none.err;
  EXPECT_EQ(none.out, kvx("run -m model.gguf -p 'hello' -n 8 --raw --cache f16").out);
  const Outcome int8 = kvx("run -m model.gguf -p 'hello' -n 8 --raw --quant-policy 8");
  ASSERT_EQ(int8.exit_code, 0) << int8.err;
  EXPECT_THAT(int8.err, HasSubstr("cache int8_affine:scale=f16,order=turbomind: "));
  EXPECT_EQ(int8.out,
            kvx("run -m model.gguf -p 'hello' -n 8 --raw --cache int8_affine:scale=f16").out);
}

TEST_F(CliModel, RefusesQuantPoliciesThatDoNotFit) {
  const std::string run = "run -m model.gguf -p hello -n 1 --raw ";
  expect_refused(run + "--quant-policy 2", "quant_policy is 2; expected a mask of 4 (int4)");
  expect_refused(run + "--quant-policy 16", "head_dim is 8");
  expect_refused(run + "--quant-policy 8 --cache int8",
                 "cache is 'int8' and quant-policy 8; expected one of the two");
  expect_refused("probe -m model.gguf", "turbomind is not given");
  expect_refused("probe --turbomind -m model.gguf --quant-policy 8", "quant-policy is 8");
}

TEST_F(CliModel, WritesTheSameTextEveryTime) {
  const std::string command = "run -m model.gguf -p 'hello' -n 12 --temperature 1 --seed 3";
  const Outcome first = kvx(command + " --threads 1");
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(kvx(command + " --threads 2").out, first.out);
}

TEST_F(CliModel, BeginsWithTheTokenThatItsModelWantsFirst) {
  tests::GgufWriter model = tests::tiny_chat_model();
  model.u32("tokenizer.ggml.bos_token_id", 2);
  model.value("tokenizer.ggml.add_bos_token", tests::kGgufBool, uint8_t{1});
  const std::vector<uint8_t> file = model.file();
  write("bos.gguf", {reinterpret_cast<const char*>(file.data()), file.size()});
  write("words.txt", "hello\n");
  for (const char* prompt : {"--raw -p hello", "-p hello", ""}) {  // the last one: a chat
    const auto num_fed = [&](const char* name) {
      const std::string err =
          kvx(fmt::format("run -m {} -n 1 {}", name, prompt), "", "words.txt").err;
      int tokens = -1;
      EXPECT_EQ(std::sscanf(err.c_str(), "prefill %d tokens", &tokens), 1) << err;
      return tokens;
    };
    EXPECT_EQ(num_fed("bos.gguf"), num_fed("model.gguf") + 1) << prompt;
  }
}

TEST_F(CliModel, ChatsWithoutAPromptUntilTheInputEnds) {
  const Outcome outcome = kvx("run -m model.gguf -n 4");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

TEST_F(CliModel, AChatWithATurnThatIsTooLongGoesOn) {
  write("chat.txt", "abcdefgh\n" + tests::tiny_text(64) + "\nabc\n");
  const Outcome outcome =
      kvx("run -m model.gguf -n 2 --block-size 4 --prefix-cache c.kvx", "", "chat.txt");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("does not fit the context of 64 tokens: write a shorter one"));
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 2) << outcome.out;
  EXPECT_EQ(kvx("cache verify c.kvx").exit_code, 0);
}

TEST_F(CliModel, AChatThatOutgrowsItsContextForgetsItsFirstTurns) {
  write("chat.txt", "abcdefgh\nijklmnop\nqrstuvwx\nyzabcdef\n");
  const Outcome outcome = kvx("run -m model.gguf -n 2 --block-size 4", "", "chat.txt");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.err,
              HasSubstr("the context of 64 tokens is full: 1 of 3 turns are forgotten"));
  // What is kept is what a chat of these turns alone holds.
  write("last.txt", "qrstuvwx\nyzabcdef\n");
  const Outcome last = kvx("run -m model.gguf -n 2 --block-size 4", "", "last.txt");
  EXPECT_THAT(outcome.out, ::testing::EndsWith(last.out.substr(last.out.find('\n'))));
}

TEST_F(CliModel, AChatHasCommands) {
  write("chat.txt", "/help\nabc\n/cache\n/new\n/cache\n/cahce\n/home/me\n");
  const Outcome outcome = kvx("run -m model.gguf -n 2 --cache int8 --block-size 4", "", "chat.txt");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("/new    begin another chat"));
  EXPECT_THAT(outcome.err, HasSubstr("of 64 tokens in 1 turn\n"));
  EXPECT_THAT(outcome.err, HasSubstr("bytes for these tokens"));
  EXPECT_THAT(outcome.err, HasSubstr("unknown command /cahce; did you mean /cache?"));
  EXPECT_THAT(outcome.err, HasSubstr("0 of 64 tokens in 0 turns"));
  // What begins like a path is said to the model, which has no token for a slash here.
  EXPECT_THAT(outcome.err, HasSubstr("the text has byte 0x2F"));
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 1) << outcome.out;
}

TEST_F(CliModel, ANewChatBeginsWithWhatTheHostTierKept) {
  write("chat.txt", "abcdefgh\n/new\nijklmnop\n/new\nabcdefgh\n");
  const std::string command = "run -m model.gguf -n 4 --cache int8 --block-size 4 --ctx 40";
  const Outcome plain = kvx(command, "", "chat.txt");
  for (const std::string tier : {"--host-tier 1MiB", "--host-tier 1MiB --host-tier-folder ."}) {
    Outcome tiered = kvx(command + " " + tier, "", "chat.txt");
    // A step gives files 100 ms, for which a machine may stall now and then, but not each time.
    for (int i = 0; i < 3 && tiered.err.find("24 of 27 prompt tokens") == std::string::npos; ++i) {
      tiered = kvx(command + " " + tier, "", "chat.txt");
    }
    ASSERT_EQ(tiered.exit_code, 0) << tiered.err;
    EXPECT_EQ(tiered.out, plain.out);
    EXPECT_THAT(tiered.err, HasSubstr("prefix cache: 24 of 27 prompt tokens"));
    EXPECT_THAT(tiered.err, HasSubstr(" went back, 0 bad"));
    EXPECT_THAT(tiered.err, Not(HasSubstr(" 0 went back")));
  }
}

TEST_F(CliModel, RefusesTextsAndPromptsThatDoNotFit) {
  expect_refused("compare -m model.gguf -f missing.txt --ctx 32", "text is 'missing.txt'");
  expect_refused("compare -m model.gguf -f text.txt --ctx 64 --chunks 4 --formats int8 --json r",
                 "200 tokens; 4 windows of 64 need 256");
  expect_refused("compare -m model.gguf -f text.txt --ctx 65",
                 "ctx is 65; the model's context is 64 tokens");
  expect_refused(fmt::format("run -m model.gguf --raw -p '{}'", tests::tiny_text(64)),
                 "prompt has 64 tokens after 0; the context is 64 tokens");
  expect_refused("run -m model.gguf -p x --ctx 65", "ctx is 65");
  expect_refused("run -m model.gguf -p x --seed -1", "--seed: is '-1'; expected a whole number");
  expect_refused("run -m model.gguf -p x --host-tier much", "'much'");
  expect_refused("run -m model.gguf -p x --host-tier 1MiB --host-tier-folder missing", "'missing'");
  expect_refused("run -m model.gguf -p x --host-tier-folder .", "--host-tier");
  expect_refused("run -m model.gguf -p x --memory 1B", "one block needs");
}

TEST_F(CliModel, RefusesAHeadDimThatAFormatCannotStore) {
  expect_refused("compare -m model.gguf -f text.txt --ctx 32 --formats nvfp4 --json r.json",
                 "head_dim is 8; nvfp4 needs a multiple of 16");
  expect_refused("run -m model.gguf -p x --cache mxfp4", "head_dim is 8; mxfp4");
}

TEST_F(CliModel, RefusesLayersAndHeadsThatTheModelHasNot) {
  expect_refused("compare -m model.gguf -f text.txt --ctx 32 --formats int8 --layers 2=bf16", "2");
  expect_refused("compare -m model.gguf -f text.txt --ctx 32 --formats int8 --heads 0:2=bf16", "2");
}

TEST_F(CliModel, RefusesATruncatedModel) {
  const std::string whole = read_file("model", work() / "model.gguf").value();
  write("model.gguf", std::string_view(whole).substr(0, whole.size() / 2));
  expect_refused("run -m model.gguf -p x", "model is 'model.gguf'");
}

// ---- cache files

TEST_F(CliModel, ASavedCacheGoesOnAsTheRunWould) {
  for (const char* cache : {"bf16", "int4:sink=4,recent=8"}) {
    const std::string options = fmt::format("-m model.gguf --block-size 4 --cache {} ", cache);
    const Outcome run = kvx("run " + options + "--raw -p 'hello there my friend' -n 12");
    const Outcome saved =
        kvx("cache save " + options + "--raw -p 'hello there my friend' -o c.kvx --zstd 3");
    ASSERT_EQ(saved.exit_code, 0) << saved.err;
    EXPECT_EQ(saved.out, "21 tokens in c.kvx\n");
    const Outcome loaded = kvx("cache load " + options + "c.kvx -n 12");
    ASSERT_EQ(loaded.exit_code, 0) << loaded.err;
    EXPECT_EQ(loaded.out, run.out);
    EXPECT_EQ(kvx("cache verify c.kvx").exit_code, 0);
    EXPECT_THAT(kvx("cache inspect c.kvx").out, HasSubstr("a sequence of 21 tokens"));
  }
}

TEST_F(CliModel, ASavedCacheIsLoadedAsItsFileSays) {
  for (const std::string cache :
       {"--cache int8 --block-size 4", "--cache int4:g32,search,sink=8,recent=8 --block-size 8",
        "--cache fp8_e4m3/int4_row:v.hadamard,recent=4 --block-size 4",
        "--cache int8 --layers 1=bf16 --heads 0:1=f16 --block-size 4"}) {
    const Outcome saved = kvx(fmt::format(
        "cache save -m model.gguf {} --raw -p 'hello there my friend' -o c.kvx", cache));
    ASSERT_EQ(saved.exit_code, 0) << cache << saved.err;
    const Outcome told = kvx(fmt::format("cache load -m model.gguf {} c.kvx -n 8", cache));
    ASSERT_EQ(told.exit_code, 0) << told.err;
    const Outcome loaded = kvx("cache load -m model.gguf c.kvx -n 8");
    ASSERT_EQ(loaded.exit_code, 0) << cache << loaded.err;
    EXPECT_EQ(loaded.out, told.out) << cache;
    // The printed options load it, too.
    const std::string inspected = kvx("cache inspect c.kvx").out;
    constexpr std::string_view kBefore = "loaded with ";
    const size_t at = inspected.find(kBefore);
    ASSERT_NE(at, std::string::npos) << inspected;
    const std::string options =
        inspected.substr(at + kBefore.size(), inspected.find('\n', at) - at - kBefore.size());
    EXPECT_EQ(kvx(fmt::format("cache load -m model.gguf {} c.kvx -n 8", options)).out, told.out)
        << options;
  }
}

TEST_F(CliModel, PrintsTheOptionsThatLoadACacheFile) {
  const std::string save = "cache save -m model.gguf --raw -p hello -o c.kvx ";
  ASSERT_EQ(kvx(save + "--cache int4:sink=4,recent=8 --block-size 4 --layers 1=bf16").exit_code, 0);
  EXPECT_THAT(
      kvx("cache inspect c.kvx").out,
      HasSubstr("loaded with --cache int4:sink=4,recent=8 --layers 1=bf16 --block-size 4\n"));
}

TEST_F(CliModel, VerifyRefusesTrailingBytes) {
  ASSERT_EQ(kvx("cache save -m model.gguf --raw -p hello -o c.kvx").exit_code, 0);
  write("long.kvx", read_file("file", work() / "c.kvx").value() + "more");
  expect_refused("cache verify long.kvx", "'long.kvx': 4 bytes follow its index; expected none");
}

TEST_F(CliModel, ASaveThroughALinkKeepsTheLink) {
  std::filesystem::create_symlink("target.kvx", work() / "link.kvx");
  ASSERT_EQ(kvx("cache save -m model.gguf --raw -p hello -o link.kvx").exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(work() / "link.kvx"));
  EXPECT_EQ(kvx("cache verify target.kvx").exit_code, 0);
}

TEST_F(CliModel, PruneRemovesWhatAKilledSaveLeft) {
  ASSERT_EQ(kvx("cache save -m model.gguf --raw -p hello -o c.kvx").exit_code, 0);
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  const std::string left = fmt::format("c.kvx.{}.0.tmp", gone);
  write(left.c_str(), "KVXCACHE and a part of a block");
  write("notes.txt", "a text");
  const Outcome pruned = kvx("cache prune .");
  EXPECT_EQ(pruned.exit_code, 0) << pruned.err;
  EXPECT_THAT(pruned.out, HasSubstr(left));
  EXPECT_THAT(pruned.out, HasSubstr("1 abandoned file, 30 bytes"));
  EXPECT_FALSE(std::filesystem::exists(work() / left));
  EXPECT_EQ(kvx("cache verify c.kvx").exit_code, 0);
  EXPECT_THAT(kvx("cache prune c.kvx").out, HasSubstr("0 abandoned files"));
  expect_refused("cache prune missing/c.kvx", "folder 'missing' cannot be read");
}

TEST_F(CliModel, SaysWhatIsWrongWithACacheFile) {
  ASSERT_EQ(kvx("cache save -m model.gguf --block-size 4 -f text.txt --ctx 32 -o c.kvx").exit_code,
            2);  // 200 tokens
  write("short.txt", "hello there");
  ASSERT_EQ(kvx("cache save -m model.gguf --block-size 4 -f short.txt -o c.kvx").exit_code, 0);
  expect_refused("cache load -m model.gguf --block-size 8 c.kvx", "block_size is 4; expected 8");
  expect_refused("cache load -m model.gguf --block-size 4 --cache int8 c.kvx", "layers_from_0");
  const Outcome transcoded =
      kvx("cache load -m model.gguf --block-size 8 --cache int8 --transcode c.kvx -n 4");
  EXPECT_EQ(transcoded.exit_code, 0) << transcoded.err;
  expect_refused("cache load -m model.gguf none.kvx", "No such file");
  expect_refused("cache save -m model.gguf --raw -p '' -o e.kvx", "the prompt is empty");
  expect_refused("cache inspect model.gguf", "it is no cache file");
  std::string bytes = read_file("file", work() / "c.kvx").value();
  bytes[100] = static_cast<char>(bytes[100] ^ 1);
  write("bad.kvx", bytes);
  expect_refused("cache verify bad.kvx",
                 "block copies are bad; block 0: a block copy's checksum is");
  expect_refused("cache load -m model.gguf bad.kvx", "checksum");
}

TEST_F(CliModel, ASecondRunBeginsWithTheFirstOnesBlocks) {
  const std::string command =
      "run -m model.gguf --block-size 4 --raw -p 'hello there my friend' -n 8";
  const Outcome plain = kvx(command);
  const Outcome first = kvx(command + " --prefix-cache p.kvx");
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.err, HasSubstr("prefix cache: 0 of 21 prompt tokens"));
  const Outcome second = kvx(command + " --prefix-cache p.kvx");
  ASSERT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(second.err, HasSubstr("prefix cache: 20 of 21 prompt tokens"));
  EXPECT_EQ(first.out, plain.out);
  EXPECT_EQ(second.out, plain.out);
  expect_refused("run -m model.gguf -p hello --prefix-cache model.gguf", "it is no cache file");
}

TEST_F(CliModel, ReplaysATraceAndWritesItsChart) {
  const Outcome outcome =
      kvx("replay --generate 300 --blocks 100,1000 --host-blocks 500 --bytes-per-token 23040 "
          "--save-trace t.jsonl --html r.html --json r.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("prefill saved %"));
  const auto json = nlohmann::json::parse(read_file("json", work() / "r.json").value());
  EXPECT_EQ(json["runs"].size(), 8u);  // four policies, two sizes
  EXPECT_THAT(read_file("html", work() / "r.html").value(), HasSubstr("generated, seed 1"));
  // The same trace from a file gives the same table.
  EXPECT_EQ(kvx("replay t.jsonl --blocks 100,1000 --host-blocks 500 --bytes-per-token 23040").out,
            outcome.out);
  expect_refused("replay model.gguf", "line 1 of the trace");
}

}  // namespace
}  // namespace kvx::tool
