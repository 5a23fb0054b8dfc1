// Random groups in every format: what append writes on the device is what it writes on the CPU.
// 10^7 groups in all by default, 10^9 with KVX_TEST_FULL=1.
#include <cstdlib>

#include "format/list.hpp"
#include "ops/append/append_cuda.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests {
namespace {

// splitmix64's step: one number after the other, the same everywhere.
uint64_t mixed(uint64_t n) {
  n = (n ^ (n >> 30)) * 0xBF58476D1CE4E5B9u;
  n = (n ^ (n >> 27)) * 0x94D049BB133111EBu;
  return n ^ (n >> 31);
}

// Sixteen numbers with one largest exponent, anywhere in the type's range, the others below it as
// often as one bit lower halves them. Now and then a zero, an infinity or a NaN.
void fill_sixteen(DType type, uint64_t seed, uint8_t* out) {
  const uint64_t chosen = mixed(seed);
  const bool has_special = chosen % 61 == 0;
  const int mantissa_bits = type == DType::kF32 ? 23 : type == DType::kF16 ? 10 : 7;
  const int exponent_bits = type == DType::kF16 ? 5 : 8;
  const auto most = static_cast<uint32_t>((1 << exponent_bits) - 2);
  // Half of the groups near one, as activations are.
  const uint32_t near_one = most / 2 + static_cast<uint32_t>(chosen >> 48) % 5;
  const uint32_t top =
      (chosen >> 32 & 1) != 0 ? near_one : static_cast<uint32_t>(chosen >> 40) % (most + 1);
  for (int i = 0; i < 16; ++i) {
    const uint64_t random = mixed(seed * 16 + i + 1);
    const auto lower = static_cast<uint32_t>(std::countr_zero(random | 1u << 12));
    const uint32_t exponent = top > lower ? top - lower : 0;
    const auto mantissa = static_cast<uint32_t>(random >> 20) & ((1u << mantissa_bits) - 1);
    const auto sign = static_cast<uint32_t>(random >> 63);
    uint32_t bits = sign << (mantissa_bits + exponent_bits) | exponent << mantissa_bits | mantissa;
    if (has_special && (random >> 13) % 16 == 0) {
      const uint32_t infinity = (most + 1) << mantissa_bits;
      const uint32_t specials[] = {sign << (mantissa_bits + exponent_bits), infinity,
                                   infinity | 1u << (mantissa_bits - 1)};
      bits = specials[(random >> 17) % 3];
    }
    memcpy(out + i * bytes_of(type), &bits, bytes_of(type));
  }
}

class GpuRandomRows : public GpuTest {
 protected:
  static constexpr LayerShape kShape = {
      .num_blocks = 256, .block_size = 64, .num_heads = 8, .k_dim = 64, .v_dim = 64};
  static constexpr int64_t kNumTokens = int64_t{kShape.num_blocks} * kShape.block_size;
  static constexpr int64_t kNumbersOfSide = kNumTokens * kShape.num_heads * kShape.k_dim;

  void fill(DType type, uint64_t seed, std::vector<uint8_t>& rows) {
    rows.resize(kNumbersOfSide * bytes_of(type));
    constexpr int kFragments = 256;
    constexpr int64_t kSixteens = kNumbersOfSide / 16 / kFragments;
    pool_->parallel_for(kFragments, [&](int piece) {
      for (int64_t i = piece * kSixteens; i < (piece + 1) * kSixteens; ++i) {
        fill_sixteen(type, seed * (kNumbersOfSide / 16) + i, rows.data() + i * 16 * bytes_of(type));
      }
    });
  }

  // One call on both machines. Returns how many groups it had.
  int64_t compare(const format::FormatSpec& spec, DType type, uint64_t seed) {
    fill(type, 2 * seed, k_);
    fill(type, 2 * seed + 1, v_);
    TestLayer host(spec, spec, kShape);
    TestLayer device(spec, spec, kShape);
    ops::AppendArgs args;
    args.cache = host.view();
    args.k = dense_rows(std::as_const(k_).data(), type, kShape.num_heads, kShape.k_dim);
    args.v = dense_rows(std::as_const(v_).data(), type, kShape.num_heads, kShape.v_dim);
    std::vector<int64_t> slots = slots_from(0, kNumTokens);
    args.slot_mapping = slots;
    const ops::CpuContext cpu = {&ops::cpu::kernel_table(cpu_levels_here().back()), pool_.get()};
    EXPECT_TRUE(ops::append(cpu, args).ok());

    Mirror mirror(memory());
    MirroredLayer on_device(mirror, device);
    const DeferredErrors counters(memory());
    args.cache = on_device.view();
    args.k.data = mirror.add(k_);
    args.v.data = mirror.add(v_);
    args.slot_mapping = {mirror.add(slots), slots.size()};
    EXPECT_TRUE(ops::append(context(), args, counters.get()).ok());
    synchronize();
    on_device.fetch(mirror);
    expect_same(host.k, device.k);
    expect_same(host.v, device.v);
    return 2 * kNumTokens * kShape.num_heads * format::groups_per_row(spec, kShape.k_dim);
  }

  static void expect_same(const TestSide& expected, const TestSide& found) {
    EXPECT_TRUE(expected.codes == found.codes || same_bytes(expected.codes, found.codes));
    EXPECT_TRUE(expected.scales == found.scales || same_bytes(expected.scales, found.scales));
  }

  std::unique_ptr<Executor> pool_ = make_thread_pool(0);
  std::vector<uint8_t> k_, v_;
};

TEST_F(GpuRandomRows, AreTheCpusBytesInEveryFormat) {
  const char* full = std::getenv("KVX_TEST_FULL");
  const bool is_full = full != nullptr && std::string_view(full) == "1";
  const int64_t wanted = is_full ? 1'000'000'000 : 10'000'000;
  int64_t groups = 0;
  for (uint64_t seed = 1; groups < wanted;) {
    for (const format::Facts* facts : format::kRowFacts) {
      const DType types[] = {DType::kBF16, DType::kF16, DType::kF32};
      const DType type = types[seed % 3];
      SCOPED_TRACE(fmt::format("{} from {}, seed {}", facts->name, name_of(type), seed));
      groups += compare(computed_or_only(*facts), type, seed++);
      if (HasFailure()) return;
    }
  }
  RecordProperty("groups", std::to_string(groups));
}

}  // namespace
}  // namespace kvx::tests
