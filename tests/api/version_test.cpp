// kvx_get_version through the static core: what it fills, and what it refuses.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "kvx/kvx_abi.h"

namespace {

TEST(GetVersion, TellsACallerThatSetsItsSizeTheLibrarysOwnVersion) {
  kvx_version_t version{sizeof(kvx_version_t), 99, 99, 99};
  ASSERT_EQ(kvx_get_version(&version), KVX_STATUS_OK);
  EXPECT_EQ(version.size, 16u);
  EXPECT_EQ(version.abi_major, uint32_t{KVX_ABI_VERSION_MAJOR});
  EXPECT_EQ(version.abi_minor, uint32_t{KVX_ABI_VERSION_MINOR});
  EXPECT_EQ(version.abi_patch, uint32_t{KVX_ABI_VERSION_PATCH});
}

TEST(GetVersion, TellsACallerWithSizeZeroThatItSpeaksOneDotOne) {
  kvx_version_t version{0, 99, 99, 99};
  ASSERT_EQ(kvx_get_version(&version), KVX_STATUS_OK);
  EXPECT_EQ(version.size, 16u);
  EXPECT_EQ(version.abi_major, 1u);
  EXPECT_EQ(version.abi_minor, 1u);
  EXPECT_EQ(version.abi_patch, 0u);
}

TEST(GetVersion, LeavesTheTailOfALargerStructAlone) {
  std::array<uint32_t, 6> larger{24, 99, 99, 99, 0xCAFE, 0xCAFE};
  ASSERT_EQ(kvx_get_version(reinterpret_cast<kvx_version_t*>(larger.data())), KVX_STATUS_OK);
  EXPECT_EQ(larger[0], 16u);
  EXPECT_EQ(larger[1], 1u);
  EXPECT_EQ(larger[4], 0xCAFEu);
  EXPECT_EQ(larger[5], 0xCAFEu);
}

TEST(GetVersion, RefusesAStructThatCannotHoldTheAnswerAndWritesNothing) {
  for (uint32_t size = 1; size < sizeof(kvx_version_t); ++size) {
    kvx_version_t version{size, 99, 99, 99};
    const kvx_version_t before = version;
    EXPECT_EQ(kvx_get_version(&version), KVX_STATUS_INVALID_ARGUMENT) << "size " << size;
    EXPECT_EQ(std::memcmp(&version, &before, sizeof version), 0) << "size " << size;
  }
}

TEST(GetVersion, RefusesNull) {
  EXPECT_EQ(kvx_get_version(nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

}  // namespace
