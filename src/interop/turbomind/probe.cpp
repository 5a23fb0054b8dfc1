// The probe on the host: five bytes, their addresses from layout.hpp.
#include "interop/turbomind/probe.hpp"

namespace kvx::interop::turbomind {
namespace {

Status check_index(std::string_view field, int64_t value, int64_t end) {
  if (value >= 0 && value < end) return {};
  return invalid_argument("{} is {}; expected 0 to {}", field, value, end - 1);
}

Status check_probe(const BlockLayout& layout, const SequenceBlocks& blocks, int layer, int head,
                   int64_t token) {
  const Geometry& geometry = layout.geometry;
  if (!is_fp4(geometry.mode)) {
    return invalid_argument("the mode is {}; the probe reads fp4", name_of(geometry.mode));
  }
  if (geometry.head_dim < 2 * kFp4Group) {
    return invalid_argument("head_dim is {}; the probe reads two scales, so expected {} or more",
                            geometry.head_dim, 2 * kFp4Group);
  }
  if (blocks.data.size() != blocks.scales.size()) {
    return invalid_argument("the sequence has {} data blocks and {} scale blocks; expected as many",
                            blocks.data.size(), blocks.scales.size());
  }
  KVX_RETURN_IF_ERROR(check_index("layer", layer, geometry.num_layers));
  KVX_RETURN_IF_ERROR(check_index("head", head, geometry.num_kv_heads));
  return check_index("token", token, static_cast<int64_t>(blocks.data.size()) * geometry.block_len);
}

}  // namespace

Result<Fp4KvProbeResult> fp4_kv_probe_host(const BlockLayout& layout, const SequenceBlocks& blocks,
                                           int layer, int head, int64_t token) {
  KVX_RETURN_IF_ERROR(check_probe(layout, blocks, layer, head, token));
  const Geometry& geometry = layout.geometry;
  const uint8_t* scales =
      get_fp4_mx_scale_base(blocks.scales.data(), layer, head, geometry.num_kv_heads,
                            geometry.block_len, geometry.head_dim, token);
  const uint8_t* data =
      blocks.data[static_cast<size_t>(token / geometry.block_len)] +
      layout.data_offset(layer, head, Side::kKey, static_cast<int>(token % geometry.block_len));
  const int64_t v = layout.token_scale_bytes;  // V's scales follow K's
  return Fp4KvProbeResult{.k_scale0 = scales[0],
                          .v_scale0 = scales[v],
                          .k_scale1 = scales[1],
                          .v_scale1 = scales[v + 1],
                          .kv_byte0 = data[0]};
}

}  // namespace kvx::interop::turbomind
