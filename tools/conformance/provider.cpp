// Loads a provider's library and finds its functions by name.
#include "tools/conformance/provider.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <stdexcept>

#include "tools/conformance/system.hpp"

namespace kvx::conformance {
namespace {

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(symbol_of(library, name));
}

template <class Function>
void find_required(void* library, const char* name, Function& function) {
  find(library, name, function);
  if (function == nullptr) throw std::runtime_error(fmt::format("it does not export {}", name));
}

void find_contiguous(void* library, Provider& provider) {
  find(library, "kvx_contiguous_create", provider.contiguous_create);
  if (provider.contiguous_create == nullptr) return;
  find_required(library, "kvx_contiguous_free", provider.contiguous_free);
  find_required(library, "kvx_contiguous_append", provider.contiguous_append);
  find_required(library, "kvx_contiguous_advance", provider.contiguous_advance);
  find_required(library, "kvx_contiguous_attend", provider.contiguous_attend);
  find_required(library, "kvx_contiguous_gather", provider.contiguous_gather);
  find_required(library, "kvx_contiguous_facts", provider.contiguous_facts);
  find_required(library, "kvx_contiguous_layer", provider.contiguous_layer);
}

void find_turbomind(void* library, Provider& provider) {
  find(library, "kvx_turbomind_layer", provider.turbomind_layer);
  if (provider.turbomind_layer == nullptr) return;
  find_required(library, "kvx_turbomind_block_sizes", provider.turbomind_block_sizes);
  find_required(library, "kvx_turbomind_find_pools", provider.turbomind_find_pools);
  find_required(library, "kvx_turbomind_block_ids", provider.turbomind_block_ids);
}

}  // namespace

Provider load_provider(const std::string& path) {
  // The system's folders are searched for a name without a slash.
  const std::string file = std::filesystem::absolute(path).string();
  void* library = open_library(file);
  if (library == nullptr) throw std::runtime_error(library_problem());
  Provider provider;
  find_required(library, "kvx_get_version", provider.get_version);
  find_required(library, "kvx_validate_cache_desc", provider.validate_cache_desc);
  find_required(library, "kvx_write_kv", provider.write_kv);
  find_required(library, "kvx_gather_kv", provider.gather_kv);
  find(library, "kvx_launch_write_kv", provider.launch_write_kv);
  find(library, "kvx_launch_write_kv_f16", provider.launch_write_kv_f16);
  find(library, "kvx_launch_write_kv_prefill", provider.launch_write_kv_prefill);
  find(library, "kvx_launch_gather_kv", provider.launch_gather_kv);
  find(library, "kvx_launch_gather_kv_f16", provider.launch_gather_kv_f16);
  find(library, "kvx_query_features", provider.query_features);
  find(library, "kvx_last_error", provider.last_error);
  find(library, "kvx_status_name", provider.status_name);
  find(library, "kvx_format_info", provider.format_info);
  find(library, "kvx_page_bytes_per_token", provider.page_bytes_per_token);
  find(library, "kvx_describe_pages", provider.describe_pages);
  find(library, "kvx_append", provider.append);
  find(library, "kvx_gather", provider.gather);
  find(library, "kvx_attend_workspace", provider.attend_workspace);
  find(library, "kvx_attend", provider.attend);
  find(library, "kvx_copy_blocks", provider.copy_blocks);
  find(library, "kvx_transcode", provider.transcode);
  find_contiguous(library, provider);
  find_turbomind(library, provider);
  return provider;
}

}  // namespace kvx::conformance
