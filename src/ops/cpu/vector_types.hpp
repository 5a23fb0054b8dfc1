// Vectors of floats of every width, in the compilers' own vector types. A level computes with some
// of them; which, its vectors.hpp defines.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

typedef float Lanes4 __attribute__((vector_size(16)));
typedef float Lanes8 __attribute__((vector_size(32)));
typedef float Lanes16 __attribute__((vector_size(64)));
typedef uint32_t Bits4 __attribute__((vector_size(16)));
typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef uint32_t Bits16 __attribute__((vector_size(64)));

// The integer type of a vector's width, and the next narrower vector.
template <class V>
struct LanesOf;
template <>
struct LanesOf<float> {
  using Bits = uint32_t;
  using Narrower = void;
};
template <>
struct LanesOf<Lanes4> {
  using Bits = Bits4;
  using Narrower = float;
};
template <>
struct LanesOf<Lanes8> {
  using Bits = Bits8;
  using Narrower = Lanes4;
};
template <>
struct LanesOf<Lanes16> {
  using Bits = Bits16;
  using Narrower = Lanes8;
};

template <class V>
inline constexpr int kLanes = sizeof(V) / sizeof(float);

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
