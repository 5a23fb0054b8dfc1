// Rows outside of any cache: quantised into arrays of their own, and back.
//
//   codes  uint8 [rows, code bytes of a row]    scales  uint8 [rows, scale bytes of a row]
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

#include "device/cuda_caller.hpp"
#include "kv/recipe.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/cuda_lane.hpp"
#include "python/src/errors.hpp"
#include "python/src/interrupt.hpp"

namespace kvx::python {
namespace {

using format::FormatSpec;
using format::ScaleSource;

// How rows of one head_dim are stored. Given scales are the same for all rows.
struct RowFormat {
  kv::SideRecipe side;
  int head_dim = 0;
  float tensor_scale = 1.0f;
  std::vector<uint8_t> given_scales;
};

std::vector<uint8_t> stored_scales(const FormatSpec& spec, int head_dim,
                                   const std::vector<float>& steps) {
  const int groups = groups_per_row(spec, head_dim);
  if (steps.empty() && spec.facts->group_sizes.preferred() == format::kWholeRow) {
    return stored_scales(spec, head_dim, {1.0f});  // fp8 as caches read it without a calibration
  }
  if (static_cast<int>(steps.size()) != groups) {
    throw CoreError(
        invalid_argument("steps has {} numbers; {} with given scales needs {} for "
                         "head_dim {}, one a group",
                         steps.size(), spec.facts->name, groups, head_dim));
  }
  const int bytes = scale_bytes_per_group(spec);
  std::vector<uint8_t> stored;
  for (const float step : steps) {
    const auto scale = value_of(format::given_scale(spec.scale_type, step));
    for (int b = 0; b < bytes; ++b) stored.push_back(static_cast<uint8_t>(scale.bits >> (8 * b)));
  }
  return stored;
}

RowFormat row_format(std::string_view recipe_text, int head_dim, float tensor_scale,
                     const std::vector<float>& steps) {
  const auto recipe = value_of(kv::parse_recipe(recipe_text));
  throw_if_error(kv::check_no_rotary(recipe));
  if (recipe.has_full_precision_window) {
    throw CoreError(
        invalid_argument("format is '{}'; rows have no full-precision window (leave "
                         "auto, sink and recent out, or add immediate)",
                         recipe_text));
  }
  if (!(recipe.k == recipe.v)) {
    throw CoreError(
        invalid_argument("format is '{}'; rows have one format, not one for keys and "
                         "one for values",
                         recipe_text));
  }
  RowFormat rows{recipe.k, head_dim, tensor_scale, {}};
  const FormatSpec& spec = rows.side.spec;
  throw_if_error(check_head_dim(spec, head_dim));
  throw_if_error(format::check_rows_alone(spec));
  throw_if_error(format::check_tensor_scale(tensor_scale));
  if (tensor_scale != 1.0f && !spec.facts->has_tensor_scale) {
    throw CoreError(
        invalid_argument("tensor_scale is {}; {} has none", tensor_scale, spec.facts->name));
  }
  if (spec.scale_source == ScaleSource::kPageShared) {
    throw CoreError(
        unsupported("format is '{}'; page-shared scales need a cache's blocks", recipe_text));
  }
  if (spec.scale_source == ScaleSource::kGiven) {
    rows.given_scales = stored_scales(spec, head_dim, steps);
  } else if (!steps.empty()) {
    throw CoreError(
        invalid_argument("steps has {} numbers; '{}' makes its own scales (expected "
                         "none, or source=given)",
                         steps.size(), recipe_text));
  }
  return rows;
}

// Bytes of a row's codes, and of the scales that quantising it writes.
int code_bytes(const RowFormat& rows) {
  return code_bytes_per_row(rows.side.spec, rows.head_dim);
}
int scale_bytes(const RowFormat& rows) {
  return rows.given_scales.empty() ? scale_bytes_per_row(rows.side.spec, rows.head_dim) : 0;
}

int rows_in_one_block(int64_t num_rows) {
  if (num_rows > std::numeric_limits<int>::max()) {
    throw CoreError(out_of_range("x has {} rows; expected at most {} in one call", num_rows,
                                 std::numeric_limits<int>::max()));
  }
  return static_cast<int>(num_rows);
}

// The rows as a layer of one block and one head that stores K alone.
ops::HeadRun run_of(RowFormat& rows, uint8_t* codes, uint8_t* scales) {
  ops::HeadRun run{0, 1, {}, {}};
  run.k.spec = rows.side.spec;
  run.k.head_dim = rows.head_dim;
  run.k.codes = {codes, 0, code_bytes(rows), 0};
  const int group_bytes = scale_bytes_per_group(rows.side.spec);
  run.k.scales = rows.given_scales.empty()
                     ? ops::ScaleAddress{scales, 0, scale_bytes(rows), 0, group_bytes}
                     : ops::ScaleAddress{rows.given_scales.data(), 0, 0, 0, group_bytes};
  run.k.tensor_scales = &rows.tensor_scale;
  run.v.spec = rows.side.spec;
  return run;
}

// Verbs read through a view that could be written through; they do not.
ops::HeadRun readable_run_of(RowFormat& rows, const nb::ndarray<nb::ro>& codes,
                             const nb::ndarray<nb::ro>& scales) {
  return run_of(rows, const_cast<uint8_t*>(static_cast<const uint8_t*>(codes.data())),
                const_cast<uint8_t*>(static_cast<const uint8_t*>(scales.data())));
}

std::tuple<int, int> row_bytes(std::string_view format, int head_dim,
                               const std::vector<float>& steps) {
  const RowFormat rows = row_format(format, head_dim, 1.0f, steps);
  return {code_bytes(rows), scale_bytes(rows)};
}

// What was written so far is dropped with its arrays when the verb is interrupted.
template <class F>
std::invoke_result_t<F, const ops::CpuContext&> on_cpu(const Context& context, F verb) {
  Interruptible interrupt;
  InterruptibleExecutor executor(*context.cpu().executor, interrupt);
  const ops::CpuContext cpu{context.cpu().kernels, &executor};
  if constexpr (std::is_void_v<std::invoke_result_t<F, const ops::CpuContext&>>) {
    verb(cpu);
    interrupt.check();
  } else {
    auto result = verb(cpu);
    interrupt.check();
    return result;
  }
}

// x: [rows, 1, head_dim]. Returns the non-finite numbers without a code under given scales.
int64_t quantize_rows(nb::handle x, nb::handle codes, nb::handle scales, std::string_view format,
                      float tensor_scale, const std::vector<float>& steps) {
  const InputRows input = input_rows(x, "x", {-1, 1, -1});
  const int block_size = rows_in_one_block(input.num_tokens);
  RowFormat rows = row_format(format, static_cast<int>(input.array.shape(2)), tensor_scale, steps);
  const auto code_array = output_bytes(codes, "codes", input.num_tokens, code_bytes(rows));
  const auto scale_array = output_bytes(scales, "scales", input.num_tokens, scale_bytes(rows));
  if (input.num_tokens == 0) return 0;
  const ops::HeadRun run = run_of(rows, static_cast<uint8_t*>(code_array.data()),
                                  static_cast<uint8_t*>(scale_array.data()));
  const auto context = current_context();

  nb::gil_scoped_release no_gil;
  std::vector<int64_t> slots(input.num_tokens);
  std::iota(slots.begin(), slots.end(), 0);
  ops::AppendArgs args;
  args.cache = {1, block_size, 1, {&run, 1}};
  args.transform.k.hadamard = rows.side.hadamard;
  args.k = input.rows;
  args.slot_mapping = slots;
  return on_cpu(*context, [&](const ops::CpuContext& cpu) {
    return value_of(ops::append(cpu, args)).nonfinite_inputs;
  });
}

// out: [rows, 1, head_dim].
void dequantize_rows(nb::handle codes, nb::handle scales, nb::handle out, std::string_view format,
                     float tensor_scale, const std::vector<float>& steps) {
  const OutputRows output = output_rows(out, "out", {-1, 1, -1});
  const auto num_rows = static_cast<int64_t>(output.array.shape(0));
  const int block_size = rows_in_one_block(num_rows);
  RowFormat rows = row_format(format, static_cast<int>(output.array.shape(2)), tensor_scale, steps);
  const auto code_array = input_bytes(codes, "codes", num_rows, code_bytes(rows));
  const auto scale_array = input_bytes(scales, "scales", num_rows, scale_bytes(rows));
  if (num_rows == 0) return;
  const ops::HeadRun run = readable_run_of(rows, code_array, scale_array);
  const auto context = current_context();

  nb::gil_scoped_release no_gil;
  const int32_t block = 0;
  const ops::GatherRange range{0, 0, num_rows, 0};
  ops::GatherArgs args;
  args.cache = {1, block_size, 1, {&run, 1}};
  args.transform.k.hadamard = rows.side.hadamard;
  args.block_table = {&block, 1};
  args.max_blocks_per_sequence = 1;
  args.num_sequences = 1;
  args.ranges = {&range, 1};
  args.k = output.rows;
  on_cpu(*context, [&](const ops::CpuContext& cpu) { throw_if_error(ops::gather(cpu, args)); });
}

void check_rotations(const RowFormat& from, const RowFormat& to, std::string_view from_format,
                     std::string_view to_format) {
  if (from.side.hadamard == to.side.hadamard) return;
  throw CoreError(
      unsupported("format is '{}' and the rows are '{}': only one of the two rotates; dequantize "
                  "and quantize them instead",
                  to_format, from_format));
}

// Codes and scales of one format to those of another, without the numbers between them. Returns the
// non-finite numbers without a code under given scales.
int64_t transcode_rows(nb::handle codes, nb::handle scales, std::string_view format,
                       float tensor_scale, const std::vector<float>& steps, int64_t num_rows,
                       int head_dim, nb::handle out_codes, nb::handle out_scales,
                       std::string_view out_format, float out_tensor_scale,
                       const std::vector<float>& out_steps) {
  RowFormat from = row_format(format, head_dim, tensor_scale, steps);
  RowFormat to = row_format(out_format, head_dim, out_tensor_scale, out_steps);
  check_rotations(from, to, format, out_format);
  const auto to_codes = output_bytes(out_codes, "out_codes", num_rows, code_bytes(to));
  const auto to_scales = output_bytes(out_scales, "out_scales", num_rows, scale_bytes(to));
  const auto from_codes = input_bytes(codes, "codes", num_rows, code_bytes(from));
  const auto from_scales = input_bytes(scales, "scales", num_rows, scale_bytes(from));
  const int block_size = rows_in_one_block(num_rows);
  if (num_rows == 0) return 0;
  const ops::HeadRun source = readable_run_of(from, from_codes, from_scales);
  const ops::HeadRun target =
      run_of(to, static_cast<uint8_t*>(to_codes.data()), static_cast<uint8_t*>(to_scales.data()));
  const auto context = current_context();

  nb::gil_scoped_release no_gil;
  const ops::BlockCopy copy{0, 0, block_size};
  return on_cpu(*context, [&](const ops::CpuContext& cpu) {
    return value_of(ops::copy_blocks(cpu, {1, block_size, 1, {&source, 1}},
                                     {1, block_size, 1, {&target, 1}}, {&copy, 1}));
  });
}

// ---- on a GPU
//
// Rows are blocks of one token there. Every table that a kernel reads lies in arrays that the
// caller's library has made on the device, so that nothing is allocated here.

struct CudaTables {
  nb::handle numbers;        // int64 [rows]: 0, 1, 2, ...
  nb::handle block_table;    // int32 [1, rows]: likewise; for dequantize_rows alone
  nb::handle num_rows;       // int32 [1]; for dequantize_rows alone
  nb::handle counters;       // int64 [2], zeros: what DeviceCounters has
  nb::handle given_scales;   // uint8 [bytes of a row's], or None where scales are computed
  nb::handle tensor_scales;  // float32 [1], or None: 1
};

// The given scales of a row as they are stored; empty where a row has its own.
nb::bytes given_scales(std::string_view format, int head_dim, const std::vector<float>& steps) {
  const RowFormat rows = row_format(format, head_dim, 1.0f, steps);
  return nb::bytes(rows.given_scales.data(), rows.given_scales.size());
}

// One a device, of the process. Called with the GIL held.
CudaLane& lane_of(int device) {
  static auto& lanes = *new std::map<int, std::unique_ptr<CudaLane>>;
  std::unique_ptr<CudaLane>& lane = lanes[device];
  if (!lane) lane = CudaLane::of_callers(fmt::format("cuda:{}", device), "first array");
  return *lane;
}

// The arrays of one call and what they mean; they live as long as this does.
class CudaRows {
 public:
  CudaRows(int device, nb::handle stream, std::initializer_list<nb::handle> arrays)
      : lane_(lane_of(device)), place_(lane_.place_of(stream, arrays)) {}

