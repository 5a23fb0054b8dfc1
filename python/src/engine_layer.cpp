// The verbs of an engine's layer, by way of the C ABI.
#include "python/src/engine_layer.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>

#include "device/cuda_caller.hpp"
#include "kv/recipe.hpp"
#include "python/src/arguments.hpp"
#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "python/src/workspaces.hpp"

namespace kvx::python {
namespace {

template <class Struct>
Struct sized() {
  Struct value{};
  value.size = sizeof value;
  return value;
}

void throw_if_failed(kvx_status_t status) {
  if (status == KVX_STATUS_OK) return;
  throw CoreError(Error{static_cast<ErrorCode>(status), kvx_last_error()});
}

uint32_t dtype_of(DType dtype) {
  if (dtype == DType::kF32) return KVX_DTYPE_F32;
  return dtype == DType::kF16 ? KVX_DTYPE_F16 : KVX_DTYPE_BF16;
}

template <class Rows>
kvx_rows_t rows_of(const Rows& view) {
  auto rows = sized<kvx_rows_t>();
  rows.dtype = dtype_of(view.dtype);
  rows.data = const_cast<void*>(static_cast<const void*>(view.data));
  rows.token_stride = view.token_stride;
  rows.head_stride = view.head_stride;
  return rows;
}

// The ABI counts formats, sources and choices from 1.
kvx_format_spec_t spec_of(const format::FormatSpec& format) {
  auto spec = sized<kvx_format_spec_t>();
  spec.format = static_cast<uint32_t>(format.facts->id) + 1;
  if (!format.has_scale()) return spec;
  spec.group_size = format.group_size == format::kWholeRow
                        ? KVX_GROUP_WHOLE_ROW
                        : static_cast<uint32_t>(format.group_size);
  spec.scale_type = static_cast<uint32_t>(format.scale_type);
  spec.scale_rule = static_cast<uint32_t>(format.scale_rule);
  spec.scale_source = static_cast<uint32_t>(format.scale_source) + 1;
  spec.scale_choice = static_cast<uint32_t>(format.scale_choice) + 1;
  return spec;
}

kvx_executor_t executor_of(Executor& executor) {
  auto result = sized<kvx_executor_t>();
  result.num_threads = static_cast<uint32_t>(executor.num_threads());
  result.user = &executor;
  result.parallel_for = [](void* user, uint32_t num_tasks, void (*task)(void*, uint32_t),
                           void* context) {
    static_cast<Executor*>(user)->parallel_for(static_cast<int>(num_tasks), [task, context](int i) {
      task(context, static_cast<uint32_t>(i));
    });
  };
  return result;
}

int64_t stride_at(const std::vector<int64_t>& strides, size_t index) {
  return index < strides.size() ? strides[index] : 0;
}

void describe(const EngineSide& from, kvx_format_spec_t& spec, kvx_side_t& side) {
  const kv::Recipe recipe = value_of(kv::parse_recipe(from.recipe));
  if (!(recipe.k == recipe.v) || recipe.k.hadamard || recipe.has_full_precision_window) {
    throw CoreError(invalid_argument(
        "format is '{}'; expected one format with options of its scales alone", from.recipe));
  }
  spec = spec_of(recipe.k.spec);
  side = sized<kvx_side_t>();
  side.head_dim = from.head_dim;
  side.flags = from.flags;
  if ((from.flags & KVX_SIDE_PREFIX_OF_K) != 0) return;
  side.spec = &spec;
  side.codes = reinterpret_cast<void*>(from.codes);
  side.code_block_stride = stride_at(from.code_strides, 0);
  side.code_token_stride = stride_at(from.code_strides, 1);
  side.code_head_stride = stride_at(from.code_strides, 2);
  side.code_fragment_bytes = static_cast<uint32_t>(stride_at(from.fragments, 0));
  side.code_fragment_stride = stride_at(from.fragments, 1);
  side.scales = reinterpret_cast<void*>(from.scales);
  side.scale_block_stride = stride_at(from.scale_strides, 0);
  side.scale_token_stride = stride_at(from.scale_strides, 1);
  side.scale_head_stride = stride_at(from.scale_strides, 2);
  side.scale_group_stride = stride_at(from.scale_strides, 3);
  side.tensor_scales = reinterpret_cast<const float*>(from.tensor_scales);
}

// int32 or int64 numbers in one dimension; dtype receives which.
nb::ndarray<nb::ro> indices_of(nb::handle object, const char* name, const ArrayPlace& place,
                               kvx_dtype_t& dtype) {
  try {
    auto array = input_ints<int64_t>(object, name, 1, place);
    dtype = KVX_DTYPE_S64;
    return array;
  } catch (const CoreError&) {
    dtype = KVX_DTYPE_S32;
    return input_ints<int32_t>(object, name, 1, place);
  }
}

}  // namespace

EngineTable::EngineTable(uint32_t format, nb::handle indices, nb::handle indptr,
                         nb::handle seq_lens, uint32_t seq_count, uint32_t beam_width,
                         uint32_t max_blocks, uint32_t flags)
    : device_(cuda_device_of(indices, "indices")) {
  ArrayPlace place;
  place.owner = "table";
  place.cuda_device = device_;
  table_ = sized<kvx_block_table_t>();
  table_.format = static_cast<kvx_block_table_format_t>(format);
  indices_ = indices_of(indices, "indices", place, table_.index_dtype);
  lengths_ = indices_of(seq_lens, "seq_lens", place, seq_lens_.dtype);
  check_range("seq_lens' entries", static_cast<int64_t>(lengths_.size()), seq_count, seq_count);
  check_range("indices' entries", static_cast<int64_t>(indices_.size()), 0, UINT32_MAX);
  table_.indices = indices_.data();
  table_.indices_count = static_cast<uint32_t>(indices_.size());
  if (!indptr.is_none()) {
    indptr_ = indices_of(indptr, "indptr", place, table_.indptr_dtype);
    table_.indptr = indptr_.data();
    table_.indptr_count = static_cast<uint32_t>(indptr_.size());
  }
  table_.seq_count = seq_count;
  table_.beam_width = beam_width;
  table_.max_blocks_per_seq = max_blocks;
  table_.flags = flags;
  seq_lens_.size = sizeof seq_lens_;
  seq_lens_.seq_count = seq_count;
  seq_lens_.lengths = lengths_.data();
}

EngineLayer::EngineLayer(const EngineShape& shape, const EngineSide& k, const EngineSide& v,
                         const EngineSide* k_rest, const std::string& device)
    : context_(current_context()),
      lane_(device == "cpu" ? nullptr : CudaLane::of_callers(device, "layer")),
      owners_(shape.owners) {
  describe(k, k_.spec, k_.side);
  describe(v, v_.spec, v_.side);
  run_ = sized<kvx_head_run_t>();
  run_.num_heads = shape.num_kv_heads;
  run_.k = &k_.side;
  run_.v = &v_.side;
  if (k_rest != nullptr) {
    describe(*k_rest, k_rest_.spec, k_rest_.side);
    run_.k_rest = &k_rest_.side;
  }
  layer_ = sized<kvx_layer_t>();
  layer_.block_size = shape.block_size;
  layer_.num_blocks = shape.num_blocks;
  layer_.num_kv_heads = shape.num_kv_heads;
  layer_.num_runs = 1;
  layer_.runs = &runs_;
  layer_.memory = lane_ ? KVX_MEMORY_DEVICE : KVX_MEMORY_HOST;
  if (!lane_) executor_ = executor_of(*context_->cpu().executor);
  // A call without tokens checks the description.
  auto args = sized<kvx_copy_args_t>();
  args.from = args.to = &layer_;
  throw_if_failed(kvx_copy_blocks(&args, nullptr));
}

std::string EngineLayer::device() const {
  return lane_ ? fmt::format("cuda:{}", lane_->device()) : "cpu";
}

ArrayPlace EngineLayer::place_of(nb::handle stream,
                                 std::initializer_list<nb::handle> arrays) const {
  if (lane_) return lane_->place_of(stream, arrays);
  if (!stream.is_none()) {
    throw CoreError(invalid_argument("stream is given; a layer on the CPU has none"));
  }
  ArrayPlace place;
  place.owner = "layer";
  return place;
}

void EngineLayer::check_table(const EngineTable& table) const {
  const int device = lane_ ? lane_->device() : -1;
  if (table.cuda_device() == device) return;
  throw CoreError(invalid_argument("the table lies on device {} and the layer on {}; expected one",
                                   table.cuda_device(), device));
}

template <class F>
void EngineLayer::run(const ArrayPlace& place, KeptArrays& kept, F verb) {
  nb::gil_scoped_release no_gil;
  context_->home().check();
  const std::lock_guard lock(mutex_);
  if (!lane_) {
    throw_if_failed(verb(ops::CudaContext{}));
    return;
  }
  const auto current = value_of(device::CurrentCudaDevice::set(lane_->device()));
  throw_if_error(lane_->begin(place, kept));
  throw_if_failed(verb(lane_->context(place)));
  throw_if_error(lane_->end(place, kept));
}

EngineLayer::AppendCall::AppendCall(EngineLayer& layer, nb::handle k, nb::handle v,
                                    nb::handle of_slots, const ArrayPlace& place) {
  const auto heads = static_cast<int64_t>(layer.layer_.num_kv_heads);
  args = sized<kvx_append_args_t>();
  kvx_dtype_t slot_dtype = KVX_DTYPE_S64;
  slots = indices_of(of_slots, "slots", place, slot_dtype);
  const auto tokens = static_cast<int64_t>(slots.size());
  const bool has_v = (layer.v_.side.flags & KVX_SIDE_PREFIX_OF_K) == 0;
  keys = input_rows(k, "k", {tokens, heads, layer.key_dim()}, place);
  if (has_v) values = input_rows(v, "v", {tokens, heads, layer.v_.side.head_dim}, place);
  if (layer.lane_) {
    layer.lane_->keep(kept, place, k, keys.array);
    if (has_v) layer.lane_->keep(kept, place, v, values.array);
    layer.lane_->keep(kept, place, of_slots, slots);
  }
  k_rows = rows_of(keys.rows);
  v_rows = rows_of(values.rows);
  args.layer = &layer.layer_;
  args.k = &k_rows;
  args.v = has_v ? &v_rows : nullptr;
  args.num_tokens = tokens;
  args.slot_dtype = slot_dtype;
  args.slots = slots.data();
  args.executor = layer.lane_ ? nullptr : &layer.executor_;
}

void EngineLayer::append(nb::handle k, nb::handle v, nb::handle slots, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {k, v, slots});
  AppendCall call(*this, k, v, slots, place);
  run(place, call.kept,
      [&](const ops::CudaContext& context) { return kvx_append(&call.args, context.stream); });
}

