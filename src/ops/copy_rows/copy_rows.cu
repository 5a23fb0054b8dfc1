// Copies the v1 calls' rows on a GPU: a thread copies one unit (row_units.hpp) of several tokens.
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include "core/checked.hpp"
#include "device/cuda_error.hpp"
#include "format/codec.hpp"
#include "format/group.hpp"
#include "ops/copy_rows/copy_rows_cuda.hpp"
#include "ops/copy_rows/row_units.hpp"
#include "ops/cuda/fast_divide.hpp"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::copy_rows {
namespace {

constexpr int kThreads = 256;
constexpr int kMostTokensAtOnce = 4;  // tokens that a thread loads before its first store

using cuda::FastDivide;
using cuda::FastDivide64;

// K or V of a call.
struct MovedSide {
  CacheSide cache;
  IoSide io;
  ScaleView scale;
  RowUnits units;
  bool is_key;
  FastDivide64 by_tokens_per_fragment{io.tokens_per_fragment};

  __device__ uint8_t* io_token(int64_t t) const {
    const int64_t fragment = by_tokens_per_fragment.quotient(t);
    return io.data + fragment * io.fragment_stride +
           (t - fragment * io.tokens_per_fragment) * io.token_stride;
  }
};

struct Launch {
  dim3 grid;           // tokens, units, sides
  int width;           // units of a token that a CTA copies
  int depth;           // tokens that a CTA's threads copy side by side
  int tokens_at_once;  // tokens of a thread
};

// A unit that a thread copies. `from` or `to` is null where nothing is copied.
struct Move {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  float step = 1.0f;
};

// The tokens that a CTA copies.
struct TokensOfCta {
  int64_t first;
  int count;
};

// ---- where the tokens of a call lie ----

struct Write {
  WritePlan plan;
  MovedSide sides[2];
  int64_t num_slots;
  FastDivide64 by_block_size;

  int64_t num_tokens() const { return plan.io.num_tokens; }
  static int shared_bytes(int) { return 0; }
  __device__ void find_places(const MovedSide&, const TokensOfCta&) const {}

  // IO is read before the slot is checked, so that only the store waits for the slot.
  __device__ Move move_of(const MovedSide& side, const Unit& unit, const TokensOfCta& tokens,
                          int number) const {
    const int64_t token = tokens.first + number;
    if (token >= plan.io.num_tokens) return {};
    Move move;
    move.from = side.io_token(token) + unit.io_offset;
    const int64_t slot = plan.slots.at(token);
    if (slot < 0 || slot >= num_slots) return move;
    const int64_t block = by_block_size.quotient(slot);
    const int64_t offset = slot - block * plan.cache.block_size;
    move.step = side.scale.at(block, unit.head);
    if (!(move.step > 0) || !format::is_finite(move.step)) return move;
    move.to = side.cache.data + block * side.cache.block_stride + offset * side.cache.token_stride +
              unit.cache_offset;
    return move;
  }
};

// A token's first byte on both sides. Null where nothing is copied.
struct TokenPlace {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
};
extern __shared__ TokenPlace places_of_cta[];

struct Gather {
  GatherPlan plan;
  MovedSide sides[2];
  FastDivide64 by_max_seq_len{plan.max_seq_len};
  FastDivide64 by_num_beams{plan.table.num_beams};
  FastDivide64 by_block_size{plan.cache.block_size};

  int64_t num_tokens() const { return plan.io.num_tokens; }
  static int shared_bytes(int tokens_of_cta) {
    return tokens_of_cta * static_cast<int>(sizeof(TokenPlace));
  }

  // Tokens are found once per token and not per unit: finding one takes longer than copying 16
  // bytes.
  __device__ void find_places(const MovedSide& side, const TokensOfCta& tokens) const {
    for (auto i = static_cast<int>(threadIdx.x); i < tokens.count;
         i += static_cast<int>(blockDim.x)) {
      const int64_t output = tokens.first + i;
      places_of_cta[i] = output < plan.io.num_tokens ? place_of(side, output) : TokenPlace();
    }
    __syncthreads();
  }
  __device__ Move move_of(const MovedSide&, const Unit& unit, const TokensOfCta&,
                          int number) const {
    const TokenPlace place = places_of_cta[number];
    if (place.from == nullptr) return {};
    return {place.from + unit.cache_offset, place.to + unit.io_offset, 1.0f};
  }

