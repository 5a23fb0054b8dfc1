// Checks of one tensor descriptor: element type, memory kind, shape and strides.
#pragma once

#include <span>
#include <string_view>

#include "api/checks/deferred_errors.hpp"
#include "api/checks/v1_views.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

// INVALID_ARGUMENT: the dtype is not a float type.
Result<Element> check_element(const kvx_tensor_desc_t& tensor, std::string_view name);

// INVALID_ARGUMENT: not a kvx_memory_type_t. A GPU's memory where no GPU can be used is added to
// deferred_errors.
Status check_memory(uint32_t memory, std::string_view name, DeferredErrors& deferred_errors);
// Requires: `memory` was checked.
MemoryType memory_type(uint32_t memory);

// INVALID_ARGUMENT: ndim or the shape differs from `expected`.
Status check_shape(const kvx_tensor_desc_t& tensor, std::span<const int64_t> expected,
                   std::string_view name);

enum class StrideRule {
  kCanonicalOr16Bytes,  // a stride is the canonical one or a multiple of 16 bytes
  kFree,                // KVX_LAYOUT_BLOCK_CUSTOM
};

// Returns the bytes from the tensor's first element to its last. Strides with which two elements
// share an address, or which break the rule, are added to deferred_errors; the result is then
// unspecified. INVALID_ARGUMENT: the tensor is larger than 64-bit addresses. Requires: a checked
// shape without an extent of 0.
Result<int64_t> check_strides(const kvx_tensor_desc_t& tensor, StrideRule rule, int element_bytes,
                              std::string_view name, DeferredErrors& deferred_errors);

struct Axis {
  int64_t extent;
  int64_t stride;
};

// Returns the distance from the begin of the first element to the end of the last, in the strides'
// unit, in which an element takes `element`. Sorts the axes by stride. A stride that is smaller
// than the span of the axes before it lets elements share an address: it is added to
// deferred_errors. INVALID_ARGUMENT: the distance exceeds 64-bit addresses.
Result<int64_t> span_of(std::span<Axis> axes, int64_t element, std::string_view name,
                        DeferredErrors& deferred_errors);

// Data that is not aligned to its elements is added to deferred_errors.
void check_alignment(const void* data, int element_bytes, std::string_view name,
                     DeferredErrors& deferred_errors);

// INVALID_ARGUMENT: a type other than S32 and S64, or null data where entries are expected.
Result<IndexArray> check_indices(const kvx_dtype_t& dtype, const void* data, int64_t count,
                                 std::string_view dtype_name, std::string_view data_name,
                                 DeferredErrors& deferred_errors);

}  // namespace kvx::boundary
