// Reads a caller's rows of floats.
#include "api/checks/rows_view.hpp"

#include "api/guard.hpp"
#include "core/checked.hpp"

namespace kvx::boundary {

Result<MutableFloatRows> read_rows(const kvx_rows_t* rows, int num_heads, int head_dim,
                                   std::string_view name) {
  KVX_ASSIGN_OR_RETURN(const kvx_rows_t args, read_struct(rows, name));
  if (args.data == nullptr) return invalid_argument("{}.data is null", name);
  if (args.token_stride < 0 || args.head_stride < 0) {
    return invalid_argument("{} has strides {} and {}; expected 0 or more", name, args.token_stride,
                            args.head_stride);
  }
  MutableFloatRows view = {static_cast<uint8_t*>(args.data), DType::kF32, args.token_stride,
                           args.head_stride};
  if (view.head_stride == 0) view.head_stride = head_dim;
  if (view.token_stride == 0) {
    const auto dense = (CheckedSize(num_heads) * CheckedSize(view.head_stride)).get();
    if (!dense) return invalid_argument("{} has rows beyond 64-bit addresses", name);
    view.token_stride = *dense;
  }
  switch (args.dtype) {
    case KVX_DTYPE_F32:
      return view;
    case KVX_DTYPE_F16:
      view.dtype = DType::kF16;
      return view;
    case KVX_DTYPE_BF16:
      view.dtype = DType::kBF16;
      return view;
    default:
      return invalid_argument("{}.dtype is {}; expected F16 1, BF16 2 or F32 3", name, args.dtype);
  }
}

Status check_apart(const LayerOfCaller& layer, const MutableFloatRows& rows, int64_t num_rows,
                   int num_heads, int head_dim, std::string_view name) {
  if (num_rows <= 0 || rows.data == nullptr) return {};
  const auto bytes =
      ((CheckedSize(num_rows - 1) * CheckedSize(rows.token_stride) +
        CheckedSize(num_heads - 1) * CheckedSize(rows.head_stride) + CheckedSize(head_dim)) *
       CheckedSize(bytes_of(rows.dtype)))
          .get();
  if (!bytes) return invalid_argument("{} has rows beyond 64-bit addresses", name);
  const MemoryRange taken = {rows.data, *bytes};
  for (const MemoryRange& range : layer.memory) {
    if (!share_memory(taken, range)) continue;
    return invalid_argument("{} overlaps the layer's memory; expected memory apart from it", name);
  }
  return {};
}

}  // namespace kvx::boundary
