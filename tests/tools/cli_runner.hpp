// Runs the program kvx as a user does, in a folder of its own, and keeps what it said and left.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/temporary_path.hpp"
#include "tools/kvx/files.hpp"

namespace kvx::tool {

struct Outcome {
  int exit_code;
  std::string out;
  std::string err;
};

class Cli : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ =
        tests::temporary_path(std::string("kvx_cli_") + test->test_suite_name() + test->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ / "work");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // arguments: as typed into a shell whose current folder is work(); environment: "A=1 B=2"; input:
  // a file.
  Outcome kvx(const std::string& arguments, const std::string& environment = "",
              const std::string& input = "/dev/null") {
    const std::string out = (folder_ / "out").string();
    const std::string err = (folder_ / "err").string();
    const std::string command =
        fmt::format("cd '{}' && {} '{}' {} >'{}' 2>'{}' <'{}'", work().string(), environment,
                    KVX_TOOL, arguments, out, err, input);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file("out", out).value(),
            read_file("err", err).value()};
  }

  std::filesystem::path work() const { return folder_ / "work"; }

  int num_files() const {
    return static_cast<int>(std::distance(std::filesystem::directory_iterator(work()), {}));
  }

  // Bad input: exit code 2, one line on stderr that holds `part`, nothing on stdout, nothing left.
  void expect_refused(const std::string& arguments, const std::string& part) {
    const int files_before = num_files();
    const Outcome outcome = kvx(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_NE(outcome.err.find(part), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_EQ(num_files(), files_before) << arguments;
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace kvx::tool