  const ArrayPlace& place() const { return place_; }

  template <class Int>
  const Int* ints(nb::handle object, const char* name, size_t dimensions) {
    const auto array = input_ints<Int>(object, name, dimensions, place_);
    take(object, array);
    return static_cast<const Int*>(array.data());
  }
  const uint8_t* bytes(nb::handle object, const char* name, int64_t num_rows, int64_t row_bytes) {
    const auto array = input_bytes(object, name, num_rows, row_bytes, place_);
    take(object, array);
    return static_cast<const uint8_t*>(array.data());
  }
  void take(nb::handle object, const nb::ndarray<nb::ro>& array) {
    arrays_.push_back(array);
    lane_.keep(kept_, place_, object, array);
  }

  // The rows as run_of() has them, a block each, their tables on the device.
  ops::HeadRun run(RowFormat& rows, uint8_t* codes, uint8_t* scales, nb::handle given,
                   nb::handle tensor_scales) {
    ops::HeadRun run = run_of(rows, codes, scales);
    run.k.codes.block_stride = code_bytes(rows);
    run.k.scales.block_stride = run.k.scales.token_stride;
    run.k.tensor_scales = nullptr;
    if (!rows.given_scales.empty()) {
      const auto size = static_cast<int64_t>(rows.given_scales.size());
      run.k.scales.base = const_cast<uint8_t*>(bytes(given, "given_scales", 1, size));
    }
    if (!tensor_scales.is_none()) {
      const auto array = input_floats(tensor_scales, "tensor_scales", 1, place_);
      take(tensor_scales, array);
      run.k.tensor_scales = static_cast<const float*>(array.data());
    }
    return run;
  }

