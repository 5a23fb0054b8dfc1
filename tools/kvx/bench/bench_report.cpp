// The measurements of kvx bench, written down in three ways.
#include "tools/kvx/bench/bench_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tools/kvx/bench/latent_shape.hpp"
#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(std::optional<double> number) {
  return number ? Json(*number) : Json(nullptr);
}

Json json_of(const BenchReport& report, const Measurement& m) {
  return {{"format", m.format},
          {"verb", m.verb},
          {"sequences", m.shape.num_sequences},
          {"length", m.shape.length},
          {"kv_heads", m.shape.num_kv_heads},
          {"q_heads", m.shape.num_q_heads},
          {"head_dim", m.shape.head_dim},
          {"value_dim", m.shape.value_dim()},
          {"is_latent", m.shape.is_latent()},
          {"block_size", m.shape.block_size},
          {"precision", m.shape.is_fast ? "fast" : "accurate"},
          {"tokens", m.num_tokens},
          {"packed_bytes", m.packed_bytes},
          {"seconds", m.seconds},
          {"gb_per_second", m.gigabytes_per_second()},
          {"percent_of_read", report.percent_of_read(m)},
          {"percent_of_block_read", json_of(report.percent_of_block_read(m))},
          {"time_over_bf16", json_of(report.time_over_bf16(m))},
          {"tokens_per_second", m.tokens_per_second()}};
}

// A recipe may hold commas.
std::string csv_cell(const Json& value) {
  if (value.is_null()) return "";
  return value.is_string() ? fmt::format("\"{}\"", value.get<std::string>()) : value.dump();
}

std::string cell(const char* pattern, std::optional<double> number) {
  return number ? fmt::format(fmt::runtime(pattern), *number) : "";
}

}  // namespace

std::optional<double> BenchReport::seconds_of(const char* format, const char* verb,
                                              const BenchShape& shape) const {
  for (const Measurement& m : measurements) {
    if (m.format == format && m.verb == verb && m.shape == shape) return m.seconds;
  }
  return std::nullopt;
}

std::optional<double> BenchReport::percent_of_block_read(const Measurement& m) const {
  if (m.verb != kAttendDecode) return std::nullopt;
  const std::optional<double> read = seconds_of(m.format.c_str(), kReadBlocks, m.shape);
  return read ? std::optional(100 * *read / m.seconds) : std::nullopt;
}

std::optional<double> BenchReport::time_over_bf16(const Measurement& m) const {
  const std::optional<double> bf16 = seconds_of("bf16", m.verb.c_str(), m.shape);
  return bf16 ? std::optional(m.seconds / *bf16) : std::nullopt;
}

std::string bench_table(const BenchReport& report, bool color) {
  const auto is_latent = [](const Measurement& m) { return m.shape.is_latent(); };
  const bool has_names = std::ranges::any_of(report.measurements, is_latent);
  Table table({{"format"},
               {has_names ? "shape" : "length", Align::kRight},
               {"verb"},
               {"packed MB", Align::kRight},
               {"ms", Align::kRight},
               {"GB/s", Align::kRight},
               {"% of read", Align::kRight},
               {"% of blocks", Align::kRight},
               {"time / bf16", Align::kRight},
               {"tokens/s", Align::kRight}});
  for (const Measurement& m : report.measurements) {
    table.add_row(
        {m.format, has_names ? latent_batch_name(m.shape) : fmt::format("{}", m.shape.length),
         m.verb, fmt::format("{:.1f}", static_cast<double>(m.packed_bytes) / 1e6),
         fmt::format("{:.2f}", 1e3 * m.seconds), fmt::format("{:.2f}", m.gigabytes_per_second()),
         fmt::format("{:.1f}", report.percent_of_read(m)),
         cell("{:.1f}", report.percent_of_block_read(m)), cell("{:.2f}", report.time_over_bf16(m)),
         fmt::format("{:.0f}", m.tokens_per_second())});
  }
  return table.text(color) +
         fmt::format(
             "\nread: {:.1f} GB/s with {} threads, the best of three loops over 256 MiB; {}.\n"
             "GB/s: packed bytes (codes and scales) that a call goes over once, by its median "
             "time.\n"
             "% of blocks: of the speed of reading the same blocks in the same order without "
             "mathematics.\n",
             report.read_gigabytes_per_second, report.threads, report.cpu_level);
}

std::string bench_json(const BenchReport& report) {
  Json measurements = Json::array();
  for (const Measurement& m : report.measurements) measurements.push_back(json_of(report, m));
  const Json json = {{"version", report.version},
                     {"cpu_level", report.cpu_level},
                     {"threads", report.threads},
                     {"read_gb_per_second", report.read_gigabytes_per_second},
                     {"measurements", measurements}};
  return json.dump(2) + "\n";
}

std::string bench_csv(const BenchReport& report) {
  std::string text;
  for (const Measurement& m : report.measurements) {
    const Json row = json_of(report, m);
    std::string titles;
    std::string cell;
    for (const auto& [title, value] : row.items()) {
      if (!titles.empty()) {
        titles += ',';
        cell += ',';
      }
      titles += title;
      cell += csv_cell(value);
    }
    if (text.empty()) text = titles + "\n";
    text += cell + "\n";
  }
  return text;
}

}  // namespace kvx::tool
