// Any bytes are a tuned recipe's file or an error with a message. What was accepted is written as
// it was read, and a cache can be made of it.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "tune/tuned_recipe.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = kvx::tune::parse_tune_file({data, size});
  if (!file.ok()) {
    require(!file.error().message.empty());
    return 0;
  }
  const auto bytes = kvx::tune::encode_tune_file(file.value());
  require(bytes.ok());
  const auto again = kvx::tune::parse_tune_file(bytes.value());
  require(again.ok() && again.value().recipe == file.value().recipe);
  require(kvx::tune::encode_tune_file(again.value()).value() == bytes.value());
  const auto recipe = kvx::tune::recipe_of_file(
      std::make_shared<const kvx::tune::TuneFile>(file.value()), ",sink=1,recent=16");
  require(recipe.ok());
  kvx::kv::KvCacheConfig config;
  config.geometry = file.value().geometry;
  if (file.value().block_size != 0) config.block_size = file.value().block_size;
  require(kvx::tune::use_recipe(recipe.value(), config).ok());
  return 0;
}
