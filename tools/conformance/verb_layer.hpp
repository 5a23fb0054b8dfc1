// VerbLayer: a layer for the verbs of 1.2 with its memory, in any order and format, and its
// expected bytes.
#pragma once

#include <memory>
#include <optional>

#include "tools/conformance/check.hpp"
#include "tools/conformance/row_codec.hpp"
#include "tools/conformance/tensors.hpp"

namespace kvx::conformance {

enum class Order {
  kNhd,        // [block, token, head, row]
  kHnd,        // [block, head, token, row]
  kRecord,     // NHD; a row's scales follow its codes
  kGaps,       // HND; 16 bytes between rows, 48 between blocks
  kFragments,  // [block, head, fragment, token, 4 bytes]
  kPages,      // the order of kvx_describe_pages
  // Engines' orders, in which K and V share a buffer of blocks; verb_layer_engines.cpp draws them.
  kVllmNhd,
  kVllmHnd,
  kFlashInfer,
  kTurboMind,
};
bool is_engines(Order order);

enum class ScaleFrom {
  kRow,     // computed by append, one a group of a row
  kPage,    // likewise, one a group of a block
  kTensor,  // given: one for all
  kHead,    // given: one a head and group
};

struct LayerCase {
  uint32_t num_blocks = 5;
  uint32_t block_size = 4;
  uint32_t num_heads = 3;
  int k_dim = 64;
  int v_dim = 64;  // 0: no V
  kvx_format_t k = KVX_FORMAT_F32;
  kvx_format_t v = KVX_FORMAT_F32;
  Order order = Order::kNhd;
  ScaleFrom scales = ScaleFrom::kRow;
  bool two_runs = false;  // the last head is a run of its own, with K's and V's formats exchanged
  bool v_is_prefix = false;   // of K
  float tensor_scale = 0.5f;  // where the format has one

  LayerCase& set_formats(kvx_format_t k_format, kvx_format_t v_format) {
    k = k_format;
    v = v_format;
    return *this;
  }
  int64_t num_slots() const { return int64_t{num_blocks} * block_size; }
  Features needs() const;
};

enum class Side { kKey, kValue };

// A row's place: head counts in the layer.
struct RowPlace {
  int64_t block;
  int64_t token;
  int64_t head;
};

class VerbLayer {
 public:
  // Its buffers' names begin with `name`.
  VerbLayer(const Provider& provider, Memory& memory, const LayerCase& given,
            const std::string& name = "");
  VerbLayer(const VerbLayer&) = delete;

  const FormatFacts& facts(Side side, int64_t head) const;
  int head_dim(Side side) const { return side == Side::kKey ? given.k_dim : given.v_dim; }
  // The tensor scale at that head; 1 where the format has none.
  float tensor_scale(Side side, int64_t head) const;

  // The row's present bytes.
  CodedRow stored(Side side, const RowPlace& place) const;
  // Stores a row there without a provider. Given scales are unchanged.
  void store(Side side, const RowPlace& place, const std::vector<float>& row);
  // Stores every row of every block.
  void fill();
  // Sets the expected bytes of an append of this row.
  void expect(Side side, const RowPlace& place, const std::vector<float>& row);
  void expect_coded(Side side, const RowPlace& place, const CodedRow& row);

  LayerCase given;
  kvx_layer_t layer{};

 private:
  struct Run {
    kvx_format_spec_t specs[2] = {};
    kvx_side_t sides[2] = {};
    kvx_head_run_t run = {};
    int64_t first_head = 0;
  };

  void describe_run(const Provider& provider, Run& run, const std::string& name);
  void describe_side(Run& run, int side, const std::string& name);
  void describe_engines_block(Run& run, const std::string& name);
  // Numbers of a side that all orders have: its head_dim, spec and tensor scales.
  void begin_side(Run& run, int side, const std::string& name);
  // Scales in a buffer of their own.
  void add_scales(Run& run, int side, const std::string& name);
  void give_scales(Run& run, int side, const std::string& name);
  const Run& run_of(int64_t head) const;
  const kvx_side_t& side_of(const Run& run, Side side) const;
  uint8_t* code_byte(Side side, const RowPlace& place, int i) const;
  uint8_t* scale_byte(Side side, const RowPlace& place, int i) const;
  CodedRow coded(Side side, const RowPlace& place, const std::vector<float>& row) const;
  bool writes_scales() const {
    return given.scales == ScaleFrom::kRow || given.scales == ScaleFrom::kPage;
  }

  Memory& memory_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<const kvx_head_run_t*> run_pointers_;
};

// Pseudo-random numbers from -8 to 8 of many magnitudes. One row in seven has a group of zeros.
std::vector<float> some_row(uint64_t place, int head_dim);

// Floats [tokens, heads, head_dim] in a buffer.
struct FloatTensor {
  FloatTensor(Memory& memory, const std::string& name, kvx_dtype_t dtype, int64_t num_tokens,
              int64_t num_heads, int head_dim, int64_t gap = 0);

  float get(int64_t token, int64_t head, int dim) const;
  std::vector<float> row(int64_t token, int64_t head) const;
  void set_row(int64_t token, int64_t head, const std::vector<float>& row);
  // Sets the expected row, rounded to the tensor's type.
  void expect_row(Memory& memory, int64_t token, int64_t head, const std::vector<float>& row) const;

  kvx_rows_t rows{};
  int64_t num_tokens;
  int64_t num_heads;
  int head_dim;

 private:
  uint8_t* at(int64_t token, int64_t head, int dim) const;
};

// A v1 call's IO tensor as rows of a verb: its last axes are [tokens, heads, head_dim].
kvx_rows_t rows_of_v1(const kvx_tensor_desc_t& tensor);

// Block ids [sequences, width] and lengths, in every kind of table that the verbs accept.
struct TableCase {
  kvx_block_table_format_t format = KVX_BLOCK_TABLE_PACKED;
  bool pages = false;  // RAGGED
  uint32_t beams = 1;  // KV_OFFSETS: so many rows after each other have one length
  kvx_dtype_t dtype = KVX_DTYPE_S32;
  std::vector<std::vector<int64_t>> blocks;
  std::vector<int64_t> lengths;

  Features needs() const;
};

struct VerbTable {
  VerbTable(Memory& memory, const TableCase& given, int64_t block_size);

  kvx_block_table_t table{};
  kvx_seq_lens_t seq_lens{};
};

// Throws Failed with the buffer and the byte when a byte differs from its expected value.
void require_unchanged_but_expected(const Memory& memory, const std::string& call);

}  // namespace kvx::conformance