void EngineLayer::process_kv(nb::handle k, nb::handle v, nb::handle slots,
                             const EngineProcessing& processing, nb::handle stream) {
  const ArrayPlace place = place_of(stream, {k, v, slots});
  AppendCall call(*this, k, v, slots, place);
  std::vector<nb::ndarray<nb::ro>> arrays;  // until the call has returned
  const auto kept = [&](nb::handle object, nb::ndarray<nb::ro> array) {
    if (lane_) lane_->keep(call.kept, place, object, array);
    arrays.push_back(std::move(array));
    return arrays.back().data();
  };
  const auto bias_of = [&](nb::handle bias, const char* name, int64_t dim) -> const void* {
    if (bias.is_none()) return nullptr;
    return kept(bias, input_rows(bias, name, {1, int64_t{layer_.num_kv_heads}, dim}, place).array);
  };
  auto args = sized<kvx_turbomind_process_args_t>();
  args.append = &call.args;
  args.rope_pairs = processing.is_interleaved ? KVX_ROPE_PAIRS_INTERLEAVED : KVX_ROPE_PAIRS_HALVES;
  args.k_bias = bias_of(processing.k_bias, "k_bias", key_dim());
  args.v_bias = bias_of(processing.v_bias, "v_bias", v_.side.head_dim);
  if (!processing.cos_sin.is_none()) {
    const int64_t numbers = processing.num_positions * 2 * processing.num_pairs;
    args.cos_sin = static_cast<const float*>(
        kept(processing.cos_sin, input_floats(processing.cos_sin, "cos_sin", numbers, place)));
    args.num_positions = processing.num_positions;
    args.num_pairs = processing.num_pairs;
    call.args.positions = static_cast<const int64_t*>(kept(
        processing.positions, input_ints<int64_t>(processing.positions, "positions", 1, place)));
  }
  run(place, call.kept, [&](const ops::CudaContext& context) {
    return kvx_turbomind_process_kv(&args, context.stream);
  });
}