 private:
  __device__ TokenPlace place_of(const MovedSide& side, int64_t output) const {
    const int64_t row = by_max_seq_len.quotient(output);
    const int64_t token = output - row * plan.max_seq_len;
    const int64_t place = by_block_size.quotient(token);  // index of the block in its row
    if (token >= plan.length_of_sequence(by_num_beams.quotient(row))) return {};
    if (!has_entries(plan.table, row, token, place)) return {};
    const TokenEntries entries = entries_of(plan.table, row, token, place);
    const int64_t entry = side.is_key ? entries.k : entries.v;
    if (!plan.reads_pools() && entry >= plan.cache.num_blocks) return {};
    const uint8_t* block = block_of(plan.table, side.cache, entry);
    if (block == nullptr) return {};
    const int64_t offset = token - place * plan.cache.block_size;
    return {block + offset * side.cache.token_stride, side.io_token(output)};
  }
};

// ---- how a unit is moved ----

template <class Word>
struct Copy {
  template <int Tokens>
  __device__ static void move(const MovedSide&, const Move (&moves)[Tokens], bool) {
    Word words[Tokens];
#pragma unroll
    for (int i = 0; i < Tokens; ++i) {
      if (moves[i].from) words[i] = *reinterpret_cast<const Word*>(moves[i].from);
    }
#pragma unroll
    for (int i = 0; i < Tokens; ++i) {
      if (moves[i].to && moves[i].from) *reinterpret_cast<Word*>(moves[i].to) = words[i];
    }
  }
};

// N adjacent numbers of one type in memory.
template <class Bits, int N>
struct alignas(sizeof(Bits) * N) Numbers {
  Bits bits[N];
};

template <int N>
__device__ void load_numbers(Element element, const uint8_t* from, float (&x)[N]) {
  if (element == Element::kF32) {
    const auto numbers = *reinterpret_cast<const Numbers<float, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = numbers.bits[i];
    return;
  }
  const auto numbers = *reinterpret_cast<const Numbers<uint16_t, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = element == Element::kF16 ? f16_to_f32(numbers.bits[i]) : bf16_to_f32(numbers.bits[i]);
  }
}

template <class Codec, class Bits, int N>
__device__ void store_plain(const float (&x)[N], uint8_t* to) {
  Numbers<Bits, N> numbers;
#pragma unroll
  for (int i = 0; i < N; ++i) numbers.bits[i] = Codec::encode(x[i]);
  *reinterpret_cast<Numbers<Bits, N>*>(to) = numbers;
}

template <class Codec, int N>
__device__ void store_scaled(const float (&x)[N], float step, uint8_t* to) {
  const float inverse_step = format::reciprocal(step);
  Numbers<uint8_t, N> codes;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    codes.bits[i] = format::is_finite(x[i]) ? Codec::encode(x[i] * inverse_step)
                                            : Codec::encode_nonfinite(x[i]);
  }
  *reinterpret_cast<Numbers<uint8_t, N>*>(to) = codes;
}

// A write makes every NaN in an F32 cache the canonical NaN. A gather keeps a NaN's bits.
struct BitsOfF32 {
  __device__ static uint32_t encode(float x) { return __float_as_uint(x); }
};

template <int N>
__device__ void store_numbers(Element element, const float (&x)[N], float step, bool is_write,
                              uint8_t* to) {
  switch (element) {
    case Element::kF32:
      if (is_write) return store_plain<format::F32Codec, uint32_t>(x, to);
      return store_plain<BitsOfF32, uint32_t>(x, to);
    case Element::kF16:
      return store_plain<format::F16Codec, uint16_t>(x, to);
    case Element::kBF16:
      return store_plain<format::BF16Codec, uint16_t>(x, to);
    case Element::kE4M3:
      return store_scaled<format::E4M3Codec>(x, step, to);
    case Element::kE5M2:
      return store_scaled<format::E5M2Codec>(x, step, to);
  }
}

template <int N>
struct Convert {
  template <int Tokens>
  __device__ static void move(const MovedSide& side, const Move (&moves)[Tokens], bool is_write) {
    const Element source = is_write ? side.io.element : side.cache.element;
    const Element target = is_write ? side.cache.element : side.io.element;
    float x[Tokens][N];
#pragma unroll
    for (int i = 0; i < Tokens; ++i) {
      if (moves[i].from) load_numbers(source, moves[i].from, x[i]);
    }
#pragma unroll
    for (int i = 0; i < Tokens; ++i) {
      if (moves[i].to && moves[i].from) {
        store_numbers(target, x[i], moves[i].step, is_write, moves[i].to);
      }
    }
  }
};

