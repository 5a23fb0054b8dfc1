// A layer of a paged cache on the device, measured verb by verb.
#include "tools/kvx/bench/cuda_bench.hpp"

#include "device/cuda_bandwidth.hpp"
#include "tools/kvx/bench/cuda_cache_sets.hpp"

namespace kvx::tool {
namespace {

class CudaBench {
 public:
  CudaBench(CudaCacheSets& sets, CudaBenchReport& report) : sets_(sets), report_(report) {}

  Status measure(const std::string& format, bool only_attend);

 private:
  Result<double> time_calls(const std::function<Status(int set)>& call);
  Status measure_attend(CudaMeasurement m);
  Status measure_prefill(CudaMeasurement m);
  Status measure_step(CudaMeasurement m);
  Status measure_moves(CudaMeasurement m);

  CudaCacheSets& sets_;
  CudaBenchReport& report_;
};

// Seconds a call, each of the sets twice.
Result<double> CudaBench::time_calls(const std::function<Status(int set)>& call) {
  const int num_calls = 2 * sets_.num_sets();
  return time_graph(sets_.stream(), num_calls, [&]() -> Status {
    for (int i = 0; i < num_calls; ++i) KVX_RETURN_IF_ERROR(call(i % sets_.num_sets()));
    return Status();
  });
}

Status CudaBench::measure_attend(CudaMeasurement m) {
  m.verb = "attend";
  m.packed_bytes = sets_.attend_bytes();
  m.yardstick_seconds = static_cast<double>(m.packed_bytes) / report_.bandwidth.read / 1e9;
  const CudaBenchShape& named = sets_.named();
  if (named.shape.is_latent()) {
    m.flops = 2.0 * (named.shape.head_dim + named.value_dim) * named.shape.num_q_heads *
              named.q_len * static_cast<double>(sets_.tokens_seen());
  }
  KVX_ASSIGN_OR_RETURN(m.seconds, time_calls([&](int set) { return sets_.attend(set); }));
  report_.measurements.push_back(m);
  return {};
}

// Causal: each query sees itself and all tokens before it.
Status CudaBench::measure_prefill(CudaMeasurement m) {
  const CudaBenchShape& named = sets_.named();
  const BenchShape& shape = named.shape;
  m.verb = "prefill";
  m.packed_bytes = sets_.set_bytes();
  const double queries = named.q_len;
  const double pairs = queries * (shape.length - queries) + queries * (queries + 1) / 2;
  m.flops =
      2.0 * (shape.head_dim + named.value_dim) * shape.num_q_heads * pairs * shape.num_sequences;
  KVX_ASSIGN_OR_RETURN(m.seconds, time_calls([&](int set) { return sets_.attend(set); }));
  report_.measurements.push_back(m);
  return {};
}

// A decode step's append: a token a sequence.
Status CudaBench::measure_step(CudaMeasurement m) {
  const int64_t num_tokens = sets_.named().shape.num_sequences;
  m.verb = "step";
  m.packed_bytes = (sets_.set_bytes() / sets_.tokens_of_set() + 2 * sets_.row_bytes()) * num_tokens;
  KVX_ASSIGN_OR_RETURN(m.yardstick_seconds, time_calls([&](int) {
                         return device::cuda_launch_nothing(sets_.stream());
                       }));
  KVX_ASSIGN_OR_RETURN(m.seconds, time_calls([&](int set) {
                         return sets_.append(set, set * sets_.tokens_of_set(), num_tokens);
                       }));
  report_.measurements.push_back(m);
  if (!sets_.has_scales()) return {};
  m.verb = "step fed";
  KVX_ASSIGN_OR_RETURN(m.seconds, time_calls([&](int set) {
                         return sets_.append_fed(set, set * sets_.tokens_of_set(), num_tokens);
                       }));
  report_.measurements.push_back(m);
  return {};
}

Status CudaBench::measure_moves(CudaMeasurement m) {
  const int64_t rows = 2 * sets_.row_bytes() * sets_.tokens_at_once();
  const int64_t packed = sets_.set_bytes() / sets_.tokens_of_set() * sets_.tokens_at_once();
  struct Move {
    const char* verb;
    int64_t bytes;
    std::function<Status(int set)> call;
  };
  std::vector<Move> moves = {
      {"append", rows + packed,
       [&](int set) {
         return sets_.append(set, set * sets_.tokens_of_set(), sets_.tokens_at_once());
       }},
      {"gather", packed + rows, [&](int set) { return sets_.gather(set); }},
      {"copy", 2 * packed, [&](int set) { return sets_.copy(set); }},
      {"pack", rows + packed, [&](int set) { return sets_.pack(set); }},
      {"transcode", rows + packed, [&](int set) { return sets_.transcode(set); }},
  };
  if (sets_.has_scales()) {
    moves.push_back({"append fed", rows + packed, [&](int set) {
                       return sets_.append_fed(set, set * sets_.tokens_of_set(),
                                               sets_.tokens_at_once());
                     }});
  }
  for (const Move& move : moves) {
    m.verb = move.verb;
    m.packed_bytes = move.bytes;
    KVX_ASSIGN_OR_RETURN(m.yardstick_seconds,
                         time_calls([&](int set) { return sets_.plain_copy(set, move.bytes); }));
    KVX_ASSIGN_OR_RETURN(m.seconds, time_calls(move.call));
    report_.measurements.push_back(m);
  }
  return {};
}

Status CudaBench::measure(const std::string& format, bool only_attend) {
  const CudaBenchShape& named = sets_.named();
  CudaMeasurement m;
  m.format = format;
  m.shape = named.name;
  if (named.is_prefill()) {
    KVX_RETURN_IF_ERROR(measure_prefill(m));
  } else {
    KVX_RETURN_IF_ERROR(measure_attend(m));
    if (named.pages == PageOrder::kPool && !named.shape.is_latent() && !only_attend &&
        !sets_.has_full_precision_window()) {
      KVX_RETURN_IF_ERROR(measure_step(m));
      KVX_RETURN_IF_ERROR(measure_moves(m));
    }
  }
  KVX_ASSIGN_OR_RETURN(const uint64_t out_of_range, sets_.num_out_of_range());
  if (out_of_range != 0) {
    return internal_error("kernels found {} things out of range", out_of_range);
  }
  return {};
}

}  // namespace

Status measure_cuda(const device::CudaDevice& device, const CudaBenchShape& shape,
                    const kv::Recipe& recipe, bool only_attend, CudaBenchReport& report) {
  KVX_RETURN_IF_ERROR(BenchCache::check(shape.shape, recipe));
  CudaCacheSets sets(device, shape);
  KVX_RETURN_IF_ERROR(sets.prepare(recipe));
  return CudaBench(sets, report).measure(recipe.text, only_attend);
}

}  // namespace kvx::tool
