// Attention of the ABI by every kind of block table over pages that decode_mma reads, which takes
// tables other than PACKED ones where they lie: PACKED's output to the bit, and what is wrong in a
// table is counted.
#include <algorithm>

#include "tests/gpu/device_layer.hpp"

namespace kvx::tests::abi_tables_test {
namespace {

using api_test::Geometry;
using api_test::PagedLayer;
using api_test::sized;

constexpr int kBlockSize = 16;
constexpr int kDim = 64;
constexpr int kKvHeads = 2;
constexpr int kMaxBlocks = 40;
const std::vector<int32_t> kLengths = {37, 16, 600};

template <class Index>
constexpr kvx_dtype_t kIndexDtype = sizeof(Index) == 8 ? KVX_DTYPE_S64 : KVX_DTYPE_S32;

// Its arrays are on the device.
struct DeviceTable {
  kvx_block_table_t table = sized<kvx_block_table_t>();
  kvx_seq_lens_t lengths = sized<kvx_seq_lens_t>();
};

class GpuAbiTables : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    blocks_ = {{8, 2, 30}, {4}, {}};
    for (int b = 0; b < 38; ++b) blocks_[2].push_back(126 - 2 * b);
    const Geometry geometry{128, kBlockSize, kKvHeads, kDim};
    pages_ = std::make_unique<PagedLayer>(geometry, api_test::in_page(KVX_FORMAT_BF16),
                                          api_test::in_page(KVX_FORMAT_BF16));
    for (size_t s = 0; s < blocks_.size(); ++s) {
      const api_test::OneSequence sequence(blocks_[s], kLengths[s]);
      const float seed = 0.3f + static_cast<float>(s);
      ASSERT_EQ(api_test::append_rows(pages_->layer,
                                      api_test::test_rows(kLengths[s], kKvHeads, kDim, seed),
                                      api_test::test_rows(kLengths[s], kKvHeads, kDim, 2 * seed),
                                      api_test::slots_of(sequence, kBlockSize)),
                KVX_STATUS_OK)
          << kvx_last_error();
    }
    layer_ = std::make_unique<DeviceLayer>(memory(), *pages_);
  }

  // A table of entries of one type, and the lengths in the same.
  template <class Index>
  DeviceTable table_of(kvx_block_table_format_t format, const std::vector<Index>& entries) {
    DeviceTable result;
    result.table.format = format;
    result.table.index_dtype = kIndexDtype<Index>;
    result.table.seq_count = static_cast<uint32_t>(kLengths.size());
    result.table.beam_width = 1;
    result.table.max_blocks_per_seq = kMaxBlocks;
    result.table.indices = place(entries);
    result.table.indices_count = static_cast<uint32_t>(entries.size());
    if (format == KVX_BLOCK_TABLE_KV_OFFSETS) {
      result.table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
    }
    result.lengths.dtype = kIndexDtype<Index>;
    result.lengths.seq_count = result.table.seq_count;
    result.lengths.lengths = place(std::vector<Index>(kLengths.begin(), kLengths.end()));
    return result;
  }
  template <class Index>
  DeviceTable pages_of(const std::vector<int32_t>& sums) {
    std::vector<Index> flat;
    for (const std::vector<int32_t>& blocks : blocks_) {
      flat.insert(flat.end(), blocks.begin(), blocks.end());
    }
    DeviceTable result = table_of(KVX_BLOCK_TABLE_RAGGED, flat);
    result.table.flags = KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
    result.table.indptr_dtype = KVX_DTYPE_S32;
    result.table.indptr = place(sums);
    result.table.indptr_count = static_cast<uint32_t>(sums.size());
    return result;
  }
  // [sequence, kMaxBlocks], or of KV_OFFSETS [sequence, K and V, kMaxBlocks].
  template <class Index>
  std::vector<Index> rows_of_blocks(bool has_v) const {
    std::vector<Index> rows;
    for (const std::vector<int32_t>& blocks : blocks_) {
      for (int side = 0; side < (has_v ? 2 : 1); ++side) {
        for (int b = 0; b < kMaxBlocks; ++b) {
          rows.push_back(b < std::ssize(blocks) ? Index{blocks[static_cast<size_t>(b)]} + side
                                                : Index{-1});
        }
      }
    }
    return rows;
  }
  std::vector<int32_t> sums_of_pages() const {
    std::vector<int32_t> sums = {0};
    for (const std::vector<int32_t>& blocks : blocks_) {
      sums.push_back(sums.back() + static_cast<int32_t>(blocks.size()));
    }
    return sums;
  }

