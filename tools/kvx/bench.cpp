// kvx bench: how fast the verbs go over packed bytes, beside how fast the machine reads memory.
#include <cstdio>

#include "tools/kvx/bench/bench_cache.hpp"
#include "tools/kvx/bench/bench_report.hpp"
#include "tools/kvx/bench/cuda_bench.hpp"
#include "tools/kvx/bench/latent_shape.hpp"
#include "tools/kvx/bench/read_bandwidth.hpp"
#include "tools/kvx/bench/timing.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/recipe_list.hpp"
#include "tools/kvx/terminal.hpp"
#include "tools/kvx/version.hpp"

namespace kvx::tool {
namespace {

struct BenchOptions {
  std::string formats = "bf16,fp8_e4m3,int8,int8/int4,int4,int4_affine,mxfp4,nvfp4";
  std::vector<int> lengths = {8192};
  BenchShape shape;
  int threads = 0;
  double min_seconds = 0.3;
  std::string json;
  std::string csv;
  std::string device = "cpu";
  std::string shapes;  // empty: kCudaShapes on a GPU, the lengths on a CPU
  std::string queries = "f16";
  bool only_attend = false;
};

// A call that fails ends the measurement; the verbs' own checks name what is wrong.
template <class Call>
Result<double> median_seconds(double min_seconds, const Call& call) {
  Status status;
  const std::vector<double> seconds = time_calls(min_seconds, [&] {
    if (status.ok()) status = call();
  });
  KVX_RETURN_IF_ERROR(status);
  return median(seconds);
}

// All verbs on one cache, appended to the report; attention alone where the recipe has a
// full-precision window, because the other verbs go over packed blocks and would measure nothing of
// it.
Status measure(const BenchShape& shape, const kv::Recipe& recipe, const Engine& engine,
               double min_seconds, BenchReport& report) {
  KVX_ASSIGN_OR_RETURN(const std::unique_ptr<BenchCache> cache,
                       BenchCache::create(shape, recipe, engine.context));
  const int64_t all_tokens = int64_t{shape.num_sequences} * shape.length;
  const auto add = [&](const char* verb, int64_t cache_tokens, int64_t num_tokens,
                       const auto& call) -> Status {
    KVX_ASSIGN_OR_RETURN(const double seconds, median_seconds(min_seconds, call));
    report.measurements.push_back(
        {recipe.text, verb, shape, seconds, cache->packed_bytes(cache_tokens), num_tokens});
    return {};
  };
  // Sequences take turns, so that no call finds in a cache what the one before it read.
  int turn = 0;
  const auto next = [&] { return turn++ % shape.num_sequences; };
  if (cache->has_full_precision_window()) {
    KVX_RETURN_IF_ERROR(cache->append_all());
  } else {
    KVX_RETURN_IF_ERROR(add("append", all_tokens, all_tokens, [&] { return cache->append_all(); }));
    KVX_RETURN_IF_ERROR(
        add("gather", shape.length, shape.length, [&] { return cache->gather(next()); }));
    KVX_RETURN_IF_ERROR(
        add(kReadBlocks, all_tokens, shape.num_sequences, [&] { return cache->read_blocks(); }));
  }
  KVX_RETURN_IF_ERROR(
      add(kAttendDecode, all_tokens, shape.num_sequences, [&] { return cache->attend_decode(); }));
  return add("attend prefill", shape.length, shape.prefill_tokens,
             [&] { return cache->attend_prefill(next()); });
}

constexpr const char* kCudaShapes = "a,b,c,d";

// Those of --shapes, or one a length.
Result<std::vector<BenchShape>> shapes_of(const BenchOptions& options) {
  if (!options.shapes.empty()) return parse_latent_shapes(options.shapes, options.shape);
  std::vector<BenchShape> shapes;
  for (const int length : options.lengths) {
    BenchShape shape = options.shape;
    shape.length = length;
    shape.prefill_tokens = std::min(shape.prefill_tokens, length);
    shapes.push_back(shape);
  }
  return shapes;
}

constexpr const char* kCpuOptions[] = {"lengths", "sequences", "heads",   "q-heads",     "head-dim",
                                       "prefill", "fast",      "threads", "min-seconds", "csv"};
constexpr const char* kCudaOptions[] = {"queries", "only-attend"};
constexpr const char* kOfShapes[] = {"lengths", "sequences", "heads", "q-heads", "head-dim"};

// An option of the other device would be ignored: it is refused.
Status check_device_options(const Command& command, const std::string& device) {
  const bool is_cuda = device == "cuda";
  for (const char* name : is_cuda ? std::span<const char* const>(kCpuOptions) : kCudaOptions) {
    if (!command.is_given(fmt::format("--{}", name))) continue;
    return invalid_argument("{} is given; it needs --device {}", name, is_cuda ? "cpu" : "cuda");
  }
  if (!command.is_given("--shapes")) return {};
  for (const char* name : kOfShapes) {
    if (!command.is_given(fmt::format("--{}", name))) continue;
    return invalid_argument("{} and shapes are given; the names of shapes say it: expected one",
                            name);
  }
  return {};
}

Status run_bench(const BenchOptions& options) {
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::Recipe> recipes, parse_recipe_list(options.formats));
  const OutputFile outputs[] = {{"json", options.json}, {"csv", options.csv}};
  KVX_RETURN_IF_ERROR(check_outputs(outputs));
  KVX_ASSIGN_OR_RETURN(const std::vector<BenchShape> shapes, shapes_of(options));
  for (const BenchShape& shape : shapes) {
    for (const kv::Recipe& recipe : recipes) KVX_RETURN_IF_ERROR(BenchCache::check(shape, recipe));
  }
  KVX_ASSIGN_OR_RETURN(const Engine engine, make_engine(options.threads));

