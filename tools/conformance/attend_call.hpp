// AttendCall: a call of kvx_attend over a layer that this program has filled, and its expected
// result: attention's definition in double precision over the decoded rows.
#pragma once

#include "tools/conformance/transforms.hpp"
#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {

struct AttendCase {
  LayerCase layer = {};
  TableCase table = {.blocks = {{3, 0, 1}, {2}, {4, 2}, {1}}, .lengths = {10, 4, 7, 0}};
  std::vector<int32_t> q_lens = {1, 1, 1, 0};
  bool decodes = false;  // q_starts null: one query each; q_lens are ones
  int num_q_heads = 6;
  kvx_dtype_t io = KVX_DTYPE_F32;
  int64_t gap = 0;
  uint32_t window = 0;
  float softcap = 0;
  float softmax_scale = 0;  // 0: the default
  bool has_sinks = false;
  bool has_lse = false;
  bool has_tree = false;
  bool has_full_precision = false;  // the first block, and those from the third on, are F32
  bool has_transforms = false;

  Features needs() const { return layer.needs().add(table.needs()); }
};

class AttendCall {
 public:
  AttendCall(const Provider& provider, const AttendCase& attend_case);
  AttendCall(const AttendCall&) = delete;

  // Expects OK, the right numbers, and changes in output and LSE only.
  void must_attend(const Provider& provider, const std::string& what = "kvx_attend");
  void must_refuse(const Provider& provider, kvx_status_t expected, const std::string& what);

  AttendCase given;
  Memory memory;
  VerbLayer source;
  VerbLayer full_precision;
  VerbTable table;
  FloatTensor q;
  FloatTensor out;
  kvx_attend_args_t args{};

 private:
  struct Query {
    int sequence;
    int64_t row;        // of q and out
    int64_t position;   // in its sequence
    int64_t first_new;  // position of the sequence's first query
  };
  bool sees(const Query& query, int64_t token) const;
  std::vector<double> numbers(Side side, const Query& query, int64_t token, int64_t head) const;
  void check_head(const Query& query, int head, const std::string& what);

  Transform k_transform_;
  Transform v_transform_;
  std::vector<int32_t> starts_;
  std::vector<float> sinks_;
  std::vector<uint8_t> tree_;
  float* lse_ = nullptr;
};

}  // namespace kvx::conformance
