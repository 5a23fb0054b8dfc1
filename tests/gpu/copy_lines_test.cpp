// Copies of lines that lie at any stride.
#include <numeric>

#include "device/cuda_async.hpp"
#include "tests/gpu/gpu.hpp"

namespace kvx::tests {
namespace {

constexpr int kLineBytes = 4;

class GpuCopyLines : public GpuTest {
 protected:
  // Lines of 0, 1, 2, ... as they arrive, without gaps.
  std::vector<uint8_t> copied(int64_t from_stride, int num_lines) {
    std::vector<uint8_t> from(64);
    std::iota(from.begin(), from.end(), uint8_t{0});
    std::vector<uint8_t> to(static_cast<size_t>(num_lines) * kLineBytes);
    Mirror mirror(memory());
    const uint8_t* source = mirror.add(from);
    const Status sent = device::cuda_copy_lines_async(
        mirror.add(to), kLineBytes, source, from_stride, kLineBytes, num_lines, context().stream);
    EXPECT_TRUE(sent.ok()) << sent.error().message;
    synchronize();
    mirror.fetch(to);
    return to;
  }
};

using Bytes = std::vector<uint8_t>;

TEST_F(GpuCopyLines, LieApart) {
  EXPECT_EQ(copied(8, 2), (Bytes{0, 1, 2, 3, 8, 9, 10, 11}));
}

// A tensor of one token may say any stride, 1 for one.
TEST_F(GpuCopyLines, OfOneLineMayHaveAnyStride) {
  EXPECT_EQ(copied(1, 1), (Bytes{0, 1, 2, 3}));
}

TEST_F(GpuCopyLines, MayBeOneLineRepeated) {
  EXPECT_EQ(copied(0, 2), (Bytes{0, 1, 2, 3, 0, 1, 2, 3}));
}

}  // namespace
}  // namespace kvx::tests
