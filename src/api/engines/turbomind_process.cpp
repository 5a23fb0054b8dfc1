// kvx_turbomind_process_kv: biases and RoPE on a step's rows, and kvx_append.
#include "api/call.hpp"
#include "api/guard.hpp"
#include "api/verbs/append.hpp"
#include "ops/process_rows/process_rows.hpp"

namespace kvx::boundary {
namespace {

// The rows that append reads are the caller's own, which this call may change.
MutableFloatRows in_place(const FloatRows& rows) {
  return {const_cast<uint8_t*>(rows.data), rows.dtype, rows.token_stride, rows.head_stride};
}

class BiasAndRope final : public RowProcessing {
 public:
  explicit BiasAndRope(const kvx_turbomind_process_args_t& args) : args_(args) {}

  Status read(const ops::AppendArgs& append, const LayerOfCaller& layer) override {
    const int k_dim = layer.k_head_dim();
    KVX_RETURN_IF_ERROR(check_rope(append, k_dim));
    if (args_.v_bias != nullptr && !layer.has_own_v()) {
      return invalid_argument("args.v_bias is set; the layer stores no V beside K");
    }
    k_ = rows_of(append, append.k, args_.k_bias, layer.view.num_kv_heads, k_dim);
    k_.cos_sin = args_.cos_sin;
    k_.positions = append.positions.data();
    k_.num_positions = args_.num_positions;
    k_.num_pairs = static_cast<int>(args_.num_pairs);
    k_.is_interleaved = args_.rope_pairs == KVX_ROPE_PAIRS_INTERLEAVED;
    if (layer.has_own_v() && append.k.data == append.v.data &&
        (args_.k_bias != nullptr || args_.v_bias != nullptr || args_.cos_sin != nullptr)) {
      return invalid_argument("args.append has one array for k and v; each is changed in place");
    }
    if (layer.has_own_v()) {
      v_ = rows_of(append, append.v, args_.v_bias, layer.view.num_kv_heads, layer.v_head_dim());
    }
    return {};
  }

  Status run() override {
    KVX_RETURN_IF_ERROR(ops::check_process_rows(k_));
    if (changes(k_)) ops::process_rows(k_);
    if (changes(v_)) ops::process_rows(v_);
    return {};
  }

  void add_arrays(VerbAddresses& addresses) const override {
    addresses.add("args.cos_sin", args_.cos_sin);
    add_bias(addresses, "args.k_bias", k_);
    add_bias(addresses, "args.v_bias", v_);
  }

  Status launch(const DeviceVerb& verb) override {
    for (const ops::ProcessRows* rows : {&k_, &v_}) {
      if (!changes(*rows)) continue;
      KVX_RETURN_IF_ERROR(ops::process_rows(verb.context, *rows, verb.counters));
    }
    return {};
  }

 private:
  static ops::ProcessRows rows_of(const ops::AppendArgs& append, const FloatRows& rows,
                                  const void* bias, int num_heads, int head_dim) {
    ops::ProcessRows result;
    result.rows = in_place(rows);
    result.bias = static_cast<const uint8_t*>(bias);
    result.slots = append.slot_mapping.data();
    result.num_tokens = std::ssize(append.slot_mapping);
    result.num_heads = num_heads;
    result.head_dim = head_dim;
    return result;
  }

  static bool changes(const ops::ProcessRows& rows) {
    return rows.bias != nullptr || rows.cos_sin != nullptr;
  }

  // A bias is aligned to its elements, as the rows are.
  static void add_bias(VerbAddresses& addresses, std::string_view name,
                       const ops::ProcessRows& rows) {
    if (rows.bias == nullptr) return;
    const MutableFloatRows bias = {const_cast<uint8_t*>(rows.bias), rows.rows.dtype, 0, 0};
    addresses.add_rows(name, bias);
  }

  Status check_rope(const ops::AppendArgs& append, int k_dim) const {
    const bool turns = args_.cos_sin != nullptr;
    if (turns != (args_.num_pairs > 0) || turns != (args_.num_positions > 0) ||
        args_.num_pairs > static_cast<uint32_t>(k_dim) / 2 || args_.num_positions < 0) {
      return invalid_argument(
          "args.cos_sin is {} with {} positions and {} pairs; expected all three or none, and at "
          "most {} pairs",
          static_cast<const void*>(args_.cos_sin), args_.num_positions, args_.num_pairs, k_dim / 2);
    }
    if (!turns || !append.positions.empty()) return {};
    return invalid_argument("args.append.positions is null; cos_sin needs each token's position");
  }

  const kvx_turbomind_process_args_t& args_;
  ops::ProcessRows k_;
  ops::ProcessRows v_;
};

Status process_kv(const kvx_turbomind_process_args_t* caller, void* stream) {
  KVX_ASSIGN_OR_RETURN(const kvx_turbomind_process_args_t args, read_struct(caller, "args"));
  if (args.append == nullptr) return invalid_argument("args.append is null");
  if (args.rope_pairs > KVX_ROPE_PAIRS_INTERLEAVED || args.reserved != 0) {
    return invalid_argument("args.rope_pairs is {} and reserved {}; expected 0 or 1, and 0",
                            args.rope_pairs, args.reserved);
  }
  BiasAndRope processing(args);
  return append(args.append, stream, &processing);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_turbomind_process_kv(const kvx_turbomind_process_args_t* args,
                                                 void* stream) {
  return kvx::boundary::run_call([&] { return kvx::boundary::process_kv(args, stream); });
}
