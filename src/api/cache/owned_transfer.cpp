// kvx_sequence_export, kvx_sequence_export_layers, kvx_export_* and kvx_sequence_import: sequences
// of another process.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"
#include "api/handle_map.hpp"
#include "transfer/sequence_export.hpp"
#include "transfer/sequence_import.hpp"

namespace kvx::boundary {
namespace {

using Exports = HandleMap<kvx_export_t, transfer::SequenceExport>;

// Never destroyed: when the process ends, an offer's thread may end before static objects do.
Exports& exports() {
  static auto* const all = new Exports;
  return *all;
}

Result<transfer::SequenceExport*> find_export(kvx_export_t handle) {
  if (handle == nullptr) return invalid_argument("offer is null");
  transfer::SequenceExport* const found = exports().find(handle);
  if (found == nullptr) return invalid_argument("offer is not a handle, or was freed");
  return found;
}

Status export_sequence(kvx_cache_t handle, int32_t sequence, const char* endpoint,
                       kvx_export_t* offer) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  if (offer == nullptr) return invalid_argument("offer is null");
  transfer::ExportOptions options;
  if (endpoint != nullptr) options.endpoint = endpoint;
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<transfer::SequenceExport> made,
                       transfer::SequenceExport::create(*owned->cache, index, options));
  *offer = exports().add(std::move(made));
  return {};
}

Status export_layers(kvx_cache_t handle, int32_t sequence, const int32_t* tokens,
                     int64_t num_tokens, const char* endpoint, kvx_export_t* offer) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  if (offer == nullptr) return invalid_argument("offer is null");
  if (tokens == nullptr) return invalid_argument("tokens is null");
  if (num_tokens < 0 || num_tokens > kv::kMaxTokens) {
    return invalid_argument("num_tokens is {}; expected 1 to {}", num_tokens, kv::kMaxTokens);
  }
  transfer::ExportOptions options;
  if (endpoint != nullptr) options.endpoint = endpoint;
  KVX_ASSIGN_OR_RETURN(
      std::unique_ptr<transfer::SequenceExport> made,
      transfer::SequenceExport::create_by_layer(
          *owned->cache, index, {tokens, static_cast<size_t>(num_tokens)}, options));
  *offer = exports().add(std::move(made));
  return {};
}

Status export_info(kvx_export_t handle, kvx_export_info_t* caller) {
  KVX_ASSIGN_OR_RETURN(const transfer::SequenceExport* offer, find_export(handle));
  const transfer::ExportState state = offer->state();
  kvx_export_info_t answer{};
  answer.endpoint = offer->endpoint();
  answer.bytes = state.bytes;
  answer.bytes_sent = state.bytes_sent;
  answer.num_taken = state.num_taken;
  answer.num_refused = state.num_refused;
  answer.num_layers = state.num_layers;
  answer.num_layers_there = state.num_layers_there;
  answer.is_broken = state.problem.empty() ? 0 : 1;
  return write_struct(answer, caller, "info");
}

Status export_wait(kvx_export_t handle, int64_t timeout_ms, uint32_t* is_taken) {
  KVX_ASSIGN_OR_RETURN(const transfer::SequenceExport* offer, find_export(handle));
  if (is_taken == nullptr) return invalid_argument("is_taken is null");
  constexpr int64_t kDay = int64_t{1000} * 3600 * 24;
  if (timeout_ms < 0 || timeout_ms > kDay) {
    return invalid_argument("timeout_ms is {}; expected 0 to {}", timeout_ms, kDay);
  }
  *is_taken = offer->wait(timeout_ms) ? 1 : 0;
  return {};
}

Status import_sequence(kvx_cache_t handle, const kvx_import_options_t* caller, int32_t* sequence,
                       kvx_import_report_t* caller_report) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const kvx_import_options_t args, read_struct(caller, "options"));
  if (args.flags > KVX_LOAD_TRANSCODE) {
    return invalid_argument("options.flags is {:#x}; expected KVX_LOAD_* alone", args.flags);
  }
  if (sequence == nullptr) return invalid_argument("sequence is null");
  if (caller_report != nullptr) KVX_RETURN_IF_ERROR(check_out_struct(caller_report, "report"));
  transfer::ImportOptions options;
  if (args.endpoint != nullptr) options.endpoint = args.endpoint;
  if (args.timeout_ms != 0) options.timeout_ms = args.timeout_ms;
  options.may_transcode = args.flags == KVX_LOAD_TRANSCODE;
  if (args.num_kv_heads != 0 || args.first_kv_head != 0) {
    const int own = owned->cache->config().geometry.num_kv_heads;
    if (args.first_kv_head < 0 || args.num_kv_heads < own ||
        args.first_kv_head > args.num_kv_heads - own) {
      return invalid_argument(
          "options.first_kv_head is {} of {}; expected room for this cache's {} from there on",
          args.first_kv_head, args.num_kv_heads, own);
    }
    options.heads = {args.first_kv_head, args.first_kv_head + own, args.num_kv_heads};
  }
  transfer::ImportReport report;
  KVX_ASSIGN_OR_RETURN(const int index, transfer::import_sequence(*owned->cache, options, &report));
  *sequence = owned->numbers.number_of(index);
  if (caller_report == nullptr) return {};
  kvx_import_report_t answer{};
  answer.is_shared = report.was_shared ? 1 : 0;
  answer.bytes = report.bytes;
  answer.num_asked_again = report.num_asked_again;
  return write_struct(answer, caller_report, "report");
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_sequence_export(kvx_cache_t cache, int32_t sequence,
                                            const char* endpoint, kvx_export_t* offer) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::export_sequence(cache, sequence, endpoint, offer); });
}

extern "C" kvx_status_t kvx_sequence_export_layers(kvx_cache_t cache, int32_t sequence,
                                                   const int32_t* tokens, int64_t num_tokens,
                                                   const char* endpoint, kvx_export_t* offer) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::export_layers(cache, sequence, tokens, num_tokens, endpoint, offer);
  });
}

extern "C" kvx_status_t kvx_export_info(kvx_export_t offer, kvx_export_info_t* info) {
  return kvx::boundary::run_call([&] { return kvx::boundary::export_info(offer, info); });
}

extern "C" kvx_status_t kvx_export_wait(kvx_export_t offer, int64_t timeout_ms,
                                        uint32_t* is_taken) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::export_wait(offer, timeout_ms, is_taken); });
}

extern "C" void kvx_export_free(kvx_export_t offer) {
  (void)kvx::boundary::exports().remove(offer,
                                        [](const kvx::transfer::SequenceExport&) { return true; });
}

extern "C" kvx_status_t kvx_sequence_import(kvx_cache_t cache, const kvx_import_options_t* options,
                                            int32_t* sequence, kvx_import_report_t* report) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::import_sequence(cache, options, sequence, report); });
}
