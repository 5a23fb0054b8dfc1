// The head of a sequence that comes layer by layer, from a hostile exporter: it is refused, or its
// pages lie in their blocks and it can be written again. The checksum is corrected first, so that
// mutations reach the code behind it.
#include <cstdlib>
#include <vector>

#include "transfer/fields.hpp"
#include "transfer/layer_head.hpp"

namespace {

using namespace kvx::transfer;

void check_pages(const SequenceHead& head) {
  for (int layer = 0; layer < static_cast<int>(head.layers.size()); ++layer) {
    for (const PageOfLayer& page : pages_of(head, layer)) {
      const int64_t block_bytes = head.index.kinds[page.block_copy->kind].bytes;
      const bool is_inside = page.place.offset >= 0 && page.place.bytes >= 1 &&
                             page.place.offset + page.place.bytes <= block_bytes;
      if (!is_inside) std::abort();
    }
  }
}

void read_head(std::span<const uint8_t> bytes) {
  const auto head = parse_head(bytes);
  if (!head.ok()) return;
  check_pages(head.value());
  const auto again = parse_head(encode_head(head.value()));
  if (!again.ok() || again.value().layers != head.value().layers) std::abort();
  check_pages(again.value());
}

// Numbers and texts in an order that the input says: nothing is read beyond its end, and what comes
// after a field that is cut short is empty.
void read_fields(std::span<const uint8_t> bytes) {
  FieldReader reader(bytes);
  size_t num_read = 0;
  for (const uint8_t step : bytes) {
    const size_t before = reader.num_left();
    const bool was_whole = reader.is_whole();
    switch (step % 4) {
      case 0:
        (void)reader.u32();
        break;
      case 1:
        (void)reader.u64();
        break;
      case 2:
        (void)reader.text(step);
        break;
      default:
        (void)reader.data(reader.u32());
    }
    num_read += before - reader.num_left();
    if (num_read > bytes.size() || (!was_whole && reader.is_whole())) std::abort();
    if (!reader.is_whole() && reader.num_left() != 0) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  read_fields(bytes);
  read_head(bytes);
  constexpr size_t kChecksumBytes = 16;
  if (size < kChecksumBytes) return 0;
  bytes.resize(size - kChecksumBytes);
  const auto sum = kvx::cache::checksum(bytes);
  bytes.insert(bytes.end(), sum.bytes.begin(), sum.bytes.end());
  read_head(bytes);
  return 0;
}