void EngineLayer::attend(nb::handle q, nb::handle out, const EngineTable& table,
                         nb::handle q_starts, const EngineAttention& attention, nb::handle stream) {
  check_table(table);
  const ArrayPlace place = place_of(stream, {out, q, q_starts});
  const InputRows queries = input_rows(q, "q", {-1, -1, key_dim()}, place);
  const OutputRows output =
      output_rows(out, "out", {queries.num_tokens, queries.num_heads, v_.side.head_dim}, place);
  check_apart(output.array, queries.array, "q");
  const auto starts = input_ints<int32_t>(q_starts, "q_starts", 1, place);
  const int64_t num_sequences = table.num_sequences();
  check_range("q_starts' entries", static_cast<int64_t>(starts.size()), num_sequences + 1,
              num_sequences + 1);
  if (!lane_) {
    const int32_t last = static_cast<const int32_t*>(starts.data())[num_sequences];
    check_range("q_starts[-1]", last, 0, queries.num_tokens);
  }
  KeptArrays kept;
  if (lane_) {
    lane_->keep(kept, place, q, queries.array);
    lane_->keep(kept, place, q_starts, starts);
  }
  const kvx_rows_t q_rows = rows_of(queries.rows);
  const kvx_rows_t out_rows = rows_of(output.rows);
  auto args = sized<kvx_attend_args_t>();
  args.num_q_heads = static_cast<uint32_t>(queries.num_heads);
  args.layer = &layer_;
  args.block_table = &table.table();
  args.seq_lens = &table.seq_lens();
  args.q_starts = static_cast<const int32_t*>(starts.data());
  args.q = &q_rows;
  args.out = &out_rows;
  args.softmax_scale = attention.softmax_scale;
  args.softcap = attention.softcap;
  args.window = attention.window;
  args.num_queries = queries.num_tokens;
  args.max_tokens = attention.max_tokens;
  args.max_q_len =
      attention.max_q_len != 0 ? attention.max_q_len : static_cast<uint32_t>(queries.num_tokens);
  args.executor = lane_ ? nullptr : &executor_;
  run(place, kept, [&](const ops::CudaContext& context) {
    if (!lane_) return kvx_attend(&args, nullptr);
    const kvx_status_t status = kvx_attend_workspace(&args, &args.workspace_bytes);
    if (status != KVX_STATUS_OK) return status;
    args.workspace =
        value_of(workspace_of(context, static_cast<int64_t>(args.workspace_bytes), {}));
    return kvx_attend(&args, context.stream);
  });
}