constexpr bool is_write(const Write*) {
  return true;
}
constexpr bool is_write(const Gather*) {
  return false;
}

template <class Call>
struct MoveParams {
  Call call;
  int first_side;
  int depth;
  FastDivide by_inner;  // threads that copy adjacent units, or adjacent tokens
};

// blockIdx: tokens, units, sides.
template <class Mover, class Call, int Tokens>
__global__ void __launch_bounds__(kThreads)
    move_rows(const __grid_constant__ MoveParams<Call> params) {
  const Call& call = params.call;
  const MovedSide& side = call.sides[params.first_side + static_cast<int>(blockIdx.z)];
  const uint32_t outer = params.by_inner.quotient(threadIdx.x);
  const uint32_t inner = threadIdx.x - outer * params.by_inner.divisor;
  const bool by_token = side.units.is_by_token;
  const uint32_t width = blockDim.x / static_cast<uint32_t>(params.depth);
  const uint32_t unit_number = blockIdx.y * width + (by_token ? outer : inner);
  const auto number = static_cast<int>(by_token ? inner : outer);
  const int count = params.depth * Tokens;
  const TokensOfCta tokens = {int64_t{blockIdx.x} * count, count};
  cuda::wait_for_earlier_launches();
  call.find_places(side, tokens);
  if (unit_number >= side.units.num_units) return;
  const Unit unit = unit_at(side.units, side.cache, side.io, unit_number);
  Move moves[Tokens];
#pragma unroll
  for (int i = 0; i < Tokens; ++i) {
    moves[i] = call.move_of(side, unit, tokens, number + i * params.depth);
  }
  Mover::move(side, moves, is_write(static_cast<const Call*>(nullptr)));
}

// ---- launches ----

template <class Call>
using Kernel = void (*)(MoveParams<Call>);

template <class Call, int Tokens>
Kernel<Call> kernel_of(const MovedSide& side) {
  if (side.units.converts) {
    return side.units.elements == 1 ? &move_rows<Convert<1>, Call, Tokens>
                                    : &move_rows<Convert<4>, Call, Tokens>;
  }
  switch (side.units.bytes(side.cache.element)) {
    case 16:
      return &move_rows<Copy<uint4>, Call, Tokens>;
    case 8:
      return &move_rows<Copy<uint2>, Call, Tokens>;
    case 4:
      return &move_rows<Copy<uint32_t>, Call, Tokens>;
    case 2:
      return &move_rows<Copy<uint16_t>, Call, Tokens>;
    default:
      return &move_rows<Copy<uint8_t>, Call, Tokens>;
  }
}

// tokens_at_once: tokens of a thread: 1, 2 or kMostTokensAtOnce. A gather's CTA first finds its
// tokens, which pays only for many, so its threads always copy kMostTokensAtOnce.
template <class Call>
Kernel<Call> kernel_for(const MovedSide& side, int tokens_at_once) {
  if constexpr (is_write(static_cast<const Call*>(nullptr))) {
    if (tokens_at_once == 1) return kernel_of<Call, 1>(side);
    if (tokens_at_once == 2) return kernel_of<Call, 2>(side);
  }
  return kernel_of<Call, kMostTokensAtOnce>(side);
}

// Where tokens are adjacent in the cache and units are adjacent in IO, a warp copies four units of
// eight tokens, so that it accesses whole sectors on both sides. With few tokens each lane of a
// warp has its own.
int neighbours(int64_t num_tokens) {
  constexpr int64_t kFewTokens = 1024;
  return num_tokens > kFewTokens ? 8 : 32;
}

Launch launch_of(const RowUnits& units, int64_t num_tokens, int num_sides, int tokens_at_once) {
  const int most_units = units.is_by_token ? kThreads / neighbours(num_tokens) : kThreads;
  const auto width = static_cast<int>(std::min<int64_t>(units.num_units, most_units));
  const auto depth = static_cast<int>(
      units.is_by_token ? kThreads / width : std::min<int64_t>(num_tokens, kThreads / width));
  const auto token_ctas =
      static_cast<unsigned>(ceil_div<int64_t>(num_tokens, int64_t{depth} * tokens_at_once));
  const auto unit_ctas = static_cast<unsigned>(ceil_div<int64_t>(units.num_units, width));
  return {dim3(token_ctas, unit_ctas, static_cast<unsigned>(num_sides)), width, depth,
          tokens_at_once};
}