  BenchReport report;
  report.version = kVersion;
  report.cpu_level = engine.level_name();
  report.threads = engine.executor->num_threads();
  Progress progress;
  const double num_caches = static_cast<double>(recipes.size() * shapes.size());
  int num_done = 0;
  for (const BenchShape& shape : shapes) {
    for (const kv::Recipe& recipe : recipes) {
      progress.show(num_done++ / num_caches,
                    fmt::format("{}, length {}", recipe.text, shape.length));
      KVX_RETURN_IF_ERROR(measure(shape, recipe, engine, options.min_seconds, report));
    }
  }
  progress.show(1, "reading memory");
  report.read_gigabytes_per_second = read_bandwidth(*engine.executor) / 1e9;
  progress.finish();
  fmt::print("{}", bench_table(report, wants_color(stdout)));
  if (!options.json.empty()) {
    KVX_RETURN_IF_ERROR(write_file("json", options.json, bench_json(report)));
  }
  if (!options.csv.empty()) KVX_RETURN_IF_ERROR(write_file("csv", options.csv, bench_csv(report)));
  return {};
}

Status run_cuda_bench(const BenchOptions& options) {
  if (!kCudaIsOptimized) return unsupported("CUDA: {}; nothing to measure", kCuda);
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::Recipe> recipes, parse_recipe_list(options.formats));
  KVX_ASSIGN_OR_RETURN(std::vector<CudaBenchShape> shapes,
                       parse_cuda_shapes(options.shapes.empty() ? kCudaShapes : options.shapes,
                                         options.shape.block_size));
  if (!options.json.empty()) KVX_RETURN_IF_ERROR(check_can_write("json", options.json));
  CudaBenchReport report;
  report.version = kVersion;
  report.query_type = options.queries == "bf16" ? DType::kBF16 : DType::kF16;
  for (CudaBenchShape& shape : shapes) shape.query_type = report.query_type;
  KVX_ASSIGN_OR_RETURN(report.device, device::open_cuda_device());
  KVX_ASSIGN_OR_RETURN(report.bandwidth, measure_cuda_bandwidth(report.device));
  Progress progress;
  const double num_cases = static_cast<double>(recipes.size() * shapes.size());
  int num_done = 0;
  for (const kv::Recipe& recipe : recipes) {
    for (const CudaBenchShape& shape : shapes) {
      progress.show(num_done++ / num_cases, fmt::format("{}, shape {}", recipe.text, shape.name));
      KVX_RETURN_IF_ERROR(measure_cuda(report.device, shape, recipe, options.only_attend, report));
    }
  }
  progress.finish();
  fmt::print("{}", cuda_bench_table(report, wants_color(stdout)));
  if (!options.json.empty()) {
    KVX_RETURN_IF_ERROR(write_file("json", options.json, cuda_bench_json(report)));
  }
  return {};
}

}  // namespace

