// Metrics: the figures that a cache shows, as text and over HTTP.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "observe/metrics_server.hpp"
#include "tests/kv/stream.hpp"

namespace kvx::observe {
namespace {

using testing::HasSubstr;
using testing::Not;

std::unique_ptr<kv::KvCache> told_cache(std::string_view recipe = "int8") {
  kv::KvCacheConfig config = kv::config_of(recipe, 16);
  config.prefix.is_on = true;
  config.eviction = cache::EvictionKind::k2Q;
  return kv::created(std::move(config));
}

std::string text() {
  const Result<std::string> text = metrics_text();
  return text.ok() ? text.value() : throw std::runtime_error(text.error().message);
}

// 50 tokens, recorded, and looked up again.
void use(kv::KvCache& cache) {
  const kv::Stream stream(50);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 50; ++i) tokens.push_back(i);
  const int sequence = cache.create_sequence().value();
  kv::feed(cache, sequence, stream, 0, 50, 25);
  ASSERT_TRUE(cache.record_tokens(sequence, tokens).ok());
  ASSERT_TRUE(cache.create_sequence_from({}, tokens).ok());
}

TEST(Metrics, SayWhatTheCacheDid) {
  auto cache = told_cache();
  const ShownCache shown(*cache, "one");
  use(*cache);
  const std::string seen = text();
  EXPECT_THAT(seen, HasSubstr("# TYPE kvx_blocks gauge"));
  EXPECT_THAT(seen, HasSubstr("kvx_prefix_cache_queries_total{cache=\"one\"} 48"));
  EXPECT_THAT(seen, HasSubstr("kvx_prefix_cache_hits_total{cache=\"one\"} 48"));
  EXPECT_THAT(seen, HasSubstr("kvx_sequences{cache=\"one\"} 2"));
  EXPECT_THAT(seen, HasSubstr("recipe=\"int8\""));
  EXPECT_THAT(seen, HasSubstr("policy=\"2q\""));
  EXPECT_THAT(seen, HasSubstr("state=\"used\"} 4"));
  EXPECT_THAT(seen, HasSubstr("kvx_step_seconds_count{cache=\"one\"} 2"));
  EXPECT_THAT(seen, HasSubstr("kvx_step_seconds_bucket{cache=\"one\",le=\"+Inf\"} 2"));
  EXPECT_THAT(seen, HasSubstr("kvx_prefix_lookup_seconds_count{cache=\"one\"} 1"));
  EXPECT_THAT(seen, Not(HasSubstr("kvx_external_")));
}

TEST(Metrics, TellOfSaturatedInputsByLayerAndSide) {
  auto cache = told_cache("int8");
  const ShownCache shown(*cache, "");
  use(*cache);
  EXPECT_THAT(text(), HasSubstr("layer=\"1\",side=\"v\"} 0"));
}

TEST(Metrics, HaveOneFamilyForAllCaches) {
  auto first = told_cache();
  auto second = told_cache("nvfp4:auto");
  const ShownCache one(*first, "same");
  std::string seen;
  {
    const ShownCache two(*second, "same");
    seen = text();
  }
  EXPECT_THAT(seen, HasSubstr("cache=\"same\""));
  EXPECT_THAT(seen, HasSubstr("cache=\"same ("));
  EXPECT_THAT(seen, HasSubstr("format=\"nvfp4\""));
  EXPECT_EQ(seen.find("# TYPE kvx_blocks gauge"), seen.rfind("# TYPE kvx_blocks gauge"));
  EXPECT_THAT(text(), Not(HasSubstr("nvfp4"))) << "it is shown no more";
}

std::string get(int port, const std::string& path) {
  const int socket_ = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  EXPECT_EQ(write(socket_, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char bytes[4096];
  for (ssize_t count; (count = read(socket_, bytes, sizeof bytes)) > 0;) {
    answer.append(bytes, static_cast<size_t>(count));
  }
  close(socket_);
  return answer;
}

TEST(MetricsServer, AnswersWhileStepsGoOn) {
  auto cache = told_cache();
  const ShownCache shown(*cache, "busy");
  const auto server = MetricsServer::create("127.0.0.1", 0);
  ASSERT_TRUE(server.ok()) << server.error().message;
  std::thread reader([&] {
    for (int i = 0; i < 20; ++i) {
      EXPECT_THAT(get(server.value()->port(), "/metrics"), HasSubstr("kvx_blocks{cache=\"busy\""));
    }
  });
  const kv::Stream stream(390);
  const int sequence = cache->create_sequence().value();
  kv::feed(*cache, sequence, stream, 0, 390, 3);
  reader.join();
  EXPECT_THAT(get(server.value()->port(), "/elsewhere"), HasSubstr("404"));
}

TEST(MetricsServer, RefusesWhatItCannotBind) {
  const auto first = MetricsServer::create("127.0.0.1", 0);
  ASSERT_TRUE(first.ok()) << first.error().message;
  const auto message = [](const std::string& address, int port) {
    const auto server = MetricsServer::create(address, port);
    return server.ok() ? "" : server.error().message;
  };
  EXPECT_THAT(message("127.0.0.1", first.value()->port()), HasSubstr("cannot be bound"));
  EXPECT_THAT(message("127.0.0.1", 65536), HasSubstr("port is 65536"));
  EXPECT_THAT(message("", 1), HasSubstr("address is ''"));
  EXPECT_THAT(message("nowhere.invalid", 0), HasSubstr("cannot be bound"));
}

TEST(LatencyHistogram, CountsEachCallInOneBucket) {
  LatencyHistogram histogram;
  histogram.add(std::chrono::microseconds(16));
  histogram.add(std::chrono::microseconds(17));
  histogram.add(std::chrono::hours(1));
  const LatencyHistogram::Snapshot seen = histogram.snapshot();
  EXPECT_EQ(seen.counts[0], 1u);
  EXPECT_EQ(seen.counts[1], 1u);
  EXPECT_EQ(seen.counts[LatencyHistogram::kNumBounds], 1u);
  EXPECT_NEAR(seen.sum_seconds, 3600.000033, 1e-6);
}

}  // namespace
}  // namespace kvx::observe
