// kvx_cache_publish_events, kvx_metrics_* and kvx_cache_set_name. What is sent is tested in
// tests/observe; here are the calls.
#include <gmock/gmock.h>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

kvx_event_publisher_t any_port() {
  auto publisher = sized<kvx_event_publisher_t>();
  publisher.endpoint = publisher.replay_endpoint = "tcp://127.0.0.1:*";
  return publisher;
}

TEST(OwnedObserve, PublishesEvents) {
  api::Cache cache = sharing_cache("int8");
  EXPECT_FALSE(cache.event_publisher().ok());
  const kvx_event_publisher_t publisher = any_port();
  ASSERT_TRUE(cache.publish_events(&publisher).ok()) << kvx_last_error();
  feed(cache, *cache.create_sequence(), 0, 20);
  const kvx_event_publisher_info_t info = *cache.event_publisher();
  EXPECT_THAT(info.endpoint, HasSubstr("tcp://127.0.0.1:"));
  EXPECT_THAT(info.replay_endpoint, HasSubstr("tcp://127.0.0.1:"));
  EXPECT_EQ(info.num_dropped, 0);
  // What is queued is sent before the publisher ends; another may begin.
  ASSERT_TRUE(cache.publish_events(&publisher).ok()) << kvx_last_error();
  ASSERT_TRUE(cache.publish_events(nullptr).ok());
  ASSERT_TRUE(cache.publish_events(nullptr).ok());
  EXPECT_FALSE(cache.event_publisher().ok());
}

TEST(OwnedObserve, RefusesPublishersThatCannotBe) {
  api::Cache cache = sharing_cache("int8");
  const auto message = [&](const kvx_event_publisher_t& publisher) {
    return cache.publish_events(&publisher).ok() ? "" : std::string(kvx_last_error());
  };
  kvx_event_publisher_t publisher = any_port();
  publisher.flags = 2;
  EXPECT_THAT(message(publisher), HasSubstr("publisher.flags is 0x2"));
  publisher = any_port();
  publisher.data_parallel_rank = UINT32_MAX;
  EXPECT_THAT(message(publisher), HasSubstr("data_parallel_rank is 4294967295"));
  publisher = any_port();
  publisher.buffer_batches = UINT32_MAX;
  EXPECT_THAT(message(publisher), HasSubstr("buffer_batches is 4294967295"));
  publisher = any_port();
  publisher.endpoint = "x";
  EXPECT_THAT(message(publisher), HasSubstr("'x' cannot be bound"));

  const kvx_event_publisher_t good = any_port();
  EXPECT_EQ(kvx_cache_publish_events(nullptr, &good), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_cache_event_publisher(cache.handle(), nullptr), KVX_STATUS_INVALID_ARGUMENT);
  ASSERT_TRUE(cache.publish_events(&good).ok());
  EXPECT_EQ(kvx_cache_event_publisher(cache.handle(), nullptr), KVX_STATUS_INVALID_ARGUMENT);
  auto without = api::Cache::create(owned_config("int8"));
  ASSERT_TRUE(without.ok());
  EXPECT_EQ(kvx_cache_publish_events(without->handle(), &good), KVX_STATUS_UNSUPPORTED);
}

std::string metrics() {
  uint64_t bytes = 0;
  EXPECT_EQ(kvx_metrics_text(nullptr, 0, &bytes), KVX_STATUS_OK) << kvx_last_error();
  std::string text(bytes + 4096, '\0');
  EXPECT_EQ(kvx_metrics_text(text.data(), text.size(), &bytes), KVX_STATUS_OK);
  text.resize(bytes - 1);
  return text;
}