void EngineLayer::gather(const EngineTable& table, nb::handle sequences, nb::handle first_tokens,
                         nb::handle num_tokens, nb::handle first_rows, nb::handle k, nb::handle v,
                         int64_t token_stride, int64_t head_stride, nb::handle stream) {
  check_table(table);
  const ArrayPlace place = place_of(stream, {k, v, first_tokens});
  const auto of_sequences = input_ints<int32_t>(sequences, "sequences", 1, place);
  const auto firsts = input_ints<int64_t>(first_tokens, "first_tokens", 1, place);
  const auto counts = input_ints<int64_t>(num_tokens, "num_tokens", 1, place);
  const auto to_rows = input_ints<int64_t>(first_rows, "first_rows", 1, place);
  const auto num_ranges = static_cast<int64_t>(of_sequences.size());
  for (const auto* array : {&firsts, &counts, &to_rows}) {
    check_range("entries of first_tokens, num_tokens and first_rows",
                static_cast<int64_t>(array->size()), num_ranges, num_ranges);
  }
  // Rows of all heads in one dimension: the strides say where a token's heads are.
  const OutputRows keys = output_rows(k, "k", {-1, 1, key_dim()}, place);
  const OutputRows values = output_rows(v, "v", {-1, 1, v_.side.head_dim}, place);
  check_apart(keys.array, nb::ndarray<nb::ro>(values.array), "v");
  const auto strided = [&](const OutputRows& rows, uint32_t head_dim) {
    kvx_rows_t result = rows_of(rows.rows);
    result.token_stride = token_stride * head_dim;
    result.head_stride = head_stride * head_dim;
    return result;
  };
  const kvx_rows_t k_rows = strided(keys, key_dim());
  const kvx_rows_t v_rows = strided(values, v_.side.head_dim);
  KeptArrays kept;
  auto args = sized<kvx_gather_args_t>();
  args.num_ranges = static_cast<uint32_t>(num_ranges);
  args.layer = &layer_;
  args.block_table = &table.table();
  args.seq_lens = &table.seq_lens();
  args.sequences = static_cast<const int32_t*>(of_sequences.data());
  args.first_tokens = static_cast<const int64_t*>(firsts.data());
  args.num_tokens = static_cast<const int64_t*>(counts.data());
  args.first_rows = static_cast<const int64_t*>(to_rows.data());
  args.k = &k_rows;
  args.v = &v_rows;
  args.executor = lane_ ? nullptr : &executor_;
  run(place, kept,
      [&](const ops::CudaContext& context) { return kvx_gather(&args, context.stream); });
}

