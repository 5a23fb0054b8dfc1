// parse_page_layout and lay_out_pages.
#include "tools/kvx/bench/callers_pages.hpp"

#include <algorithm>
#include <charconv>

#include "core/checked.hpp"

namespace kvx::tool {
namespace {

constexpr int64_t kRegionAlignment = 256;

// Strides of a region whose rows follow each other in the order.
struct PageStrides {
  int64_t block;
  int64_t token;
  int64_t head;
};

PageStrides page_strides(PageOrder order, int block_size, int num_heads, int row_bytes) {
  const int64_t row = row_bytes;
  if (order == PageOrder::kNhd) return {block_size * num_heads * row, num_heads * row, row};
  return {block_size * num_heads * row, row, block_size * row};
}

}  // namespace

Result<PageLayout> parse_page_layout(std::string_view name) {
  if (name == "pool") return PageLayout{};
  PageLayout layout;
  if (name.starts_with("nhd")) layout.order = PageOrder::kNhd;
  if (name.starts_with("hnd")) layout.order = PageOrder::kHnd;
  const std::string_view digits = name.substr(std::min<size_t>(name.size(), 3));
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), layout.block_size);
  const bool is_number = error == std::errc() && end == digits.data() + digits.size();
  constexpr int kMostTokens = 4096;
  if (layout.order == PageOrder::kPool || !is_number || layout.block_size < 1 ||
      layout.block_size > kMostTokens) {
    return invalid_argument("pages are '{}'; expected pool, nhd16, nhd64, hnd16, hnd64, ...", name);
  }
  return layout;
}

Result<cache::Region> lay_out_pages(cache::Memory& memory, PageOrder order, int64_t num_blocks,
                                    int block_size, ops::HeadRun& run) {
  const auto rows_bytes = [&](int row_bytes) {
    return round_up<int64_t>(num_blocks * block_size * run.num_heads * row_bytes, kRegionAlignment);
  };
  struct SideBytes {
    ops::SideView* side;
    int code_bytes;
    int scale_bytes;  // 0: none, or given
  };
  SideBytes sides[] = {{&run.k, 0, 0}, {&run.v, 0, 0}};
  int64_t all = 0;
  for (SideBytes& s : sides) {
    s.code_bytes = format::code_bytes_per_row(s.side->spec, s.side->head_dim);
    const bool is_given = s.side->spec.scale_source == format::ScaleSource::kGiven;
    if (!is_given) s.scale_bytes = format::scale_bytes_per_row(s.side->spec, s.side->head_dim);
    all += rows_bytes(s.code_bytes) + rows_bytes(s.scale_bytes);
  }
  KVX_ASSIGN_OR_RETURN(cache::Region region, memory.allocate(all, "pages of kvx bench"));
  uint8_t* next = region.data();
  for (const SideBytes& s : sides) {
    const PageStrides p = page_strides(order, block_size, run.num_heads, s.code_bytes);
    s.side->codes = {next, p.block, p.token, p.head};
    next += rows_bytes(s.code_bytes);
  }
  for (const SideBytes& s : sides) {
    if (s.scale_bytes == 0) continue;
    const PageStrides p = page_strides(order, block_size, run.num_heads, s.scale_bytes);
    s.side->scales = {next, p.block, p.token, p.head, format::scale_bytes_per_group(s.side->spec)};
    next += rows_bytes(s.scale_bytes);
  }
  return region;
}

Result<cache::Region> lay_out_latent_pages(cache::Memory& memory, int64_t num_blocks,
                                           int block_size, ops::HeadRun& run) {
  const int code_bytes = format::code_bytes_per_row(run.k.spec, run.k.head_dim);
  const bool has_scales =
      run.k.spec.has_scale() && run.k.spec.scale_source != format::ScaleSource::kGiven;
  const int64_t row_bytes = round_up<int64_t>(
      code_bytes + (has_scales ? format::scale_bytes_per_row(run.k.spec, run.k.head_dim) : 0), 16);
  KVX_ASSIGN_OR_RETURN(cache::Region region, memory.allocate(num_blocks * block_size * row_bytes,
                                                             "latent rows of kvx bench"));
  run.k.codes = {region.data(), block_size * row_bytes, row_bytes, row_bytes};
  if (has_scales) {
    run.k.scales = {region.data() + code_bytes, block_size * row_bytes, row_bytes, row_bytes,
                    format::scale_bytes_per_group(run.k.spec)};
  }
  const int value_dim = run.v.head_dim;
  run.v = run.k;
  run.v.head_dim = value_dim;
  run.v.is_alias = true;
  return region;
}

}  // namespace kvx::tool
