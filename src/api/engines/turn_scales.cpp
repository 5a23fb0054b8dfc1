// kvx_turn_scales: the order of an engine's nvfp4 scales.
#include "ops/turn_scales/turn_scales.hpp"

#include <algorithm>

#include "api/call.hpp"
#include "api/guard.hpp"
#include "api/verbs/device_verb.hpp"
#include "core/checked.hpp"

namespace kvx::boundary {
namespace {

// Scales that share addresses are the caller's mistake; sums and products that overflow are not.
Status check_extent(const kvx_turn_scales_args_t& args) {
  for (const int64_t stride : {args.block_stride, args.token_stride, args.head_stride}) {
    if (stride >= 0) continue;
    return invalid_argument("args has a stride of {}; expected 0 or more", stride);
  }
  if (args.token_stride < args.num_groups) {
    return invalid_argument("args.token_stride is {}; expected at least num_groups, {}",
                            args.token_stride, args.num_groups);
  }
  const CheckedSize num_rows =
      CheckedSize(args.num_blocks) * CheckedSize(args.num_heads) * CheckedSize(args.block_size);
  const CheckedSize bytes =
      CheckedSize(std::max<int64_t>(args.num_blocks - 1, 0)) * CheckedSize(args.block_stride) +
      CheckedSize(int64_t{args.block_size} - 1) * CheckedSize(args.token_stride) +
      CheckedSize(int64_t{args.num_heads} - 1) * CheckedSize(args.head_stride) +
      CheckedSize(args.num_groups);
  if (num_rows.get() && bytes.get()) return {};
  return invalid_argument(
      "args has {} blocks of {} tokens and {} heads with strides of {}, {} and {}"
      " bytes; expected rows within 64-bit addresses",
      args.num_blocks, args.block_size, args.num_heads, args.block_stride, args.token_stride,
      args.head_stride);
}

Result<ops::ScaleRows> read_scales(const kvx_turn_scales_args_t& args) {
  using ops::ScaleRows;
  if (args.order != KVX_SCALE_ORDER_LINEAR && args.order != KVX_SCALE_ORDER_SWIZZLED) {
    return invalid_argument("args.order is {}; expected LINEAR 1 or SWIZZLED 2", args.order);
  }
  if (args.scales == nullptr) return invalid_argument("args.scales is null");
  if (args.num_blocks < 0 || args.num_blocks > INT32_MAX || args.num_heads < 1 ||
      args.num_heads > kMostHeads) {
    return invalid_argument("args.num_blocks is {} and num_heads {}; expected 0 to {}, and 1 to {}",
                            args.num_blocks, args.num_heads, INT32_MAX, kMostHeads);
  }
  if (args.block_size < 1 || args.block_size > INT32_MAX ||
      args.block_size % ScaleRows::kTokens != 0) {
    return invalid_argument("args.block_size is {}; expected a multiple of {}", args.block_size,
                            ScaleRows::kTokens);
  }
  if (args.num_groups < 1 || args.num_groups > ScaleRows::kMaxGroups) {
    return invalid_argument("args.num_groups is {}; expected 1 to {}", args.num_groups,
                            ScaleRows::kMaxGroups);
  }
  KVX_RETURN_IF_ERROR(check_extent(args));
  return ScaleRows{.data = static_cast<uint8_t*>(args.scales),
                   .num_blocks = args.num_blocks,
                   .num_heads = static_cast<int>(args.num_heads),
                   .block_size = static_cast<int>(args.block_size),
                   .num_groups = static_cast<int>(args.num_groups),
                   .block_stride = args.block_stride,
                   .token_stride = args.token_stride,
                   .head_stride = args.head_stride};
}

Status turn_scales(const kvx_turn_scales_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_turn_scales_args_t args, read_struct(caller, "args"));
  KVX_ASSIGN_OR_RETURN(const ops::ScaleRows scales, read_scales(args));
  const bool makes_linear = args.order == KVX_SCALE_ORDER_LINEAR;
  if (args.memory != 0) {
    DeferredErrors deferred_errors;
    KVX_RETURN_IF_ERROR(check_memory(args.memory, "args", deferred_errors));
    KVX_RETURN_IF_ERROR(deferred_errors.status());
  }
  if (args.memory == 0 || memory_type(args.memory) == MemoryType::kHost) {
    ops::turn_scales(scales, makes_linear);
    return {};
  }
  VerbAddresses addresses;
  addresses.add("args.scales", scales.data);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(addresses, nullptr, stream));
  return ops::turn_scales(verb.context, scales, makes_linear);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_turn_scales(const kvx_turn_scales_args_t* args, void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::turn_scales(args, stream); });
}
