// Provider: a shared library with the functions of the C ABI's header.
#pragma once

#include <kvx/kvx_abi.h>

#include <string>

namespace kvx::conformance {

using WriteFunction = decltype(&kvx_write_kv);
using GatherFunction = decltype(&kvx_gather_kv);

// The four functions of KVX v1 are always there; the others are null where the library has none.
struct Provider {
  decltype(&kvx_get_version) get_version = nullptr;
  decltype(&kvx_validate_cache_desc) validate_cache_desc = nullptr;
  WriteFunction write_kv = nullptr;
  GatherFunction gather_kv = nullptr;

  WriteFunction launch_write_kv = nullptr;
  WriteFunction launch_write_kv_f16 = nullptr;
  decltype(&kvx_launch_write_kv_prefill) launch_write_kv_prefill = nullptr;
  GatherFunction launch_gather_kv = nullptr;
  GatherFunction launch_gather_kv_f16 = nullptr;
  decltype(&kvx_query_features) query_features = nullptr;
  decltype(&kvx_last_error) last_error = nullptr;
  decltype(&kvx_status_name) status_name = nullptr;

  // The verbs of 1.2, on layers in the caller's memory.
  decltype(&kvx_format_info) format_info = nullptr;
  decltype(&kvx_page_bytes_per_token) page_bytes_per_token = nullptr;
  decltype(&kvx_describe_pages) describe_pages = nullptr;
  decltype(&kvx_append) append = nullptr;
  decltype(&kvx_gather) gather = nullptr;
  decltype(&kvx_attend_workspace) attend_workspace = nullptr;
  decltype(&kvx_attend) attend = nullptr;
  decltype(&kvx_copy_blocks) copy_blocks = nullptr;
  decltype(&kvx_transcode) transcode = nullptr;

  // Contiguous caches, all or none.
  decltype(&kvx_contiguous_create) contiguous_create = nullptr;
  decltype(&kvx_contiguous_free) contiguous_free = nullptr;
  decltype(&kvx_contiguous_append) contiguous_append = nullptr;
  decltype(&kvx_contiguous_advance) contiguous_advance = nullptr;
  decltype(&kvx_contiguous_attend) contiguous_attend = nullptr;
  decltype(&kvx_contiguous_gather) contiguous_gather = nullptr;
  decltype(&kvx_contiguous_facts) contiguous_facts = nullptr;
  decltype(&kvx_contiguous_layer) contiguous_layer = nullptr;

  // TurboMind's pools, all or none.
  decltype(&kvx_turbomind_block_sizes) turbomind_block_sizes = nullptr;
  decltype(&kvx_turbomind_layer) turbomind_layer = nullptr;
  decltype(&kvx_turbomind_find_pools) turbomind_find_pools = nullptr;
  decltype(&kvx_turbomind_block_ids) turbomind_block_ids = nullptr;
};

// Loads a provider. Throws std::runtime_error with the reason when that fails. The library stays
// loaded.
Provider load_provider(const std::string& path);

}  // namespace kvx::conformance
