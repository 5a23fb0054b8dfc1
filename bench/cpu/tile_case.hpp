// Case: one format at one CPU level, with a tile of random rows that its packed kernels read.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "format/spec.hpp"
#include "ops/attend/cpu/prefetcher.hpp"
#include "ops/attend/cpu/tile_kernels.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::bench {

using ops::Precision;
using ops::cpu::kMaxTileTokens;

// What all cases of a run have in common.
struct Shape {
  int head_dim = 128;
  int rows = 4;  // of queries, at most 8
  Precision precision = Precision::kAccurate;
};

inline double thread_microseconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

[[noreturn]] inline void fail(const std::string& message) {
  fmt::print(stderr, "tile_bench: {}\n", message);
  std::exit(1);
}

template <class T>
T must(Result<T> result) {
  if (!result.ok()) fail(result.error().message);
  return std::move(result).value();
}

inline device::CpuLevel level_named(const std::string& name) {
  for (const device::CpuLevel level : device::kAllCpuLevels) {
    if (device::name_of(level) != name) continue;
    if (!device::supports(level)) fail(fmt::format("this machine does not run {}", name));
    return level;
  }
  fail(fmt::format("{} is no level", name));
}

struct alignas(64) Floats16 {
  float at[16];
};

// Memory on whole cache lines.
class Floats {
 public:
  explicit Floats(int count) : lines_(count / 16 + 1) {}
  float* get() { return lines_[0].at; }

 private:
  std::vector<Floats16> lines_;
};

// One format at one level: a tile of random rows and a call of each kernel.
class Case {
 public:
  Case(const std::string& format, const std::string& level, const Shape& shape)
      : format_name(format),
        level_name(level),
        shape_(shape),
        queries_(shape.rows * shape.head_dim),
        prepared_(2 * shape.rows * shape.head_dim + 8 * shape.head_dim),
        scores_(shape.rows * kMaxTileTokens),
        sums_(shape.rows * shape.head_dim),
        scratch_((kMaxTileTokens + 16) * shape.head_dim),
        probabilities_(shape.rows * kMaxTileTokens) {
    const auto id = format::format_named(format);
    if (!id) fail(fmt::format("{} is no format", format));
    spec_ = must(format::make_spec(*id));
    const Status fits = format::check_head_dim(spec_, shape.head_dim);
    if (!fits.ok()) fail(fits.error().message);
    const device::CpuLevel cpu = level_named(level);
    kernels_ = ops::cpu::tile_kernels(cpu).find_packed(spec_, shape.head_dim, shape.precision);
    if (!kernels_) fail(fmt::format("{} has no packed kernels at {}", format, level));
    fill(ops::cpu::kernel_table(cpu));
  }

  void score() {
    must_run(kernels_->score({.keys = tile_,
                              .prefetcher = prefetcher_,
                              .queries = queries_.get(),
                              .prepared = prepared_.get(),
                              .num_rows = shape_.rows,
                              .scores = scores_.get(),
                              .scores_stride = kMaxTileTokens,
                              .scratch = scratch_.get()}));
  }
  void add_values() {
    must_run(kernels_->add_values({.values = tile_,
                                   .prefetcher = prefetcher_,
                                   .p = probabilities_.get(),
                                   .p_stride = kMaxTileTokens,
                                   .num_rows = shape_.rows,
                                   .sums = sums_.get(),
                                   .scratch = scratch_.get()}));
  }

  // A round of a few calls each; keeps the least.
  void measure() {
    constexpr int kCalls = 10;
    const double start = thread_microseconds();
    for (int i = 0; i < kCalls; ++i) score();
    const double middle = thread_microseconds();
    for (int i = 0; i < kCalls; ++i) add_values();
    const double end = thread_microseconds();
    score_us = std::min(score_us, (middle - start) / kCalls);
    values_us = std::min(values_us, (end - middle) / kCalls);
  }

  std::string format_name;
  std::string level_name;
  double score_us = 1e9;
  double values_us = 1e9;

 private:
  void must_run(bool ran) const {
    if (!ran) fail(fmt::format("{}'s kernels declined the tile", format_name));
  }

