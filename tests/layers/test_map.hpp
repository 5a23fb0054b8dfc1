// The size of the folders of src/, and tests/README.md: the page that lists where the tests of a
// source file are.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvx::layers {

// Names every folder of src/ that directly holds more files than `most`: "src/ops holds 26 files;
// expected at most 25".
std::vector<std::string> find_large_folders(const std::filesystem::path& root, int most);

// Compares tests/README.md with the tree and returns one line per difference:
//   - a folder of src/ with files, or a .cpp file of src/ without a test of its own name, that the
//     page does not list
//   - a path on the page that does not exist
//   - rows that are not in alphabetical order
// src/a/b/x.cpp has a test of its own name in tests/a/b/x_test.cpp or tests/a/x_test.cpp.
std::vector<std::string> find_map_errors(const std::filesystem::path& root);

}  // namespace kvx::layers
