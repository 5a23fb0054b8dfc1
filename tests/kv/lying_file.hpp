// A cache file whose checksums hold and whose block size is not its fingerprint's.
#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tier/cache_file.hpp"

namespace kvx::kv {

// Makes it of a file that a cache saved: one block of 1024 tokens without block copies.
inline void lie_about_block_size(const std::string& path) {
  tier::FileIndex index = tier::CacheFileReader::open(path).value().index();
  index.block_size = 1024;
  std::vector<int32_t> tokens(1024);
  std::iota(tokens.begin(), tokens.end(), 0);
  index.blocks = {{-1, std::move(tokens), {}}};
  index.sequences = {0};
  ASSERT_TRUE(tier::CacheFileWriter::create(path, 0).value().finish(index).ok());
}

}  // namespace kvx::kv
