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
};

// Loads a provider. Throws std::runtime_error with the reason when that fails. The library stays
// loaded.
Provider load_provider(const std::string& path);

}  // namespace kvx::conformance
