// oneDNN runs single-threaded on small tiles: a panel of weight rows times a strip of tokens. The
// tiles are our executor's tasks, so there is one thread pool and one order of summation.
#include "runner/linear.hpp"

#include <algorithm>
#include <dnnl.hpp>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "core/checked.hpp"
#include "core/float16.hpp"

// libgomp's, which oneDNN was built with. Declared here because clang has no omp.h of its own.
extern "C" void omp_set_num_threads(int num_threads);

namespace kvx::runner {
namespace {

// Measured in docs/decisions/0002-matrix-products.md.
constexpr int kPanelRows = 320;  // whole blocks of 64, oneDNN's: it pads others
constexpr int kStripTokens = 128;

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::memory::data_type data_type_of(DType type) {
  return type == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

dnnl::memory::desc dense(int64_t rows, int64_t columns, dnnl::memory::data_type type) {
  return {{rows, columns}, type, dnnl::memory::format_tag::ab};
}

dnnl::primitive_attr own_scratchpad() {
  dnnl::primitive_attr attributes;
  // A primitive runs in several threads at once: each brings its own scratch memory.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

// [num_tokens, num_columns] x [num_columns, num_rows], with the weights in layout.
dnnl::matmul::primitive_desc describe(int num_tokens, int num_columns, int num_rows, DType type,
                                      const dnnl::memory::desc& layout) {
  const auto element = data_type_of(type);
  const dnnl::matmul::desc operation(dense(num_tokens, num_columns, element), layout,
                                     dense(num_tokens, num_rows, dnnl::memory::data_type::f32));
  return {operation, own_scratchpad(), cpu_engine()};
}

// oneDNN's choice of layout depends on the number of tokens; a full strip decides for all.
dnnl::memory::desc packed_layout(int num_columns, int num_rows, DType type) {
  const dnnl::memory::desc any({num_columns, num_rows}, data_type_of(type),
                               dnnl::memory::format_tag::any);
  return describe(kStripTokens, num_columns, num_rows, type, any).weights_desc();
}

template <class T>
T* at_least(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// A primitive for one shape of tile, with its descriptions at hand.
struct Product {
  explicit Product(const dnnl::matmul::primitive_desc& description)
      : primitive(description),
        input(description.src_desc()),
        output(description.dst_desc()),
        scratchpad(description.scratchpad_desc()) {}

  dnnl::matmul primitive;
  dnnl::memory::desc input, output, scratchpad;
};

using Arguments = std::unordered_map<int, dnnl::memory>;

// The memory of one thread while it multiplies a tile; it grows to the largest tile and stays.
struct ThreadScratch {
  std::vector<uint16_t> bf16_input;
  std::vector<float> product;
  std::vector<uint8_t> scratchpad;
  dnnl::stream stream{cpu_engine()};
  // Made once: making them for every tile cost up to 5 % of decoding.
  std::map<const Product*, Arguments> arguments;

  Arguments& arguments_of(const Product& tile) {
    const auto [entry, is_new] = arguments.try_emplace(&tile);
    if (is_new) {
      const auto without_data = [](const dnnl::memory::desc& layout) {
        return dnnl::memory(layout, cpu_engine(), nullptr);
      };
      entry->second = {{DNNL_ARG_SRC, without_data(tile.input)},
                       {DNNL_ARG_WEIGHTS, dnnl::memory()},
                       {DNNL_ARG_DST, without_data(tile.output)},
                       {DNNL_ARG_SCRATCHPAD, without_data(tile.scratchpad)}};
    }
    return entry->second;
  }
};

ThreadScratch& thread_scratch() {
  omp_set_num_threads(1);  // for this thread: oneDNN must not start threads of its own
  thread_local ThreadScratch scratch;
  return scratch;
}

// Layers share their shapes, so primitives live once for the whole process. Entries stay where they
// are; their number is bounded by the strip's length times the models' shapes.
const Product& product_of(int num_tokens, int num_columns, int num_rows, DType type) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, int, DType>, Product> products;
  const std::lock_guard lock(mutex);
  const std::tuple key(num_tokens, num_columns, num_rows, type);
  const auto found = products.find(key);
  if (found != products.end()) return found->second;
  const auto layout = packed_layout(num_columns, num_rows, type);
  const auto description = describe(num_tokens, num_columns, num_rows, type, layout);
  return products.emplace(key, Product(description)).first->second;
}

struct Panel {
  int part = 0;
  int first_row = 0;
  int num_rows = 0;
  dnnl::memory weights{};
  // For the whole strips of the prepared number of tokens, and for what is left.
  const Product* strip = nullptr;
  const Product* rest = nullptr;
};

class CpuLinear : public Linear {
 public:
  CpuLinear(int num_columns, std::vector<LinearPart> parts, DType weights);
  Status pack(WeightMemory& memory);
  Status multiply(const float* x, int num_tokens, std::span<float* const> outs,
                  Executor& executor) override;

 private:
  Status pack(Panel& panel, WeightMemory& memory) const;
  const void* input_in_weights_type(const float* x, int num_tokens, Executor& executor) const;
  void prepare(int num_tokens);
  void multiply_tile(const Panel& panel, const void* input, int first_token, int num_tokens,
                     float* out) const;

  int num_columns_;
  DType type_;
  std::vector<LinearPart> parts_;
  std::vector<Panel> panels_;
  int prepared_tokens_ = 0;
};

CpuLinear::CpuLinear(int num_columns, std::vector<LinearPart> parts, DType weights)
    : num_columns_(num_columns), type_(weights), parts_(std::move(parts)) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const int rows = parts_[i].num_rows;
    for (int first = 0; first < rows; first += kPanelRows) {
      panels_.push_back({.part = static_cast<int>(i),
                         .first_row = first,
                         .num_rows = std::min(kPanelRows, rows - first)});
    }
  }
}

Status CpuLinear::pack(WeightMemory& memory) {
  for (Panel& panel : panels_) KVX_RETURN_IF_ERROR(pack(panel, memory));
  return {};
}

Status CpuLinear::pack(Panel& panel, WeightMemory& memory) const {
  ThreadScratch& scratch = thread_scratch();
  const int64_t elements = int64_t{panel.num_rows} * num_columns_;
  std::vector<float> rows(static_cast<size_t>(elements));
  parts_[panel.part].read_rows(panel.first_row, panel.num_rows, rows.data());
  // A row of weights is a column of oneDNN's [num_columns_, num_rows].
  const dnnl::memory::desc plain({num_columns_, panel.num_rows}, dnnl::memory::data_type::f32,
                                 dnnl::memory::format_tag::ba);
  dnnl::memory source(plain, cpu_engine(), rows.data());
  const dnnl::memory::desc layout = packed_layout(num_columns_, panel.num_rows, type_);
  KVX_ASSIGN_OR_RETURN(uint8_t * bytes, memory.take(static_cast<int64_t>(layout.get_size())));
  panel.weights = dnnl::memory(layout, cpu_engine(), bytes);
  dnnl::reorder(source, panel.weights).execute(scratch.stream, source, panel.weights);
  scratch.stream.wait();
  return {};
}

// bf16 weights want a bf16 input: rounded once here, for all panels_, into the calling thread's
// scratch.
const void* CpuLinear::input_in_weights_type(const float* x, int num_tokens,
                                             Executor& executor) const {
  if (type_ == DType::kF32) return x;
  const int64_t columns = num_columns_;
  uint16_t* out = at_least(thread_scratch().bf16_input, static_cast<size_t>(num_tokens * columns));
  constexpr int kTokensPerTask = 16;
  executor.parallel_for(ceil_div(num_tokens, kTokensPerTask), [&](int task) {
    const int64_t begin = task * kTokensPerTask * columns;
    const int64_t end = std::min<int64_t>(begin + kTokensPerTask * columns, num_tokens * columns);
    for (int64_t i = begin; i < end; ++i) out[i] = f32_to_bf16(x[i]);
  });
  return out;
}

// Makes the primitives that num_tokens need; the tasks only find them, because a task must not
// throw.
void CpuLinear::prepare(int num_tokens) {
  if (num_tokens == prepared_tokens_) return;
  prepared_tokens_ = 0;
  const int rest = num_tokens % kStripTokens;
  for (Panel& panel : panels_) {
    if (num_tokens >= kStripTokens) {
      panel.strip = &product_of(kStripTokens, num_columns_, panel.num_rows, type_);
    }
    if (rest > 0) panel.rest = &product_of(rest, num_columns_, panel.num_rows, type_);
  }
  prepared_tokens_ = num_tokens;
}

void CpuLinear::multiply_tile(const Panel& panel, const void* input, int first_token,
                              int num_tokens, float* out) const {
  ThreadScratch& scratch = thread_scratch();
  const Product& product = num_tokens == kStripTokens ? *panel.strip : *panel.rest;
  const size_t element_bytes = static_cast<size_t>(bytes_of(type_));
  const auto* rows = static_cast<const uint8_t*>(input) +
                     static_cast<size_t>(first_token) * num_columns_ * element_bytes;
  float* tile = at_least(scratch.product, static_cast<size_t>(kStripTokens) * kPanelRows);
  uint8_t* scratchpad = at_least(scratch.scratchpad, product.scratchpad.get_size());

  Arguments& arguments = scratch.arguments_of(product);
  arguments.at(DNNL_ARG_SRC).set_data_handle(const_cast<uint8_t*>(rows));
  arguments.at(DNNL_ARG_WEIGHTS) = panel.weights;
  arguments.at(DNNL_ARG_DST).set_data_handle(tile);
  arguments.at(DNNL_ARG_SCRATCHPAD).set_data_handle(scratchpad);
  product.primitive.execute(scratch.stream, arguments);
  scratch.stream.wait();

  const LinearPart& part = parts_[panel.part];
  for (int token = 0; token < num_tokens; ++token) {
    const float* from = tile + int64_t{token} * panel.num_rows;
    float* to = out + int64_t{first_token + token} * part.num_rows + panel.first_row;
    std::copy_n(from, panel.num_rows, to);
    if (part.bias.empty()) continue;
    for (int row = 0; row < panel.num_rows; ++row) to[row] += part.bias[panel.first_row + row];
  }
}

Status CpuLinear::multiply(const float* x, int num_tokens, std::span<float* const> outs,
                           Executor& executor) try {
  prepare(num_tokens);
  const void* input = input_in_weights_type(x, num_tokens, executor);
  const int num_panels = static_cast<int>(panels_.size());
  const int num_strips = ceil_div(num_tokens, kStripTokens);
  executor.parallel_for(num_panels * num_strips, [&](int tile) {
    const Panel& panel = panels_[tile % num_panels];
    const int first = tile / num_panels * kStripTokens;
    multiply_tile(panel, input, first, std::min(kStripTokens, num_tokens - first),
                  outs[panel.part]);
  });
  return {};
} catch (const dnnl::error& error) {
  return internal_error("oneDNN cannot multiply {} tokens by {} columns: {}", num_tokens,
                        num_columns_, error.what());
}

}  // namespace

bool cpu_multiplies_bf16() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto bf16 = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & bf16) == bf16;
}

Result<std::unique_ptr<Linear>> create_cpu_linear(int num_columns, std::vector<LinearPart> parts,
                                                  DType weights, WeightMemory& memory) try {
  auto linear = std::make_unique<CpuLinear>(num_columns, std::move(parts), weights);
  KVX_RETURN_IF_ERROR(linear->pack(memory));
  return std::unique_ptr<Linear>(std::move(linear));
} catch (const dnnl::error& error) {
  return internal_error("oneDNN cannot pack a matrix of {} columns: {}", num_columns, error.what());
}

}  // namespace kvx::runner