void add_bench(Command app, Action& action) {
  Command command =
      app.add_subcommand("bench", "Measure append, gather and attend on packed caches");
  auto o = std::make_shared<BenchOptions>();
  BenchShape& shape = o->shape;
  command.add_option("--formats", o->formats, "Caches to measure, separated by commas")
      .capture_default_str();
  command.add_option("--lengths", o->lengths, "Tokens in a sequence; several with commas")
      .delimiter(',')
      .whole_number(1, 1 << 24)
      .capture_default_str();
  command.add_option("--sequences", shape.num_sequences, "Sequences")
      .whole_number(1, 1 << 16)
      .capture_default_str();
  command.add_option("--heads", shape.num_kv_heads, "KV heads")
      .whole_number(1, 1024)
      .capture_default_str();
  command.add_option("--q-heads", shape.num_q_heads, "Query heads, a multiple of --heads")
      .whole_number(1, 65536)
      .capture_default_str();
  command.add_option("--head-dim", shape.head_dim, "Numbers in a head's K or V")
      .whole_number(1, format::kMaxHeadDim)
      .capture_default_str();
  command.add_option("--block-size", shape.block_size, "Tokens in a block")
      .whole_number(1, cache::kMaxBlockSize)
      .capture_default_str();
  command
      .add_option("--prefill", shape.prefill_tokens,
                  "Queries in the prefill measurement: the last N tokens of a sequence")
      .whole_number(1, 1 << 20)
      .capture_default_str();
  command.add_option("--device", o->device, "cpu, or cuda for the first GPU")
      .one_of({"cpu", "cuda"})
      .capture_default_str();
  command.add_option(
      "--shapes", o->shapes,
      "Batches by name. mla64x8192 is latent rows (MLA) of 64 sequences of 8192 tokens and 128 "
      "query heads, mla64x8192h16 the same with 16; a CPU has these names alone. With --device "
      "cuda, where a,b,c,d is the default (sequences x tokens, 8 KV heads): a is "
      "64 x 8192, b 1 x 131072, c 256 x 1024, d 16 x 32768; a64, a80 and a96 are a with that "
      "head_dim, a192 and a256 too, at 4096 tokens, mixed 64 sequences of 128 to 32768 "
      "tokens, oss and ossw GPT-OSS's layers without and with their window, aw a with a window "
      "of 4096 tokens, aws with the first four beside it, or SEQUENCESxTOKENS; aq4 is a with 4 "
      "queries a sequence; a:nhd16 is a on a caller's pages, NHD or HND, in blocks of 16 "
      "tokens, scales in regions of their own; prefill: p is a prompt of 8192, "
      "pc 1024 queries at the end of 32768 tokens, pm and pcm the same without wgmma; p256 and "
      "pc192/128 have those head_dims, of K and V");
  command
      .add_option(
          "--queries", o->queries,
          "With --device cuda: type of the queries and outputs; with bf16 the integers that "
          "many queries meet are rounded to f16, which is faster")
      .one_of({"f16", "bf16"})
      .capture_default_str();
  command.add_flag("--only-attend", o->only_attend, "With --device cuda: measure attend alone");
  command.add_flag("--fast", shape.is_fast,
                   "Attention may be off by 8e-3 of its size where that saves time");
  command.add_option("--threads", o->threads, "Threads; 0 is one a core")
      .whole_number(0, kMaxThreads);
  command.add_option("--min-seconds", o->min_seconds, "Time given to each measurement at least")
      .number(0.0, 60.0)
      .capture_default_str();
  command.add_option("--json", o->json, "Write the measurements as JSON to this file");
  command.add_option("--csv", o->csv, "Write the measurements as CSV to this file");
  command.footer(
      "Examples:\n"
      "  kvx bench\n"
      "  kvx bench --formats bf16,nvfp4 --lengths 1024,8192,32768 --csv bench.csv\n"
      "  kvx bench --formats bf16,int8:auto,nvfp4:auto\n"
      "  kvx bench --device cuda --formats bf16,int8,nvfp4 --shapes a,b\n"
      "  kvx bench --heads 3 --q-heads 9 --head-dim 64 --threads 1\n"
      "  kvx bench --shapes mla1x8192h16 --formats bf16,int8+bf16,nvfp4+bf16 --prefill 16\n"
      "  kvx bench abi --csv abi.csv\n");
  Command abi = add_bench_abi(command, action);
  command.callback([&action, o, abi, command] {
    if (abi.is_named()) return;
    action = [o, command]() -> Status {
      KVX_RETURN_IF_ERROR(check_device_options(command, o->device));
      return o->device == "cuda" ? run_cuda_bench(*o) : run_bench(*o);
    };
  });
}

}  // namespace kvx::tool
