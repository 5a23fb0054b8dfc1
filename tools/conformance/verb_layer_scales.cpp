// What a VerbLayer's sides have in every order, and scales in buffers of their own.
#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {

void VerbLayer::begin_side(Run& run, int index, const std::string& name) {
  kvx_side_t& side = run.sides[index];
  const FormatFacts& format = facts_of(static_cast<kvx_format_t>(run.specs[index].format));
  side.head_dim = static_cast<uint32_t>(index == 0 ? given.k_dim : given.v_dim);
  side.spec = &run.specs[index];
  if (!format.has_scale()) return;
  side.scale_group_stride = format.scale_bytes();
  if (!format.has_tensor_scale) return;
  side.tensor_scales = memory_.add_list(name + " tensor scales",
                                        std::vector<float>(run.run.num_heads, given.tensor_scale));
}

void VerbLayer::add_scales(Run& run, int index, const std::string& name) {
  if (!writes_scales()) return give_scales(run, index, name);
  kvx_side_t& side = run.sides[index];
  const FormatFacts& format = facts_of(static_cast<kvx_format_t>(run.specs[index].format));
  const int64_t heads = run.run.num_heads, tokens = given.block_size;
  const int64_t scale_bytes =
      int64_t{format.groups_per_row(static_cast<int>(side.head_dim))} * format.scale_bytes();
  const int64_t rows = given.scales == ScaleFrom::kPage ? 1 : tokens;
  side.scale_token_stride = given.scales == ScaleFrom::kPage ? 0 : scale_bytes * heads;
  side.scale_head_stride = scale_bytes;
  side.scale_block_stride = scale_bytes * heads * rows;
  side.scales = memory_.add(name + " scales", side.scale_block_stride * given.num_blocks).data();
}

// Scales from 1/32 to 1/4, different for every head and group.
void VerbLayer::give_scales(Run& run, int index, const std::string& name) {
  kvx_side_t& side = run.sides[index];
  const FormatFacts& format = facts_of(static_cast<kvx_format_t>(run.specs[index].format));
  const bool is_one = given.scales == ScaleFrom::kTensor;
  const int groups = is_one ? 1 : format.groups_per_row(static_cast<int>(side.head_dim));
  std::vector<uint8_t> scales;
  const auto count = is_one ? 1 : static_cast<int>(run.run.num_heads) * groups;
  for (int i = 0; i < count; ++i) {
    const float amax =
        static_cast<float>(1 + (i * 5 + index) % 7) * (format.element == &kE5M2 ? 1024.0f : 1.0f);
    const std::vector<uint8_t> scale = encode_scale(format, amax, given.tensor_scale);
    scales.insert(scales.end(), scale.begin(), scale.end());
  }
  side.scales = memory_.add_list(name + " given scales", scales);
  side.scale_group_stride = is_one ? 0 : format.scale_bytes();
  side.scale_head_stride = is_one ? 0 : int64_t{groups} * format.scale_bytes();
}

}  // namespace kvx::conformance
