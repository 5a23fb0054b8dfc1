// What kvx says about its formats, all of it read from their facts: the table of `kvx formats` and
// the page docs/formats.md.
#pragma once

#include <string>

namespace kvx::tool {

std::string formats_text(bool color);

// docs/formats.md, byte for byte.
std::string formats_markdown();

// The grammar of a recipe and its options.
std::string recipe_help();

}  // namespace kvx::tool
