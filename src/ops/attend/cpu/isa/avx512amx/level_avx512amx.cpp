// The matrix kernels for AMX (tiles of BF16) beside AVX-512 BF16.
#define KVX_CPU_LEVEL level_avx512amx
#include "ops/attend/cpu/isa/avx512amx/products.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

const MatrixKernels& matrix_table();
const MatrixKernels& matrix_table() {
  static constexpr MatrixKernels kTable = {
      .split_rows = split_rows,
      .split_probabilities = split_probabilities,
      .find_packers = find_packers,
      .attend_tile = attend_matrix_tile,
      .pack_keys = pack_keys,
      .pack_values = pack_values,
      .score = score_matrix,
      .add_values = add_matrix_values,
      .fewest_rows = 16,
      .fewest_packed_rows = 64,
  };
  return kTable;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
