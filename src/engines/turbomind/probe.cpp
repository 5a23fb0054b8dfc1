// The probe: five bytes, their addresses from layout.hpp, on the host or fetched from a GPU.
#include "engines/turbomind/probe.hpp"

#include <vector>

#include "device/cuda_caller.hpp"

namespace kvx::engines::turbomind {
namespace {

Status check_index(std::string_view field, int64_t value, int64_t end) {
  if (value >= 0 && value < end) return {};
  return invalid_argument("{} is {}; expected 0 to {}", field, value, end - 1);
}

Status check_probe(const BlockLayout& layout, int64_t num_blocks, int layer, int head,
                   int64_t token) {
  const Geometry& geometry = layout.geometry;
  if (!is_fp4(geometry.mode)) {
    return invalid_argument("the mode is {}; the probe reads fp4", name_of(geometry.mode));
  }
  if (geometry.head_dim < 2 * kFp4Group) {
    return invalid_argument("head_dim is {}; the probe reads two scales, so expected {} or more",
                            geometry.head_dim, 2 * kFp4Group);
  }
  KVX_RETURN_IF_ERROR(check_index("layer", layer, geometry.num_layers));
  KVX_RETURN_IF_ERROR(check_index("head", head, geometry.num_kv_heads));
  return check_index("token", token, num_blocks * geometry.block_len);
}

// A token's K row and its scales.
struct Places {
  const uint8_t* row;
  const uint8_t* scales;
};

// token: of the block.
Places places_in(const BlockLayout& layout, const uint8_t* data, uint8_t* scales, int layer,
                 int head, int token) {
  const Geometry& geometry = layout.geometry;
  return {data + layout.data_offset(layer, head, KvSide::kKey, token),
          get_fp4_mx_scale_base(&scales, layer, head, geometry.num_kv_heads, geometry.block_len,
                                geometry.head_dim, token)};
}

// token_scale_bytes: of K; V's follow.
Fp4KvProbeResult result_of(const uint8_t* scales, int64_t token_scale_bytes, uint8_t byte) {
  const uint8_t* v = scales + token_scale_bytes;
  return {.k_scale0 = scales[0],
          .v_scale0 = v[0],
          .k_scale1 = scales[1],
          .v_scale1 = v[1],
          .kv_byte0 = byte};
}

}  // namespace

Result<Fp4KvProbeResult> fp4_kv_probe_host(const BlockLayout& layout, const SequenceBlocks& blocks,
                                           int layer, int head, int64_t token) {
  KVX_RETURN_IF_ERROR(check_probe(layout, std::ssize(blocks.data), layer, head, token));
  if (blocks.data.size() != blocks.scales.size()) {
    return invalid_argument("the sequence has {} data blocks and {} scale blocks; expected as many",
                            blocks.data.size(), blocks.scales.size());
  }
  const int block_len = layout.geometry.block_len;
  const auto block = static_cast<size_t>(token / block_len);
  const Places at = places_in(layout, blocks.data[block], blocks.scales[block], layer, head,
                              static_cast<int>(token % block_len));
  return result_of(at.scales, layout.token_scale_bytes, *at.row);
}

Result<Fp4KvProbeResult> fp4_kv_probe(const BlockLayout& layout, const DeviceSequenceBlocks& blocks,
                                      int layer, int head, int64_t token,
                                      device::CudaStream stream) {
  KVX_RETURN_IF_ERROR(check_probe(layout, blocks.num_blocks, layer, head, token));
  if (blocks.data == nullptr || blocks.scales == nullptr) {
    return invalid_argument("the table of {} blocks is null",
                            blocks.data == nullptr ? "data" : "scale");
  }
  KVX_ASSIGN_OR_RETURN(const device::CudaAddress table, device::find_cuda_address(blocks.data));
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(table.device));
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream));
  const int block_len = layout.geometry.block_len;
  const int64_t block = token / block_len;
  uint8_t* data = nullptr;
  uint8_t* scales = nullptr;
  KVX_RETURN_IF_ERROR(device::cuda_copy(&data, blocks.data + block, sizeof data));
  KVX_RETURN_IF_ERROR(device::cuda_copy(&scales, blocks.scales + block, sizeof scales));
  const Places at =
      places_in(layout, data, scales, layer, head, static_cast<int>(token % block_len));
  std::vector<uint8_t> fetched(static_cast<size_t>(2 * layout.token_scale_bytes));
  uint8_t byte = 0;
  KVX_RETURN_IF_ERROR(device::cuda_copy(fetched.data(), at.scales, std::ssize(fetched)));
  KVX_RETURN_IF_ERROR(device::cuda_copy(&byte, at.row, 1));
  return result_of(fetched.data(), layout.token_scale_bytes, byte);
}

}  // namespace kvx::engines::turbomind
