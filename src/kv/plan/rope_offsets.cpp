// Block offsets by sums and products alone: sine and cosine come from their series, and an angle's
// multiples from powers of a complex number. libm's last bit differs between machines, and offsets
// decide bytes.
#include "kv/plan/rope_offsets.hpp"

#include <cmath>

namespace kvx::kv {
namespace {

constexpr double kPi = 3.14159265358979323846;

// std::complex's product has branches for infinities; this one is four products.
struct Turn {
  double cosine = 1;
  double sine = 0;

  friend Turn operator*(const Turn& a, const Turn& b) {
    return {a.cosine * b.cosine - a.sine * b.sine, a.sine * b.cosine + a.cosine * b.sine};
  }
};

// The turn by an angle of 0 to pi: of a 16th of it by Taylor's series, whose next term is below
// 1e-18, then doubled four times.
Turn turn_by(double angle) {
  const double x = angle / 16;
  Turn turn{0, 0};
  double term = 1;
  for (int n = 0; n < 14; ++n) {
    double& sum = n % 2 == 0 ? turn.cosine : turn.sine;
    sum += n % 4 < 2 ? term : -term;
    term = term * x / (n + 1);
  }
  for (int i = 0; i < 4; ++i) turn = turn * turn;
  return turn;
}

// The mean of the turns by 0, 1, ..., block_size - 1 angles.
Turn mean_turn(const Turn& one, int block_size) {
  Turn sum{0, 0};
  Turn power;
  for (int i = 0; i < block_size; ++i) {
    sum.cosine += power.cosine;
    sum.sine += power.sine;
    power = power * one;
  }
  return {sum.cosine / block_size, sum.sine / block_size};
}

Turn power_of(const Turn& one, int exponent) {
  Turn power;
  for (int i = 0; i < exponent; ++i) power = power * one;
  return power;
}

}  // namespace

Status check_rope(const std::string& name, const Rope& rope, int head_dim) {
  const size_t num_pairs = rope.inv_freq.size();
  if (num_pairs == 0 || num_pairs > static_cast<size_t>(head_dim) / 2) {
    return invalid_argument("{} inv_freq has {} numbers; expected 1 to k_head_dim / 2, {}", name,
                            num_pairs, head_dim / 2);
  }
  for (size_t i = 0; i < num_pairs; ++i) {
    if (rope.inv_freq[i] >= 0 && rope.inv_freq[i] <= kPi) continue;
    return invalid_argument("{} inv_freq[{}] is {}; expected 0 to pi", name, i, rope.inv_freq[i]);
  }
  if (rope.attention_scaling > 0 && std::isfinite(rope.attention_scaling)) return {};
  return invalid_argument("{} attention_scaling is {}; expected a positive finite number", name,
                          rope.attention_scaling);
}

std::vector<float> rope_block_offsets(const Rope& rope, const std::vector<float>& rope_mean,
                                      int num_kv_heads, int head_dim, int block_size,
                                      int64_t num_blocks) {
  const int64_t per_block = int64_t{num_kv_heads} * head_dim;
  std::vector<float> offsets(static_cast<size_t>(num_blocks * per_block));
  const int num_pairs = static_cast<int>(rope.inv_freq.size());
  for (int pair = 0; pair < num_pairs; ++pair) {
    const bool is_interleaved = rope.pairs == RopePairs::kInterleaved;
    const int a = is_interleaved ? 2 * pair : pair;
    const int b = is_interleaved ? 2 * pair + 1 : pair + num_pairs;
    const Turn one = turn_by(rope.inv_freq[pair]);
    const Turn a_block = power_of(one, block_size);
    Turn turn = mean_turn(one, block_size);
    turn = {turn.cosine * rope.attention_scaling, turn.sine * rope.attention_scaling};
    for (int64_t block = 1; block < num_blocks; ++block) {
      turn = turn * a_block;
      for (int head = 0; head < num_kv_heads; ++head) {
        const float* m = rope_mean.data() + int64_t{head} * head_dim;
        float* c = offsets.data() + block * per_block + int64_t{head} * head_dim;
        c[a] = static_cast<float>(turn.cosine * m[a] - turn.sine * m[b]);
        c[b] = static_cast<float>(turn.sine * m[a] + turn.cosine * m[b]);
      }
    }
  }
  for (int64_t block = 1; block < num_blocks; ++block) {
    for (int head = 0; head < num_kv_heads; ++head) {
      for (int d = 2 * num_pairs; d < head_dim; ++d) {
        offsets[block * per_block + int64_t{head} * head_dim + d] =
            rope_mean[int64_t{head} * head_dim + d];
      }
    }
  }
  return offsets;
}

}  // namespace kvx::kv
