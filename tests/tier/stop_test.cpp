// A wish to stop belongs to a thread, and ends a file between two of its blocks. tests/python
// (test_interrupt.py) has attention and a real signal.
#include "core/stop.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "tests/support/temporary_path.hpp"
#include "tier/cache_file.hpp"

namespace kvx::tier {
namespace {

class Wish final : public StopWish {
 public:
  Wish() { set_stop_wish(this); }
  ~Wish() override { set_stop_wish(nullptr); }
  bool is_there() override { return is_wished; }

  bool is_wished = false;
};

TEST(StopWish, IsNotThereWhereNobodyCanWishIt) {
  EXPECT_EQ(stop_wish(), nullptr);
  EXPECT_FALSE(is_stop_wished(stop_wish()));
}

TEST(StopWish, BelongsToTheThreadThatSetIt) {
  Wish wish;
  EXPECT_FALSE(is_stop_wished(stop_wish()));
  wish.is_wished = true;
  bool is_wished_elsewhere = true;
  std::thread([&] { is_wished_elsewhere = is_stop_wished(stop_wish()); }).join();
  EXPECT_FALSE(is_wished_elsewhere);
  EXPECT_TRUE(is_stop_wished(stop_wish()));
}

TEST(StopWish, EndsAFileBetweenTwoOfItsBlocks) {
  const std::string path = tests::temporary_path("stop_test.kvx");
  const std::vector<uint8_t> block(64, 7);
  auto writer = CacheFileWriter::create(path, 0);
  ASSERT_TRUE(writer.ok());
  Wish wish;
  EXPECT_TRUE(writer.value().add_block_copy(0, block).ok());
  wish.is_wished = true;
  const auto second = writer.value().add_block_copy(0, block);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().message, "the call was interrupted");
}

}  // namespace
}  // namespace kvx::tier
