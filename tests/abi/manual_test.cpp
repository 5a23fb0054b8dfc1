// docs/abi.md describes every function of the header.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(KVX_SOURCE_DIR "/" + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::set<std::string> functions_of(const std::string& header) {
  const std::regex function(R"(KVX_API[^;(]*\b(kvx_\w+)\()");
  std::set<std::string> names;
  for (std::sregex_iterator it(header.begin(), header.end(), function), end; it != end; ++it) {
    names.insert((*it)[1]);
  }
  return names;
}

TEST(Manual, DescribesEveryFunctionOfTheHeader) {
  const std::set<std::string> functions = functions_of(text_of("include/kvx/kvx_abi.h"));
  const std::string manual = text_of("docs/abi.md");
  EXPECT_THAT(functions, testing::Contains("kvx_write_kv"));
  for (const std::string& name : functions) {
    const std::regex word("`" + name + "[`(]");
    EXPECT_TRUE(std::regex_search(manual, word)) << name << " is not in docs/abi.md";
  }
}

TEST(Manual, NamesNoFunctionThatTheHeaderHasNot) {
  const std::set<std::string> functions = functions_of(text_of("include/kvx/kvx_abi.h"));
  const std::string manual = text_of("docs/abi.md");
  const std::regex call(R"(`(kvx_\w+)\()");
  for (std::sregex_iterator it(manual.begin(), manual.end(), call), end; it != end; ++it) {
    EXPECT_TRUE(functions.contains((*it)[1])) << (*it)[1];
  }
}

}  // namespace
