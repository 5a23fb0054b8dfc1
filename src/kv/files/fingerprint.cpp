// fingerprint_of: a line a fact, "name value"; layers that are stored alike share a line.
#include "kv/files/fingerprint.hpp"

#include <charconv>

#include "cache/prefix/content_hash.hpp"

namespace kvx::kv {
namespace {

std::string spec_text(const format::FormatSpec& spec, bool hadamard) {
  std::string text =
      fmt::format("{}:g{}:{}:{}:{}:{}", spec.facts->name, spec.group_size, name_of(spec.scale_type),
                  name_of(spec.scale_rule), name_of(spec.scale_source), name_of(spec.scale_choice));
  return hadamard ? text + ":hadamard" : text;
}

std::string layer_text(const LayerPlan& layer) {
  std::string text;
  for (const HeadRunPlan& run : layer.runs) {
    text += fmt::format("{}{} heads K {} V {}", text.empty() ? "" : ", ", run.num_heads,
                        spec_text(run.k.spec, layer.k_hadamard),
                        spec_text(run.v.spec, layer.v_hadamard));
    // Only where rows are two segments: other files stay as they are.
    if (layer.has_segments) text.append(" rotary ").append(spec_text(run.rotary, false));
  }
  return text;
}

// Not a word of them where there are none: files of caches without sinks stay as they are.
std::string sinks_text(int sinks) {
  return sinks == 0 ? "" : fmt::format(" sinks {}", sinks);
}

template <class T>
void add_numbers(const std::vector<T>& numbers, std::string& bytes) {
  bytes += fmt::format("{}:", numbers.size());
  bytes.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
}

// Not its offsets: they have as many blocks as a cache, and caches of two lengths share files.
// Nothing where there is none: older files' hashes stay as they are.
void add_rope_mean(const LayerCalibration& layer, std::string& bytes) {
  if (layer.k_rope_mean.empty()) return;
  bytes += fmt::format("rope {}:", layer.k_rope.pairs == RopePairs::kHalves ? 0 : 1);
  add_numbers(layer.k_rope_mean, bytes);
  add_numbers(layer.k_rope.inv_freq, bytes);
  add_numbers(std::vector<double>{layer.k_rope.attention_scaling}, bytes);
}

std::string_view take_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::string_view name_of_line(std::string_view line) {
  return line.substr(0, line.find(' '));
}
std::string_view value_of_line(std::string_view line) {
  return line.substr(std::min(name_of_line(line).size() + 1, line.size()));
}

constexpr std::string_view kRecentBlocks = "recent_blocks";

// The number of a line "recent_blocks N"; -1 of any other line.
int64_t recent_blocks_of(std::string_view line) {
  if (name_of_line(line) != kRecentBlocks) return -1;
  const std::string_view value = value_of_line(line);
  int64_t number = -1;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  return error == std::errc() && end == value.data() + value.size() ? number : -1;
}

// Whether the line says a full-precision window, and not a longer one than the other line's.
bool is_window_within(std::string_view found, std::string_view expected) {
  const int64_t num_found = recent_blocks_of(found);
  return num_found >= 1 && num_found <= recent_blocks_of(expected);
}

}  // namespace

// Calibrated numbers are too many to spell: their hash stands for them.
std::string calibration_name(std::span<const LayerCalibration> layers) {
  if (layers.empty()) return "none";
  std::string bytes;
  for (const LayerCalibration& layer : layers) {
    for (const std::vector<float>* table :
         {&layer.k.group_scales, &layer.k.tensor_scales, &layer.v.group_scales,
          &layer.v.tensor_scales, &layer.k_mean, &layer.v_mean, &layer.k_factor, &layer.v_factor,
          &layer.k_block_offset}) {
      add_numbers(*table, bytes);
    }
    // Not a word of it where there is none: calibrations without it keep their name.
    if (!layer.k_feedback.empty()) {
      bytes += "feedback ";
      add_numbers(layer.k_feedback, bytes);
    }
    add_rope_mean(layer, bytes);
  }
  return hex(cache::checksum({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}));
}

std::string fingerprint_of(const FingerprintFacts& facts) {
  const CacheGeometry& geometry = *facts.geometry;
  std::string text;
  const auto add = [&text](std::string_view name, const auto& value) {
    text += fmt::format("{} {}\n", name, value);
  };
  add("order", block_order_name(facts.order));
  add("block_size", facts.block_size);
  add("num_layers", geometry.num_layers);
  add("num_kv_heads", geometry.num_kv_heads);
  add("k_head_dim", geometry.k_head_dim);
  add("v_head_dim", geometry.v_head_dim);
  // No line where V is stored apart: files of such caches stay as they are.
  if (geometry.is_latent) add("latent", 1);
  add("head_blocks", facts.full_precision_window.sink_blocks);
  add(kRecentBlocks, facts.full_precision_window.recent_blocks);
  add("wide",
      facts.full_precision_window.is_on() ? facts.full_precision_spec->facts->name : "none");
  std::string last;
  for (int layer = 0; layer < geometry.num_layers; ++layer) {
    std::string stored =
        fmt::format("window {}{}, {}", geometry.window_of(layer),
                    sinks_text(geometry.sinks_of(layer)), layer_text(facts.layers[layer]));
    if (stored == last) continue;
    add(fmt::format("layers_from_{}", layer), stored);
    last = std::move(stored);
  }
  add("calibration", calibration_name(facts.calibration));
  add("model", facts.model);
  return text;
}

std::string reason_not_to_load(std::string_view found, std::string_view expected) {
  while (!found.empty() || !expected.empty()) {
    const std::string_view have = take_line(found);
    const std::string_view want = take_line(expected);
    if (have == want || is_window_within(have, want)) continue;
    if (name_of_line(have) != name_of_line(want)) {
      return fmt::format("'{}' stands where '{}' was expected", have, want);
    }
    return fmt::format("{} is {}; expected {}", name_of_line(have), value_of_line(have),
                       recent_blocks_of(want) > 1 ? fmt::format("1 to {}", value_of_line(want))
                                                  : std::string(value_of_line(want)));
  }
  return "";
}

}  // namespace kvx::kv
