// Checks of one tensor descriptor.
#include "api/checks/check_tensor.hpp"

#include <array>

#include "api/guard.hpp"
#include "core/checked.hpp"
#include "device/cuda_caller.hpp"

namespace kvx::boundary {
namespace {

void check_rule(const kvx_tensor_desc_t& tensor, int element_bytes, std::string_view name,
                DeferredErrors& deferred_errors) {
  const int64_t elements_in_16_bytes = 16 / element_bytes;
  CheckedSize canonical = 1;
  for (int i = static_cast<int>(tensor.ndim) - 1; i >= 0; --i) {
    const bool is_canonical = canonical.get() == tensor.stride[i];
    if (!is_canonical && tensor.stride[i] % elements_in_16_bytes != 0) {
      deferred_errors.add(unsupported(
          "{}.stride[{}] is {}; expected the canonical {} or a multiple of {} "
          "elements (16 bytes)",
          name, i, tensor.stride[i], canonical.get().value_or(0), elements_in_16_bytes));
    }
    canonical = canonical * CheckedSize(tensor.shape[i]);
  }
}

}  // namespace

Result<int64_t> span_of(std::span<Axis> axes, int64_t element, std::string_view name,
                        DeferredErrors& deferred_errors) {
  std::sort(axes.begin(), axes.end(),
            [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  CheckedSize taken = element;
  for (const Axis& axis : axes) {
    if (axis.extent == 1) continue;
    const auto inner = taken.get();
    if (inner && axis.stride < *inner) {
      deferred_errors.add(unsupported(
          "{} has a stride of {} over a span of {}; strides with which elements share an "
          "address are not supported",
          name, axis.stride, *inner));
      return 0;
    }
    taken = taken + CheckedSize(axis.extent - 1) * CheckedSize(axis.stride);
  }
  const auto total = taken.get();
  if (!total) return invalid_argument("{} has strides beyond 64-bit addresses", name);
  return *total;
}

Result<Element> check_element(const kvx_tensor_desc_t& tensor, std::string_view name) {
  switch (number_of(tensor.dtype)) {
    case KVX_DTYPE_F16:
      return Element::kF16;
    case KVX_DTYPE_BF16:
      return Element::kBF16;
    case KVX_DTYPE_F32:
      return Element::kF32;
    case KVX_DTYPE_F8_E4M3:
      return Element::kE4M3;
    case KVX_DTYPE_F8_E5M2:
      return Element::kE5M2;
    default:
      return invalid_argument(
          "{}.dtype is {}; expected F16 1, BF16 2, F32 3, F8_E4M3 4 or "
          "F8_E5M2 5",
          name, number_of(tensor.dtype));
  }
}

Status check_memory(uint32_t memory, std::string_view name, DeferredErrors& deferred_errors) {
  switch (memory) {
    case KVX_MEMORY_HOST:
      return {};
    case KVX_MEMORY_DEVICE:
    case KVX_MEMORY_UNIFIED:
      if (const Status usable = device::check_usable_cuda_device(); !usable.ok()) {
        deferred_errors.add(
            unsupported("{}.memory is {}; {}", name, memory, usable.error().message));
      }
      return {};
    default:
      return invalid_argument("{}.memory is {}; expected HOST 1, DEVICE 2 or UNIFIED 3", name,
                              memory);
  }
}

MemoryType memory_type(uint32_t memory) {
  switch (memory) {
    case KVX_MEMORY_DEVICE:
      return MemoryType::kDevice;
    case KVX_MEMORY_UNIFIED:
      return MemoryType::kUnified;
    default:
      return MemoryType::kHost;
  }
}

Status check_shape(const kvx_tensor_desc_t& tensor, std::span<const int64_t> expected,
                   std::string_view name) {
  if (tensor.ndim != expected.size()) {
    return invalid_argument("{}.ndim is {}; expected {}", name, tensor.ndim, expected.size());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (tensor.shape[i] == expected[i]) continue;
    return invalid_argument("{}.shape[{}] is {}; expected {}", name, i, tensor.shape[i],
                            expected[i]);
  }
  return {};
}

Result<int64_t> check_strides(const kvx_tensor_desc_t& tensor, StrideRule rule, int element_bytes,
                              std::string_view name, DeferredErrors& deferred_errors) {
  if (rule == StrideRule::kCanonicalOr16Bytes)
    check_rule(tensor, element_bytes, name, deferred_errors);
  std::array<Axis, KVX_MAX_TENSOR_DIMS> axes{};
  for (uint32_t i = 0; i < tensor.ndim; ++i) axes[i] = {tensor.shape[i], tensor.stride[i]};
  KVX_ASSIGN_OR_RETURN(const int64_t elements,
                       span_of(std::span(axes).first(tensor.ndim), 1, name, deferred_errors));
  const auto bytes = (CheckedSize(elements) * CheckedSize(element_bytes)).get();
  if (!bytes) return invalid_argument("{} has strides beyond 64-bit addresses", name);
  return *bytes;
}

void check_alignment(const void* data, int element_bytes, std::string_view name,
                     DeferredErrors& deferred_errors) {
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(element_bytes) == 0) return;
  deferred_errors.add(unsupported("{} begins at {}; expected a multiple of its elements' {} bytes",
                                  name, data, element_bytes));
}

Result<IndexArray> check_indices(const kvx_dtype_t& dtype, const void* data, int64_t count,
                                 std::string_view dtype_name, std::string_view data_name,
                                 DeferredErrors& deferred_errors) {
  const uint32_t number = number_of(dtype);
  if (number != KVX_DTYPE_S32 && number != KVX_DTYPE_S64) {
    return invalid_argument("{} is {}; expected S32 6 or S64 7", dtype_name, number);
  }
  if (data == nullptr && count != 0) {
    return invalid_argument("{} is null; expected {} entries", data_name, count);
  }
  const bool is_64_bit = number == KVX_DTYPE_S64;
  check_alignment(data, is_64_bit ? 8 : 4, data_name, deferred_errors);
  return IndexArray{data, is_64_bit};
}

}  // namespace kvx::boundary
