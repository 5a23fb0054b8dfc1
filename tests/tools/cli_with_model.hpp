// CliWithModel: the tool in a folder that has a tiny model and a text for it.
#pragma once

#include "tests/tools/cli_runner.hpp"
#include "tests/tools/tiny_model.hpp"

namespace kvx::tool {

class CliWithModel : public Cli {
 protected:
  void SetUp() override {
    Cli::SetUp();
    const std::vector<uint8_t> file = tests::tiny_chat_model().file();
    write("model.gguf", {reinterpret_cast<const char*>(file.data()), file.size()});
    write("text.txt", tests::tiny_text(200));
  }
  void write(const char* name, std::string_view content) {
    ASSERT_TRUE(write_file("file", work() / name, content).ok());
  }
};

}  // namespace kvx::tool
