// plan_text: a budget's plan, as a table of its layers and a picture of their heads.
#pragma once

#include <string>

#include "tools/kvx/tune/assignment.hpp"

namespace kvx::tool {

// One row a layer: its formats, bits and errors. Where heads were widened one by one, a picture
// follows: a row a layer, a head's bits as a number and its error as a shade.
std::string plan_text(const Assignment& plan, bool color);

}  // namespace kvx::tool
