// Checks of the scales of 8-bit float caches.
#include <array>

#include "api/checks/check_index.hpp"
#include "api/checks/check_tensor.hpp"
#include "api/guard.hpp"

namespace kvx::boundary {
namespace {

bool is_all_zero(const kvx_scale_desc_t& desc) {
  return number_of(desc.dtype) == 0 && number_of(desc.granularity) == 0 && desc.ndim == 0 &&
         desc.data == nullptr;
}

// How many dimensions the scales of a granularity have, and whether they are blocks and heads.
struct ScaleShape {
  int ndim;
  bool has_blocks;
  bool has_heads;
};

Result<ScaleShape> shape_of(const kvx_scale_desc_t& desc, std::string_view name) {
  switch (number_of(desc.granularity)) {
    case KVX_SCALE_PER_TENSOR:
      return ScaleShape{1, false, false};
    case KVX_SCALE_PER_BLOCK:
      return ScaleShape{1, true, false};
    case KVX_SCALE_PER_HEAD:
      return ScaleShape{1, false, true};
    case KVX_SCALE_PER_BLOCK_HEAD:
      return ScaleShape{2, true, true};
    default:
      return invalid_argument(
          "{}.granularity is {}; expected PER_TENSOR 1, PER_BLOCK 2, PER_HEAD 3 or PER_BLOCK_HEAD "
          "4",
          name, number_of(desc.granularity));
  }
}

Result<DType> dtype_of(const kvx_scale_desc_t& desc, std::string_view name) {
  switch (number_of(desc.dtype)) {
    case KVX_DTYPE_F32:
      return DType::kF32;
    case KVX_DTYPE_F16:
      return DType::kF16;
    case KVX_DTYPE_BF16:
      return DType::kBF16;
    default:
      return invalid_argument("{}.dtype is {}; expected F16 1, BF16 2 or F32 3", name,
                              number_of(desc.dtype));
  }
}

// A scale of the whole tensor may have ndim 0.
Status check_scale_shape(const kvx_scale_desc_t& desc, const ScaleShape& shape,
                         const CacheView& cache, std::string_view name) {
  if (!shape.has_blocks && !shape.has_heads && desc.ndim == 0) return {};
  if (desc.ndim != static_cast<uint32_t>(shape.ndim)) {
    return invalid_argument("{}.ndim is {}; expected {}", name, desc.ndim, shape.ndim);
  }
  const int64_t first = shape.has_blocks ? cache.num_blocks : shape.has_heads ? cache.num_heads : 1;
  const std::array<int64_t, 2> expected = {first, cache.num_heads};
  for (int i = 0; i < shape.ndim; ++i) {
    if (desc.shape[i] == expected[i]) continue;
    return invalid_argument("{}.shape[{}] is {}; expected {}", name, i, desc.shape[i], expected[i]);
  }
  return {};
}

}  // namespace

Status check_scale_size(const kvx_scale_desc_t& desc, std::string_view name) {
  if (desc.size == 0 && is_all_zero(desc)) return {};
  return check_nested(desc, name);
}

Result<ScaleView> check_scale(const kvx_scale_desc_t& desc, const void* fallback,
                              const CacheView& cache, std::string_view name,
                              DeferredErrors& deferred_errors) {
  if (desc.data == nullptr) {
    check_alignment(fallback, 4, name, deferred_errors);
    return ScaleView{.data = static_cast<const uint8_t*>(fallback)};
  }
  KVX_ASSIGN_OR_RETURN(const ScaleShape shape, shape_of(desc, name));
  KVX_ASSIGN_OR_RETURN(const DType dtype, dtype_of(desc, name));
  KVX_RETURN_IF_ERROR(check_scale_shape(desc, shape, cache, name));
  const int bytes = kvx::bytes_of(dtype);
  check_alignment(desc.data, bytes, name, deferred_errors);
  ScaleView view = {.data = static_cast<const uint8_t*>(desc.data), .dtype = dtype};
  for (int i = 0; i < shape.ndim; ++i) {
    if (!shape.has_blocks && !shape.has_heads) break;
    int64_t last = 0;  // of the axis, in bytes
    if (desc.stride[i] < 0 || __builtin_mul_overflow(desc.stride[i], bytes, &last) ||
        __builtin_mul_overflow(last, desc.shape[i], &last)) {
      deferred_errors.add(
          unsupported("{}.stride[{}] is {}; expected 0 or more, within 64-bit addresses", name, i,
                      desc.stride[i]));
      return view;
    }
    int64_t& stride = i == 0 && shape.has_blocks ? view.block_stride : view.head_stride;
    stride = desc.stride[i] * bytes;
  }
  return view;
}

}  // namespace kvx::boundary