void EngineLayer::copy_blocks(EngineLayer& to, nb::handle from_blocks, nb::handle to_blocks,
                              nb::handle stream) {
  const ArrayPlace place = place_of(stream, {from_blocks, to_blocks});
  const auto from_ids = input_ints<int64_t>(from_blocks, "from_blocks", 1, place);
  const auto to_ids = input_ints<int64_t>(to_blocks, "to_blocks", 1, place);
  check_range("to_blocks' entries", static_cast<int64_t>(to_ids.size()),
              static_cast<int64_t>(from_ids.size()), static_cast<int64_t>(from_ids.size()));
  KeptArrays kept;
  auto args = sized<kvx_copy_args_t>();
  args.num_copies = static_cast<uint32_t>(from_ids.size());
  args.from = &layer_;
  args.to = &to.layer_;
  args.from_blocks = static_cast<const int64_t*>(from_ids.data());
  args.to_blocks = static_cast<const int64_t*>(to_ids.data());
  args.executor = lane_ ? nullptr : &executor_;
  run(place, kept,
      [&](const ops::CudaContext& context) { return kvx_copy_blocks(&args, context.stream); });
}

void EngineLayer::transcode(EngineLayer& to, nb::handle from_slots, nb::handle to_slots,
                            nb::handle stream) {
  const ArrayPlace place = place_of(stream, {from_slots, to_slots});
  const auto from = input_ints<int64_t>(from_slots, "from_slots", 1, place);
  const auto into = input_ints<int64_t>(to_slots, "to_slots", 1, place);
  check_range("to_slots' entries", static_cast<int64_t>(into.size()),
              static_cast<int64_t>(from.size()), static_cast<int64_t>(from.size()));
  KeptArrays kept;
  auto args = sized<kvx_transcode_args_t>();
  args.slot_dtype = KVX_DTYPE_S64;
  args.from = &layer_;
  args.to = &to.layer_;
  args.num_tokens = static_cast<int64_t>(from.size());
  args.from_slots = from.data();
  args.to_slots = into.data();
  args.executor = lane_ ? nullptr : &executor_;
  run(place, kept,
      [&](const ops::CudaContext& context) { return kvx_transcode(&args, context.stream); });
}

namespace {

// Bytes of a row of a format, for checks against an array's size.
nb::dict format_bytes(const std::string& recipe, int head_dim) {
  const kv::Recipe parsed = value_of(kv::parse_recipe(recipe));
  const format::FormatSpec& spec = parsed.k.spec;
  throw_if_error(format::check_head_dim(spec, head_dim));
  nb::dict dict;
  dict["code_bytes"] = format::code_bytes_per_row(spec, head_dim);
  dict["num_groups"] = spec.has_scale() ? format::groups_per_row(spec, head_dim) : 0;
  dict["group_bytes"] = spec.has_scale() ? format::scale_bytes_per_group(spec) : 0;
  return dict;
}

}  // namespace

