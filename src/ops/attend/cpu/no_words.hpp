// What a level has in place of products of words, which only AVX2 without VNNI uses: no format
// takes them, so the functions are named and never called.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Whether a codec's fixed-point numbers are words.
template <class Codec>
constexpr bool takes_words() {
  return false;
}

struct Pairs {
  Ints even, odd;
};
Pairs widen_unsigned(Ints bytes);
Pairs widen_signed(Ints bytes);
Ints add_pairs(Ints sum, Ints a, Ints b);
Ints add_words(Ints a, Ints b);
Ints add_word_middles(Ints sum, Ints totals);
void store_pairs(Ints numbers, int8_t* words);

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
