// Memory: zeroed, aligned, given back once.
#include "cache/pool/memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace kvx::cache {
namespace {

TEST(HostMemory, HandsOutZeroedAlignedBytes) {
  for (int64_t bytes : {int64_t{1}, int64_t{63}, int64_t{4097}, int64_t{5} << 20}) {
    auto region = host_memory().allocate(bytes, "test");
    ASSERT_TRUE(region.ok()) << region.error().message;
    uint8_t* data = region.value().data();
    EXPECT_EQ(region.value().bytes(), bytes);
    EXPECT_EQ(region.value().kind(), MemoryKind::kHost);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
    EXPECT_TRUE(std::all_of(data, data + bytes, [](uint8_t byte) { return byte == 0; }));
    std::fill(data, data + bytes, uint8_t{0xA5});  // all of it can be written
  }
}

TEST(HostMemory, LargeRegionsBeginOnAHugePage) {
  auto region = host_memory().allocate(int64_t{3} << 20, "test");
  ASSERT_TRUE(region.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(region.value().data()) % (2 << 20), 0u);
}

TEST(HostMemory, SaysHowManyBytesItCouldNotFind) {
  for (int64_t bytes : {int64_t{1} << 60, std::numeric_limits<int64_t>::max()}) {
    const auto region = host_memory().allocate(bytes, "blocks of class 'packed'");
    ASSERT_FALSE(region.ok());
    EXPECT_EQ(region.error().code, ErrorCode::kOutOfRange);
    EXPECT_EQ(region.error().message,
              fmt::format("blocks of class 'packed': no memory for {} bytes", bytes));
  }
}

TEST(HostMemory, RefusesSizesBelowOne) {
  for (int64_t bytes : {int64_t{0}, int64_t{-5}}) {
    const auto region = host_memory().allocate(bytes, "test");
    ASSERT_FALSE(region.ok());
    EXPECT_EQ(region.error().message, fmt::format("test: bytes is {}; expected 1 or more", bytes));
  }
}

// Counts what is handed out.
class CountingMemory final : public Memory {
 public:
  MemoryKind kind() const override { return MemoryKind::kHost; }
  int64_t bytes_out() const { return bytes_out_; }

 protected:
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override {
    bytes_out_ += bytes;
    return new uint8_t[static_cast<size_t>(bytes)]();
  }
  void free(uint8_t* data, int64_t bytes) override {
    bytes_out_ -= bytes;
    delete[] data;
  }

 private:
  int64_t bytes_out_ = 0;
};

TEST(Region, GivesItsBytesBackOnce) {
  CountingMemory memory;
  {
    auto first = memory.allocate(100, "test");
    ASSERT_TRUE(first.ok());
    Region moved = std::move(first).value();
    Region target;
    target = std::move(moved);
    EXPECT_EQ(memory.bytes_out(), 100);
    EXPECT_EQ(target.bytes(), 100);
  }
  EXPECT_EQ(memory.bytes_out(), 0);
}

TEST(Region, GivesBackWhatItHeldWhenAnotherTakesItsPlace) {
  CountingMemory memory;
  auto first = memory.allocate(100, "test");
  ASSERT_TRUE(first.ok());
  Region held = std::move(first).value();
  {
    auto second = memory.allocate(7, "test");
    ASSERT_TRUE(second.ok());
    held = std::move(second).value();
  }
  EXPECT_EQ(held.bytes(), 7);
  held = Region();
  EXPECT_EQ(held.data(), nullptr);
  EXPECT_EQ(memory.bytes_out(), 0);
}

}  // namespace
}  // namespace kvx::cache
