// Reads a caller's layer: by runs of heads with their formats, or by a v1 cache descriptor
// (cache_layer.cpp).
#include "api/checks/layer_view.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "api/checks/cache_layer.hpp"
#include "api/checks/format_spec.hpp"
#include "api/guard.hpp"
#include "core/checked.hpp"
#include "format/q4_0.hpp"
#include "ops/value_prefix.hpp"

namespace kvx::boundary {
namespace {

// --- runs ---

// How many blocks, tokens and heads the strides of a side span.
struct Counts {
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_heads;
  bool are_scales_readable;  // by the host; false on a GPU
};

// Checks that the rows of a block are apart, and adds the memory of all blocks. Scattered blocks
// may be anywhere between others' memory: only the rows of one block are checked, and no range is
// known. axes: the blocks' is the first.
Status check_strides(std::array<Axis, 4> axes, int64_t row_bytes, bool is_scattered,
                     const void* begin, const std::string& name, std::vector<MemoryRange>& memory) {
  const Axis blocks = axes.front();
  if (is_scattered) {
    if (blocks.stride < 1) {
      return invalid_argument("{} has a block stride of {}; expected 1 or more", name,
                              blocks.stride);
    }
    axes.front() = {1, 0};
  }
  DeferredErrors deferred_errors;
  KVX_ASSIGN_OR_RETURN(const int64_t bytes, span_of(axes, row_bytes, name, deferred_errors));
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  if (!is_scattered) {
    memory.push_back({static_cast<const uint8_t*>(begin), bytes});
    return {};
  }
  if ((CheckedSize(blocks.extent - 1) * CheckedSize(blocks.stride) + CheckedSize(bytes)).get()) {
    return {};
  }
  return invalid_argument("{} has strides beyond 64-bit addresses", name);
}

bool is_scattered(const kvx_side_t& side) {
  return (side.flags & KVX_SIDE_SCATTERED_BLOCKS) != 0;
}

Status check_codes(const kvx_side_t& side, const Counts& counts, int row_bytes,
                   const std::string& name, std::vector<MemoryRange>& memory) {
  if (side.codes == nullptr) return invalid_argument("{}.codes is null", name);
  const int fragment_bytes =
      side.code_fragment_bytes == 0
          ? row_bytes
          : static_cast<int>(std::min<uint32_t>(side.code_fragment_bytes, INT32_MAX));
  if (row_bytes % fragment_bytes != 0) {
    return invalid_argument(
        "{}.code_fragment_bytes is {}; expected a divisor of the row's {} bytes", name,
        side.code_fragment_bytes, row_bytes);
  }
  std::array<Axis, 4> axes = {{{counts.num_blocks, side.code_block_stride},
                               {counts.block_size, side.code_token_stride},
                               {counts.num_heads, side.code_head_stride},
                               {row_bytes / fragment_bytes, side.code_fragment_stride}}};
  return check_strides(axes, fragment_bytes, is_scattered(side), side.codes, name + ".codes",
                       memory);
}

// Scales that append writes must not overlap. Given scales may be shared in any way.
Status check_scale_strides(const kvx_side_t& side, const format::FormatSpec& spec,
                           const Counts& counts, const std::string& name,
                           std::vector<MemoryRange>& memory) {
  const auto* begin = static_cast<const uint8_t*>(side.scales);
  const int group_bytes = format::scale_bytes_per_group(spec);
  const int64_t groups = format::groups_per_row(spec, static_cast<int>(side.head_dim));
  std::array<Axis, 4> axes = {{{counts.num_blocks, side.scale_block_stride},
                               {counts.block_size, side.scale_token_stride},
                               {counts.num_heads, side.scale_head_stride},
                               {groups, side.scale_group_stride}}};
  for (const Axis& axis : axes) {
    if (axis.stride >= 0) continue;
    return invalid_argument("{}.scales has a stride of {}; expected 0 or more", name, axis.stride);
  }
  if (spec.scale_source == format::ScaleSource::kPageShared) {
    if (side.scale_token_stride != 0) {
      return invalid_argument("{}.scale_token_stride is {}; page-shared scales have 0", name,
                              side.scale_token_stride);
    }
    axes[1].extent = 1;
  }
  if (spec.scale_source == format::ScaleSource::kGiven) {
    CheckedSize last = group_bytes;
    for (const Axis& axis : axes) {
      last = last + CheckedSize(axis.extent - 1) * CheckedSize(axis.stride);
    }
    memory.push_back({begin, last.get().value_or(0)});
    if (last.get()) return {};
    return invalid_argument("{}.scales has strides beyond 64-bit addresses", name);
  }
  return check_strides(axes, group_bytes, is_scattered(side), begin, name + ".scales", memory);
}

Status check_has_tensor_scales(const ops::SideView& side, const std::string& name) {
  if (side.tensor_scales == nullptr || side.spec.facts->has_tensor_scale) return {};
  return invalid_argument("{}.tensor_scales is set; {} has none", name, side.spec.facts->name);
}

Status check_tensor_scales(const ops::SideView& side, int num_heads) {
  if (side.tensor_scales == nullptr) return {};
  for (int head = 0; head < num_heads; ++head) {
    KVX_RETURN_IF_ERROR(format::check_tensor_scale(side.tensor_scales[head]));
  }
  return {};
}

Status check_flags(const kvx_side_t& side, uint32_t allowed, const std::string& name) {
  if ((side.flags & ~allowed) == 0) return {};
  return Error{ErrorCode::kIncompatible, fmt::format("{}.flags is {:#x}; expected none but {:#x}",
                                                     name, side.flags, allowed)};
}

// Only kernels on a GPU read codes in sign-magnitude interleaved order.
Status check_interleaved(const ops::SideView& side, const Counts& counts, const std::string& name) {
  if (!side.is_interleaved) return {};
  const format::Facts& facts = *side.spec.facts;
  if (facts.element != "E2M1" || facts.packing != format::Packing::kNibbles) {
    return invalid_argument(
        "{} has codes in interleaved order, which {} does not have; expected nvfp4, mxfp4 or "
        "mxfp4_g16",
        name, facts.name);
  }
  if (side.spec.scale_source == format::ScaleSource::kPageShared || side.codes.is_fragmented()) {
    return unsupported(
        "{} has codes in interleaved order and {}; expected computed or given scales and "
        "contiguous rows",
        name, side.codes.is_fragmented() ? "rows in fragments" : "page-shared scales");
  }
  if (counts.are_scales_readable) {
    return unsupported(
        "{} has codes in interleaved order and lies on the host; only a GPU reads them", name);
  }
  return {};
}

// ggml's q4_0 blocks are int4 in another order.
Status check_q4_0_blocks(const ops::SideView& side, const std::string& name) {
  const format::FormatSpec& spec = side.spec;
  if (spec.facts->id != format::FormatId::kInt4 || spec.group_size != format::q4_0::kGroup ||
      spec.scale_type != format::ScaleType::kF16 ||
      spec.scale_source != format::ScaleSource::kComputed ||
      spec.scale_choice != format::ScaleChoice::kAmax) {
    return invalid_argument(
        "{} has q4_0 blocks in {} with groups of {} and {} {} scales; expected int4 with groups of "
        "{} and computed f16 scales of amax",
        name, spec.facts->name, spec.group_size, format::name_of(spec.scale_source),
        format::name_of(spec.scale_type), format::q4_0::kGroup);
  }
  if (side.head_dim % format::q4_0::kGroup != 0 ||
      side.codes.fragment_bytes != format::q4_0::kCodeBytes) {
    return invalid_argument(
        "{} has q4_0 blocks, head_dim {} and code_fragment_bytes {}; expected a multiple of {} and "
        "{}",
        name, side.head_dim, side.codes.fragment_bytes, format::q4_0::kGroup,
        format::q4_0::kCodeBytes);
  }
  if (side.feedback != nullptr) {
    return unsupported("{} has q4_0 blocks and feedback; expected one of the two", name);
  }
  return {};
}

// The channels' steps and zeros, which a dual-scale format has and no other.
Status read_channels(const kvx_side_t& side, const Counts& counts, const std::string& name,
                     std::vector<MemoryRange>& memory, ops::SideView& view) {
  if (!view.spec.is_dual()) {
    if (side.channels == nullptr) return {};
    return invalid_argument("{}.channels is set; {} has none", name, view.spec.facts->name);
  }
  KVX_RETURN_IF_ERROR(format::check_block_size(view.spec, static_cast<int>(counts.block_size)));
  if (view.codes.is_fragmented()) {
    return unsupported("{} has {} and rows in fragments; expected contiguous rows", name,
                       view.spec.facts->name);
  }
  if (side.channels == nullptr) {
    return invalid_argument("{}.channels is null; {} has steps and zeros of its channels", name,
                            view.spec.facts->name);
  }
  const std::array<Axis, 4> axes = {{{counts.num_blocks, side.channel_block_stride},
                                     {1, 0},
                                     {counts.num_heads, side.channel_head_stride},
                                     {1, 0}}};
  const int bytes = format::channel_bytes_per_block(view.spec, view.head_dim);
  KVX_RETURN_IF_ERROR(
      check_strides(axes, bytes, is_scattered(side), side.channels, name + ".channels", memory));
  view.channels = {static_cast<uint8_t*>(side.channels), side.channel_block_stride,
                   side.channel_head_stride};
  return {};
}

Result<ops::SideView> read_side(const kvx_side_t& side, const Counts& counts,
                                const std::string& name, std::vector<MemoryRange>& memory) {
  constexpr uint32_t kOrders = KVX_SIDE_INTERLEAVED_ORDER | KVX_SIDE_Q4_0_BLOCKS;
  KVX_RETURN_IF_ERROR(check_flags(side, kOrders | KVX_SIDE_SCATTERED_BLOCKS, name));
  const bool has_q4_0_blocks = (side.flags & KVX_SIDE_Q4_0_BLOCKS) != 0;
  if ((side.flags & kOrders) == kOrders) {
    return invalid_argument("{}.flags has two orders of codes; expected one", name);
  }
  ops::SideView view;
  view.is_interleaved = (side.flags & kOrders) != 0;
  KVX_ASSIGN_OR_RETURN(view.spec, read_format(side.spec, name + ".spec"));
  view.head_dim = static_cast<int>(std::min<uint32_t>(side.head_dim, INT32_MAX));
  KVX_RETURN_IF_ERROR(format::check_head_dim(view.spec, view.head_dim));
  const int row_bytes = format::code_bytes_per_row(view.spec, view.head_dim);
  KVX_RETURN_IF_ERROR(check_codes(side, counts, row_bytes, name, memory));
  view.codes = {static_cast<uint8_t*>(side.codes),
                side.code_block_stride,
                side.code_token_stride,
                side.code_head_stride,
                side.code_fragment_stride,
                static_cast<int>(side.code_fragment_bytes)};
  if (view.codes.is_fragmented() && view.spec.scale_source == format::ScaleSource::kPageShared) {
    return unsupported(
        "{} has page-shared scales and rows in fragments; expected contiguous rows, which a "
        "growing "
        "scale rewrites in place",
        name);
  }
  view.tensor_scales = side.tensor_scales;
  view.feedback = side.feedback;
  KVX_RETURN_IF_ERROR(has_q4_0_blocks ? check_q4_0_blocks(view, name)
                                      : check_interleaved(view, counts, name));
  KVX_RETURN_IF_ERROR(read_channels(side, counts, name, memory, view));
  if (view.feedback != nullptr && !view.spec.has_scale()) {
    return invalid_argument("{}.feedback is set; {} has no scales", name, view.spec.facts->name);
  }
  const int num_heads = static_cast<int>(counts.num_heads);
  KVX_RETURN_IF_ERROR(check_has_tensor_scales(view, name));
  if (counts.are_scales_readable) KVX_RETURN_IF_ERROR(check_tensor_scales(view, num_heads));
  if (!view.spec.has_scale()) return view;
  if (side.scales == nullptr) {
    return invalid_argument("{}.scales is null; {} has scales", name, view.spec.facts->name);
  }
  KVX_RETURN_IF_ERROR(check_scale_strides(side, view.spec, counts, name, memory));
  view.scales = {static_cast<uint8_t*>(side.scales), side.scale_block_stride,
                 side.scale_token_stride, side.scale_head_stride, side.scale_group_stride};
  if (counts.are_scales_readable)
    KVX_RETURN_IF_ERROR(check_given_scales(view, num_heads, name + ".scales"));
  return view;
}

// Latent layers read parts of rows, which a dual-scale block does not have.
Status check_is_of_rows(const ops::SideView& side, const std::string& name) {
  if (!side.spec.is_dual()) return {};
  return unsupported("{} makes parts of K's rows, which {} does not have; expected another format",
                     name, side.spec.facts->name);
}

// Reads a V that is the first numbers of K's rows.
Result<ops::SideView> read_prefix_of_k(const kvx_side_t& side, const ops::SideView& k,
                                       const std::string& name) {
  KVX_RETURN_IF_ERROR(check_flags(side, KVX_SIDE_PREFIX_OF_K, name));
  if (k.is_interleaved) {
    return unsupported("{} is a prefix of K, whose codes are in another order; expected none",
                       name);
  }
  kvx_side_t expected{};
  expected.size = side.size;
  expected.head_dim = side.head_dim;
  expected.flags = side.flags;
  if (memcmp(&side, &expected, sizeof side) != 0) {
    return invalid_argument(
        "{} is a prefix of K and describes memory; expected head_dim and flags alone", name);
  }
  if (side.head_dim < 1 || side.head_dim > static_cast<uint32_t>(k.head_dim)) {
    return invalid_argument("{}.head_dim is {}; expected 1 to K's {}", name, side.head_dim,
                            k.head_dim);
  }
  KVX_RETURN_IF_ERROR(check_is_of_rows(k, name));
  const ops::SideView view = ops::prefix_of(k, static_cast<int>(side.head_dim));
  KVX_RETURN_IF_ERROR(format::check_head_dim(view.spec, view.head_dim));
  return view;
}

// The numbers of K's rows behind those of k.
Result<ops::SideView> read_rest(const kvx_side_t* caller, const ops::SideView& k,
                                const Counts& counts, const std::string& name,
                                std::vector<MemoryRange>& memory) {
  KVX_ASSIGN_OR_RETURN(const kvx_side_t side, read_struct(caller, name));
  KVX_ASSIGN_OR_RETURN(const ops::SideView rest, read_side(side, counts, name, memory));
  KVX_RETURN_IF_ERROR(check_is_of_rows(k, name));
  KVX_RETURN_IF_ERROR(check_is_of_rows(rest, name));
  if (rest.head_dim > format::kMaxHeadDim - k.head_dim) {
    return invalid_argument("{}.head_dim is {}; expected at most {}, k's row being {}", name,
                            rest.head_dim, format::kMaxHeadDim - k.head_dim, k.head_dim);
  }
  if (k.is_interleaved || rest.is_interleaved) {
    return unsupported("{} is set with codes in another order; expected one of the two", name);
  }
  return rest;
}

// Adds the ranges of codes and scales to `memory`. rest: of K's second segment; no head_dim: none.
Status read_run(const kvx_head_run_t& run, const Counts& counts, const std::string& name,
                std::vector<MemoryRange>& memory, ops::HeadRun& view, ops::SideView& rest) {
  KVX_ASSIGN_OR_RETURN(const kvx_side_t k, read_struct(run.k, name + ".k"));
  KVX_ASSIGN_OR_RETURN(view.k, read_side(k, counts, name + ".k", memory));
  if (run.k_rest != nullptr) {
    KVX_ASSIGN_OR_RETURN(rest, read_rest(run.k_rest, view.k, counts, name + ".k_rest", memory));
  }
  if (run.v == nullptr) return {};
  KVX_ASSIGN_OR_RETURN(const kvx_side_t v, read_struct(run.v, name + ".v"));
  if ((v.flags & KVX_SIDE_PREFIX_OF_K) != 0) {
    KVX_ASSIGN_OR_RETURN(view.v, read_prefix_of_k(v, view.k, name + ".v"));
    return {};
  }
  KVX_ASSIGN_OR_RETURN(view.v, read_side(v, counts, name + ".v", memory));
  return {};
}

Status read_runs(const kvx_layer_t& layer, const std::string& name, LayerOfCaller& result) {
  if (layer.num_blocks < 1 || layer.num_blocks > INT32_MAX || layer.block_size < 1 ||
      layer.block_size > INT32_MAX / 2 || layer.num_kv_heads < 1 ||
      layer.num_kv_heads > kMostHeads) {
    return invalid_argument(
        "{} has {} blocks of {} tokens and {} KV heads; expected at least 1 of "
        "each and at most {} heads",
        name, layer.num_blocks, layer.block_size, layer.num_kv_heads, kMostHeads);
  }
  if (layer.k_scale != nullptr || layer.v_scale != nullptr) {
    return invalid_argument("{}.{} is set; only a layer of a v1 cache has it, runs have scales",
                            name, layer.k_scale != nullptr ? "k_scale" : "v_scale");
  }
  if (layer.runs == nullptr || layer.num_runs < 1 || layer.num_runs > layer.num_kv_heads) {
    return invalid_argument("{} has {} runs at {}; expected 1 to num_kv_heads {}", name,
                            layer.num_runs, static_cast<const void*>(layer.runs),
                            layer.num_kv_heads);
  }
  result.runs.clear();
  result.rest_runs.clear();
  result.memory.clear();
  int64_t first_head = 0;
  for (uint32_t r = 0; r < layer.num_runs; ++r) {
    const std::string run_name = fmt::format("{}.runs[{}]", name, r);
    KVX_ASSIGN_OR_RETURN(const kvx_head_run_t run, read_struct(layer.runs[r], run_name));
    if (run.num_heads < 1 || first_head + run.num_heads > layer.num_kv_heads) {
      return invalid_argument("{}.num_heads is {}; expected 1 to the {} heads that are left",
                              run_name, run.num_heads, layer.num_kv_heads - first_head);
    }
    const Counts counts = {layer.num_blocks, layer.block_size, run.num_heads,
                           !result.is_on_device()};
    ops::HeadRun view = {.first_head = static_cast<int>(first_head),
                         .num_heads = static_cast<int>(run.num_heads),
                         .k = {},
                         .v = {}};
    ops::HeadRun rest = view;
    KVX_RETURN_IF_ERROR(read_run(run, counts, run_name, result.memory, view, rest.k));
    result.runs.push_back(view);
    result.rest_runs.push_back(rest);
    const ops::HeadRun& first = result.runs.front();
    const int first_rest = result.rest_runs.front().k.head_dim;
    if (rest.k.head_dim != first_rest) {
      return invalid_argument("{}.k_rest has {} numbers; expected runs[0]'s {}", run_name,
                              rest.k.head_dim, first_rest);
    }
    if (view.k.head_dim != first.k.head_dim || view.v.head_dim != first.v.head_dim) {
      return invalid_argument("{} has head_dims {} and {}; expected runs[0]'s {} and {}", run_name,
                              view.k.head_dim, view.v.head_dim, first.k.head_dim, first.v.head_dim);
    }
    if (view.v.is_alias != first.v.is_alias) {
      return invalid_argument("{}.v is {} of K; expected the same of all runs", run_name,
                              view.v.is_alias ? "a prefix" : "no prefix");
    }
    first_head += run.num_heads;
  }
  if (first_head != layer.num_kv_heads) {
    return invalid_argument("{}.runs have {} heads; expected num_kv_heads {}", name, first_head,
                            layer.num_kv_heads);
  }
  result.view = {layer.num_blocks, static_cast<int>(layer.block_size),
                 static_cast<int>(layer.num_kv_heads), result.runs};
  if (result.rest_runs.front().k.head_dim == 0) result.rest_runs.clear();
  result.rest = result.view;
  result.rest.runs = result.rest_runs;
  if (result.has_segments()) result.view.next_segment = &result.rest;
  return {};
}

// --- memory ---

// Reads the kind of memory and the counters. With a v1 descriptor, read_cache_layer() reads its
// kind.
Status read_memory(const kvx_layer_t& layer, const std::string& name, LayerOfCaller& result) {
  if (layer.reserved != 0) {
    return invalid_argument("{}.reserved is {}; expected 0", name, layer.reserved);
  }
  result.kind = MemoryType::kHost;
  result.narrow_scales = {};
  result.counters = reinterpret_cast<ops::DeviceCounters*>(layer.counters);
  if (layer.memory == 0) return {};
  DeferredErrors deferred_errors;
  KVX_RETURN_IF_ERROR(check_memory(layer.memory, name, deferred_errors));
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  result.kind = memory_type(layer.memory);
  return {};
}

// Called after everything else was read, so that an invalid argument is reported before an
// unsupported one.
Status check_memory(const kvx_layer_t& layer, const std::string& name, LayerMemory allowed,
                    const LayerOfCaller& result) {
  if (layer.memory != 0 && memory_type(layer.memory) != result.kind) {
    return invalid_argument("{}.memory is {}; its cache has another kind", name, layer.memory);
  }
  if (result.is_on_device() && allowed == LayerMemory::kHost) {
    return unsupported("{} lies in a GPU's memory; this call takes host memory", name);
  }
  if (!result.is_on_device() && layer.counters != nullptr) {
    return invalid_argument("{}.counters is set; only a layer on a GPU has counters", name);
  }
  return {};
}

// --- transforms ---

Result<ops::SideTransform> read_transform(const kvx_transform_t* caller, int num_heads,
                                          int head_dim, bool may_have_offset, bool is_readable,
                                          const std::string& name) {
  if (caller == nullptr) return ops::SideTransform{};
  KVX_ASSIGN_OR_RETURN(const kvx_transform_t args, read_struct(caller, name));
  if ((args.flags & ~uint32_t{KVX_TRANSFORM_HADAMARD}) != 0) {
    return Error{ErrorCode::kIncompatible,
                 fmt::format("{}.flags is {:#x}; this library supports 0x1", name, args.flags)};
  }
  if (head_dim == 0) return invalid_argument("{} is set; no V is stored", name);
  if ((args.block_offset != nullptr && !may_have_offset) ||
      (args.block_offset == nullptr) != (args.num_offset_blocks == 0) ||
      args.num_offset_blocks < 0 || args.num_offset_blocks > INT32_MAX) {
    return invalid_argument(
        "{}.block_offset is {} with {} blocks; expected both or neither, for K only, and at most "
        "{} blocks",
        name, static_cast<const void*>(args.block_offset), args.num_offset_blocks, INT32_MAX);
  }
  const int64_t count = int64_t{num_heads} * head_dim;
  for (int64_t i = 0; is_readable && args.factor != nullptr && i < count; ++i) {
    if (args.factor[i] > 0 && std::isfinite(args.factor[i])) continue;
    return invalid_argument("{}.factor[{}] is {}; expected a positive finite number", name, i,
                            args.factor[i]);
  }
  return ops::SideTransform{.mean = args.mean,
                            .factor = args.factor,
                            .block_offset = args.block_offset,
                            .num_offset_blocks = args.num_offset_blocks,
                            .hadamard = (args.flags & KVX_TRANSFORM_HADAMARD) != 0};
}

}  // namespace

Status read_layer(const kvx_layer_t* layer, std::string_view given_name, LayerOfCaller& result,
                  LayerMemory allowed) {
  const std::string name(given_name);
  KVX_ASSIGN_OR_RETURN(const kvx_layer_t args, read_struct(layer, name));
  KVX_RETURN_IF_ERROR(read_memory(args, name, result));
  KVX_RETURN_IF_ERROR(args.cache != nullptr ? read_cache_layer(args, name, result)
                                            : read_runs(args, name, result));
  KVX_ASSIGN_OR_RETURN(
      result.transform.k,
      read_transform(args.k_transform, result.view.num_kv_heads, result.runs.front().k.head_dim,
                     true, !result.is_on_device(), name + ".k_transform"));
  KVX_ASSIGN_OR_RETURN(
      result.transform.v,
      read_transform(args.v_transform, result.view.num_kv_heads, result.v_head_dim(), false,
                     !result.is_on_device(), name + ".v_transform"));
  const bool is_transformed =
      !result.transform.k.is_identity() || !result.transform.v.is_identity();
  if (result.runs.front().v.is_alias && is_transformed) {
    return unsupported(
        "{} has a transform and a V that is a prefix of K; a transform would change both", name);
  }
  return check_memory(args, name, allowed, result);
}

Status check_values(const LayerOfCaller& from, const LayerOfCaller& to) {
  if (!to.runs.front().v.is_alias || !from.has_own_v()) return {};
  return unsupported("to keeps V as a prefix of K, from beside it; expected rows of one kind");
}

Status check_apart(const LayerOfCaller& from, const LayerOfCaller& to) {
  for (const MemoryRange& range : from.memory) {
    const auto shares = [&range](const MemoryRange& of_to) { return share_memory(range, of_to); };
    if (!std::ranges::any_of(to.memory, shares)) continue;
    return invalid_argument("from and to share memory; expected layers apart");
  }
  return {};
}

}  // namespace kvx::boundary
