// kvx bench abi: the C ABI's write and gather beside memcpy of the same bytes, in the columns that
// KVX's own benchmark prints; on a GPU beside cudaMemcpyAsync.
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>

#include "tools/kvx/bench/abi_cache.hpp"
#include "tools/kvx/bench/timing.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/table.hpp"
#include "tools/kvx/terminal.hpp"
#include "tools/kvx/version.hpp"

namespace kvx::tool {
namespace {

// The fair cases of KVX's benchmark.
struct AbiBenchOptions {
  std::vector<int> sequences = {1, 8, 32};
  std::vector<int> lengths = {128, 1024};
  std::vector<int> heads = {8, 32};
  std::vector<int> tokens_per_seq = {1, 16, 32};
  std::vector<std::string> layouts = abi_layouts();
  int head_dim = 128;
  int block_size = 16;
  int iters = 20;
  int warmup = 3;
  std::string device = "cpu";
  std::string csv;
};

struct AbiMeasurement {
  std::string kernel;  // "write_nhd", "memcpy_write_nhd" (the same bytes), ...
  AbiShape shape;
  int64_t tokens;       // of one call
  double seconds;       // the median of a call
  double memcpy_share;  // memcpy's time for the same bytes by this one
};

// Bytes that a call reads and writes, K and V.
double gigabytes_per_second(const AbiMeasurement& m) {
  return 4 * static_cast<double>(m.tokens * m.shape.row_bytes()) / m.seconds / 1e9;
}

template <class Call>
double time_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return seconds_since(start);
}

struct TwoTimes {
  double call;
  double copy;
};

// The call and memcpy take turns, so that both see the same machine.
template <class Call, class Copy>
TwoTimes medians_of(const AbiBenchOptions& options, const Call& call, const Copy& copy) {
  std::vector<double> calls;
  std::vector<double> copies;
  for (int i = 0; i < options.warmup + options.iters; ++i) {
    const TwoTimes seconds = {time_of(call), time_of(copy)};
    if (i < options.warmup) continue;
    calls.push_back(seconds.call);
    copies.push_back(seconds.copy);
  }
  return {median(std::move(calls)), median(std::move(copies))};
}

// The memory of the GPU that the calls run on, and their stream.
struct AbiDevice {
  std::unique_ptr<cache::Memory> memory;
  device::OwnedCudaStream stream;
};

Result<AbiDevice> open_device() {
  if (!kCudaIsOptimized) return unsupported("CUDA: {}; nothing to measure", kCuda);
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice device, device::open_cuda_device());
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<cache::Memory> memory, cache::cuda_memory(device.index));
  KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  return AbiDevice{std::move(memory), std::move(stream)};
}

// Seconds a call, many in a graph, so that the device and not the host is timed.
Result<double> seconds_on_device(const AbiBenchOptions& options, device::CudaStream stream,
                                 const std::function<Status()>& call) {
  constexpr int kAtOnce = 32;
  KVX_ASSIGN_OR_RETURN(const device::CudaGraph graph,
                       device::CudaGraph::capture(stream, [&]() -> Status {
                         for (int i = 0; i < kAtOnce; ++i) KVX_RETURN_IF_ERROR(call());
                         return {};
                       }));
  std::vector<double> seconds;
  for (int i = 0; i < options.warmup + options.iters; ++i) {
    KVX_ASSIGN_OR_RETURN(const float milliseconds, graph.time(stream));
    if (i >= options.warmup) seconds.push_back(1e-3 * static_cast<double>(milliseconds) / kAtOnce);
  }
  return median(std::move(seconds));
}

// device: null for the CPU.
Result<TwoTimes> times_of(const AbiBenchOptions& options, const AbiDevice* device,
                          const std::function<Status()>& call,
                          const std::function<Status()>& copy) {
  if (device != nullptr) {
    const device::CudaStream stream = device->stream.get();
    KVX_ASSIGN_OR_RETURN(const double call_seconds, seconds_on_device(options, stream, call));
    KVX_ASSIGN_OR_RETURN(const double copy_seconds, seconds_on_device(options, stream, copy));
    return TwoTimes{call_seconds, copy_seconds};
  }
  Status status;
  const auto keep = [&status](Status result) {
    if (status.ok()) status = std::move(result);
  };
  const TwoTimes times = medians_of(
      options, [&] { keep(call()); }, [&] { keep(copy()); });
  KVX_RETURN_IF_ERROR(status);
  return times;
}

