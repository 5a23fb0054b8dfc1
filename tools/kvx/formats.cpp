// kvx formats: the list of formats, their sizes and options.
#include <cstdio>

#include "tools/kvx/command.hpp"
#include "tools/kvx/format_pages.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {

void add_formats(Command app, Action& action) {
  Command command = app.add_subcommand("formats", "List the formats, their sizes and options");
  auto as_markdown = std::make_shared<bool>(false);
  command.add_flag("--markdown", *as_markdown, "Print the page docs/formats.md");
  command.footer(recipe_help() +
                 "\nExamples:\n"
                 "  kvx formats\n"
                 "  kvx formats --markdown > docs/formats.md\n");
  command.callback([&action, as_markdown] {
    action = [as_markdown]() -> Status {
      fmt::print("{}", *as_markdown ? formats_markdown() : formats_text(wants_color(stdout)));
      return {};
    };
  });
}

}  // namespace kvx::tool