  ops::DeviceCounters* counters(nb::handle object) {
    return reinterpret_cast<ops::DeviceCounters*>(
        const_cast<int64_t*>(ints<int64_t>(object, "counters", 1)));
  }

  // verb(context) launches; without the GIL.
  template <class F>
  void launch(F verb) {
    nb::gil_scoped_release no_gil;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const auto current = value_of(device::CurrentCudaDevice::set(lane_.device()));
    throw_if_error(lane_.begin(place_, kept_));
    throw_if_error(verb(lane_.context(place_)));
    throw_if_error(lane_.end(place_, kept_));
  }

 private:
  CudaLane& lane_;
  ArrayPlace place_;
  KeptArrays arrays_;
  KeptArrays kept_;
};

// As quantize_rows; what could not be expressed is counted.
void quantize_rows_on_cuda(nb::handle x, nb::handle codes, nb::handle scales,
                           std::string_view format, float tensor_scale,
                           const std::vector<float>& steps, const CudaTables& tables,
                           nb::handle stream) {
  CudaRows cuda(cuda_device_of(codes, "codes"), stream, {codes, x});
  const InputRows input = input_rows(x, "x", {-1, 1, -1}, cuda.place());
  cuda.take(x, input.array);
  rows_in_one_block(input.num_tokens);
  RowFormat rows = row_format(format, static_cast<int>(input.array.shape(2)), tensor_scale, steps);
  const auto code_array =
      output_bytes(codes, "codes", input.num_tokens, code_bytes(rows), cuda.place());
  const auto scale_array =
      output_bytes(scales, "scales", input.num_tokens, scale_bytes(rows), cuda.place());
  if (input.num_tokens == 0) return;
  const ops::HeadRun run = cuda.run(rows, static_cast<uint8_t*>(code_array.data()),
                                    static_cast<uint8_t*>(scale_array.data()), tables.given_scales,
                                    tables.tensor_scales);
  ops::AppendArgs args;
  args.cache = {input.num_tokens, 1, 1, {&run, 1}};
  args.transform.k.hadamard = rows.side.hadamard;
  args.k = input.rows;
  args.slot_mapping = {cuda.ints<int64_t>(tables.numbers, "numbers", 1),
                       static_cast<size_t>(input.num_tokens)};
  ops::DeviceCounters* const counters = cuda.counters(tables.counters);
  cuda.launch(
      [&](const ops::CudaContext& context) { return ops::append(context, args, counters); });
}

void dequantize_rows_on_cuda(nb::handle codes, nb::handle scales, nb::handle out,
                             std::string_view format, float tensor_scale,
                             const std::vector<float>& steps, const CudaTables& tables,
                             nb::handle stream) {
  CudaRows cuda(cuda_device_of(out, "out"), stream, {out, codes, scales});
  const OutputRows output = output_rows(out, "out", {-1, 1, -1}, cuda.place());
  const auto num_rows = static_cast<int64_t>(output.array.shape(0));
  rows_in_one_block(num_rows);
  RowFormat rows = row_format(format, static_cast<int>(output.array.shape(2)), tensor_scale, steps);
  const uint8_t* const code_bytes_of_rows = cuda.bytes(codes, "codes", num_rows, code_bytes(rows));
  const uint8_t* const scale_bytes_of_rows =
      cuda.bytes(scales, "scales", num_rows, scale_bytes(rows));
  if (num_rows == 0) return;
  const ops::HeadRun run = cuda.run(rows, const_cast<uint8_t*>(code_bytes_of_rows),
                                    const_cast<uint8_t*>(scale_bytes_of_rows), tables.given_scales,
                                    tables.tensor_scales);
  ops::GatherArgs args;
  args.cache = {num_rows, 1, 1, {&run, 1}};
  args.transform.k.hadamard = rows.side.hadamard;
  args.block_table = {cuda.ints<int32_t>(tables.block_table, "block_table", 2), num_rows};
  args.max_blocks_per_sequence = num_rows;
  args.num_sequences = 1;
  args.k = output.rows;
  args.num_rows = num_rows;
  const ops::CudaGatherRanges ranges{
      .count = 1, .seq_lens = cuda.ints<int32_t>(tables.num_rows, "num_rows", 1)};
  ops::DeviceCounters* const counters = cuda.counters(tables.counters);
  cuda.launch([&](const ops::CudaContext& context) {
    return ops::gather(context, args, ranges, num_rows, counters);
  });
}

// As transcode_rows; what could not be expressed is counted.
void transcode_rows_on_cuda(nb::handle codes, nb::handle scales, std::string_view format,
                            float tensor_scale, const std::vector<float>& steps, int64_t num_rows,
                            int head_dim, nb::handle out_codes, nb::handle out_scales,
                            std::string_view out_format, float out_tensor_scale,
                            const std::vector<float>& out_steps, const CudaTables& from_tables,
                            const CudaTables& to_tables, nb::handle stream) {
  RowFormat from = row_format(format, head_dim, tensor_scale, steps);
  RowFormat to = row_format(out_format, head_dim, out_tensor_scale, out_steps);
  check_rotations(from, to, format, out_format);
  CudaRows cuda(cuda_device_of(out_codes, "out_codes"), stream, {out_codes, codes, scales});
  const auto to_codes =
      output_bytes(out_codes, "out_codes", num_rows, code_bytes(to), cuda.place());
  const auto to_scales =
      output_bytes(out_scales, "out_scales", num_rows, scale_bytes(to), cuda.place());
  const uint8_t* const from_codes = cuda.bytes(codes, "codes", num_rows, code_bytes(from));
  const uint8_t* const from_scales = cuda.bytes(scales, "scales", num_rows, scale_bytes(from));
  rows_in_one_block(num_rows);
  if (num_rows == 0) return;
  const ops::HeadRun source =
      cuda.run(from, const_cast<uint8_t*>(from_codes), const_cast<uint8_t*>(from_scales),
               from_tables.given_scales, from_tables.tensor_scales);
  const ops::HeadRun target =
      cuda.run(to, static_cast<uint8_t*>(to_codes.data()), static_cast<uint8_t*>(to_scales.data()),
               to_tables.given_scales, to_tables.tensor_scales);
  const int64_t* const numbers = cuda.ints<int64_t>(to_tables.numbers, "numbers", 1);
  ops::DeviceCounters* const counters = cuda.counters(to_tables.counters);
  cuda.launch([&](const ops::CudaContext& context) {
    return ops::copy_blocks(context, {num_rows, 1, 1, {&source, 1}}, {num_rows, 1, 1, {&target, 1}},
                            {.count = num_rows, .from_blocks = numbers, .to_blocks = numbers},
                            counters);
  });
}

CudaTables tables_of(const nb::tuple& tables) {
  return {tables[0], tables[1], tables[2], tables[3], tables[4], tables[5]};
}

}  // namespace

void bind_rows(nb::module_& module) {
  module.def("row_bytes", &row_bytes, nb::arg("format"), nb::arg("head_dim"), nb::arg("steps"));
  module.def("quantize_rows", &quantize_rows, nb::arg("x").none(), nb::arg("codes").none(),
             nb::arg("scales").none(), nb::arg("format"), nb::arg("tensor_scale"),
             nb::arg("steps"));
  module.def("dequantize_rows", &dequantize_rows, nb::arg("codes").none(), nb::arg("scales").none(),
             nb::arg("out").none(), nb::arg("format"), nb::arg("tensor_scale"), nb::arg("steps"));
  module.def("transcode_rows", &transcode_rows, nb::arg("codes").none(), nb::arg("scales").none(),
             nb::arg("format"), nb::arg("tensor_scale"), nb::arg("steps"), nb::arg("num_rows"),
             nb::arg("head_dim"), nb::arg("out_codes").none(), nb::arg("out_scales").none(),
             nb::arg("out_format"), nb::arg("out_tensor_scale"), nb::arg("out_steps"));

  module.def("cuda_device_of", &cuda_device_of, nb::arg("array").none(), nb::arg("name"));
  module.def("given_scales", &given_scales, nb::arg("format"), nb::arg("head_dim"),
             nb::arg("steps"));
  module.def(
      "quantize_rows_on_cuda",
      [](nb::handle x, nb::handle codes, nb::handle scales, std::string_view format,
         float tensor_scale, const std::vector<float>& steps, const nb::tuple& tables,
         nb::handle stream) {
        quantize_rows_on_cuda(x, codes, scales, format, tensor_scale, steps, tables_of(tables),
                              stream);
      },
      nb::arg("x").none(), nb::arg("codes").none(), nb::arg("scales").none(), nb::arg("format"),
      nb::arg("tensor_scale"), nb::arg("steps"), nb::arg("tables"), nb::arg("stream").none());
  module.def(
      "dequantize_rows_on_cuda",
      [](nb::handle codes, nb::handle scales, nb::handle out, std::string_view format,
         float tensor_scale, const std::vector<float>& steps, const nb::tuple& tables,
         nb::handle stream) {
        dequantize_rows_on_cuda(codes, scales, out, format, tensor_scale, steps, tables_of(tables),
                                stream);
      },
      nb::arg("codes").none(), nb::arg("scales").none(), nb::arg("out").none(), nb::arg("format"),
      nb::arg("tensor_scale"), nb::arg("steps"), nb::arg("tables"), nb::arg("stream").none());
  module.def(
      "transcode_rows_on_cuda",
      [](nb::handle codes, nb::handle scales, std::string_view format, float tensor_scale,
         const std::vector<float>& steps, int64_t num_rows, int head_dim, nb::handle out_codes,
         nb::handle out_scales, std::string_view out_format, float out_tensor_scale,
         const std::vector<float>& out_steps, const nb::tuple& from_tables,
         const nb::tuple& to_tables, nb::handle stream) {
        transcode_rows_on_cuda(codes, scales, format, tensor_scale, steps, num_rows, head_dim,
                               out_codes, out_scales, out_format, out_tensor_scale, out_steps,
                               tables_of(from_tables), tables_of(to_tables), stream);
      },
      nb::arg("codes").none(), nb::arg("scales").none(), nb::arg("format"), nb::arg("tensor_scale"),
      nb::arg("steps"), nb::arg("num_rows"), nb::arg("head_dim"), nb::arg("out_codes").none(),
      nb::arg("out_scales").none(), nb::arg("out_format"), nb::arg("out_tensor_scale"),
      nb::arg("out_steps"), nb::arg("from_tables"), nb::arg("to_tables"), nb::arg("stream").none());
}

}  // namespace kvx::python