Status measure(const AbiBenchOptions& options, const AbiDevice* device, const AbiShape& shape,
               std::vector<AbiMeasurement>& found) {
  AbiShape whole = shape;  // a gather fetches all tokens
  whole.tokens_per_seq = shape.seq_len;
  for (const std::string& layout : options.layouts) {
    AbiCache cache(shape, layout);
    if (device != nullptr) {
      KVX_RETURN_IF_ERROR(cache.move_to_device(*device->memory, device->stream.get()));
    }
    KVX_ASSIGN_OR_RETURN(const TwoTimes write, times_of(
                                                   options, device, [&] { return cache.write(); },
                                                   [&] { return cache.copy_as_write(); }));
    KVX_ASSIGN_OR_RETURN(const TwoTimes gather, times_of(
                                                    options, device, [&] { return cache.gather(); },
                                                    [&] { return cache.copy_as_gather(); }));
    const auto add = [&](const std::string& verb, const AbiShape& s, int64_t tokens, TwoTimes t) {
      found.push_back({verb + "_" + layout, s, tokens, t.call, t.copy / t.call});
      found.push_back({"memcpy_" + verb + "_" + layout, s, tokens, t.copy, 1});
    };
    add("write", shape, cache.tokens_of_write(), write);
    add("gather", whole, cache.tokens_of_gather(), gather);
  }
  return {};
}

// The cost of a call's checks, apart from the bytes that it moves.
struct CheckTimes {
  double write_descriptors;  // seconds a call
  double slot;               // seconds each
  double gather_descriptors;
  double table_entry;
};

// Calls that take a microsecond or less are timed by the hundred.
template <class Call>
double seconds_of_short(const AbiBenchOptions& options, const Call& call) {
  constexpr int kAtOnce = 100;
  std::vector<double> seconds;
  for (int i = 0; i < options.warmup + options.iters; ++i) {
    const double together = time_of([&] {
      for (int n = 0; n < kAtOnce; ++n) call();
    });
    if (i >= options.warmup) seconds.push_back(together / kAtOnce);
  }
  return median(std::move(seconds));
}

Result<CheckTimes> measure_checks(const AbiBenchOptions& options) {
  AbiShape shape;
  shape.tokens_per_seq = shape.seq_len;
  AbiCache cache(shape, "nhd");
  Status status;
  const auto keep = [&status](Status result) {
    if (status.ok()) status = std::move(result);
  };
  const int64_t slots = cache.tokens_of_write();
  const double one = seconds_of_short(options, [&] { keep(cache.write_nowhere(1)); });
  const double all = seconds_of_short(options, [&] { keep(cache.write_nowhere(slots)); });
  const double none = seconds_of_short(options, [&] { keep(cache.gather_nothing(false)); });
  const double table = seconds_of_short(options, [&] { keep(cache.gather_nothing(true)); });
  KVX_RETURN_IF_ERROR(status);
  return CheckTimes{one, (all - one) / static_cast<double>(slots - 1), none,
                    (table - none) / static_cast<double>(cache.table_entries())};
}

std::string text_of(const CheckTimes& times) {
  return fmt::format(
      "\nChecks alone, in calls that move nothing: a write's descriptors {:.2f} us, each of its "
      "slots "
      "{:.2f} ns;\na gather's descriptors {:.2f} us, each entry of its table {:.2f} ns.\n",
      1e6 * times.write_descriptors, 1e9 * times.slot, 1e6 * times.gather_descriptors,
      1e9 * times.table_entry);
}

std::string table_of(const std::vector<AbiMeasurement>& measurements, bool is_on_device,
                     bool color) {
  Table table({{"kernel"},
               {"sequences", Align::kRight},
               {"length", Align::kRight},
               {"heads", Align::kRight},
               {"tokens/seq", Align::kRight},
               {"ms", Align::kRight},
               {"GB/s", Align::kRight},
               {"% of memcpy", Align::kRight}});
  for (const AbiMeasurement& m : measurements) {
    if (m.kernel.starts_with("memcpy")) continue;
    table.add_row(
        {m.kernel, fmt::format("{}", m.shape.seq_count), fmt::format("{}", m.shape.seq_len),
         fmt::format("{}", m.shape.num_heads), fmt::format("{}", m.shape.tokens_per_seq),
         fmt::format("{:.4f}", 1e3 * m.seconds), fmt::format("{:.1f}", gigabytes_per_second(m)),
         fmt::format("{:.0f}", 100 * m.memcpy_share)});
  }
  const char* footnote =
      is_on_device
          ? "\nF16, the median of graphs of 32 calls. GB/s counts bytes read and bytes "
            "written, K and V; memcpy is two\ncudaMemcpyAsync of the same bytes, in graphs "
            "alike. Small ones lie in the second-level cache.\n"
          : "\nF16, one thread, the median of the calls. GB/s counts bytes read and bytes "
            "written, K and V; memcpy moves the same\nbytes from one array to another, "
            "call by call in turn.\n";
  return table.text(color) + footnote;
}