  // num_queries: of each sequence.
  std::vector<float> attend(const DeviceTable& by, int num_queries) {
    const auto num_sequences = static_cast<int>(kLengths.size());
    std::vector<float> q =
        api_test::test_rows(num_queries * num_sequences, api_test::kQHeads, kDim, 4.2f);
    std::vector<float> out(q.size(), 9.0f);  // what is not written is seen
    std::vector<int32_t> starts;
    for (int s = 0; s <= num_sequences; ++s) starts.push_back(s * num_queries);
    Mirror mirror(memory());
    const kvx_rows_t q_rows = api::rows(mirror.add(q), KVX_DTYPE_F32);
    const kvx_rows_t out_rows = api::rows(mirror.add(out), KVX_DTYPE_F32);
    auto args = sized<kvx_attend_args_t>();
    args.layer = &layer_->layer;
    args.block_table = &by.table;
    args.seq_lens = &by.lengths;
    args.q_starts = mirror.add(starts);
    args.num_q_heads = api_test::kQHeads;
    args.q = &q_rows;
    args.out = &out_rows;
    args.num_queries = starts.back();
    args.max_q_len = static_cast<uint32_t>(num_queries);
    uint64_t bytes = 0;
    EXPECT_EQ(kvx_attend_workspace(&args, &bytes), KVX_STATUS_OK) << kvx_last_error();
    const auto workspace = memory().allocate(static_cast<int64_t>(bytes) + 1, "workspace");
    args.workspace = workspace.value().data();
    args.workspace_bytes = bytes;
    EXPECT_EQ(kvx_attend(&args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    mirror.fetch(out);
    return out;
  }
  uint64_t out_of_range() const { return layer_->out_of_range(); }

 private:
  template <class T>
  const T* place(const std::vector<T>& numbers) {
    const int64_t bytes = std::ssize(numbers) * static_cast<int64_t>(sizeof(T));
    cache::Region region = memory().allocate(bytes, "a table").value();
    EXPECT_TRUE(device::cuda_copy(region.data(), numbers.data(), bytes).ok());
    const auto* data = reinterpret_cast<const T*>(region.data());
    kept_.push_back(std::move(region));
    return data;
  }

  std::vector<std::vector<int32_t>> blocks_;  // even ids: V's of KV_OFFSETS are between them
  std::unique_ptr<PagedLayer> pages_;
  std::unique_ptr<DeviceLayer> layer_;
  std::vector<cache::Region> kept_;
};

// A few query rows go to decode_mma, many to prefill, for which tables are packed.
TEST_F(GpuAbiTables, GivePackedsOutputToTheBit) {
  for (const int num_queries : {1, 4, 16}) {
    SCOPED_TRACE(num_queries);
    const std::vector<float> expected =
        attend(table_of(KVX_BLOCK_TABLE_PACKED, rows_of_blocks<int32_t>(false)), num_queries);
    const DeviceTable tables[] = {
        table_of(KVX_BLOCK_TABLE_PACKED, rows_of_blocks<int64_t>(false)),
        table_of(KVX_BLOCK_TABLE_KV_OFFSETS, rows_of_blocks<int32_t>(true)),
        pages_of<int32_t>(sums_of_pages()),
        pages_of<int64_t>(sums_of_pages()),
    };
    for (size_t i = 0; i < std::size(tables); ++i) {
      EXPECT_EQ(attend(tables[i], num_queries), expected) << "table " << i;
    }
    EXPECT_EQ(out_of_range(), 0u);
  }
}

TEST_F(GpuAbiTables, WhatIsWrongInATableIsCountedAndOtherSequencesAreRight) {
  const std::vector<float> expected =
      attend(table_of(KVX_BLOCK_TABLE_PACKED, rows_of_blocks<int32_t>(false)), 1);
  uint64_t counted = 0;
  const auto spoils_the_third = [&](const char* what, const DeviceTable& by) {
    SCOPED_TRACE(what);
    const std::vector<float> found = attend(by, 1);
    const int64_t of_two = 2 * api_test::kQHeads * kDim;
    EXPECT_TRUE(std::equal(found.begin(), found.begin() + of_two, expected.begin()));
    EXPECT_NE(found, expected);
    EXPECT_GT(out_of_range(), counted);
    counted = out_of_range();
  };
  std::vector<int32_t> offsets = rows_of_blocks<int32_t>(true);
  offsets[5 * kMaxBlocks + 7] += 2;
  spoils_the_third("a V that is not behind its K", table_of(KVX_BLOCK_TABLE_KV_OFFSETS, offsets));
  std::vector<int64_t> wide = rows_of_blocks<int64_t>(false);
  wide[2 * kMaxBlocks + 3] += int64_t{1} << 33;
  spoils_the_third("an entry of more than 32 bits", table_of(KVX_BLOCK_TABLE_PACKED, wide));
  std::vector<int32_t> sums = sums_of_pages();
  sums[3] -= 20;
  spoils_the_third("fewer pages than tokens need", pages_of<int32_t>(sums));
  sums[3] = 1 << 30;
  spoils_the_third("pages beyond the list", pages_of<int32_t>(sums));
}

}  // namespace
}  // namespace kvx::tests::abi_tables_test
