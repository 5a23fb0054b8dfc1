// KernelTable: the functions that touch bytes on the CPU, one table for each instruction-set level.
// The verbs' loops are written once and call through it; isa/<name>/level_<name>.cpp compiles the
// same templates with the level's flags.
#pragma once

#include <cstdint>

#include "core/executor.hpp"
#include "core/rows.hpp"
#include "device/cpu_level.hpp"
#include "format/spec.hpp"
#include "format/traits.hpp"

namespace kvx::ops::cpu {

// A run of tokens inside one block, one head: f32 rows (already transformed) to stored rows.
struct EncodeParams {
  const format::FormatSpec* spec;
  int head_dim;
  float tensor_scale;
  const float* rows;  // [num_tokens, head_dim]
  int first_token;    // of the run, inside the block; a page-shared scale covers tokens [0,
                      // first_token + num_tokens)
  int num_tokens;
  uint8_t* codes;              // of the block's token 0
  int64_t token_stride;        // bytes
  uint8_t* scales;             // of the block's token 0, group 0; null without scales
  int64_t scale_token_stride;  // bytes
  int64_t scale_group_stride;  // bytes
  int64_t row_stride = 0;      // floats from row to row; 0: head_dim
  // The count of numbers beyond the largest code is added to it; null: nobody wants it.
  int64_t* saturated = nullptr;
  const float* feedback = nullptr;  // of the head, [head_dim, head_dim]; null: none
  uint8_t* channels = nullptr;      // of the block and head, where the format is dual-scale
};

// A run of tokens inside one block, one head: stored rows to f32 rows.
struct DecodeParams {
  const format::FormatSpec* spec;
  int head_dim;
  float tensor_scale;
  format::DecodeFor purpose;
  float* rows;  // [num_tokens, head_dim]
  int first_token;
  int num_tokens;
  const uint8_t* codes;               // of the block's token 0
  int64_t token_stride;               // bytes
  const uint8_t* scales;              // of the block's token 0, group 0
  int64_t scale_token_stride;         // bytes
  int64_t scale_group_stride;         // bytes
  const uint8_t* channels = nullptr;  // of the block and head, where the format is dual-scale
};

struct FormatKernels {
  int64_t (*encode_rows)(
      const EncodeParams&);  // returns the number of non-finite inputs that no code can express
  void (*decode_rows)(const DecodeParams&);
};

struct KernelTable {
  device::CpuLevel level;
  const FormatKernels* formats;  // indexed by FormatId
  int num_formats;

  // Contiguous floats of any type to f32 and back (docs/numbers.md, section 1).
  void (*load_floats)(DType from, const void* source, int n, float* target);
  void (*store_floats)(DType to, const float* source, int n, void* target);
  // In place, blocks of hadamard_block(head_dim): rows [num_rows, head_dim].
  void (*hadamard_rows)(float* rows, int num_rows, int head_dim);

  const FormatKernels& of(const format::FormatSpec& spec) const {
    return formats[static_cast<int>(spec.facts->id)];
  }
};

// Requires: device::supports(level).
const KernelTable& kernel_table(device::CpuLevel level);

}  // namespace kvx::ops::cpu

namespace kvx::ops {

// What a CPU verb runs with: a level's kernels and the threads to run them on.
struct CpuContext {
  const cpu::KernelTable* kernels;
  Executor* executor;
};

}  // namespace kvx::ops
