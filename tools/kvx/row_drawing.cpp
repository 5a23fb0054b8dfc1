// Rows are drawn from the spec's sizes: codes first, then the scales that lie in the row.
#include "tools/kvx/row_drawing.hpp"

#include <fmt/format.h>

#include <vector>

#include "format/packing.hpp"

namespace kvx::tool {
namespace {

using format::FormatSpec;
using format::Packing;

struct Box {
  int num_bytes;
  std::string label;
};

std::string count_of(int count, std::string_view what) {
  return count == 1 ? fmt::format("{}", what) : fmt::format("{} x {}", count, what);
}

std::vector<Box> boxes_of(const FormatSpec& spec, int head_dim) {
  std::vector<Box> boxes = {
      {code_bytes_per_row(spec, head_dim), count_of(head_dim, spec.facts->element)}};
  if (!spec.has_scale() || spec.scale_source != format::ScaleSource::kComputed) return boxes;
  const std::string type(name_of(spec.scale_type));
  if (spec.is_affine()) {
    boxes.push_back({bytes_of(spec.scale_type), "scale " + type});
    boxes.push_back({bytes_of(spec.scale_type), "zero " + type});
  } else {
    boxes.push_back({scale_bytes_per_row(spec, head_dim),
                     count_of(groups_per_row(spec, head_dim), "scale " + type)});
  }
  return boxes;
}

std::string byte_of_two(int byte, int low, int high) {
  return fmt::format("byte {}: e{} | e{} << 4", byte, low, high);
}

// The codes of each byte, where two share one. TurboMind's order repeats every four bytes.
std::string nibble_line(Packing packing) {
  switch (packing) {
    case Packing::kBytes:
      return "";
    case Packing::kNibbles:
      return byte_of_two(0, 0, 1) + "   " + byte_of_two(1, 2, 3) + "   ...\n";
    case Packing::kQuarters:
      return "byte 0: e0 | e1 << 2 | e2 << 4 | e3 << 6   byte 1: e4 | ...   ...\n";
    case Packing::kThreeBits:
      return "each 24 bytes 64 codes: 16 bytes of their low bits, e0 | e1 << 2 | e2 << 4 | ...,\n"
             "then 8 bytes of their high bits, e0 | e32 << 1 | e1 << 2 | e33 << 3 | ...\n";
    case Packing::kWords:
      return "each 4 bytes one uint32 of eight: e0 | e1 << 4 | e2 << 8 | ... | e7 << 28\n";
    case Packing::kTurboMind: {
      std::string line;
      for (int b = 0; b < 4; ++b) {
        const int low = format::turbomind_first(b);
        line += byte_of_two(b, low, low + 2) + "   ";
      }
      return line + "...\n";
    }
  }
  return "";
}

std::string draw_boxes(const std::vector<Box>& boxes) {
  constexpr size_t kMinWidth = 12;
  std::string edge = "+";
  std::string labels = "|";
  std::string offsets;
  int offset = 0;
  for (const Box& box : boxes) {
    const size_t width = std::max(kMinWidth, box.label.size() + 2);
    edge.append(width, '-').push_back('+');
    labels += fmt::format(" {:<{}}|", box.label, width - 1);
    offsets += fmt::format("{:<{}}", offset, width + 1);
    offset += box.num_bytes;
  }
  return fmt::format("{0}\n{1}\n{0}\n{2}{3} bytes\n", edge, labels, offsets, offset);
}

}  // namespace

std::string draw_row(const FormatSpec& spec, int head_dim) {
  return draw_boxes(boxes_of(spec, head_dim)) + nibble_line(spec.facts->packing);
}

std::string draw_dual_block(const FormatSpec& spec, int head_dim, int block_size) {
  return draw_boxes(
      {{block_size * code_bytes_per_row(spec, head_dim), count_of(block_size, "row of codes")},
       {block_size, count_of(block_size, "scale e4m3")},
       {head_dim, count_of(head_dim, "step e4m3")},
       {head_dim, count_of(head_dim, "zero int8")}});
}

}  // namespace kvx::tool
