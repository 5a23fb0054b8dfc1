// Any text is a recipe or an error with a message. A cache can store what was accepted.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "format/spec.hpp"
#include "kv/recipe.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void check_side(const kvx::kv::SideRecipe& side) {
  require(side.spec.facts != nullptr);
  for (int head_dim : {64, 80, 128, 576}) {
    if (!kvx::format::check_head_dim(side.spec, head_dim).ok()) continue;
    require(kvx::format::code_bytes_per_row(side.spec, head_dim) > 0);
    require(kvx::format::bits_per_value(side.spec, head_dim, 64) >= 2);
  }
}

void check_recipe(const kvx::kv::Recipe& recipe) {
  check_side(recipe.k);
  check_side(recipe.v);
  require(recipe.sink_tokens >= 0 && recipe.recent_tokens >= 0);
}

template <class Result>
void check_override(const Result& result) {
  if (!result.ok()) {
    require(!result.error().message.empty());
    return;
  }
  require(!result.value().where.empty());
  check_recipe(result.value().recipe);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto recipe = kvx::kv::parse_recipe(text);
  if (recipe.ok()) {
    require(recipe.value().text == text);
    check_recipe(recipe.value());
  } else {
    require(!recipe.error().message.empty());
  }
  check_override(kvx::kv::parse_layer_override(text));
  check_override(kvx::kv::parse_head_override(text));
  return 0;
}
