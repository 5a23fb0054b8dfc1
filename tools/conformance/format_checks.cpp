// 1.2: kvx_format_info agrees with docs/numbers.md, and pages hold all rows and scales.
#include <cstring>

#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {
namespace {

kvx_format_spec_t spec_of(kvx_format_t format) {
  kvx_format_spec_t spec{};
  spec.size = sizeof spec;
  spec.format = format;
  return spec;
}

void describes(const Provider& provider, const FormatFacts& facts) {
  const kvx_format_spec_t spec = spec_of(facts.format);
  for (const int dim : {64, 96, 128}) {
    kvx_format_info_t info{};
    info.size = sizeof info;
    require_status(provider.format_info(&spec, static_cast<uint32_t>(dim), &info), KVX_STATUS_OK,
                   "kvx_format_info");
    require(std::string(info.name) == facts.name, "the name is '{}', expected '{}'", info.name,
            facts.name);
    const auto same = [dim](const char* field, uint32_t found, int64_t expected) {
      require(found == expected, "{} at head_dim {} is {}, expected {}", field, dim, found,
              expected);
    };
    same("head_dim_multiple", info.head_dim_multiple, facts.head_dim_multiple);
    same("groups_per_row", info.groups_per_row, facts.groups_per_row(dim));
    same("code_bytes_per_row", info.code_bytes_per_row, facts.code_bytes(dim));
    same("scale_bytes_per_group", info.scale_bytes_per_group, facts.scale_bytes());
    same("scale_bytes_per_row", info.scale_bytes_per_row,
         int64_t{facts.groups_per_row(dim)} * facts.scale_bytes());
    same("scale_type", info.scale_type, facts.scale_type);
    same("has_tensor_scale", info.has_tensor_scale, facts.has_tensor_scale ? 1 : 0);
    if (facts.has_scale()) same("group_size", info.group_size, facts.group_length(dim));
  }
  kvx_format_info_t info{};
  info.size = sizeof info;
  const auto odd = static_cast<uint32_t>(facts.head_dim_multiple + 1);
  if (facts.head_dim_multiple > 1) {
    require_status(provider.format_info(&spec, odd, &info), KVX_STATUS_INVALID_ARGUMENT,
                   fmt::format("head_dim {}", odd));
  }
  require_status(provider.format_info(&spec, 0, &info), KVX_STATUS_INVALID_ARGUMENT, "head_dim 0");
}

void guards_its_structs(const Provider& provider) {
  kvx_format_spec_t spec = spec_of(KVX_FORMAT_INT8);
  kvx_format_info_t info;
  memset(&info, 0x5A, sizeof info);
  info.size = 16;
  require_status(provider.format_info(&spec, 64, &info), KVX_STATUS_OK, "16 bytes of info");
  require(info.size == 16, "info.size is {}, expected 16", info.size);
  require(info.code_bytes_per_row == 0x5A5A5A5A, "more than 16 bytes were written");
  info.size = sizeof info;
  const auto refuse = [&](const char* what, auto spoil) {
    kvx_format_spec_t bad = spec;
    spoil(bad);
    require_status(provider.format_info(&bad, 64, &info), KVX_STATUS_INVALID_ARGUMENT, what);
  };
  refuse("format 0", [](kvx_format_spec_t& s) { s.format = 0; });
  refuse("format 99", [](kvx_format_spec_t& s) { s.format = 99; });
  refuse("groups of 48", [](kvx_format_spec_t& s) { s.group_size = 48; });
  refuse("int8's scales as E8M0", [](kvx_format_spec_t& s) { s.scale_type = KVX_SCALE_TYPE_E8M0; });
  refuse("a reserved field", [](kvx_format_spec_t& s) { s.reserved = 1; });
  require_status(provider.format_info(nullptr, 64, &info), KVX_STATUS_INVALID_ARGUMENT,
                 "a null spec");
  require_status(provider.format_info(&spec, 64, nullptr), KVX_STATUS_INVALID_ARGUMENT,
                 "a null info");
}

// Every row and scale lies inside the pages and overlaps no other: a row that was stored is
// unchanged when all rows have been stored.
void lays_out_pages(const Provider& provider, kvx_format_t format) {
  Memory memory;
  LayerCase layer;
  layer.set_formats(format, format).order = Order::kPages;
  VerbLayer pages(provider, memory, layer);
  pages.fill();
  for (int64_t slot = 0; slot < layer.num_slots(); ++slot) {
    for (int64_t head = 0; head < layer.num_heads; ++head) {
      for (int s = 0; s < 2; ++s) {
        const auto side = static_cast<Side>(s);
        const RowPlace place = {slot / layer.block_size, slot % layer.block_size, head};
        const auto number = static_cast<uint64_t>((slot * layer.num_heads + head) * 2 + s);
        const CodedRow expected = encode_row(pages.facts(side, head), some_row(number, 64),
                                             pages.tensor_scale(side, head));
        const CodedRow found = pages.stored(side, place);
        require(found.codes == expected.codes && found.scales == expected.scales,
                "the rows of a page lie over each other at slot {}, head {}", slot, head);
      }
    }
  }
  require(memory.buffers().size() == 1, "pages want one buffer");
  const Buffer& buffer = *memory.buffers()[0];
  memset(buffer.data(), 0, static_cast<size_t>(buffer.size()));
  for (const float x : decode_row(facts_of(format), pages.stored(Side::kValue, {2, 1, 1}), 64, 1)) {
    require(x == 0, "a page of zeros decodes to {}", x);
  }
}

void refuses_bad_pages(const Provider& provider) {
  const kvx_format_spec_t spec = spec_of(KVX_FORMAT_INT8);
  kvx_page_desc_t page{};
  page.size = sizeof page;
  page.block_size = 4;
  page.k_head_dim = page.v_head_dim = 64;
  page.k_spec = page.v_spec = &spec;
  uint64_t bytes = 12345;
  const auto refuse = [&](const char* what, auto spoil) {
    kvx_page_desc_t bad = page;
    spoil(bad);
    require_status(provider.page_bytes_per_token(&bad, &bytes), KVX_STATUS_INVALID_ARGUMENT, what);
    require(bytes == 12345, "{}: bytes was written", what);
  };
  refuse("blocks of 6 tokens", [](kvx_page_desc_t& p) { p.block_size = 6; });
  refuse("blocks of no tokens", [](kvx_page_desc_t& p) { p.block_size = 0; });
  refuse("a null k_spec", [](kvx_page_desc_t& p) { p.k_spec = nullptr; });
  refuse("a k_head_dim of 0", [](kvx_page_desc_t& p) { p.k_head_dim = 0; });
  require_status(provider.page_bytes_per_token(nullptr, &bytes), KVX_STATUS_INVALID_ARGUMENT,
                 "a null page");
  require_status(provider.page_bytes_per_token(&page, nullptr), KVX_STATUS_INVALID_ARGUMENT,
                 "null bytes");
  kvx_side_t k{};
  kvx_side_t v{};
  k.size = v.size = sizeof k;
  uint8_t memory[64] = {};
  require_status(provider.describe_pages(&page, nullptr, 1, &k, &v), KVX_STATUS_INVALID_ARGUMENT,
                 "null pages");
  require_status(provider.describe_pages(&page, memory, 0, &k, &v), KVX_STATUS_INVALID_ARGUMENT,
                 "no KV heads");
  v.size = 8;
  require_status(provider.describe_pages(&page, memory, 1, &k, &v), KVX_STATUS_INVALID_ARGUMENT,
                 "a side of 8 bytes");
  require(k.codes == nullptr, "a call that fails has filled k");
}

}  // namespace

std::vector<Check> format_checks() {
  std::vector<Check> checks;
  const auto add = [&checks](std::string name, const LayerCase& layer, auto ask) {
    checks.push_back(
        {Section::kFormatWords, std::move(name), layer.needs(), [ask](const Provider& provider) {
           require(provider.format_info != nullptr && provider.page_bytes_per_token != nullptr &&
                       provider.describe_pages != nullptr,
                   "kvx_format_info, kvx_page_bytes_per_token or kvx_describe_pages "
                   "is not exported");
           ask(provider);
         }});
  };
  LayerCase int8;
  int8.set_formats(KVX_FORMAT_INT8, KVX_FORMAT_INT8);
  for (const FormatFacts& facts : all_formats()) {
    const kvx_format_t format = facts.format;
    LayerCase layer;
    layer.set_formats(format, format);
    add(fmt::format("the sizes of {} rows", facts.name), layer,
        [&facts](const Provider& p) { describes(p, facts); });
    add(fmt::format("pages of {}", facts.name), layer,
        [format](const Provider& p) { lays_out_pages(p, format); });
  }
  add("structs of format_info", int8, guards_its_structs);
  add("refuse bad pages", int8, refuses_bad_pages);
  return checks;
}

}  // namespace kvx::conformance
