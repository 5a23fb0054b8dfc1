// kvx_launch_*: the v1 calls, restricted to one element type where the name has one.
#include "api/call.hpp"
#include "api/guard.hpp"
#include "api/v1/gather_kv.hpp"
#include "api/v1/write_kv.hpp"

namespace kvx::boundary {
namespace {

Status write_prefill(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                     int32_t tokens_per_seq, std::optional<Element> only, void* stream) {
  KVX_RETURN_IF_ERROR(check_top_level(cache, "cache"));
  KVX_RETURN_IF_ERROR(check_top_level(write, "write"));
  const int64_t num_tokens = write->io.num_tokens;
  if (tokens_per_seq <= 0 || num_tokens % tokens_per_seq != 0) {
    return invalid_argument("tokens_per_seq is {}; expected a positive divisor of io.num_tokens {}",
                            tokens_per_seq, num_tokens);
  }
  return write_kv(cache, write, only, stream);
}

}  // namespace
}  // namespace kvx::boundary

// `suffix` of a function's name and the type that it is restricted to.
#define KVX_FOR_EACH_LAUNCH(FORM)          \
  FORM(, std::nullopt)                     \
  FORM(_f32, kvx::boundary::Element::kF32) \
  FORM(_f16, kvx::boundary::Element::kF16) \
  FORM(_bf16, kvx::boundary::Element::kBF16)

#define KVX_LAUNCH_FUNCTIONS(suffix, only)                                                         \
  extern "C" kvx_status_t kvx_launch_write_kv##suffix(                                             \
      const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, void* stream) {                \
    return kvx::boundary::run_call(                                                                \
        [&] { return kvx::boundary::write_kv(cache, write, only, stream); });                      \
  }                                                                                                \
  extern "C" kvx_status_t kvx_launch_write_kv_prefill##suffix(                                     \
      const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, int32_t tokens_per_seq,        \
      void* stream) {                                                                              \
    return kvx::boundary::run_call(                                                                \
        [&] { return kvx::boundary::write_prefill(cache, write, tokens_per_seq, only, stream); }); \
  }                                                                                                \
  extern "C" kvx_status_t kvx_launch_gather_kv##suffix(                                            \
      const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, void* stream) {              \
    return kvx::boundary::run_call(                                                                \
        [&] { return kvx::boundary::gather_kv(cache, gather, only, stream); });                    \
  }

KVX_FOR_EACH_LAUNCH(KVX_LAUNCH_FUNCTIONS)
