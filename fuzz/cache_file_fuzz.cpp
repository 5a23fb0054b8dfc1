// Any bytes as a cache file, or as the head of a layer file, are refused or read, never out of
// bounds. The checksums are corrected first, so that mutations reach the code behind them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kv/files/fingerprint.hpp"
#include "tier/cache_file.hpp"
#include "tier/layers/layer_file.hpp"

namespace {

using kvx::tier::FileHeader;
using kvx::tier::kHeaderBytes;

void read_block_copies(std::span<const uint8_t> bytes, const kvx::tier::FileIndex& index) {
  constexpr int64_t kMostBytes = 1 << 16;
  for (const auto& block : index.blocks) {
    for (const auto& block_copy : block.block_copies) {
      const int64_t num_bytes = index.kinds[block_copy.kind].bytes;
      if (num_bytes > kMostBytes) continue;
      std::vector<uint8_t> out(static_cast<size_t>(num_bytes));
      (void)decode_block_copy(block_copy,
                              bytes.subspan(static_cast<size_t>(block_copy.offset),
                                            static_cast<size_t>(block_copy.stored_bytes)),
                              out);
    }
  }
}

void read_file(std::span<const uint8_t> bytes, bool repairs_checksums) {
  const auto file_bytes = static_cast<int64_t>(bytes.size());
  const auto header = kvx::tier::parse_header(
      bytes.first(std::min<size_t>(bytes.size(), kHeaderBytes)), file_bytes);
  if (!header.ok()) return;
  FileHeader at = header.value();
  const auto index_bytes =
      bytes.subspan(static_cast<size_t>(at.index_offset), static_cast<size_t>(at.index_bytes));
  if (repairs_checksums) at.index_checksum = kvx::cache::checksum(index_bytes);
  const auto index = kvx::tier::parse_index(index_bytes, at);
  if (!index.ok()) return;
  read_block_copies(bytes, index.value());
  (void)kvx::kv::parse_fingerprint(index.value().fingerprint);
}

// The index of a layer file follows its header.
void read_layers(std::vector<uint8_t> bytes) {
  using kvx::tier::kLayerFileMagic;
  if (bytes.size() < kHeaderBytes) return;
  std::copy(kLayerFileMagic.begin(), kLayerFileMagic.end(), bytes.begin());
  const uint64_t index_bytes = bytes.size() - kHeaderBytes;
  std::memcpy(bytes.data() + 16, &index_bytes, sizeof index_bytes);
  const auto put_checksum = [&](std::span<const uint8_t> of, size_t at) {
    const auto sum = kvx::cache::checksum(of);
    std::copy(sum.bytes.begin(), sum.bytes.end(), bytes.begin() + static_cast<ptrdiff_t>(at));
  };
  put_checksum(std::span(bytes).subspan(kHeaderBytes), 32);
  put_checksum(std::span(bytes).first(48), 48);
  (void)kvx::tier::parse_layer_head(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  read_layers(bytes);
  read_file(bytes, false);
  constexpr size_t kChecked = 48;
  if (size >= kHeaderBytes) {
    const auto sum = kvx::cache::checksum(std::span(bytes).first(kChecked));
    std::copy(sum.bytes.begin(), sum.bytes.end(), bytes.begin() + kChecked);
    read_file(bytes, true);
  }
  return 0;
}
