// The measurements of `kvx bench --device cuda`: the verbs on a GPU, through their public
// functions, against yardsticks measured in the same run.
#pragma once

#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "device/cuda.hpp"
#include "kv/recipe.hpp"
#include "tools/kvx/bench/bench_cache.hpp"
#include "tools/kvx/bench/callers_pages.hpp"
#include "tools/kvx/bench/cuda_timing.hpp"

namespace kvx::tool {

// A name and a batch; docs/howto/read-a-benchmark.md lists them.
struct CudaBenchShape {
  std::string name;
  BenchShape shape;
  int value_dim = 128;  // K's is the shape's head_dim; of latent rows the shape's own value_dim()
  int q_len = 1;
  int window = 0;
  int window_sinks = 0;
  PageOrder pages = PageOrder::kPool;
  bool has_sinks = false;
  bool without_wgmma = false;      // a prompt in the kernel that older and newer devices have
  DType query_type = DType::kF16;  // of 16 bits; outputs' too
  bool is_mixed = false;           // lengths from 128 to the shape's, evenly on a logarithmic scale

  // Prompts, or chunks of them: bound by arithmetic, not by bytes.
  bool is_prefill() const { return q_len > 16; }
};

// Names with commas: of docs/howto/read-a-benchmark.md, or SEQUENCESxTOKENS ("4x65536"); "a:nhd16"
// on a caller's pages.
Result<std::vector<CudaBenchShape>> parse_cuda_shapes(const std::string& names, int block_size);

struct CudaMeasurement {
  std::string format;
  std::string shape;
  std::string verb;
  double seconds = 0;        // median of kCudaReplays graph replays, a call
  int64_t packed_bytes = 0;  // that the call reads or writes once
  // prefill, and attend of latent rows: 2 * (K's head_dim + V's) * query heads * (query, token)
  // pairs that are seen
  double flops = 0;
  // attend: these bytes at the read bandwidth; step: a launch that does nothing; the others: a copy
  // of as many bytes, in the same graph over the same sets.
  double yardstick_seconds = 0;
  double teraflops_per_second() const { return flops / seconds / 1e12; }
  double percent() const { return 100 * yardstick_seconds / seconds; }
  double gigabytes_per_second() const { return static_cast<double>(packed_bytes) / seconds / 1e9; }
};

struct CudaBenchReport {
  std::string version;
  device::CudaDevice device;
  CudaBandwidth bandwidth;
  DType query_type = DType::kF16;
  std::vector<CudaMeasurement> measurements;
};

// Every verb on one format and shape, appended to the report; only attend where the recipe has
// full-precision ends, or where that is asked for.
Status measure_cuda(const device::CudaDevice& device, const CudaBenchShape& shape,
                    const kv::Recipe& recipe, bool only_attend, CudaBenchReport& report);

std::string cuda_bench_table(const CudaBenchReport& report, bool color);
std::string cuda_bench_json(const CudaBenchReport& report);

}  // namespace kvx::tool