  void fill(const ops::cpu::KernelTable& table) {
    std::mt19937 rng(5);
    std::normal_distribution<float> normal;
    for (int i = 0; i < shape_.rows * shape_.head_dim; ++i) queries_.get()[i] = normal(rng);
    for (int i = 0; i < shape_.rows * kMaxTileTokens; ++i) {
      probabilities_.get()[i] = std::uniform_real_distribution<float>()(rng);
    }
    spec_.is_dual() ? fill_dual_block(rng) : encode_tile(table, rng);
    prefetcher_.start(no_tile_, no_tile_);
    kernels_->prepare_queries(spec_, shape_.head_dim, queries_.get(), shape_.rows, prepared_.get());
  }

  // Rows as a pool's block has them, codes and then scales.
  void encode_tile(const ops::cpu::KernelTable& table, std::mt19937& rng) {
    const int dim = shape_.head_dim;
    const int64_t code_bytes = format::code_bytes_per_row(spec_, dim);
    const int64_t scale_bytes = format::scale_bytes_per_row(spec_, dim);
    const int step_bytes = format::bytes_of(spec_.scale_type);
    Floats rows(kMaxTileTokens * dim);
    std::normal_distribution<float> normal;
    for (int i = 0; i < kMaxTileTokens * dim; ++i) rows.get()[i] = normal(rng);
    block_ = Floats(static_cast<int>(kMaxTileTokens * (code_bytes + scale_bytes) / 4 + 16));
    auto* codes = reinterpret_cast<uint8_t*>(block_.get());
    uint8_t* scales = codes + kMaxTileTokens * code_bytes;
    table.of(spec_).encode_rows({.spec = &spec_,
                                 .head_dim = dim,
                                 .tensor_scale = 1.0f,
                                 .rows = rows.get(),
                                 .first_token = 0,
                                 .num_tokens = kMaxTileTokens,
                                 .codes = codes,
                                 .token_stride = code_bytes,
                                 .scales = spec_.has_scale() ? scales : nullptr,
                                 .scale_token_stride = scale_bytes,
                                 .scale_group_stride = step_bytes});
    tile_.spec = &spec_;
    tile_.head_dim = dim;
    tile_.num_tokens = kMaxTileTokens;
    tile_.scale_group_stride = step_bytes;
    for (int t = 0; t < kMaxTileTokens; ++t) {
      tile_.codes[t] = codes + t * code_bytes;
      tile_.scales[t] = scales + t * scale_bytes;
    }
  }

  // A block of random codes: steps and scales of the usual sizes.
  void fill_dual_block(std::mt19937& rng) {
    const int dim = shape_.head_dim;
    const int64_t code_bytes = format::code_bytes_per_row(spec_, dim);
    block_ = Floats(static_cast<int>((kMaxTileTokens * (code_bytes + 1) + 2 * dim) / 4 + 16));
    auto* codes = reinterpret_cast<uint8_t*>(block_.get());
    uint8_t* scales = codes + kMaxTileTokens * code_bytes;
    uint8_t* channels = scales + kMaxTileTokens;
    const auto random_byte = [&](int first, int last) {
      return static_cast<uint8_t>(std::uniform_int_distribution<int>(first, last)(rng));
    };
    constexpr int kOne = 0x38;  // E4M3
    for (int i = 0; i < kMaxTileTokens * code_bytes; ++i) codes[i] = random_byte(0, 255);
    for (int t = 0; t < kMaxTileTokens; ++t) scales[t] = random_byte(kOne, kOne + 15);
    for (int c = 0; c < dim; ++c) channels[c] = random_byte(kOne, kOne + 15);
    for (int i = 0; i < 7; ++i) channels[i] |= 0x80;  // the factor is 1
    for (int c = 0; c < dim; ++c) channels[dim + c] = random_byte(0, 255);
    tile_.spec = &spec_;
    tile_.head_dim = dim;
    tile_.num_tokens = kMaxTileTokens;
    tile_.scale_group_stride = 1;
    tile_.channels = channels;
    for (int t = 0; t < kMaxTileTokens; ++t) {
      tile_.codes[t] = codes + t * code_bytes;
      tile_.scales[t] = scales + t;
    }
  }

  Shape shape_;
  format::FormatSpec spec_;
  const ops::cpu::PackedKernels* kernels_ = nullptr;
  Floats queries_, prepared_, scores_, sums_, scratch_, probabilities_;
  Floats block_{0};
  ops::cpu::PackedTile tile_;
  ops::cpu::PackedTile no_tile_;
  ops::cpu::Prefetcher prefetcher_;
};

}  // namespace kvx::bench
