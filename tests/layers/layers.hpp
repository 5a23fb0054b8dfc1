// The table of which folder may include which, and a checker that compares a tree with it.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace kvx::layers {

// folder -> folders whose headers it may include. Its own headers are always allowed; "kvx" stands
// for include/kvx.
using AllowedEdges = std::map<std::string, std::set<std::string>>;

const AllowedEdges& allowed_edges();

// One line a forbidden #include: "src/core/a.hpp:3: core must not include tier/b.hpp".
// A folder with sources that is not in the table is a violation as well.
std::vector<std::string> find_violations(const std::filesystem::path& root,
                                         const AllowedEdges& allowed);

}  // namespace kvx::layers
