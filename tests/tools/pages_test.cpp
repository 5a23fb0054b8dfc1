// The pages that the tool prints are the ones that docs/ holds.
#include <fmt/format.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace kvx::tool
