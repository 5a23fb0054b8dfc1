// docs/abi.md describes every function of the header.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "tests/support/find_words.hpp"

namespace {

using kvx::tests::find_words;

std::string text_of(const std::string& path) {
  std::ifstream file(KVX_SOURCE_DIR "/" + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::set<std::string> functions_of(const std::string& header) {
  return find_words(header, R"(KVX_API[^;(]*\b(kvx_\w+)\()");
}

TEST(Manual, DescribesEveryFunctionOfTheHeader) {
  const std::set<std::string> functions = functions_of(text_of("include/kvx/kvx_abi.h"));
  const std::string manual = text_of("docs/abi.md");
  EXPECT_THAT(functions, testing::Contains("kvx_write_kv"));
  const std::set<std::string> described = find_words(manual, "`(kvx_\\w+)[`(]");
  for (const std::string& name : functions) {
    EXPECT_TRUE(described.contains(name)) << name << " is not in docs/abi.md";
  }
}

TEST(Manual, NamesNoFunctionThatTheHeaderHasNot) {
  const std::set<std::string> functions = functions_of(text_of("include/kvx/kvx_abi.h"));
  const std::string manual = text_of("docs/abi.md");
  for (const std::string& call : find_words(manual, R"(`(kvx_\w+)\()")) {
    EXPECT_TRUE(functions.contains(call)) << call;
  }
}

}  // namespace
