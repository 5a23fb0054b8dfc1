// Instances of decode_mma: dual-scale formats.
#include "format/list.hpp"
#include "ops/attend/cuda/decode_mma/dual/keys.cuh"
#include "ops/attend/cuda/decode_mma/dual/values.cuh"
#include "ops/attend/cuda/decode_mma/kernel.cuh"
#include "ops/attend/cuda/decode_mma/pairs.hpp"

namespace kvx::ops::cuda {
namespace {

template <class Key, class Value, int Dim>
DecodeMmaKernel dual_kernel_for_dim(const TileTraits& traits) {
  using Keys = DualKeys<Key::Codec::kBits, Dim>;
  using Values = DualValues<Value::Codec::kBits, Dim>;
  return traits.has_many_rows ? decode_mma_kernel<Keys, Values, Dim, 2, true>()
                              : decode_mma_kernel<Keys, Values, Dim, 1, true>();
}

}  // namespace

#define KVX_DUAL_INSTANCE(K, V)                                                           \
  template <>                                                                             \
  DecodeMmaKernel dual_instance<format::FormatId::k##K, format::FormatId::k##V>(          \
      const TileTraits& traits) {                                                         \
    return traits.key_dim == 64 ? dual_kernel_for_dim<format::K, format::V, 64>(traits)   \
                                : dual_kernel_for_dim<format::K, format::V, 128>(traits); \
  }
KVX_DUAL_INSTANCE(Int2Dual, Int2Dual)
KVX_DUAL_INSTANCE(Int3Dual, Int2Dual)
KVX_DUAL_INSTANCE(Int3Dual, Int3Dual)
KVX_DUAL_INSTANCE(Int4Dual, Int3Dual)
KVX_DUAL_INSTANCE(Int4Dual, Int4Dual)

}  // namespace kvx::ops::cuda
