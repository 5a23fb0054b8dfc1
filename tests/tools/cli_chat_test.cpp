// kvx run as a chat on a terminal: editing, commands, ctrl-C, progress.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>

#include "tests/tools/cli_runner.hpp"
#include "tests/tools/pty_runner.hpp"
#include "tests/tools/tiny_model.hpp"

namespace kvx::tool {
namespace {

using ::testing::HasSubstr;

class CliChat : public Cli {
 protected:
  // The tiny model with another context, long enough for an answer that takes seconds.
  void write_model(uint32_t context) {
    std::vector<uint8_t> file = tests::tiny_chat_model().file();
    constexpr std::string_view kKey = "llama.context_length";
    const auto at = std::search(file.begin(), file.end(), kKey.begin(), kKey.end());
    ASSERT_NE(at, file.end());
    std::memcpy(&*at + kKey.size() + sizeof(uint32_t), &context,
                sizeof context);  // behind its type
    ASSERT_TRUE(write_file("file", work() / "model.gguf",
                           {reinterpret_cast<const char*>(file.data()), file.size()})
                    .ok());
  }
  std::vector<std::string> run(std::vector<std::string> options) const {
    std::vector<std::string> arguments = {KVX_TOOL, "run", "-m", "model.gguf"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return arguments;
  }
  static constexpr const char* kControlC = "\x03";
  static constexpr const char* kControlD = "\x04";
  static constexpr const char* kUp = "\x1b[A";
  static constexpr const char* kLeft = "\x1b[D";
};

TEST_F(CliChat, TakesLinesAndCommandsUntilControlD) {
  write_model(64);
  PtyRunner chat(work().string(), run({"-n", "4"}));
  ASSERT_TRUE(chat.expect("/help lists the commands")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type("/help\n");
  ASSERT_TRUE(chat.expect("print what the cache holds")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type("hello\n");
  ASSERT_TRUE(chat.expect("decode 4 tokens")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type("/cache\n");
  ASSERT_TRUE(chat.expect("of 64 tokens in 1 turn")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type(kControlD);
  EXPECT_EQ(chat.wait(), 0) << chat.screen();
}

TEST_F(CliChat, EditsItsLinesAndRemembersThem) {
  write_model(64);
  PtyRunner chat(work().string(), run({"-n", "4"}));
  ASSERT_TRUE(chat.expect("> "));
  chat.type(std::string("/hlp") + kLeft + kLeft + "e\n");
  ASSERT_TRUE(chat.expect("begin another chat")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type(std::string(kUp) + "\n");
  EXPECT_TRUE(chat.expect("begin another chat")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type(kControlD);
  EXPECT_EQ(chat.wait(), 0);
}

TEST_F(CliChat, ControlCEndsTheAnswerAndNotTheChat) {
  write_model(1 << 20);
  PtyRunner chat(work().string(), run({"--ctx", "200000", "-n", "150000", "--temperature", "1"}));
  ASSERT_TRUE(chat.expect("> "));
  // Into the answer: on a slow machine the prompt is still being read, and the turn is forgotten.
  int found = 1;
  for (useconds_t wait = 300'000; found != 0; wait *= 2) {
    chat.type("hello\r");
    ASSERT_TRUE(chat.expect("hello"));
    ASSERT_TRUE(chat.expect("\n"));
    usleep(wait);
    chat.type(kControlC);
    found = chat.expect_one_of({"decode ", "this turn is forgotten"});
    ASSERT_GE(found, 0) << chat.screen();
    if (found != 0) {
      ASSERT_TRUE(chat.expect("> "));
    }
  }
  ASSERT_TRUE(chat.expect("> "));
  chat.type("/cache\r");
  ASSERT_TRUE(chat.expect("in 1 turn")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type(kControlC);
  ASSERT_TRUE(chat.expect("ctrl-C again ends the chat")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type("/help\r");  // a line between the two: the chat goes on
  ASSERT_TRUE(chat.expect("begin another chat")) << chat.screen();
  ASSERT_TRUE(chat.expect("> "));
  chat.type(kControlC);
  ASSERT_TRUE(chat.expect("ctrl-C again ends the chat"));
  ASSERT_TRUE(chat.expect("> "));
  chat.type(kControlC);
  EXPECT_EQ(chat.wait(), 0) << chat.screen();
}

TEST_F(CliChat, ShowsHowMuchOfAPromptAndOfASaveIsDone) {
  write_model(1 << 14);
  ASSERT_TRUE(write_file("file", work() / "long.txt", tests::tiny_text(2000)).ok());
  PtyRunner save(work().string(),
                 {KVX_TOOL, "cache", "save", "-m", "model.gguf", "-f", "long.txt", "-o", "c.kvx"});
  EXPECT_EQ(save.wait(), 0) << save.screen();
  EXPECT_THAT(save.screen(), HasSubstr("0 %  reading 2000 tokens"));
  EXPECT_THAT(save.screen(), HasSubstr("saving blocks"));
  EXPECT_THAT(save.screen(), HasSubstr("2000 tokens in c.kvx"));
  const Outcome piped = kvx("cache save -m model.gguf -f long.txt -o d.kvx");
  EXPECT_EQ(piped.exit_code, 0);
  EXPECT_EQ(piped.err, "");
}

}  // namespace
}  // namespace kvx::tool
