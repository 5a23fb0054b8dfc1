// EventPublisher, heard through ZeroMQ: what comes is what the cache did, and nobody delays it.
#include "observe/event_publisher.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <msgpack.hpp>
#include <zmq.hpp>
#include <zmq_addon.hpp>

#include "tests/kv/stream.hpp"
#include "tests/support/waits_until.hpp"

namespace kvx::observe {
namespace {

using kv::Stream;
using testing::ElementsAre;
using testing::HasSubstr;
using Strings = std::vector<std::string>;

constexpr int kBlockSize = 16;

std::unique_ptr<kv::KvCache> prefix_cache(int64_t host_tier_bytes = 0) {
  kv::KvCacheConfig config = kv::config_of("int8", kBlockSize);
  config.prefix.is_on = true;
  config.prefix.hash = cache::HashAlgorithm::kSha256;
  if (host_tier_bytes > 0) config.tiers = {{tier::TierKind::kHost, host_tier_bytes}};
  return kv::created(std::move(config));
}

// A sequence of the tokens [0, num_tokens), recorded.
int add_sequence(kv::KvCache& cache, int num_tokens, const cache::PrefixKeys& keys = {}) {
  const Stream stream(num_tokens);
  std::vector<int32_t> tokens;
  for (int i = 0; i < num_tokens; ++i) tokens.push_back(i);
  const int sequence = cache.create_sequence_from(keys, {}).value();
  kv::feed(cache, sequence, stream, 0, num_tokens, 1000);
  EXPECT_TRUE(cache.record_tokens(sequence, tokens).ok());
  return sequence;
}

EventPublisherOptions any_port() {
  EventPublisherOptions options;
  options.endpoint = "tcp://127.0.0.1:*";
  options.replay_endpoint = "tcp://127.0.0.1:*";
  options.topic = "kv";
  return options;
}

std::unique_ptr<EventPublisher> published(kv::KvCache& cache,
                                          const EventPublisherOptions& options = any_port()) {
  auto publisher = EventPublisher::create(cache, options);
  if (!publisher.ok()) throw std::runtime_error(publisher.error().message);
  return std::move(publisher).value();
}

int64_t number_of(const zmq::message_t& frame) {
  int64_t number = 0;
  for (size_t i = 0; i < frame.size(); ++i) number = number << 8 | frame.data<uint8_t>()[i];
  return number;
}

// Any event, with the fields that tests look at.
struct Heard {
  std::string type;
  std::string medium;
  size_t num_hashes = 0;
  std::vector<int> tokens;
  bool has_parent = false;
  std::string lora_name;
};

Heard heard_from(const std::map<std::string, msgpack::object>& event) {
  Heard heard;
  heard.type = event.at("type").as<std::string>();
  if (heard.type == "AllBlocksCleared") return heard;
  heard.medium = event.at("medium").as<std::string>();
  heard.num_hashes = event.at("block_hashes").via.array.size;
  if (heard.type == "BlockRemoved") return heard;
  heard.tokens = event.at("token_ids").as<std::vector<int>>();
  heard.has_parent = !event.at("parent_block_hash").is_nil();
  if (!event.at("lora_name").is_nil()) heard.lora_name = event.at("lora_name").as<std::string>();
  return heard;
}

std::vector<Heard> events_of(const zmq::message_t& payload) {
  const msgpack::object_handle batch = msgpack::unpack(payload.data<char>(), payload.size());
  const auto parts = batch.get().as<std::vector<msgpack::object>>();
  EXPECT_EQ(parts.size(), 3u);
  EXPECT_GT(parts[0].as<double>(), 1.7e9);
  std::vector<Heard> events;
  for (const auto& event : parts[1].as<std::vector<std::map<std::string, msgpack::object>>>()) {
    events.push_back(heard_from(event));
  }
  return events;
}

// Asks the replay socket for all batches from `first` on. Returns each number with its events.
std::vector<std::pair<int64_t, std::vector<Heard>>> replay(const EventPublisher& publisher,
                                                           int64_t first) {
  zmq::context_t context(1);
  zmq::socket_t socket(context, zmq::socket_type::req);
  socket.set(zmq::sockopt::linger, 0);
  socket.set(zmq::sockopt::rcvtimeo, 60'000);
  socket.connect(publisher.replay_endpoint());
  std::array<uint8_t, 8> request{};
  for (int i = 0; i < 8; ++i) request[i] = static_cast<uint8_t>(first >> (8 * (7 - i)));
  socket.send(zmq::buffer(request), zmq::send_flags::none);
  std::vector<std::pair<int64_t, std::vector<Heard>>> batches;
  // A REQ socket takes one answer: the others of this request are read as a DEALER would.
  std::vector<zmq::message_t> frames;
  EXPECT_TRUE(zmq::recv_multipart(socket, std::back_inserter(frames)));
  if (frames.size() == 3 && number_of(frames[1]) != -1) {
    batches.emplace_back(number_of(frames[1]), events_of(frames[2]));
  }
  return batches;
}

// All batches that are kept, over a DEALER socket, once `num_events` have been sent.
std::vector<std::pair<int64_t, std::vector<Heard>>> all_batches(const EventPublisher& publisher,
                                                                int64_t num_events) {
  EXPECT_TRUE(tests::waits_until([&] { return publisher.counts().num_events >= num_events; }))
      << publisher.counts().num_events << " events were sent of " << num_events;
  zmq::context_t context(1);
  zmq::socket_t socket(context, zmq::socket_type::dealer);
  socket.set(zmq::sockopt::linger, 0);
  socket.set(zmq::sockopt::rcvtimeo, 60'000);
  socket.connect(publisher.replay_endpoint());
  const std::string from_the_first(8, '\0');
  const std::array<zmq::const_buffer, 2> request = {zmq::const_buffer(),
                                                    zmq::buffer(from_the_first)};
  zmq::send_multipart(socket, request);
  std::vector<std::pair<int64_t, std::vector<Heard>>> batches;
  while (true) {
    std::vector<zmq::message_t> frames;
    if (!zmq::recv_multipart(socket, std::back_inserter(frames)) || frames.size() != 4) {
      ADD_FAILURE() << "the answer has " << frames.size() << " frames; expected 4";
      return batches;
    }
    if (number_of(frames[2]) == -1) return batches;
    EXPECT_EQ(frames[1].to_string(), "kv");
    batches.emplace_back(number_of(frames[2]), events_of(frames[3]));
  }
}

std::vector<Heard> all_events(const EventPublisher& publisher, int64_t num_events) {
  std::vector<Heard> events;
  for (const auto& [number, batch] : all_batches(publisher, num_events)) {
    events.insert(events.end(), batch.begin(), batch.end());
  }
  return events;
}

TEST(EventPublisher, SendsWhatTheCacheDoes) {
  auto cache = prefix_cache();
  const auto publisher = published(*cache);
  const int sequence = add_sequence(*cache, 50, {"a LoRA", "", "a tenant"});
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  ASSERT_EQ(cache->evict_blocks(1).value(), 1);
  ASSERT_TRUE(cache->clear_prefixes().ok());
  // 3 stored, 1 evicted, 2 removed as all is cleared, and that.
  int num_stored = 0;
  int num_removed = 0;
  std::vector<int> tokens;
  const std::vector<Heard> events = all_events(*publisher, 7);
  for (const Heard& event : events) {
    if (event.type == "BlockStored") {
      EXPECT_EQ(event.has_parent, !tokens.empty());
      EXPECT_EQ(event.lora_name, "a LoRA");
      EXPECT_EQ(event.tokens.size(), event.num_hashes * kBlockSize);
      tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
      num_stored += static_cast<int>(event.num_hashes);
    } else if (event.type == "BlockRemoved") {
      num_removed += static_cast<int>(event.num_hashes);
    }
    EXPECT_EQ(event.medium, event.type == "AllBlocksCleared" ? "" : "GPU");
  }
  EXPECT_EQ(num_stored, 3);
  EXPECT_EQ(num_removed, 3);
  EXPECT_EQ(events.back().type, "AllBlocksCleared");
  for (int i = 0; i < 48; ++i) EXPECT_EQ(tokens[i], i);
}

TEST(EventPublisher, TellsOfBlocksThatAreThereAlreadyInEveryTier) {
  auto cache = prefix_cache(1 << 20);
  add_sequence(*cache, 50);
  cache->wait_for_tiers();
  const auto publisher = published(*cache);
  Strings media;
  for (const Heard& event : all_events(*publisher, 6)) {
    EXPECT_EQ(event.type, "BlockStored");
    for (size_t i = 0; i < event.num_hashes; ++i) media.push_back(event.medium);
  }
  EXPECT_EQ(media, (Strings{"GPU", "GPU", "GPU", "CPU", "CPU", "CPU"}));
}

TEST(EventPublisher, JoinsAChainsBlocksIntoOneEvent) {
  auto cache = prefix_cache();
  constexpr int kNumBlocks = 24;
  add_sequence(*cache, kNumBlocks * kBlockSize);
  const auto publisher = published(*cache);
  const std::vector<Heard> events = all_events(*publisher, kNumBlocks);
  // The thread may take some of them before the last is queued, but hardly each alone.
  EXPECT_LT(events.size(), size_t{kNumBlocks});
  EXPECT_EQ(events[0].tokens.front(), 0);
  EXPECT_FALSE(events[0].has_parent);
}

TEST(EventPublisher, SubscribersHearIt) {
  auto cache = prefix_cache();
  const auto publisher = published(*cache);
  zmq::context_t context(1);
  zmq::socket_t socket(context, zmq::socket_type::sub);
  socket.set(zmq::sockopt::linger, 0);
  socket.set(zmq::sockopt::rcvtimeo, 50);
  socket.set(zmq::sockopt::subscribe, "kv");
  socket.connect(publisher->endpoint());
  std::vector<zmq::message_t> frames;
  for (int i = 0; frames.empty() && i < 1200; ++i) {  // until the subscription has arrived
    ASSERT_TRUE(cache->clear_prefixes().ok());
    (void)zmq::recv_multipart(socket, std::back_inserter(frames));
  }
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_EQ(frames[0].to_string(), "kv");
  EXPECT_EQ(events_of(frames[2])[0].type, "AllBlocksCleared");
}

TEST(EventPublisher, LeavesOutANumberForEventsThatFoundNoRoom) {
  auto cache = prefix_cache();
  EventPublisherOptions options = any_port();
  options.queue_events = 1;
  options.buffer_batches = 30000;  // all of them, however fast the thread is
  const auto publisher = published(*cache, options);
  // Far more than the queue takes, while nobody waits for it.
  for (int i = 0; i < 20000; ++i) ASSERT_TRUE(cache->clear_prefixes().ok());
  const int64_t num_dropped = publisher->counts().num_dropped;
  ASSERT_GT(num_dropped, 0);
  const auto before = all_batches(*publisher, 20000 - num_dropped);
  ASSERT_TRUE(cache->clear_prefixes().ok());
  const auto batches = all_batches(*publisher, 20001 - num_dropped);
  int64_t num_gaps = batches.front().first;
  for (size_t i = 1; i < batches.size(); ++i) {
    num_gaps += batches[i].first - batches[i - 1].first - 1;
  }
  EXPECT_GT(num_gaps, 0);
  EXPECT_GT(batches.size(), before.size());
}

TEST(EventPublisher, KeepsAsManyBatchesAsItIsTold) {
  auto cache = prefix_cache();
  EventPublisherOptions options = any_port();
  options.buffer_batches = 2;
  const auto publisher = published(*cache, options);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(cache->clear_prefixes().ok());
    all_batches(*publisher, i + 1);  // so that each has a batch of its own
  }
  const auto batches = all_batches(*publisher, 4);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].first, 2);
  EXPECT_EQ(batches[1].first, 3);
  EXPECT_EQ(replay(*publisher, 3).size(), 1u) << "a REQ socket gets the first batch";
  // An answer is counted when it is sent, which may be after it was heard.
  EXPECT_TRUE(tests::waits_until([&] { return publisher->counts().num_replays >= 6; }));
}

TEST(EventPublisher, RefusesWhatItCannotDo) {
  auto cache = prefix_cache();
  const auto message = [&](const EventPublisherOptions& options) {
    const auto publisher = EventPublisher::create(*cache, options);
    return publisher.ok() ? "" : publisher.error().message;
  };
  EventPublisherOptions options = any_port();
  options.endpoint = "nonsense";
  EXPECT_THAT(message(options), HasSubstr("'nonsense' cannot be bound"));
  options = any_port();
  options.endpoint = "";
  EXPECT_THAT(message(options), HasSubstr("endpoint is ''"));
  options = any_port();
  options.buffer_batches = 0;
  EXPECT_THAT(message(options), HasSubstr("buffer_batches is 0"));
  options = any_port();
  options.data_parallel_rank = -1;
  EXPECT_THAT(message(options), HasSubstr("data_parallel_rank is -1"));
  const auto first = published(*cache);
  options = any_port();
  options.endpoint = first->endpoint();
  EXPECT_THAT(message(options), HasSubstr("in use"));

  auto without = kv::created(kv::config_of("int8", kBlockSize));
  const auto publisher = EventPublisher::create(*without, any_port());
  ASSERT_FALSE(publisher.ok());
  EXPECT_EQ(publisher.error().code, ErrorCode::kUnsupported);
}

TEST(EventPublisher, IsHeardBesideTheCallersListener) {
  auto cache = prefix_cache();
  int num_heard = 0;
  cache->set_prefix_listener([&](const cache::PrefixEvent&) { ++num_heard; });
  auto publisher = published(*cache);
  const int sequence = add_sequence(*cache, 50);
  EXPECT_EQ(num_heard, 3);
  all_batches(*publisher, 3);
  publisher.reset();
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  ASSERT_TRUE(cache->clear_prefixes().ok());
  EXPECT_EQ(num_heard, 7);
}

}  // namespace
}  // namespace kvx::observe
