// The pages that the tool prints are the ones that docs/ holds.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sstream>

#include "tools/kvx/files.hpp"
#include "tools/kvx/format_pages.hpp"
#include "tools/kvx/status_page.hpp"

namespace kvx::tool {
namespace {

std::string doc(const std::string& name) {
  const auto content = read_file("page", fmt::format(KVX_SOURCE_DIR "/docs/{}", name));
  return content.ok() ? content.value() : content.error().message;
}

TEST(Pages, FormatsIsWhatTheToolPrints) {
  EXPECT_EQ(doc("formats.md"), formats_markdown())
      << "renew it: kvx formats --markdown > docs/formats.md";
}

TEST(Pages, StatusIsWhatTheToolPrints) {
  EXPECT_EQ(doc("status.md"), status_markdown())
      << "renew it: kvx info --status --markdown > docs/status.md";
}

// A code block of the README is indented by four spaces, code in main by two.
TEST(Pages, TheReadmesExampleIsTheProgramThatRuns) {
  const auto program = read_file("example", KVX_SOURCE_DIR "/examples/paged_cache/paged_cache.cpp");
  const auto readme = read_file("README", KVX_SOURCE_DIR "/README.md");
  ASSERT_TRUE(program.ok() && readme.ok());
  std::istringstream lines(program.value());
  std::string shown;
  bool is_shown = false;
  for (std::string line; std::getline(lines, line);) {
    if (line == "  // end README") is_shown = false;
    if (is_shown) shown += line.empty() ? "\n" : fmt::format("  {}\n", line);
    if (line == "  // begin README") is_shown = true;
  }
  ASSERT_FALSE(shown.empty());
  EXPECT_NE(readme.value().find(shown), std::string::npos) << shown;
}

}  // namespace
}  // namespace kvx::tool
