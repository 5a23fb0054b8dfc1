// process_rows: a step's rows before they are stored: a bias is added, and pairs of numbers are
// turned by RoPE, in place.
#pragma once

#include <cstring>

#include "core/float16.hpp"
#include "core/host_device.hpp"
#include "core/result.hpp"
#include "core/rows.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

struct ProcessRows {
  MutableFloatRows rows;           // [num_tokens, num_heads, head_dim]
  const uint8_t* bias = nullptr;   // [num_heads, head_dim] of the rows' type; null: none
  const int64_t* slots = nullptr;  // [num_tokens]; rows with a negative slot stay as they are
  int64_t num_tokens = 0;
  int num_heads = 0;
  int head_dim = 0;
  // [num_positions, 2, num_pairs]: cosines, then sines; null: nothing turns, and there is no pair
  const float* cos_sin = nullptr;
  const int64_t* positions = nullptr;  // [num_tokens]; needed by cos_sin
  int64_t num_positions = 0;
  int num_pairs = 0;
  bool is_interleaved = false;  // pairs are (2 i, 2 i + 1), else (i, i + num_pairs)

  // What one thread computes of a row: a pair, or a number behind the pairs.
  KVX_INLINE int num_units() const { return head_dim - num_pairs; }
  KVX_INLINE uint8_t* row(int64_t token, int head) const {
    return rows.data + (token * rows.token_stride + head * rows.head_stride) * bytes_of(rows.dtype);
  }
  KVX_INLINE bool has_position(int64_t token) const {
    return cos_sin == nullptr || (positions[token] >= 0 && positions[token] < num_positions);
  }
};

namespace process {

KVX_INLINE float load(DType type, const uint8_t* row, int i) {
  if (type == DType::kF32) {
    float x = 0;
    memcpy(&x, row + int64_t{4} * i, sizeof x);
    return x;
  }
  uint16_t bits = 0;
  memcpy(&bits, row + int64_t{2} * i, sizeof bits);
  return type == DType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

KVX_INLINE void store(DType type, float x, uint8_t* row, int i) {
  if (type == DType::kF32) {
    memcpy(row + int64_t{4} * i, &x, sizeof x);
    return;
  }
  const uint16_t bits = type == DType::kF16 ? f32_to_f16(x) : f32_to_bf16(x);
  memcpy(row + int64_t{2} * i, &bits, sizeof bits);
}

KVX_INLINE float rounded(DType type, float x) {
  if (type == DType::kF32) return x;
  return type == DType::kF16 ? f16_to_f32(f32_to_f16(x)) : bf16_to_f32(f32_to_bf16(x));
}

// Number i of a row with its bias: the sum is rounded to the rows' type, as an engine's own kernel
// leaves it.
KVX_INLINE float biased(const ProcessRows& args, const uint8_t* row, int head, int i) {
  const DType type = args.rows.dtype;
  const float x = load(type, row, i);
  if (args.bias == nullptr) return x;
  const uint8_t* bias = args.bias + int64_t{head} * args.head_dim * bytes_of(type);
  return rounded(type, x + load(type, bias, i));
}

}  // namespace process

// Computes one unit of a row. Products are not contracted, so that every machine has the same
// bytes. Requires: has_position(token).
KVX_INLINE void process_unit(const ProcessRows& args, int64_t token, int head, int unit) {
  const DType type = args.rows.dtype;
  uint8_t* row = args.row(token, head);
  if (unit >= args.num_pairs) {
    const int i = unit + args.num_pairs;
    process::store(type, process::biased(args, row, head, i), row, i);
    return;
  }
  const int first = args.is_interleaved ? 2 * unit : unit;
  const int second = args.is_interleaved ? 2 * unit + 1 : unit + args.num_pairs;
  const float* cosines = args.cos_sin + args.positions[token] * 2 * args.num_pairs;
  const float cosine = cosines[unit];
  const float sine = cosines[args.num_pairs + unit];
  const float a = process::biased(args, row, head, first);
  const float b = process::biased(args, row, head, second);
  process::store(type, a * cosine - b * sine, row, first);
  process::store(type, b * cosine + a * sine, row, second);
}

// INVALID_ARGUMENT: a token that is written has a position that cos_sin does not have. On the host.
Status check_process_rows(const ProcessRows& args);
// Requires: check_process_rows().
void process_rows(const ProcessRows& args);

// The same bytes on a GPU, whose memory holds all arrays. Rows whose position cos_sin does not have
// stay as they are and are counted.
Status process_rows(const CudaContext& context, const ProcessRows& args, DeviceCounters* counters);

}  // namespace kvx::ops
