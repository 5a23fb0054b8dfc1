// Checks of one tensor descriptor: element type, memory kind, shape and strides.
#pragma once

#include <span>
#include <string_view>

#include "api/checks/deferred_errors.hpp"
#include "api/v1/views.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// INVALID_ARGUMENT: no float type.
Result<Element> check_element(const kvx_tensor_desc_t& tensor, std::string_view name);

// INVALID_ARGUMENT: no memory kind. A GPU's memory where no GPU can be used is added to the
// deferred_errors.
Status check_memory(uint32_t memory, std::string_view name, DeferredErrors& deferred_errors);
// Requires: checked.
MemoryKind memory_kind(uint32_t memory);

// INVALID_ARGUMENT: another ndim or shape.
Status check_shape(const kvx_tensor_desc_t& tensor, std::span<const int64_t> expected,
                   std::string_view name);

enum class StrideRule {
  kCanonicalOr16Bytes,  // a stride is the canonical one or a multiple of 16 bytes
  kFree,                // KVX_LAYOUT_BLOCK_CUSTOM
};

// The bytes from the tensor's first element to its last. Strides by which two elements would share
// an address, or which break the rule, are added to the deferred_errors; the result is then
// meaningless. INVALID_ARGUMENT: the tensor would be larger than memory. Requires: a checked shape,
// no extent 0.
Result<int64_t> check_strides(const kvx_tensor_desc_t& tensor, StrideRule rule, int element_bytes,
                              std::string_view name, DeferredErrors& deferred_errors);

struct Axis {
  int64_t extent;
  int64_t stride;
};

// What lies from the first element to the last, in the strides' unit, an element taking `element`.
// A finding when strides let elements share an address: every axis must step over all that the axes
// with smaller strides take. INVALID_ARGUMENT: beyond 64-bit addresses. Sorts the axes.
Result<int64_t> span_of(std::span<Axis> axes, int64_t element, std::string_view name,
                        DeferredErrors& deferred_errors);

// Data that does not begin on a whole element is added to the deferred_errors.
void check_alignment(const void* data, int element_bytes, std::string_view name,
                     DeferredErrors& deferred_errors);

// INVALID_ARGUMENT: another type than S32 and S64, or null data where entries are expected.
Result<IndexArray> check_indices(const kvx_dtype_t& dtype, const void* data, int64_t count,
                                 std::string_view dtype_name, std::string_view data_name,
                                 DeferredErrors& deferred_errors);

}  // namespace kvx::boundary
