// kvx_recipe_info: what a recipe string means for rows of given head_dims.
#include <algorithm>
#include <cstring>

#include "api/call.hpp"
#include "api/guard.hpp"
#include "tune/tuned_recipe.hpp"

namespace kvx::boundary {
namespace {

// Codes and scales of one row.
Result<uint64_t> row_bytes(const format::FormatSpec& spec, uint32_t head_dim) {
  const int dim = static_cast<int>(std::min<uint32_t>(head_dim, INT32_MAX));
  KVX_RETURN_IF_ERROR(format::check_head_dim(spec, dim));
  return static_cast<uint64_t>(format::code_bytes_per_row(spec, dim)) +
         static_cast<uint64_t>(format::scale_bytes_per_row(spec, dim));
}

uint32_t number_of_format(const format::FormatSpec& spec) {
  return static_cast<uint32_t>(spec.facts->id) + 1;  // the C ABI counts formats from 1
}
static_assert(static_cast<uint32_t>(format::FormatId::kF32) + 1 == KVX_FORMAT_F32);
static_assert(static_cast<uint32_t>(format::FormatId::kNvfp4) + 1 == KVX_FORMAT_NVFP4);

Status recipe_info(const char* text, uint32_t k_head_dim, uint32_t v_head_dim,
                   kvx_recipe_info_t* info) {
  if (text == nullptr) return invalid_argument("recipe is null");
  if (info == nullptr) return invalid_argument("info is null");
  if (info->size < sizeof(uint32_t)) {
    return invalid_argument("info.size is {}; expected at least {}", info->size, sizeof(uint32_t));
  }
  KVX_ASSIGN_OR_RETURN(const tune::CacheRecipe read, tune::read_recipe(text));
  const kv::Recipe& recipe = read.recipe;
  KVX_RETURN_IF_ERROR(kv::check_no_rotary(recipe));
  KVX_ASSIGN_OR_RETURN(const uint64_t k_bytes, row_bytes(recipe.k.spec, k_head_dim));
  KVX_ASSIGN_OR_RETURN(const uint64_t v_bytes, row_bytes(recipe.v.spec, v_head_dim));
  kvx_recipe_info_t answer{};
  answer.size = std::min<uint32_t>(info->size, sizeof answer);
  answer.k_format = number_of_format(recipe.k.spec);
  answer.v_format = number_of_format(recipe.v.spec);
  answer.k_has_hadamard = recipe.k.hadamard;
  answer.v_has_hadamard = recipe.v.hadamard;
  answer.bytes_per_token = k_bytes + v_bytes;
  if (recipe.has_full_precision_window) {
    const format::FormatSpec& window = recipe.full_precision_spec;
    KVX_ASSIGN_OR_RETURN(const uint64_t window_k_bytes, row_bytes(window, k_head_dim));
    KVX_ASSIGN_OR_RETURN(const uint64_t window_v_bytes, row_bytes(window, v_head_dim));
    answer.window_format = number_of_format(window);
    answer.sink_tokens = static_cast<uint32_t>(recipe.sink_tokens);
    answer.recent_tokens = static_cast<uint32_t>(recipe.recent_tokens);
    answer.window_bytes_per_token = window_k_bytes + window_v_bytes;
  }
  memcpy(info, &answer, answer.size);
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_recipe_info(const char* recipe, uint32_t k_head_dim,
                                        uint32_t v_head_dim, kvx_recipe_info_t* info) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::recipe_info(recipe, k_head_dim, v_head_dim, info); });
}
