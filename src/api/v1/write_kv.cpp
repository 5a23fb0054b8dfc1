// kvx_write_kv: checks the whole call, then copies runs of tokens that go to consecutive slots.
#include "api/v1/write_kv.hpp"

#include <array>
#include <cmath>

#include "api/call.hpp"
#include "api/checks/check_cache.hpp"
#include "api/checks/check_index.hpp"
#include "api/checks/device_memory.hpp"
#include "api/guard.hpp"
#include "api/kernels.hpp"
#include "ops/copy_rows/copy_rows_cuda.hpp"
#include "ops/copy_rows/row_mover.hpp"
#include "ops/copy_rows/write_plan.hpp"

namespace kvx::boundary {
namespace {

using ops::copy_rows::RowMover;
using ops::copy_rows::RunAddresses;
using ops::copy_rows::WritePlan;

// Scales are needed where 8-bit floats are written from another type.
bool needs_scale(const CacheSide& cache, const IoSide& io) {
  return !float_type(cache.element) && cache.element != io.element;
}

void check_types(const CacheSide& cache, const IoSide& io, std::optional<Element> only,
                 std::string_view name, DeferredErrors& deferred_errors) {
  if (!can_write(io.element, cache.element)) {
    deferred_errors.add(
        unsupported("io.{} has 8-bit floats and cache.{} another type; expected F16, "
                    "BF16, F32 or the cache's own",
                    name, name[0]));
  }
  if (only && (cache.element != *only || io.element != *only)) {
    deferred_errors.add(unsupported("cache.{} or io.{} has another dtype than this function's name",
                                    name[0], name));
  }
}

// The tensors, followed by the arrays that only the GPU reads.
std::array<CallAddress, 7> addresses_of(const WritePlan& plan) {
  return {{{"cache.k", plan.cache.k.data, plan.cache.k.memory},
           {"cache.v", plan.cache.v.data, plan.cache.v.memory},
           {"io.key", plan.io.k.data, plan.io.k.memory},
           {"io.value", plan.io.v.data, plan.io.v.memory},
           readable("slots.slots", plan.slots.slots.data),
           readable("k_scale", plan.k_scale.data),
           readable("v_scale", plan.v_scale.data)}};
}

Result<WritePlan> check_write(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                              std::optional<Element> only) {
  if (cache == nullptr || write == nullptr) {
    return invalid_argument("{} is null", cache == nullptr ? "cache" : "write");
  }
  DeferredErrors deferred_errors;
  WritePlan plan;
  KVX_RETURN_IF_ERROR(check_top_level(write, "write"));
  KVX_RETURN_IF_ERROR(check_io_sizes(write->io));
  KVX_RETURN_IF_ERROR(check_nested(write->slots, "slots"));
  KVX_RETURN_IF_ERROR(check_scale_size(write->k_scale_desc, "k_scale_desc"));
  KVX_RETURN_IF_ERROR(check_scale_size(write->v_scale_desc, "v_scale_desc"));
  KVX_ASSIGN_OR_RETURN(plan.cache, check_cache(cache, deferred_errors));
  KVX_ASSIGN_OR_RETURN(plan.io, check_io(write->io, 0, plan.cache, deferred_errors));
  KVX_ASSIGN_OR_RETURN(plan.slots,
                       check_slot_mapping(write->slots, plan.io.num_tokens, deferred_errors));
  check_types(plan.cache.k, plan.io.k, only, "key", deferred_errors);
  check_types(plan.cache.v, plan.io.v, only, "value", deferred_errors);
  if (needs_scale(plan.cache.k, plan.io.k)) {
    KVX_ASSIGN_OR_RETURN(plan.k_scale, check_scale(write->k_scale_desc, write->k_scale, plan.cache,
                                                   "k_scale", deferred_errors));
  }
  if (needs_scale(plan.cache.v, plan.io.v)) {
    KVX_ASSIGN_OR_RETURN(plan.v_scale, check_scale(write->v_scale_desc, write->v_scale, plan.cache,
                                                   "v_scale", deferred_errors));
  }
  check_one_place(addresses_of(plan), deferred_errors);
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  if (plan.io.num_tokens > 0) KVX_RETURN_IF_ERROR(check_apart(plan.io, plan.cache));
  return plan;
}

// Checks that every scale that the tokens use is positive and finite.
Status check_scales(const WritePlan& plan, const ScaleView& scale, std::string_view name) {
  if (scale.data == nullptr) return {};
  const int64_t num_heads = scale.head_stride != 0 ? plan.cache.num_heads : 1;
  int64_t checked_block = -1;
  for (int64_t t = 0; t < plan.slots.num_tokens; ++t) {
    const int64_t slot = plan.slots.at(t);
    if (slot < 0) continue;
    const int64_t block = slot / plan.cache.block_size;
    const bool is_checked =
        checked_block >= 0 && (scale.block_stride == 0 || block == checked_block);
    if (is_checked) continue;
    for (int64_t h = 0; h < num_heads; ++h) {
      const float value = scale.at(block, h);
      if (value > 0 && std::isfinite(value)) continue;
      return invalid_argument("{} of block {}, head {} is {}; expected a positive finite number",
                              name, block, h, value);
    }
    checked_block = block;
  }
  return {};
}

// Returns how many tokens from t on go to consecutive slots of one block.
int64_t run_length(const WritePlan& plan, int64_t t) {
  const int64_t slot = plan.slots.at(t);
  const int64_t room = plan.cache.block_size - slot % plan.cache.block_size;
  const int64_t most = std::min({room, plan.slots.num_tokens - t, plan.io.tokens_in_a_row(t)});
  int64_t n = 1;
  while (n < most && plan.slots.at(t + n) == slot + n) ++n;
  return n;
}

RunAddresses run_at(const WritePlan& plan, const CacheSide& side, const IoSide& io, int64_t t,
                    int64_t num_tokens) {
  const int64_t slot = plan.slots.at(t);
  const int64_t block = slot / plan.cache.block_size;
  const int64_t offset = slot % plan.cache.block_size;
  return {.cache = side.data + block * side.block_stride + offset * side.token_stride,
          .io = io.token(t),
          .num_tokens = num_tokens,
          .block = block};
}

Status write_on_host(const WritePlan& plan) {
  KVX_RETURN_IF_ERROR(check_slots(plan.slots, plan.cache));
  KVX_RETURN_IF_ERROR(check_scales(plan, plan.k_scale, "k_scale"));
  KVX_RETURN_IF_ERROR(check_scales(plan, plan.v_scale, "v_scale"));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  RowMover k(*kernels, plan.cache, plan.cache.k, plan.io.k, plan.io.num_tokens);
  RowMover v(*kernels, plan.cache, plan.cache.v, plan.io.v, plan.io.num_tokens);
  for (int64_t t = 0; t < plan.slots.num_tokens;) {
    if (plan.slots.at(t) < 0) {
      ++t;
      continue;
    }
    const int64_t n = run_length(plan, t);
    k.write(run_at(plan, plan.cache.k, plan.io.k, t, n), plan.k_scale);
    v.write(run_at(plan, plan.cache.v, plan.io.v, t, n), plan.v_scale);
    t += n;
  }
  return {};
}

}  // namespace

Status write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                std::optional<Element> only, void* stream) {
  KVX_ASSIGN_OR_RETURN(const WritePlan plan, check_write(cache, write, only));
  if (plan.io.num_tokens == 0) return {};
  if (!plan.is_on_device()) return write_on_host(plan);
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* device, find_device(addresses_of(plan)));
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device->index));
  return write_on_device({*device, stream}, plan);
}

}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_write_kv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                                     void* stream) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::write_kv(cache, write, std::nullopt, stream); });
}