// A small write is bound by the latency of its loads and not by bandwidth, so its threads copy one
// or two tokens each, as long as the device can run all of them at once.
Launch shortest_launch(const RowUnits& units, int64_t num_tokens, int num_sides,
                       int num_multiprocessors) {
  constexpr int kCtasPerMultiprocessor = 4;
  for (const int tokens_at_once : {1, 2}) {
    const Launch launch = launch_of(units, num_tokens, num_sides, tokens_at_once);
    const int64_t num_ctas = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    if (num_ctas <= int64_t{kCtasPerMultiprocessor} * num_multiprocessors) return launch;
  }
  return launch_of(units, num_tokens, num_sides, kMostTokensAtOnce);
}

Status check_fits(const RowUnits& units, const char* name) {
  constexpr int64_t kMostUnits = int64_t{65535} * (kThreads / 32);  // a grid's second dimension
  if (units.num_units <= kMostUnits) return {};
  return unsupported("a token of {} is {} units on the GPU; expected at most {}", name,
                     units.num_units, kMostUnits);
}

// Copies K and V in one launch where their units agree.
template <class Call>
Status launch(const Call& call, const char* name, const CudaContext& context) {
  const MovedSide& k = call.sides[0];
  const MovedSide& v = call.sides[1];
  KVX_RETURN_IF_ERROR(check_fits(k.units, "K"));
  KVX_RETURN_IF_ERROR(check_fits(v.units, "V"));
  const bool are_alike =
      kernel_for<Call>(k, kMostTokensAtOnce) == kernel_for<Call>(v, kMostTokensAtOnce) &&
      k.units.num_units == v.units.num_units && k.units.is_by_token == v.units.is_by_token;
  for (int side = 0; side < (are_alike ? 1 : 2); ++side) {
    const MovedSide& moved = call.sides[side];
    const int num_sides = are_alike ? 2 : 1;
    const Launch shape =
        is_write(&call) ? shortest_launch(moved.units, call.num_tokens(), num_sides,
                                          context.device.num_multiprocessors)
                        : launch_of(moved.units, call.num_tokens(), num_sides, kMostTokensAtOnce);
    const int inner = moved.units.is_by_token ? shape.depth : shape.width;
    const MoveParams<Call> params = {call, side, shape.depth, FastDivide(inner)};
    KVX_RETURN_IF_ERROR(
        cuda::launch_overlapping(context, name, kernel_for<Call>(moved, shape.tokens_at_once),
                                 {shape.grid, shape.width * shape.depth,
                                  Call::shared_bytes(shape.depth * shape.tokens_at_once)},
                                 params));
  }
  return {};
}

}  // namespace

Status write_on_device(const CudaContext& context, const WritePlan& plan) {
  constexpr int64_t kWidest = 16;
  const CacheView& cache = plan.cache;
  const Write call = {
      plan,
      {{cache.k, plan.io.k, plan.k_scale, units_of(cache, cache.k, plan.io.k, kWidest), true},
       {cache.v, plan.io.v, plan.v_scale, units_of(cache, cache.v, plan.io.v, kWidest), false}},
      cache.num_slots(),
      FastDivide64(cache.block_size)};
  return launch(call, "kvx_write_kv", context);
}

Status gather_on_device(const CudaContext& context, const GatherPlan& plan) {
  const CacheView& cache = plan.cache;
  int64_t alignment = 16;
  if (plan.reads_pools()) {
    alignment = std::gcd(plan.table.bytes_per_block,
                         static_cast<int64_t>((reinterpret_cast<uintptr_t>(plan.table.primary) |
                                               reinterpret_cast<uintptr_t>(plan.table.secondary)) %
                                              16));
  }
  const Gather call = {
      plan,
      {{cache.k, plan.io.k, {}, units_of(cache, cache.k, plan.io.k, alignment), true},
       {cache.v, plan.io.v, {}, units_of(cache, cache.v, plan.io.v, alignment), false}}};
  return launch(call, "kvx_gather_kv", context);
}

}  // namespace kvx::ops::copy_rows
