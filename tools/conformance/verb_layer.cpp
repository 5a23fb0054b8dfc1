// Layers, rows and tables of the verbs of 1.2.
#include "tools/conformance/verb_layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tools/conformance/numbers.hpp"

namespace kvx::conformance {
namespace {

constexpr int64_t kFragmentBytes = 4;

uint32_t source_of(ScaleFrom scales) {
  switch (scales) {
    case ScaleFrom::kRow:
      return KVX_SCALE_SOURCE_COMPUTED;
    case ScaleFrom::kPage:
      return KVX_SCALE_SOURCE_PAGE_SHARED;
    default:
      return KVX_SCALE_SOURCE_GIVEN;
  }
}

}  // namespace

Features LayerCase::needs() const {
  Features needs;
  needs.add(kFormats, k).add(kMemoryTypes, KVX_MEMORY_HOST);
  if (v_dim != 0 && !v_is_prefix) needs.add(kFormats, v);
  if (order == Order::kFragments) needs.add_flags(kTraits, KVX_TRAIT_FRAGMENTED_ROWS);
  if (v_is_prefix) needs.add_flags(kTraits, KVX_TRAIT_V_IN_K);
  return needs;
}

VerbLayer::VerbLayer(const Provider& provider, Memory& memory, const LayerCase& layer_case,
                     const std::string& name)
    : given(layer_case), memory_(memory) {
  const uint32_t last = given.two_runs ? 1 : 0;
  for (uint32_t r = 0; r <= last; ++r) {
    auto run = std::make_unique<Run>();
    run->first_head = r == 0 ? 0 : given.num_heads - 1;
    run->run.num_heads =
        r != last ? given.num_heads - 1 : given.num_heads - static_cast<uint32_t>(run->first_head);
    const bool is_exchanged = r != 0;
    for (int side = 0; side < 2; ++side) {
      kvx_format_spec_t& spec = run->specs[side];
      spec.size = sizeof spec;
      spec.format = (side == 0) != is_exchanged ? given.k : given.v;
      if (facts_of(static_cast<kvx_format_t>(spec.format)).has_scale()) {
        spec.scale_source = source_of(given.scales);
      }
    }
    describe_run(provider, *run, name + (r == 0 ? "" : "last run's "));
    run_pointers_.push_back(&run->run);
    runs_.push_back(std::move(run));
  }
  layer.size = sizeof layer;
  layer.block_size = given.block_size;
  layer.num_blocks = given.num_blocks;
  layer.num_kv_heads = given.num_heads;
  layer.num_runs = static_cast<uint32_t>(runs_.size());
  layer.runs = run_pointers_.data();
}

void VerbLayer::describe_run(const Provider& provider, Run& run, const std::string& name) {
  run.run.size = sizeof run.run;
  run.run.k = &run.sides[0];
  if (given.v_dim != 0) run.run.v = &run.sides[1];
  for (kvx_side_t& side : run.sides) side.size = sizeof side;
  if (given.order == Order::kPages) {
    kvx_page_desc_t page{};
    page.size = sizeof page;
    page.block_size = given.block_size;
    page.k_head_dim = static_cast<uint32_t>(given.k_dim);
    page.v_head_dim = given.v_is_prefix ? 0 : static_cast<uint32_t>(given.v_dim);
    page.k_spec = &run.specs[0];
    page.v_spec = &run.specs[1];
    uint64_t bytes = 0;
    require_status(provider.page_bytes_per_token(&page, &bytes), KVX_STATUS_OK,
                   "kvx_page_bytes_per_token");
    Buffer& pages = memory_.add(
        name + "pages",
        static_cast<int64_t>(given.num_blocks * run.run.num_heads * given.block_size * bytes));
    require_status(provider.describe_pages(&page, pages.data(), run.run.num_heads, &run.sides[0],
                                           &run.sides[1]),
                   KVX_STATUS_OK, "kvx_describe_pages");
  } else if (is_engines(given.order)) {
    describe_engines_block(run, name);
  } else {
    describe_side(run, 0, name + "K");
    if (given.v_dim != 0 && !given.v_is_prefix) describe_side(run, 1, name + "V");
  }
  if (given.v_is_prefix) {
    run.sides[1] = {};
    run.sides[1].size = sizeof run.sides[1];
    run.sides[1].head_dim = static_cast<uint32_t>(given.v_dim);
    run.sides[1].flags = KVX_SIDE_PREFIX_OF_K;
  }
}

void VerbLayer::describe_side(Run& run, int index, const std::string& name) {
  kvx_side_t& side = run.sides[index];
  const FormatFacts& format = facts_of(static_cast<kvx_format_t>(run.specs[index].format));
  const int dim = index == 0 ? given.k_dim : given.v_dim;
  const int64_t heads = run.run.num_heads;
  const int64_t tokens = given.block_size;
  const int64_t code_bytes = format.code_bytes(dim);
  const int64_t scale_bytes = int64_t{format.groups_per_row(dim)} * format.scale_bytes();
  begin_side(run, index, name);
  // Bytes from row to row, and whether the rows of a head are adjacent.
  const bool is_record = given.order == Order::kRecord && given.scales == ScaleFrom::kRow;
  const int64_t row = code_bytes + (is_record ? (scale_bytes + 3) / 4 * 4 : 0) +
                      (given.order == Order::kGaps ? 16 : 0);
  const bool by_token = given.order == Order::kNhd || given.order == Order::kRecord;
  side.code_token_stride = by_token ? row * heads : row;
  side.code_head_stride = by_token ? row : row * tokens;
  side.code_block_stride = row * heads * tokens + (given.order == Order::kGaps ? 48 : 0);
  if (given.order == Order::kFragments) {
    side.code_fragment_bytes = static_cast<uint32_t>(std::min(kFragmentBytes, code_bytes));
    side.code_token_stride = side.code_fragment_bytes;
    side.code_fragment_stride = tokens * side.code_fragment_bytes;
  }
  Buffer& codes = memory_.add(name + " codes", side.code_block_stride * given.num_blocks);
  side.codes = codes.data();
  if (!format.has_scale()) return;
  if (!is_record) return add_scales(run, index, name);
  side.scales = codes.data() + code_bytes;
  side.scale_block_stride = side.code_block_stride;
  side.scale_token_stride = side.code_token_stride;
  side.scale_head_stride = side.code_head_stride;
}

const VerbLayer::Run& VerbLayer::run_of(int64_t head) const {
  return runs_.size() > 1 && head >= runs_[1]->first_head ? *runs_[1] : *runs_[0];
}

// A V that is a part of K has K's bytes.
const kvx_side_t& VerbLayer::side_of(const Run& run, Side side) const {
  return run.sides[side == Side::kValue && !given.v_is_prefix ? 1 : 0];
}

const FormatFacts& VerbLayer::facts(Side side, int64_t head) const {
  return facts_of(static_cast<kvx_format_t>(side_of(run_of(head), side).spec->format));
}

float VerbLayer::tensor_scale(Side side, int64_t head) const {
  const kvx_side_t& s = side_of(run_of(head), side);
  return s.tensor_scales != nullptr ? s.tensor_scales[head - run_of(head).first_head] : 1.0f;
}

uint8_t* VerbLayer::code_byte(Side side, const RowPlace& place, int i) const {
  const Run& run = run_of(place.head);
  const kvx_side_t& s = side_of(run, side);
  uint8_t* row = static_cast<uint8_t*>(s.codes) + place.block * s.code_block_stride +
                 place.token * s.code_token_stride +
                 (place.head - run.first_head) * s.code_head_stride;
  if (s.code_fragment_bytes == 0) return row + i;
  const int64_t fragment = i / static_cast<int64_t>(s.code_fragment_bytes);
  return row + fragment * s.code_fragment_stride + i % static_cast<int64_t>(s.code_fragment_bytes);
}

uint8_t* VerbLayer::scale_byte(Side side, const RowPlace& place, int i) const {
  const Run& run = run_of(place.head);
  const kvx_side_t& s = side_of(run, side);
  const int bytes = facts(side, place.head).scale_bytes();
  return static_cast<uint8_t*>(s.scales) + place.block * s.scale_block_stride +
         place.token * s.scale_token_stride + (place.head - run.first_head) * s.scale_head_stride +
         i / bytes * s.scale_group_stride + i % bytes;
}

CodedRow VerbLayer::stored(Side side, const RowPlace& place) const {
  const FormatFacts& format = facts(side, place.head);
  CodedRow row;
  for (int i = 0; i < format.code_bytes(head_dim(side)); ++i) {
    row.codes.push_back(*code_byte(side, place, i));
  }
  const int num_scale_bytes = format.groups_per_row(head_dim(side)) * format.scale_bytes();
  for (int i = 0; i < num_scale_bytes; ++i) row.scales.push_back(*scale_byte(side, place, i));
  return row;
}

// Encodes a row for this place, with the scales there when they are given.
CodedRow VerbLayer::coded(Side side, const RowPlace& place, const std::vector<float>& row) const {
  const FormatFacts& format = facts(side, place.head);
  const float tensor = tensor_scale(side, place.head);
  if (writes_scales() || !format.has_scale()) return encode_row(format, row, tensor);
  CodedRow result = {{}, stored(side, place).scales};
  result.codes = encode_codes(format, row, result.scales, tensor);
  return result;
}

void VerbLayer::store(Side side, const RowPlace& place, const std::vector<float>& row) {
  const CodedRow made = coded(side, place, row);
  for (size_t i = 0; i < made.codes.size(); ++i) {
    *code_byte(side, place, static_cast<int>(i)) = made.codes[i];
  }
  for (size_t i = 0; writes_scales() && i < made.scales.size(); ++i) {
    *scale_byte(side, place, static_cast<int>(i)) = made.scales[i];
  }
}

void VerbLayer::fill() {
  const int num_sides = given.v_dim != 0 && !given.v_is_prefix ? 2 : 1;
  for (int64_t slot = 0; slot < given.num_slots(); ++slot) {
    for (int64_t head = 0; head < given.num_heads; ++head) {
      for (int s = 0; s < num_sides; ++s) {
        const auto side = static_cast<Side>(s);
        const auto place = static_cast<uint64_t>((slot * given.num_heads + head) * 2 + s);
        store(side, {slot / given.block_size, slot % given.block_size, head},
              some_row(place, head_dim(side)));
      }
    }
  }
}

void VerbLayer::expect_coded(Side side, const RowPlace& place, const CodedRow& row) {
  for (size_t i = 0; i < row.codes.size(); ++i) {
    *memory_.expect(code_byte(side, place, static_cast<int>(i))) = row.codes[i];
  }
  for (size_t i = 0; writes_scales() && i < row.scales.size(); ++i) {
    *memory_.expect(scale_byte(side, place, static_cast<int>(i))) = row.scales[i];
  }
}

void VerbLayer::expect(Side side, const RowPlace& place, const std::vector<float>& row) {
  expect_coded(side, place, coded(side, place, row));
}

std::vector<float> some_row(uint64_t place, int head_dim) {
  std::vector<float> row;
  for (int i = 0; i < head_dim; ++i) {
    const uint64_t bits = noise(place * 4099 + static_cast<uint64_t>(i));
    const bool is_zero = place % 7 == 3 && i >= 16 && i < 32;
    const float fraction = static_cast<float>(bits % 4096) / 4096.0f;
    const float magnitude = std::ldexp(1.0f + fraction, static_cast<int>(bits >> 20 & 7) - 5);
    row.push_back(is_zero ? 0.0f : (bits >> 40 & 1) != 0 ? -magnitude : magnitude);
  }
  return row;
}

// ---- floats

kvx_rows_t rows_of_v1(const kvx_tensor_desc_t& tensor) {
  kvx_rows_t rows{};
  rows.size = sizeof rows;
  rows.dtype = static_cast<uint32_t>(tensor.dtype);
  rows.data = tensor.data;
  rows.token_stride = tensor.stride[tensor.ndim - 3];
  rows.head_stride = tensor.stride[tensor.ndim - 2];
  return rows;
}

FloatTensor::FloatTensor(Memory& memory, const std::string& name, kvx_dtype_t dtype, int64_t tokens,
                         int64_t heads, int dim, int64_t gap)
    : num_tokens(tokens), num_heads(heads), head_dim(dim) {
  rows.size = sizeof rows;
  rows.dtype = dtype;
  rows.head_stride = dim + gap;
  rows.token_stride = heads * rows.head_stride + gap;
  rows.data =
      memory.add(name, std::max<int64_t>(tokens, 1) * rows.token_stride * bytes_of(dtype)).data();
  if (gap != 0) return;
  rows.token_stride = rows.head_stride = 0;  // 0 means dense
}

uint8_t* FloatTensor::at(int64_t token, int64_t head, int dim) const {
  const bool is_dense = rows.token_stride == 0;
  const int64_t head_stride = is_dense ? head_dim : rows.head_stride;
  const int64_t token_stride = is_dense ? num_heads * head_dim : rows.token_stride;
  return static_cast<uint8_t*>(rows.data) + (token * token_stride + head * head_stride + dim) *
                                                bytes_of(static_cast<kvx_dtype_t>(rows.dtype));
}

float FloatTensor::get(int64_t token, int64_t head, int dim) const {
  uint32_t bits = 0;
  memcpy(&bits, at(token, head, dim),
         static_cast<size_t>(bytes_of(static_cast<kvx_dtype_t>(rows.dtype))));
  if (rows.dtype == KVX_DTYPE_F16) return static_cast<float>(decode_float(kF16, bits));
  if (rows.dtype == KVX_DTYPE_BF16) return static_cast<float>(decode_float(kBF16, bits));
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

std::vector<float> FloatTensor::row(int64_t token, int64_t head) const {
  std::vector<float> row;
  for (int d = 0; d < head_dim; ++d) row.push_back(get(token, head, d));
  return row;
}

namespace {

void put_float(uint32_t dtype, float x, uint8_t* target) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (dtype == KVX_DTYPE_F16) bits = encode_float(kF16, x);
  if (dtype == KVX_DTYPE_BF16) bits = encode_float(kBF16, x);
  memcpy(target, &bits, static_cast<size_t>(bytes_of(static_cast<kvx_dtype_t>(dtype))));
}

}  // namespace

void FloatTensor::set_row(int64_t token, int64_t head, const std::vector<float>& row) {
  for (int d = 0; d < head_dim; ++d) {
    put_float(rows.dtype, row[static_cast<size_t>(d)], at(token, head, d));
  }
}

void FloatTensor::expect_row(Memory& memory, int64_t token, int64_t head,
                             const std::vector<float>& row) const {
  for (int d = 0; d < head_dim; ++d) {
    put_float(rows.dtype, row[static_cast<size_t>(d)], memory.expect(at(token, head, d)));
  }
}

// ---- tables

void require_unchanged_but_expected(const Memory& memory, const std::string& call) {
  const std::optional<Difference> difference = memory.first_difference();
  if (!difference) return;
  fail("{}: byte {} of {} is {:#04x}, expected {:#04x}", call, difference->offset,
       difference->buffer, difference->found, difference->expected);
}

}  // namespace kvx::conformance
