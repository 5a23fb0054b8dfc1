// Sequences of another process by way of kvx.hpp.
#include <gmock/gmock.h>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

constexpr int32_t kTokens = 40;

TEST(CppFace, ASequenceOnOfferEntersAnotherCache) {
  api::Cache cache = sharing_cache("int8");
  api::Cache other = sharing_cache("int8");
  auto sequence = std::move(*api::Sequence::create(cache));
  feed(cache, sequence.number(), 0, kTokens);
  const auto offer = sequence.export_to("tcp://127.0.0.1:*");
  ASSERT_TRUE(offer.ok()) << offer.failure().text;
  EXPECT_THAT(*offer->endpoint(), HasSubstr("tcp://127.0.0.1:"));
  EXPECT_FALSE(*offer->wait(0)) << "nobody has it yet";

  kvx_import_report_t report{};
  const auto came = api::Sequence::import_from(other, *offer->endpoint(), {}, &report);
  ASSERT_TRUE(came.ok()) << came.failure().text;
  EXPECT_EQ(*other.recorded_tokens(came->number()), token_ids(0, kTokens));
  EXPECT_EQ(rows_of(other, came->number()), rows_of(cache, sequence.number()));
  EXPECT_GT(report.bytes, 0);
  EXPECT_TRUE(*offer->wait(60'000));
  EXPECT_EQ(offer->info()->num_taken, 1);
}

TEST(CppFace, LayersOfASequenceEnterAnotherCache) {
  api::Cache cache = sharing_cache("int8");
  api::Cache other = sharing_cache("int8");
  auto sequence = std::move(*api::Sequence::create(cache));
  const auto offer = sequence.export_layers_to("tcp://127.0.0.1:*", token_ids(0, kTokens));
  ASSERT_TRUE(offer.ok()) << offer.failure().text;
  EXPECT_EQ(offer->info()->num_layers, static_cast<int32_t>(kOwnedLayers));
  EXPECT_EQ(offer->info()->num_layers_there, 0);
  feed(cache, sequence.number(), 0, kTokens);
  EXPECT_EQ(offer->info()->num_layers_there, static_cast<int32_t>(kOwnedLayers));

  const auto came = other.import_sequence(*offer->endpoint());
  ASSERT_TRUE(came.ok()) << came.failure().text;
  EXPECT_EQ(rows_of(other, *came), rows_of(cache, sequence.number()));
}

TEST(CppFace, ARefusedImportSaysWhy) {
  api::Cache cache = sharing_cache("int8");
  api::Cache other = sharing_cache("int4");
  auto sequence = std::move(*api::Sequence::create(cache));
  feed(cache, sequence.number(), 0, kTokens);
  const auto offer = cache.export_sequence(sequence.number(), "tcp://127.0.0.1:*");
  ASSERT_TRUE(offer.ok()) << offer.failure().text;
  const auto refused = api::Sequence::import_from(other, *offer->endpoint());
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.failure().text, HasSubstr("int4"));

  api::ImportOptions options;
  options.may_transcode = true;
  EXPECT_TRUE(other.import_sequence(*offer->endpoint(), options).ok()) << kvx_last_error();

  options.first_kv_head = 1;
  options.num_kv_heads = kOwnedHeads;
  const auto beyond = other.import_sequence(*offer->endpoint(), options);
  ASSERT_FALSE(beyond.ok());
  EXPECT_THAT(beyond.failure().text, HasSubstr("options.first_kv_head is 1 of 2"));
}

}  // namespace
}  // namespace kvx::api_test