TEST(OwnedObserve, NamesACacheInItsMetrics) {
  {
    api::Cache cache = sharing_cache("int8");
    ASSERT_TRUE(cache.set_name("a \"name\"").ok());
    EXPECT_THAT(metrics(), HasSubstr("kvx_sequences{cache=\"a \\\"name\\\"\"} 0"));
    ASSERT_EQ(kvx_cache_set_name(cache.handle(), nullptr), KVX_STATUS_OK);
    EXPECT_THAT(metrics(), testing::Not(HasSubstr("name")));
    EXPECT_THAT(metrics(), HasSubstr("kvx_sequences"));
  }
  EXPECT_THAT(metrics(), testing::Not(HasSubstr("kvx_sequences")));
  EXPECT_EQ(kvx_cache_set_name(nullptr, "a"), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(OwnedObserve, ServesMetrics) {
  uint32_t port = 0;
  ASSERT_EQ(kvx_metrics_serve(nullptr, 0, &port), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_GT(port, 0u);
  uint32_t same = 0;
  ASSERT_EQ(kvx_metrics_serve("127.0.0.1", port, &same), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(same, port);
  EXPECT_EQ(kvx_metrics_stop(), KVX_STATUS_OK);
  EXPECT_EQ(kvx_metrics_stop(), KVX_STATUS_OK);
  EXPECT_EQ(kvx_metrics_serve(nullptr, 65536, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_metrics_serve("nowhere.invalid", 0, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_metrics_text(nullptr, 0, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

// ---- transfers: what is sent is tested in tests/transfer

TEST(OwnedTransfer, TakesASequenceToAnotherCache) {
  api::Cache from = sharing_cache("int8");
  api::Cache to = sharing_cache("int8");
  const int32_t sequence = *from.create_sequence();
  feed(from, sequence, 0, 20);
  kvx_export_t offer = nullptr;
  ASSERT_EQ(kvx_sequence_export(from.handle(), sequence, nullptr, &offer), KVX_STATUS_OK)
      << kvx_last_error();
  auto info = sized<kvx_export_info_t>();
  ASSERT_EQ(kvx_export_info(offer, &info), KVX_STATUS_OK);
  auto options = sized<kvx_import_options_t>();
  options.endpoint = info.endpoint;
  int32_t imported = -1;
  auto report = sized<kvx_import_report_t>();
  ASSERT_EQ(kvx_sequence_import(to.handle(), &options, &imported, &report), KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(report.bytes, info.bytes);
  EXPECT_EQ(rows_of(to, imported), rows_of(from, sequence));
  uint32_t is_taken = 0;
  EXPECT_EQ(kvx_export_wait(offer, 60'000, &is_taken), KVX_STATUS_OK);
  EXPECT_EQ(is_taken, 1u);
  kvx_export_free(offer);
  kvx_export_free(offer);
  kvx_export_free(nullptr);
  EXPECT_EQ(kvx_export_info(offer, &info), KVX_STATUS_INVALID_ARGUMENT) << "it was freed";
  EXPECT_THAT(kvx_last_error(), HasSubstr("offer is not a handle"));
}

TEST(OwnedTransfer, TakesASequenceLayerByLayer) {
  api::Cache from = sharing_cache("int8");
  api::Cache to = sharing_cache("int8");
  const int32_t sequence = *from.create_sequence();
  feed(from, sequence, 0, 8);
  const std::vector<int32_t> tokens = token_ids(0, 20);
  kvx_export_t offer = nullptr;
  ASSERT_EQ(kvx_sequence_export_layers(from.handle(), sequence, tokens.data(), 20, nullptr, &offer),
            KVX_STATUS_OK)
      << kvx_last_error();
  auto info = sized<kvx_export_info_t>();
  ASSERT_EQ(kvx_export_info(offer, &info), KVX_STATUS_OK);
  EXPECT_EQ(info.num_layers, kOwnedLayers);
  EXPECT_EQ(info.num_layers_there, 0);
  feed(from, sequence, 8, 20);
  ASSERT_EQ(kvx_export_info(offer, &info), KVX_STATUS_OK);
  EXPECT_EQ(info.num_layers_there, kOwnedLayers);
  EXPECT_EQ(info.is_broken, 0u);
  auto options = sized<kvx_import_options_t>();
  options.endpoint = info.endpoint;
  int32_t imported = -1;
  ASSERT_EQ(kvx_sequence_import(to.handle(), &options, &imported, nullptr), KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(rows_of(to, imported), rows_of(from, sequence));
  options.first_kv_head = 1;
  options.num_kv_heads = kOwnedHeads;
  EXPECT_EQ(kvx_sequence_import(to.handle(), &options, &imported, nullptr),
            KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("options.first_kv_head is 1 of"));
  kvx_export_free(offer);

  const int32_t other = *from.create_sequence();
  ASSERT_EQ(kvx_sequence_export_layers(from.handle(), other, tokens.data(), 20, nullptr, &offer),
            KVX_STATUS_OK);
  ASSERT_TRUE(from.free_sequence(other).ok());
  ASSERT_EQ(kvx_export_info(offer, &info), KVX_STATUS_OK);
  EXPECT_EQ(info.is_broken, 1u);
  kvx_export_free(offer);
}

TEST(OwnedTransfer, RefusesLayersThatCannotBe) {
  api::Cache cache = sharing_cache("int8");
  const kvx_cache_t h = cache.handle();
  const int32_t sequence = *cache.create_sequence();
  const std::vector<int32_t> tokens = token_ids(0, 20);
  kvx_export_t offer = nullptr;
  const auto refused = [&](kvx_cache_t of, int32_t s, const int32_t* first, int64_t count,
                           kvx_export_t* to) {
    return kvx_sequence_export_layers(of, s, first, count, nullptr, to);
  };
  EXPECT_EQ(refused(nullptr, sequence, tokens.data(), 20, &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(refused(h, -1, tokens.data(), 20, &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(refused(h, sequence, nullptr, 20, &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(refused(h, sequence, tokens.data(), -1, &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(refused(h, sequence, tokens.data(), 0, &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(refused(h, sequence, tokens.data(), 20, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_export_layers(h, sequence, tokens.data(), 20, "x", &offer),
            KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("'x' cannot be bound"));
}

TEST(OwnedTransfer, RefusesCallsThatCannotBe) {
  api::Cache cache = sharing_cache("int8");
  const kvx_cache_t h = cache.handle();
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 20);
  kvx_export_t offer = nullptr;
  uint32_t is_taken = 0;
  int32_t imported = 0;
  auto options = sized<kvx_import_options_t>();
  EXPECT_EQ(kvx_sequence_export(nullptr, sequence, nullptr, &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_export(h, -1, nullptr, &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_export(h, sequence, nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_export(h, sequence, "x", &offer), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_export_info(nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_export_wait(nullptr, 0, &is_taken), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_import(h, nullptr, &imported, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_import(h, &options, &imported, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("endpoint is ''"));
  options.endpoint = "tcp://127.0.0.1:1";
  options.timeout_ms = 50;
  EXPECT_EQ(kvx_sequence_import(h, &options, nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_import(h, &options, &imported, nullptr), KVX_STATUS_UNSUPPORTED);
  options.flags = 2;
  EXPECT_EQ(kvx_sequence_import(h, &options, &imported, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kvx::api_test
