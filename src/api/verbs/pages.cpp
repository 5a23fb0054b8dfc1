// Opaque pages: where a row's codes and scales lie inside a page of an engine's own pool.
//
//   page of one block and KV head, block_size * bytes_per_token bytes:
//     [K codes: block_size rows][K scales: block_size rows][K channels][V codes][V scales][V
//     channels]
//
// block_size is a multiple of four tokens, so every section begins on four bytes, the size of the
// largest scale. Only dual-scale formats have channels: their steps and zeros, of the block.
#include <algorithm>
#include <cstring>

#include "api/call.hpp"
#include "api/checks/format_spec.hpp"
#include "api/checks/layer_view.hpp"
#include "api/checks/out_structs.hpp"
#include "api/guard.hpp"

namespace kvx::boundary {
namespace {

struct PageSide {
  int64_t head_dim = 0;  // 0: not stored
  int64_t code_bytes = 0;
  int64_t scale_bytes = 0;
  int64_t group_bytes = 0;
  int64_t channel_bytes = 0;  // a token's share of those of a block

  int64_t bytes_per_token() const { return code_bytes + scale_bytes + channel_bytes; }
};

struct Page {
  int64_t block_size = 0;
  PageSide k;
  PageSide v;

  int64_t bytes_per_token() const { return k.bytes_per_token() + v.bytes_per_token(); }
};

Result<PageSide> read_side(const kvx_format_spec_t* spec, uint32_t head_dim, int64_t block_size,
                           std::string_view name) {
  KVX_ASSIGN_OR_RETURN(const format::FormatSpec format, read_format(spec, name));
  const int dim = static_cast<int>(std::min<uint32_t>(head_dim, INT32_MAX));
  KVX_RETURN_IF_ERROR(format::check_head_dim(format, dim));
  KVX_RETURN_IF_ERROR(format::check_block_size(format, static_cast<int>(block_size)));
  if (format.has_scale() && format.scale_source != format::ScaleSource::kComputed) {
    return unsupported("{}.scale_source is {}; a page holds computed scales", name,
                       format::name_of(format.scale_source));
  }
  return PageSide{dim, format::code_bytes_per_row(format, dim),
                  format::scale_bytes_per_row(format, dim), format::scale_bytes_per_group(format),
                  format::channel_bytes_per_block(format, dim) / block_size};
}

Result<Page> read_page(const kvx_page_desc_t* caller) {
  KVX_ASSIGN_OR_RETURN(const kvx_page_desc_t args, read_struct(caller, "page"));
  if (args.block_size == 0 || args.block_size % 4 != 0 || args.block_size > INT32_MAX / 2) {
    return invalid_argument("page.block_size is {}; expected a positive multiple of 4",
                            args.block_size);
  }
  Page page;
  page.block_size = args.block_size;
  KVX_ASSIGN_OR_RETURN(page.k,
                       read_side(args.k_spec, args.k_head_dim, args.block_size, "page.k_spec"));
  if (args.v_head_dim != 0) {
    KVX_ASSIGN_OR_RETURN(page.v,
                         read_side(args.v_spec, args.v_head_dim, args.block_size, "page.v_spec"));
  }
  return page;
}

kvx_side_t describe_side(const Page& page, const PageSide& side, const kvx_format_spec_t* spec,
                         uint8_t* first, int64_t num_kv_heads) {
  const int64_t head_bytes = page.block_size * page.bytes_per_token();
  kvx_side_t result{};
  result.size = sizeof result;
  result.head_dim = static_cast<uint32_t>(side.head_dim);
  result.spec = spec;
  result.codes = first;
  result.code_block_stride = head_bytes * num_kv_heads;
  result.code_token_stride = side.code_bytes;
  result.code_head_stride = head_bytes;
  if (side.channel_bytes != 0) {
    result.channels = first + page.block_size * (side.code_bytes + side.scale_bytes);
    result.channel_block_stride = result.code_block_stride;
    result.channel_head_stride = head_bytes;
  }
  if (side.scale_bytes == 0) return result;
  result.scales = first + page.block_size * side.code_bytes;
  result.scale_block_stride = result.code_block_stride;
  result.scale_token_stride = side.scale_bytes;
  result.scale_head_stride = head_bytes;
  result.scale_group_stride = side.group_bytes;
  return result;
}

Status describe_pages(const kvx_page_desc_t* caller, void* pages, uint32_t num_kv_heads,
                      kvx_side_t* k, kvx_side_t* v) {
  KVX_ASSIGN_OR_RETURN(const Page page, read_page(caller));
  if (pages == nullptr) return invalid_argument("pages is null");
  if (num_kv_heads < 1 || num_kv_heads > kMostHeads) {
    return invalid_argument("num_kv_heads is {}; expected 1 to {}", num_kv_heads, kMostHeads);
  }
  auto* first = static_cast<uint8_t*>(pages);
  const bool has_v = page.v.head_dim != 0;
  KVX_RETURN_IF_ERROR(check_side_room(k, "k", page.k.channel_bytes != 0));
  if (has_v) KVX_RETURN_IF_ERROR(check_side_room(v, "v", page.v.channel_bytes != 0));
  fill_side(describe_side(page, page.k, caller->k_spec, first, num_kv_heads), k);
  if (!has_v) return {};
  uint8_t* first_v = first + page.block_size * page.k.bytes_per_token();
  fill_side(describe_side(page, page.v, caller->v_spec, first_v, num_kv_heads), v);
  return {};
}

Status page_bytes_per_token(const kvx_page_desc_t* caller, uint64_t* bytes) {
  KVX_ASSIGN_OR_RETURN(const Page page, read_page(caller));
  if (bytes == nullptr) return invalid_argument("bytes is null");
  *bytes = static_cast<uint64_t>(page.bytes_per_token());
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_page_bytes_per_token(const kvx_page_desc_t* page, uint64_t* bytes) {
  return kvx::boundary::run_call([&] { return kvx::boundary::page_bytes_per_token(page, bytes); });
}

extern "C" kvx_status_t kvx_describe_pages(const kvx_page_desc_t* page, void* pages,
                                           uint32_t num_kv_heads, kvx_side_t* k, kvx_side_t* v) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::describe_pages(page, pages, num_kv_heads, k, v); });
}
