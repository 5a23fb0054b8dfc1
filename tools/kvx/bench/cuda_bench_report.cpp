// The report of `kvx bench --device cuda` as a table and as JSON.
#include <nlohmann/json.hpp>

#include "tools/kvx/bench/cuda_bench.hpp"
#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

std::string cuda_bench_table(const CudaBenchReport& report, bool color) {
  Table table({{"format"},
               {"shape"},
               {"verb"},
               {"MB", Align::kRight},
               {"us", Align::kRight},
               {"GB/s", Align::kRight},
               {"%", Align::kRight},
               {"TFLOP/s", Align::kRight}});
  for (const CudaMeasurement& m : report.measurements) {
    table.add_row({m.format, m.shape, m.verb,
                   fmt::format("{:.1f}", static_cast<double>(m.packed_bytes) / 1e6),
                   fmt::format("{:.1f}", 1e6 * m.seconds),
                   fmt::format("{:.0f}", m.gigabytes_per_second()),
                   m.yardstick_seconds > 0 ? fmt::format("{:.1f}", m.percent()) : "",
                   m.flops > 0 ? fmt::format("{:.0f}", m.teraflops_per_second()) : ""});
  }
  return table.text(color) +
         fmt::format(
             "\n{}, driver for CUDA {}.{}: read {:.0f} GB/s, copy {:.0f} GB/s (read and written), "
             "over 4 GiB; queries and outputs in {}.\n%: attend of that read; append (bf16 rows to "
             "packed bytes), gather "
             "(back), copy "
             "(packed blocks) and pack (16-bit blocks to packed ones) of a copy of as many bytes, "
             "timed alike; step (append of a token a sequence) of a launch that does nothing; fed: "
             "with error feedback of K. TFLOP/s of prefill and latent rows: 2 * (K's head_dim + "
             "V's) "
             "* query heads * causal pairs. Medians "
             "of {} graph "
             "replays.\n",
             report.device.name, report.device.driver_version / 1000,
             report.device.driver_version % 1000 / 10, report.bandwidth.read, report.bandwidth.copy,
             name_of(report.query_type), kCudaReplays);
}

std::string cuda_bench_json(const CudaBenchReport& report) {
  Json measurements = Json::array();
  for (const CudaMeasurement& m : report.measurements) {
    measurements.push_back({{"format", m.format},
                            {"shape", m.shape},
                            {"verb", m.verb},
                            {"packed_bytes", m.packed_bytes},
                            {"seconds", m.seconds},
                            {"gb_per_second", m.gigabytes_per_second()},
                            {"yardstick_seconds", m.yardstick_seconds},
                            {"percent", m.percent()},
                            {"tflops_per_second", m.teraflops_per_second()}});
  }
  const Json json = {{"version", report.version},
                     {"device", report.device.name},
                     {"driver_cuda", report.device.driver_version},
                     {"read_gb_per_second", report.bandwidth.read},
                     {"copy_gb_per_second", report.bandwidth.copy},
                     {"queries", name_of(report.query_type)},
                     {"measurements", measurements}};
  return json.dump(2) + "\n";
}

}  // namespace kvx::tool