void bind_engine_layer(nb::module_& module) {
  module.def("format_bytes", &format_bytes, nb::arg("recipe"), nb::arg("head_dim"));
  nb::class_<EngineTable>(module, "EngineTable")
      .def(nb::init<uint32_t, nb::handle, nb::handle, nb::handle, uint32_t, uint32_t, uint32_t,
                    uint32_t>(),
           nb::arg("format"), nb::arg("indices").none(), nb::arg("indptr").none(),
           nb::arg("seq_lens").none(), nb::arg("seq_count"), nb::arg("beam_width"),
           nb::arg("max_blocks"), nb::arg("flags"));
  nb::class_<EngineSide>(module, "EngineSide")
      .def(nb::init<>())
      .def_rw("recipe", &EngineSide::recipe)
      .def_rw("head_dim", &EngineSide::head_dim)
      .def_rw("codes", &EngineSide::codes)
      .def_rw("code_strides", &EngineSide::code_strides)
      .def_rw("fragments", &EngineSide::fragments)
      .def_rw("scales", &EngineSide::scales)
      .def_rw("scale_strides", &EngineSide::scale_strides)
      .def_rw("tensor_scales", &EngineSide::tensor_scales)
      .def_rw("flags", &EngineSide::flags);
  nb::class_<EngineLayer>(module, "EngineLayer")
      .def(
          "__init__",
          [](EngineLayer* self, int64_t num_blocks, uint32_t block_size, uint32_t num_kv_heads,
             const EngineSide& k, const EngineSide& v, const EngineSide* k_rest,
             const std::string& device, nb::object owners) {
            new (self) EngineLayer({num_blocks, block_size, num_kv_heads, std::move(owners)}, k, v,
                                   k_rest, device);
          },
          nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("k"),
          nb::arg("v"), nb::arg("k_rest").none(), nb::arg("device"), nb::arg("owners"))
      .def_prop_ro("device", &EngineLayer::device)
      .def("append", &EngineLayer::append, nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("slots").none(), nb::arg("stream").none())
      .def(
          "process_kv",
          [](EngineLayer& self, nb::handle k, nb::handle v, nb::handle slots, nb::handle k_bias,
             nb::handle v_bias, nb::handle cos_sin, nb::handle positions, int64_t num_positions,
             uint32_t num_pairs, bool is_interleaved, nb::handle stream) {
            self.process_kv(
                k, v, slots,
                {k_bias, v_bias, cos_sin, positions, num_positions, num_pairs, is_interleaved},
                stream);
          },
          nb::arg("k").none(), nb::arg("v").none(), nb::arg("slots").none(),
          nb::arg("k_bias").none(), nb::arg("v_bias").none(), nb::arg("cos_sin").none(),
          nb::arg("positions").none(), nb::arg("num_positions"), nb::arg("num_pairs"),
          nb::arg("is_interleaved"), nb::arg("stream").none())
      .def(
          "attend",
          [](EngineLayer& self, nb::handle q, nb::handle out, const EngineTable& table,
             nb::handle q_starts, float softmax_scale, float softcap, uint32_t window,
             int64_t max_tokens, uint32_t max_q_len, nb::handle stream) {
            self.attend(q, out, table, q_starts,
                        {softmax_scale, softcap, window, max_tokens, max_q_len}, stream);
          },
          nb::arg("q").none(), nb::arg("out").none(), nb::arg("table"), nb::arg("q_starts").none(),
          nb::arg("softmax_scale"), nb::arg("softcap"), nb::arg("window"), nb::arg("max_tokens"),
          nb::arg("max_q_len"), nb::arg("stream").none())
      .def("gather", &EngineLayer::gather, nb::arg("table"), nb::arg("sequences").none(),
           nb::arg("first_tokens").none(), nb::arg("num_tokens").none(),
           nb::arg("first_rows").none(), nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("token_stride"), nb::arg("head_stride"), nb::arg("stream").none())
      .def("copy_blocks", &EngineLayer::copy_blocks, nb::arg("to"), nb::arg("from_blocks").none(),
           nb::arg("to_blocks").none(), nb::arg("stream").none())
      .def("transcode", &EngineLayer::transcode, nb::arg("to"), nb::arg("from_slots").none(),
           nb::arg("to_slots").none(), nb::arg("stream").none());
}

}  // namespace kvx::python
