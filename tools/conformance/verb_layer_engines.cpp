// Orders of engines' caches, in which the rows of K and V lie in one buffer of blocks.
//
//   kVllmNhd     [block, token, head][K codes][K scales][V codes][V scales]
//   kVllmHnd     [block, head, token][K codes][K scales][V codes][V scales]
//   kFlashInfer  [block][K: codes [head, token], scales [head, token]][V: likewise], which
//                TensorRT-LLM and vLLM's nvfp4 have, too
//   kTurboMind   [block][head][K codes [token]][V codes [token]], then
//                       [head][K scales [token]][V scales [token]]
//
// Scales that append does not make row by row lie in buffers of their own.
#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {
namespace {

// Bytes of a row of K, or of V; the scales are 0 where they lie elsewhere.
struct RowBytes {
  int64_t codes = 0;
  int64_t scales = 0;
};

// A part of a side's rows: its codes, or its scales.
struct Part {
  int64_t offset = 0;  // in its block
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct EnginesBlock {
  Part codes[2];
  Part scales[2];
  int64_t num_bytes = 0;
};

int64_t aligned(int64_t bytes) {
  return (bytes + 3) / 4 * 4;
}

EnginesBlock vllm_block(const RowBytes (&rows)[2], int64_t heads, int64_t tokens, bool is_hnd) {
  EnginesBlock block;
  const int64_t v_at = aligned(rows[0].codes + rows[0].scales);
  const int64_t content = v_at + aligned(rows[1].codes + rows[1].scales);
  const int64_t token_stride = is_hnd ? content : content * heads;
  const int64_t head_stride = is_hnd ? content * tokens : content;
  for (int side = 0; side < 2; ++side) {
    const int64_t at = side == 0 ? 0 : v_at;
    block.codes[side] = {at, token_stride, head_stride};
    block.scales[side] = {at + rows[side].codes, token_stride, head_stride};
  }
  block.num_bytes = content * heads * tokens;
  return block;
}

EnginesBlock flashinfer_block(const RowBytes (&rows)[2], int64_t heads, int64_t tokens) {
  EnginesBlock block;
  for (int side = 0; side < 2; ++side) {
    const auto& [codes, scales] = rows[side];
    block.codes[side] = {block.num_bytes, codes, codes * tokens};
    block.num_bytes += aligned(codes * tokens * heads);
    block.scales[side] = {block.num_bytes, scales, scales * tokens};
    block.num_bytes += aligned(scales * tokens * heads);
  }
  return block;
}

EnginesBlock turbomind_block(const RowBytes (&rows)[2], int64_t heads, int64_t tokens) {
  EnginesBlock block;
  const int64_t head_codes = aligned((rows[0].codes + rows[1].codes) * tokens);
  const int64_t head_scales = aligned((rows[0].scales + rows[1].scales) * tokens);
  for (int side = 0; side < 2; ++side) {
    const auto& [codes, scales] = rows[side];
    block.codes[side] = {side * rows[0].codes * tokens, codes, head_codes};
    block.scales[side] = {head_codes * heads + side * rows[0].scales * tokens, scales, head_scales};
  }
  block.num_bytes = (head_codes + head_scales) * heads;
  return block;
}

EnginesBlock block_of(Order order, const RowBytes (&rows)[2], int64_t heads, int64_t tokens) {
  switch (order) {
    case Order::kFlashInfer:
      return flashinfer_block(rows, heads, tokens);
    case Order::kTurboMind:
      return turbomind_block(rows, heads, tokens);
    default:
      return vllm_block(rows, heads, tokens, order == Order::kVllmHnd);
  }
}

}  // namespace

bool is_engines(Order order) {
  return order == Order::kVllmNhd || order == Order::kVllmHnd || order == Order::kFlashInfer ||
         order == Order::kTurboMind;
}

void VerbLayer::describe_engines_block(Run& run, const std::string& name) {
  const int num_sides = given.v_dim != 0 && !given.v_is_prefix ? 2 : 1;
  RowBytes rows[2];
  for (int i = 0; i < num_sides; ++i) {
    const FormatFacts& format = facts_of(static_cast<kvx_format_t>(run.specs[i].format));
    const int dim = i == 0 ? given.k_dim : given.v_dim;
    rows[i].codes = format.code_bytes(dim);
    if (format.has_scale() && given.scales == ScaleFrom::kRow) {
      rows[i].scales = int64_t{format.groups_per_row(dim)} * format.scale_bytes();
    }
  }
  const EnginesBlock block = block_of(given.order, rows, run.run.num_heads, given.block_size);
  uint8_t* data = memory_.add(name + "blocks", block.num_bytes * given.num_blocks).data();
  for (int i = 0; i < num_sides; ++i) {
    const std::string side_name = name + (i == 0 ? "K" : "V");
    begin_side(run, i, side_name);
    kvx_side_t& side = run.sides[i];
    side.codes = data + block.codes[i].offset;
    side.code_block_stride = block.num_bytes;
    side.code_token_stride = block.codes[i].token_stride;
    side.code_head_stride = block.codes[i].head_stride;
    if (rows[i].scales != 0) {
      side.scales = data + block.scales[i].offset;
      side.scale_block_stride = block.num_bytes;
      side.scale_token_stride = block.scales[i].token_stride;
      side.scale_head_stride = block.scales[i].head_stride;
    } else if (facts_of(static_cast<kvx_format_t>(side.spec->format)).has_scale()) {
      add_scales(run, i, side_name);
    }
  }
}

}  // namespace kvx::conformance