std::string csv_of(const AbiBenchOptions& options, const std::vector<AbiMeasurement>& found) {
  std::string text =
      "kernel,seq_count,seq_len,block_size,num_heads,head_dim,num_blocks,iters,warmup,ms_per,"
      "tokens_per_s,gb_per_s,tokens_per_seq\n";
  for (const AbiMeasurement& m : found) {
    const AbiShape& s = m.shape;
    text +=
        fmt::format("{},{},{},{},{},{},{},{},{},{:.6f},{:.1f},{:.3f},{}\n", m.kernel, s.seq_count,
                    s.seq_len, s.block_size, s.num_heads, s.head_dim, s.num_blocks(), options.iters,
                    options.warmup, 1e3 * m.seconds, static_cast<double>(m.tokens) / m.seconds,
                    gigabytes_per_second(m), s.tokens_per_seq);
  }
  return text;
}

std::vector<AbiShape> shapes_of(const AbiBenchOptions& options) {
  std::vector<AbiShape> shapes;
  for (const int heads : options.heads) {
    for (const int sequences : options.sequences) {
      for (const int length : options.lengths) {
        for (const int tokens : options.tokens_per_seq) {
          shapes.push_back(
              {sequences, length, tokens, heads, options.head_dim, options.block_size});
        }
      }
    }
  }
  return shapes;
}

Status run_bench_abi(const AbiBenchOptions& options) {
  const std::vector<AbiShape> shapes = shapes_of(options);
  for (const AbiShape& shape : shapes) KVX_RETURN_IF_ERROR(AbiCache::check(shape));
  if (!options.csv.empty()) KVX_RETURN_IF_ERROR(check_can_write("csv", options.csv));
  std::optional<AbiDevice> device;
  if (options.device == "cuda") {
    KVX_ASSIGN_OR_RETURN(device, open_device());
  }
  std::vector<AbiMeasurement> found;
  Progress progress;
  for (size_t i = 0; i < shapes.size(); ++i) {
    progress.show(static_cast<double>(i) / static_cast<double>(shapes.size()),
                  fmt::format("{} sequences of {}, {} heads", shapes[i].seq_count,
                              shapes[i].seq_len, shapes[i].num_heads));
    KVX_RETURN_IF_ERROR(measure(options, device ? &*device : nullptr, shapes[i], found));
  }
  std::string checks;
  if (!device) {
    KVX_ASSIGN_OR_RETURN(const CheckTimes times, measure_checks(options));
    checks = text_of(times);
  }
  progress.finish();
  fmt::print("{}{}", table_of(found, device.has_value(), wants_color(stdout)), checks);
  if (options.csv.empty()) return {};
  return write_file("csv", options.csv, csv_of(options, found));
}

}  // namespace

Command add_bench_abi(Command bench, Action& action) {
  Command command =
      bench.add_subcommand("abi", "Measure the C ABI's write and gather beside memcpy");
  auto o = std::make_shared<AbiBenchOptions>();
  const auto add_list = [command](const char* name, std::vector<int>& list, int64_t most,
                                  const char* help) {
    command.add_option(name, list, help).delimiter(',').whole_number(1, most).capture_default_str();
  };
  add_list("--sequences", o->sequences, 4096, "Sequences; several with commas");
  add_list("--lengths", o->lengths, 1 << 20, "Tokens in a sequence");
  add_list("--heads", o->heads, 1024, "KV heads");
  add_list("--tokens-per-seq", o->tokens_per_seq, 1 << 20, "Tokens that a write adds to each");
  command.add_option("--layouts", o->layouts, "nhd, nhd_strided, hnd, hnd_packed")
      .delimiter(',')
      .one_of(abi_layouts())
      .capture_default_str();
  command.add_option("--head-dim", o->head_dim, "Numbers in a head's K or V")
      .whole_number(1, 4096)
      .capture_default_str();
  command.add_option("--block-size", o->block_size, "Tokens in a block")
      .whole_number(1, 4096)
      .capture_default_str();
  command.add_option("--iters", o->iters, "Calls that are timed")
      .whole_number(1, 1000000)
      .capture_default_str();
  command.add_option("--warmup", o->warmup, "Calls before them")
      .whole_number(0, 1000000)
      .capture_default_str();
  command.add_option("--device", o->device, "cpu, or cuda for the first GPU")
      .one_of({"cpu", "cuda"})
      .capture_default_str();
  command.add_option("--csv", o->csv, "Write the measurements as CSV to this file");
  command.footer(
      "Examples:\n"
      "  kvx bench abi --csv abi.csv\n"
      "  kvx bench abi --sequences 8 --lengths 8192 --tokens-per-seq 512 --heads 8\n");
  command.callback([&action, o] { action = [o] { return run_bench_abi(*o); }; });
  return command;
}

}  // namespace kvx::tool
