// Copies rows between a caller's tensors and a cache of any layout.
#include "ops/copy_rows/row_mover.hpp"

#include <algorithm>
#include <array>

namespace kvx::ops::copy_rows {
namespace {

// One level of a nest of loops: `count` iterations, with a stride on each side.
struct Level {
  int64_t count;
  int64_t to_stride;
  int64_t from_stride;
};

template <int Bytes>
void copy_innermost(uint8_t* to, const uint8_t* from, const Level& level) {
  for (int64_t i = 0; i < level.count; ++i) {
    memcpy(to + i * level.to_stride, from + i * level.from_stride, Bytes);
  }
}

void copy_innermost(uint8_t* to, const uint8_t* from, const Level& level, int64_t bytes,
                    StreamCopy stream) {
  if (stream != nullptr && bytes >= kStreamedRunBytes) {
    for (int64_t i = 0; i < level.count; ++i) {
      stream(to + i * level.to_stride, from + i * level.from_stride, bytes);
    }
    return;
  }
  const bool is_gap_free = level.to_stride == bytes && level.count * bytes >= kStreamedRunBytes;
  if (stream != nullptr && bytes == kStreamedUnitBytes && is_gap_free) {
    return stream_units(to, from, level.from_stride, level.count);
  }
  switch (bytes) {  // for these sizes the compiler inlines memcpy
    case 1:
      return copy_innermost<1>(to, from, level);
    case 2:
      return copy_innermost<2>(to, from, level);
    case 4:
      return copy_innermost<4>(to, from, level);
    case 8:
      return copy_innermost<8>(to, from, level);
    case 16:
      return copy_innermost<16>(to, from, level);
    default:
      for (int64_t i = 0; i < level.count; ++i) {
        memcpy(to + i * level.to_stride, from + i * level.from_stride, static_cast<size_t>(bytes));
      }
  }
}

constexpr int kLevels = 4;  // tokens, heads, runs of a row, elements of a run
using Nest = std::array<Level, kLevels>;

// Copies fragments of `bytes`, level by level. Levels that are contiguous on both sides are merged
// into one fragment: a run of canonical NHD tokens is one memcpy.
void copy_nest(uint8_t* to, const uint8_t* from, Nest nest, int64_t bytes,
               StreamCopy stream = nullptr) {
  int last = kLevels - 1;
  while (last >= 0) {
    const Level& level = nest[last];
    const bool has_gap = level.to_stride != bytes || level.from_stride != bytes;
    if (level.count != 1 && has_gap) break;
    bytes *= level.count;
    --last;
  }
  const Level innermost = last >= 0 ? nest[last] : Level{1, 0, 0};
  for (int i = std::max(last, 0); i < kLevels; ++i) nest[i] = {1, 0, 0};
  for (int64_t a = 0; a < nest[0].count; ++a) {
    for (int64_t b = 0; b < nest[1].count; ++b) {
      for (int64_t c = 0; c < nest[2].count; ++c) {
        copy_innermost(
            to + a * nest[0].to_stride + b * nest[1].to_stride + c * nest[2].to_stride,
            from + a * nest[0].from_stride + b * nest[1].from_stride + c * nest[2].from_stride,
            innermost, bytes, stream);
      }
    }
  }
}

// The nest that copies contiguous rows to the cache.
Nest nest_to_cache(const CacheSide& side, int64_t num_tokens, int64_t num_heads,
                   int64_t io_token_stride, int64_t io_head_stride) {
  const int bytes = bytes_of(side.element);
  const RowShape& row = side.row;
  return {{{num_tokens, side.token_stride, io_token_stride},
           {num_heads, side.head_stride, io_head_stride},
           {row.num_runs, row.run_stride, row.run_length * bytes},
           {row.run_length, row.element_stride, bytes}}};
}

// A write visits the cache in the order of its addresses, so that it fills whole lines in turn.
Nest in_order_of_target(Nest nest) {
  std::stable_sort(nest.begin(), nest.end(), [](const Level& a, const Level& b) {
    return a.count > 1 && (b.count == 1 || a.to_stride > b.to_stride);
  });
  return nest;
}

// The nest of the other direction. A gather already visits its output in the order of addresses.
Nest reversed(Nest nest) {
  for (Level& level : nest) std::swap(level.to_stride, level.from_stride);
  return nest;
}

// Returns the format whose codes are these elements. The scales of 8-bit floats are given.
format::FormatSpec spec_of(Element element) {
  using format::FormatId;
  constexpr FormatId kIds[] = {FormatId::kF16, FormatId::kBF16, FormatId::kF32, FormatId::kFp8E4M3,
                               FormatId::kFp8E5M2};
  format::SpecOptions options;
  if (!float_type(element)) options.scale_source = format::ScaleSource::kGiven;
  return format::make_spec(kIds[static_cast<int>(element)], options).value();
}

}  // namespace

bool can_write(Element io, Element cache) {
  return io == cache || float_type(io).has_value();
}

bool can_gather(Element cache, Element io) {
  return io == cache || (float_type(cache) && float_type(io));
}

RowMover::RowMover(const cpu::KernelTable& kernels, const CacheView& cache, const CacheSide& side,
                   const IoSide& io, int64_t num_tokens)
    : kernels_(kernels),
      side_(side),
      io_(io),
      num_heads_(cache.num_heads),
      head_dim_(cache.head_dim) {
  if (side.element == io.element) {
    const int64_t row_bytes = num_heads_ * head_dim_ * bytes_of(side.element);
    if (num_tokens >= kStreamedCallBytes / row_bytes) stream_ = stream_copy();
    return;
  }
  spec_ = spec_of(side.element);
  codes_.resize(static_cast<size_t>(head_dim_) * bytes_of(side.element));
}

RowMover::~RowMover() {
  if (stream_ != nullptr) finish_streams();
}

void RowMover::write(const RunAddresses& run, const ScaleView& scale) {
  if (side_.element == io_.element) {
    copy_nest(run.cache, run.io,
              in_order_of_target(nest_to_cache(side_, run.num_tokens, num_heads_, io_.token_stride,
                                               io_.head_stride)),
              bytes_of(side_.element), stream_);
    return;
  }
  for (int64_t t = 0; t < run.num_tokens; ++t) {
    for (int64_t h = 0; h < num_heads_; ++h) {
      encode_row(run.io + t * io_.token_stride + h * io_.head_stride,
                 run.cache + t * side_.token_stride + h * side_.head_stride,
                 scale.at(run.block, h));
    }
  }
}

void RowMover::gather(const RunAddresses& run) {
  if (side_.element == io_.element) {
    copy_nest(run.io, run.cache,
              reversed(nest_to_cache(side_, run.num_tokens, num_heads_, io_.token_stride,
                                     io_.head_stride)),
              bytes_of(side_.element), stream_);
    return;
  }
  for (int64_t t = 0; t < run.num_tokens; ++t) {
    for (int64_t h = 0; h < num_heads_; ++h) {
      decode_row(run.cache + t * side_.token_stride + h * side_.head_stride,
                 run.io + t * io_.token_stride + h * io_.head_stride);
    }
  }
}

void RowMover::encode_row(const uint8_t* io_row, uint8_t* cache_row, float step) {
  const int io_bytes = bytes_of(io_.element);
  const int bytes = bytes_of(side_.element);
  float numbers[kAtOnce];
  for (int64_t first = 0; first < head_dim_; first += kAtOnce) {
    const int n = static_cast<int>(std::min<int64_t>(kAtOnce, head_dim_ - first));
    kernels_.load_floats(*float_type(io_.element), io_row + first * io_bytes, n, numbers);
    kernels_.of(spec_).encode_rows({.spec = &spec_,
                                    .head_dim = n,
                                    .tensor_scale = 1.0f,
                                    .rows = numbers,
                                    .first_token = 0,
                                    .num_tokens = 1,
                                    .codes = codes_.data() + first * bytes,
                                    .token_stride = 0,
                                    .scales = reinterpret_cast<uint8_t*>(&step),
                                    .scale_token_stride = 0,
                                    .scale_group_stride = 0});
  }
  copy_nest(cache_row, codes_.data(), nest_to_cache(side_, 1, 1, 0, 0), bytes);
}

void RowMover::decode_row(const uint8_t* cache_row, uint8_t* io_row) {
  const int io_bytes = bytes_of(io_.element);
  const int bytes = bytes_of(side_.element);
  copy_nest(codes_.data(), cache_row, reversed(nest_to_cache(side_, 1, 1, 0, 0)), bytes);
  float numbers[kAtOnce];
  for (int64_t first = 0; first < head_dim_; first += kAtOnce) {
    const int n = static_cast<int>(std::min<int64_t>(kAtOnce, head_dim_ - first));
    kernels_.load_floats(*float_type(side_.element), codes_.data() + first * bytes, n, numbers);
    kernels_.store_floats(*float_type(io_.element), numbers, n, io_row + first * io_bytes);
  }
}

}  // namespace kvx::ops::copy_rows
