// temporary_path: a file's or a folder's name that no other process of these tests has.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

namespace kvx::tests {

inline std::string temporary_path(const std::string& name) {
  return testing::TempDir() + name + "-" + std::to_string(getpid());
}

}  // namespace kvx::tests
