// EngineLayer: one layer's K and V in an engine's own tensors, in the engine's own layout. It is a
// kvx_layer_t with the arrays that it points into; the verbs are those of the C ABI, which checks
// what a call brings.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvx/kvx_abi.h"
#include "python/src/arrays.hpp"
#include "python/src/context.hpp"
#include "python/src/cuda_lane.hpp"

namespace kvx::python {

// Where K's or V's rows lie. Addresses are those of the arrays in EngineShape::owners.
struct EngineSide {
  std::string recipe;  // a format with its options, "fp8_e4m3:source=given"
  uint32_t head_dim = 0;
  uintptr_t codes = 0;
  std::vector<int64_t> code_strides;   // bytes of block, token, head
  std::vector<int64_t> fragments;      // bytes of a fragment and from one to the next; or none
  uintptr_t scales = 0;                // 0: none
  std::vector<int64_t> scale_strides;  // bytes of block, token, head, group
  uintptr_t tensor_scales = 0;         // float32 [num_kv_heads]; 0: none
  uint32_t flags = 0;                  // KVX_SIDE_*
};

struct EngineShape {
  int64_t num_blocks = 0;
  uint32_t block_size = 0;
  uint32_t num_kv_heads = 0;
  nb::object owners;  // of the memory, kept as long as the layer
};

// A block table of any of the C ABI's kinds with its lengths, in arrays of the caller.
class EngineTable {
 public:
  EngineTable(uint32_t format, nb::handle indices, nb::handle indptr, nb::handle seq_lens,
              uint32_t seq_count, uint32_t beam_width, uint32_t max_blocks, uint32_t flags);

  const kvx_block_table_t& table() const { return table_; }
  const kvx_seq_lens_t& seq_lens() const { return seq_lens_; }
  int64_t num_sequences() const { return int64_t{table_.seq_count} * table_.beam_width; }
  int cuda_device() const { return device_; }

 private:
  nb::ndarray<nb::ro> indices_;
  nb::ndarray<nb::ro> indptr_;
  nb::ndarray<nb::ro> lengths_;
  kvx_block_table_t table_{};
  kvx_seq_lens_t seq_lens_{};
  int device_ = -1;
};

struct EngineAttention {
  float softmax_scale = 0;
  float softcap = 0;
  uint32_t window = 0;
  int64_t max_tokens = 0;  // on a GPU
  uint32_t max_q_len = 0;  // on a GPU; 0: all queries
};

// Of process_kv; none: no bias, nothing turns.
struct EngineProcessing {
  nb::handle k_bias;  // [num_kv_heads, key_dim] of k's dtype
  nb::handle v_bias;
  nb::handle cos_sin;    // float32 [num_positions, 2, num_pairs]
  nb::handle positions;  // int64 [tokens]
  int64_t num_positions = 0;
  uint32_t num_pairs = 0;
  bool is_interleaved = false;
};

class EngineLayer {
 public:
  // k_rest: rows' numbers behind k's, in a segment of their own; null: k has them all.
  EngineLayer(const EngineShape& shape, const EngineSide& k, const EngineSide& v,
              const EngineSide* k_rest, const std::string& device);

  std::string device() const;
  void append(nb::handle k, nb::handle v, nb::handle slots, nb::handle stream);
  // kvx_turbomind_process_kv: k and v change in place. What is none is left out; with cos_sin,
  // [tokens, 2, num_pairs], positions are [tokens].
  void process_kv(nb::handle k, nb::handle v, nb::handle slots, const EngineProcessing& processing,
                  nb::handle stream);
  void attend(nb::handle q, nb::handle out, const EngineTable& table, nb::handle q_starts,
              const EngineAttention& attention, nb::handle stream);
  // Token ranges to rows: all arrays are [ranges], int64 but for int32 sequences. head_stride and
  // token_stride of k and v are in elements; k and v are contiguous.
  void gather(const EngineTable& table, nb::handle sequences, nb::handle first_tokens,
              nb::handle num_tokens, nb::handle first_rows, nb::handle k, nb::handle v,
              int64_t token_stride, int64_t head_stride, nb::handle stream);
  void copy_blocks(EngineLayer& to, nb::handle from_blocks, nb::handle to_blocks,
                   nb::handle stream);
  void transcode(EngineLayer& to, nb::handle from_slots, nb::handle to_slots, nb::handle stream);

 private:
  // K or V with what its description points to.
  struct Side {
    kvx_format_spec_t spec{};
    kvx_side_t side{};
  };

  // Numbers of a row of K, in all its segments.
  uint32_t key_dim() const { return k_.side.head_dim + k_rest_.side.head_dim; }
  ArrayPlace place_of(nb::handle stream, std::initializer_list<nb::handle> arrays) const;
  void check_table(const EngineTable& table) const;
  // The arguments of kvx_append, and what they point to.
  struct AppendCall {
    AppendCall(EngineLayer& layer, nb::handle k, nb::handle v, nb::handle slots,
               const ArrayPlace& place);
    AppendCall(const AppendCall&) = delete;
    InputRows keys;
    InputRows values;
    nb::ndarray<nb::ro> slots;
    kvx_rows_t k_rows{};
    kvx_rows_t v_rows{};
    kvx_append_args_t args{};
    KeptArrays kept;
  };
  // Calls verb(stream) without the GIL, in the order of the caller's stream.
  template <class F>
  void run(const ArrayPlace& place, KeptArrays& kept, F verb);

  std::shared_ptr<const Context> context_;
  std::unique_ptr<CudaLane> lane_;  // null on the CPU
  nb::object owners_;
  Side k_;
  Side v_;
  Side k_rest_;  // 0 numbers: rows are one segment
  kvx_head_run_t run_{};
  const kvx_head_run_t* runs_ = &run_;
  kvx_layer_t layer_{};
  kvx_executor_t executor_{};
  std::mutex mutex_;
};

}  // namespace kvx::python
