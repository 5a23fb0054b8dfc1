// Stores: a folder, and a real Redis, by the same cases; and what a server may do to its client.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "tests/cache/random_history.hpp"
#include "tests/support/temporary_path.hpp"
#include "tests/tier/redis_server.hpp"
#include "tier/store/redis_replies.hpp"
#include "tier/store/remote_store.hpp"

namespace kvx::tier {
namespace {

using testing::HasSubstr;

std::vector<uint8_t> noise(size_t bytes, int seed) {
  std::vector<uint8_t> value(bytes);
  for (size_t i = 0; i < bytes; ++i) value[i] = static_cast<uint8_t>(i * 31 + i / 253 + seed);
  return value;
}

// Their timeout is no test's subject: a machine may stall.
RedisOptions options_with_url(const std::string& url) {
  RedisOptions options;
  options.url = url;
  options.timeout_ms = 60'000;
  return options;
}

std::unique_ptr<RemoteStore> redis(const RedisServer& server,
                                   RedisOptions options = options_with_url("")) {
  if (options.url.empty()) options.url = server.url();
  options.max_value_bytes = 4 << 20;
  return open_redis_store(options).value();
}

bool put_one(RemoteStore& store, const std::string& key, std::span<const uint8_t> value) {
  StorePut item{key, value};
  const Status status = store.put(std::span(&item, 1));
  EXPECT_TRUE(status.ok()) << status.error().message;
  return item.is_stored;
}

// -1: there is none.
int64_t get_one(RemoteStore& store, const std::string& key, std::span<uint8_t> buffer) {
  StoreGet item{key, buffer};
  const Status status = store.get(std::span(&item, 1));
  EXPECT_TRUE(status.ok()) << status.error().message;
  return item.num_bytes;
}

class Stores : public testing::TestWithParam<bool> {  // Redis?
 protected:
  void SetUp() override {
    if (GetParam()) {
      server_ = std::make_unique<RedisServer>();
      store_ = redis(*server_);
    } else {
      folder_ = tests::temporary_path("kvx_store_test");
      std::filesystem::remove_all(folder_);
      store_ = open_folder_store(folder_).value();
    }
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::unique_ptr<RedisServer> server_;
  std::string folder_;
  std::unique_ptr<RemoteStore> store_;
};
INSTANTIATE_TEST_SUITE_P(FolderAndRedis, Stores, testing::Bool(),
                         [](const auto& one) { return one.param ? "Redis" : "Folder"; });

TEST_P(Stores, GiveBackWhatTheyWereGiven) {
  std::vector<std::vector<uint8_t>> values;
  for (int i = 0; i < 20; ++i) values.push_back(noise(100'000 + i, i));
  std::vector<StorePut> puts;
  for (int i = 0; i < 20; ++i) puts.push_back({fmt::format("kvx1/t/s/{:03}-0p", i), values[i]});
  ASSERT_TRUE(store_->put(puts).ok());
  std::vector<std::vector<uint8_t>> buffers(21, std::vector<uint8_t>(200'000));
  std::vector<StoreGet> gets;
  for (int i = 0; i < 21; ++i) gets.push_back({fmt::format("kvx1/t/s/{:03}-0p", i), buffers[i]});
  ASSERT_TRUE(store_->get(gets).ok());
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(puts[i].is_stored);
    ASSERT_EQ(gets[i].num_bytes, 100'000 + i);
    buffers[i].resize(gets[i].num_bytes);
    EXPECT_EQ(buffers[i], values[i]);
  }
  EXPECT_EQ(gets[20].num_bytes, -1);
}

TEST_P(Stores, AValueLargerThanItsBufferIsNone) {
  ASSERT_TRUE(put_one(*store_, "kvx1/t/s/large-0p", noise(1000, 1)));
  std::vector<uint8_t> buffer(999);
  EXPECT_EQ(get_one(*store_, "kvx1/t/s/large-0p", buffer), -1);
  buffer.resize(1000);
  EXPECT_EQ(get_one(*store_, "kvx1/t/s/large-0p", buffer), 1000);
}

// What is missing or too large takes another way than what is not, and the next ones are whole.
TEST_P(Stores, TellOfEachValueWhenItIsThere) {
  constexpr int kNumKeys = 40;
  const auto key = [](int i) { return fmt::format("kvx1/t/s/{:03}-0p", i); };
  const auto is_missing = [](int i) { return i % 5 == 3; };
  const auto is_too_large = [](int i) { return i % 7 == 2; };
  std::vector<std::vector<uint8_t>> values;
  std::vector<StorePut> puts;
  for (int i = 0; i < kNumKeys; ++i) values.push_back(noise(i < 3 ? i : 3000 * i, i));
  for (int i = 0; i < kNumKeys; ++i) {
    if (!is_missing(i)) puts.push_back({key(i), values[i]});
  }
  ASSERT_TRUE(store_->put(puts).ok());
  std::vector<std::vector<uint8_t>> buffers;
  std::vector<StoreGet> gets;
  for (int i = 0; i < kNumKeys; ++i) {
    buffers.emplace_back(values[i].size() + (is_too_large(i) ? -1 : i % 3));
  }
  for (int i = 0; i < kNumKeys; ++i) gets.push_back({key(i), buffers[i]});
  std::vector<int64_t> seen(kNumKeys, -2);
  std::vector<uint8_t> are_whole(kNumKeys, 0);
  const auto arrived = [&](size_t i) {
    seen[i] = gets[i].num_bytes;
    are_whole[i] = std::ranges::equal(values[i], gets[i].buffer.first(values[i].size())) ? 1 : 0;
  };
  for (int i = 0; i < kNumKeys; ++i) {
    if (is_too_large(i)) values[i].pop_back();  // there is no more to compare with
  }
  ASSERT_TRUE(store_->get_each(gets, arrived).ok());
  for (int i = 0; i < kNumKeys; ++i) {
    const bool is_there = !is_missing(i) && !is_too_large(i);
    EXPECT_EQ(seen[i], is_there ? std::ssize(values[i]) : -1) << i;
    EXPECT_TRUE(!is_there || are_whole[i] == 1) << i;
  }
}

TEST_P(Stores, SayWhatTheyHaveAndForgetIt) {
  for (const char* key : {"kvx1/a/s/1-0p", "kvx1/a/s/2-0p", "kvx1/a/t/3-0p", "kvx1/ab/s/4-0p"}) {
    ASSERT_TRUE(put_one(*store_, key, noise(10, 1)));
  }
  const std::vector<std::string> keys = {"kvx1/a/s/1-0p", "kvx1/a/s/2-0p", "kvx1/a/t/3-0p",
                                         "kvx1/ab/s/4-0p", "kvx1/a/s/5-0p"};
  const auto held = [&] {
    std::vector<uint8_t> has(keys.size(), 9);
    EXPECT_TRUE(store_->exists(keys, has).ok());
    return has;
  };
  EXPECT_EQ(held(), (std::vector<uint8_t>{1, 1, 1, 1, 0}));
  ASSERT_TRUE(store_->remove(std::span(keys).first(1)).ok());
  EXPECT_EQ(held(), (std::vector<uint8_t>{0, 1, 1, 1, 0}));
  ASSERT_TRUE(store_->remove(std::span(keys).first(1)).ok()) << "twice is no error";
  ASSERT_TRUE(store_->remove_all("kvx1/a").ok());
  EXPECT_EQ(held(), (std::vector<uint8_t>{0, 0, 0, 1, 0})) << "another tenant's stays";
  ASSERT_TRUE(store_->remove_all("kvx1/none").ok());
}

// Puts the same keys again and again, with other values each time, until it is killed.
[[noreturn]] void put_for_ever(const std::string& folder) {
  const auto store = open_folder_store(folder).value();
  for (int seed = 0;; ++seed) {
    const std::vector<uint8_t> value = noise(200'000, seed % 251);
    StorePut item{fmt::format("kvx1/t/s/{:02}-0p", seed % 10), value};
    (void)store->put(std::span(&item, 1));
  }
}

TEST(FolderStore, AWriterThatIsKilledLeavesWholeValues) {
  const std::string folder = tests::temporary_path("kvx_killed_writer");
  std::filesystem::remove_all(folder);
  const auto reader = open_folder_store(folder).value();
  std::vector<uint8_t> buffer(400'000);
  const int64_t num_kills = cache::num_operations(30, 1000);
  int64_t num_values = 0;
  for (int64_t i = 0; i < num_kills; ++i) {
    const pid_t writer = fork();
    if (writer == 0) put_for_ever(folder);
    const auto pause = std::chrono::milliseconds(1 + i % 20);
    // The first writer lives until it has put something, however slow the machine.
    do {
      std::this_thread::sleep_for(pause);
      ASSERT_EQ(waitpid(writer, nullptr, WNOHANG), 0) << "the writer ended before it was killed";
    } while (i == 0 && get_one(*reader, "kvx1/t/s/00-0p", buffer) < 0);
    kill(writer, SIGKILL);
    waitpid(writer, nullptr, 0);
    for (int key = 0; key < 10; ++key) {
      const int64_t bytes = get_one(*reader, fmt::format("kvx1/t/s/{:02}-0p", key), buffer);
      if (bytes < 0) continue;
      ++num_values;
      ASSERT_EQ(bytes, 200'000);
      const std::vector<uint8_t> expected = noise(200'000, buffer[0]);
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), buffer.begin())) << "kill " << i;
    }
  }
  EXPECT_GT(num_values, 0);
  std::filesystem::remove_all(folder);
}

TEST(FolderStore, StoresOfOneProcessShareAFolder) {
  const std::string folder = tests::temporary_path("kvx_shared_folder");
  std::filesystem::remove_all(folder);
  constexpr int kNumStores = 4, kNumValues = 50;
  const auto key = [](int store, int value) {
    return fmt::format("kvx1/t/{}/{:02}-0p", store, value);
  };
  std::vector<std::thread> writers;
  for (int store = 0; store < kNumStores; ++store) {
    writers.emplace_back([&, store] {
      const auto opened = open_folder_store(folder).value();
      for (int value = 0; value < kNumValues; ++value) {
        EXPECT_TRUE(put_one(*opened, key(store, value), noise(20'000 + value, store)));
      }
    });
  }
  for (std::thread& one : writers) one.join();
  const auto reader = open_folder_store(folder).value();
  std::vector<uint8_t> buffer(30'000);
  for (int store = 0; store < kNumStores; ++store) {
    for (int value = 0; value < kNumValues; ++value) {
      const std::vector<uint8_t> expected = noise(20'000 + value, store);
      ASSERT_EQ(get_one(*reader, key(store, value), buffer), std::ssize(expected));
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), buffer.begin()));
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(FolderStore, RefusesAFolderThatMayNotBeWritten) {
  const auto store = open_folder_store("/proc/self/none");
  ASSERT_FALSE(store.ok());
  EXPECT_THAT(store.error().message, HasSubstr("'/proc/self/none' takes no files"));
}

TEST(RedisStore, RefusesOtherUrlsWithoutRepeatingThem) {
  for (const char* url : {"", "http://a", "redis://", "redis://secret@host", "redis://host:port",
                          "redis://host/x", "redis://[::1"}) {
    const auto store = open_redis_store(options_with_url(url));
    ASSERT_FALSE(store.ok()) << url;
    EXPECT_THAT(store.error().message, HasSubstr("expected redis://"));
    EXPECT_EQ(store.error().message.find("secret"), std::string::npos);
  }
}

TEST(RedisStore, GivesItsPasswordAndTakesItsDatabase) {
  RedisServer server({"--requirepass", "p@ss:word"});
  const auto without = redis(server);
  StorePut item{"kvx1/t/s/1-0p", {}};
  const Status refused = without->put(std::span(&item, 1));
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message, HasSubstr("NOAUTH"));
  const auto with =
      redis(server,
            options_with_url(fmt::format("redis://:p%40ss%3Aword@127.0.0.1:{}/3", server.port())));
  EXPECT_TRUE(put_one(*with, "kvx1/t/s/1-0p", noise(10, 1)));
  RedisOptions options = options_with_url(server.url());
  options.password = "p@ss:word";
  const auto beside = redis(server, options);
  std::vector<uint8_t> buffer(10);
  EXPECT_EQ(get_one(*beside, "kvx1/t/s/1-0p", buffer), -1) << "database 0 has not got it";
}

// A certificate of 127.0.0.1 that vouches for itself.
TEST(RedisStore, SpeaksTlsWithAServerWhoseCertificateIsGoodAlone) {
  const std::string folder = tests::temporary_path("kvx_tls");
  std::filesystem::create_directories(folder);
  const std::string certificate = folder + "/certificate.pem", key = folder + "/key.pem";
  const std::string command = fmt::format(
      "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvx -addext "
      "subjectAltName=IP:127.0.0.1 -keyout {} -out {} 2>/dev/null",
      key, certificate);
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  RedisServer server({"--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file",
                      certificate, "--tls-auth-clients", "no"},
                     RedisServer::Wire::kTls);
  const std::vector<uint8_t> value = noise(3'000'000, 1);
  const auto problem = [&](const std::string& host, const std::string& ca_file) {
    RedisOptions options = options_with_url(fmt::format("rediss://{}:{}", host, server.port()));
    options.ca_file = ca_file;
    StorePut item{"kvx1/t/s/1-0p", value};
    const Status status = redis(server, options)->put(std::span(&item, 1));
    return status.ok() ? std::string() : status.error().message;
  };
  EXPECT_EQ(problem("127.0.0.1", certificate), "");
  EXPECT_THAT(problem("127.0.0.1", ""), HasSubstr("certificate verify failed"))
      << "nobody knows it";
  EXPECT_THAT(problem("localhost", certificate), HasSubstr("verify failed")) << "another host's";
  RedisOptions options = options_with_url(fmt::format("rediss://127.0.0.1:{}", server.port()));
  options.ca_file = certificate;
  std::vector<uint8_t> buffer(value.size());
  EXPECT_EQ(get_one(*redis(server, options), "kvx1/t/s/1-0p", buffer), std::ssize(value));
  EXPECT_EQ(buffer, value);
  std::filesystem::remove_all(folder);
}

TEST(RedisStore, ForgetsValuesAfterTheirTime) {
  RedisServer server;
  RedisOptions options = options_with_url(server.url());
  std::vector<uint8_t> buffer(10);
  options.ttl_seconds = 3600;
  const auto lasting = redis(server, options);
  ASSERT_TRUE(put_one(*lasting, "kvx1/t/s/1-0p", noise(10, 1)));
  options.ttl_seconds = 1;
  const auto store = redis(server, options);
  ASSERT_TRUE(put_one(*store, "kvx1/t/s/2-0p", noise(10, 1)));
  EXPECT_TRUE(tests::waits_until([&] { return get_one(*store, "kvx1/t/s/2-0p", buffer) == -1; }));
  EXPECT_EQ(get_one(*lasting, "kvx1/t/s/1-0p", buffer), 10);
}

TEST(RedisStore, AFullServerTakesNothingAndIsNoError) {
  RedisServer server({"--maxmemory", "3mb", "--maxmemory-policy", "noeviction"});
  const auto store = redis(server);
  bool is_stored = true;
  for (int i = 0; i < 40 && is_stored; ++i) {
    is_stored = put_one(*store, fmt::format("kvx1/t/s/{}-0p", i), noise(1 << 20, i));
  }
  EXPECT_FALSE(is_stored);
}

TEST(RedisStore, ComesBackWithItsServer) {
  RedisServer server;
  const auto store = redis(server);
  ASSERT_TRUE(put_one(*store, "kvx1/t/s/1-0p", noise(10, 1)));
  server.kill();
  StorePut item{"kvx1/t/s/2-0p", {}};
  EXPECT_FALSE(store->put(std::span(&item, 1)).ok());
  server.start();
  EXPECT_TRUE(put_one(*store, "kvx1/t/s/3-0p", noise(10, 1)));
}

TEST(RedisStore, AServerThatHangsIsAnErrorInTime) {
  RedisServer server;
  RedisOptions options = options_with_url(server.url());
  options.timeout_ms = 100;
  const auto store = redis(server, options);
  StorePut item{"kvx1/t/s/1-0p", {}};
  // Where the machine stalls a call may be late while the server runs, too.
  ASSERT_TRUE(tests::waits_until([&] { return store->put(std::span(&item, 1)).ok(); }));
  server.stop();
  const Status late = store->put(std::span(&item, 1));
  server.go_on();
  ASSERT_FALSE(late.ok());
  EXPECT_THAT(late.error().message, HasSubstr("not answered in time"));
}

// ---- what a server may say

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(RedisReplies, ReadsRepliesHoweverTheirBytesCome) {
  const std::string stream =
      "+OK\r\n:7\r\n$5\r\nab\r\nc\r\n$-1\r\n-ERR no\r\n*2\r\n$1\r\nx\r\n:3\r\n";
  for (size_t piece = 1; piece <= stream.size(); ++piece) {
    RedisReplies replies(1 << 20);
    std::vector<std::unique_ptr<RedisReply>> found;
    for (size_t at = 0; at < stream.size(); at += piece) {
      ASSERT_TRUE(replies.feed(bytes_of(std::string_view(stream).substr(at, piece))).ok());
      while (auto reply = replies.next().value()) found.push_back(std::move(reply));
    }
    using enum RedisReply::Kind;
    ASSERT_EQ(found.size(), 6u);
    EXPECT_EQ(found[0]->kind, kStatus);
    EXPECT_EQ(found[1]->number, 7);
    EXPECT_EQ(found[2]->text, "ab\r\nc");
    EXPECT_EQ(found[3]->kind, kNothing);
    EXPECT_EQ(found[4]->text, "ERR no");
    ASSERT_EQ(found[5]->elements.size(), 2u);
    EXPECT_EQ(found[5]->elements[1]->number, 3);
  }
}

TEST(RedisReplies, ATextsHeadIsReadWhenItIsWhole) {
  const auto head = read_text_head(bytes_of("$65536\r\nabc"));
  ASSERT_TRUE(head.has_value());
  EXPECT_EQ(head->text_bytes, 65536);
  EXPECT_EQ(head->head_bytes, 8u);
  EXPECT_EQ(read_text_head(bytes_of("$0\r\n"))->text_bytes, 0);
  for (const char* other : {"", "$", "$5", "$5\r", "$5\n", "$\r\n", "$-1\r\n", "+5\r\n", "$5x\r\n",
                            "$99999999999999999999\r\n"}) {
    EXPECT_FALSE(read_text_head(bytes_of(other)).has_value()) << other;
  }
}

TEST(RedisReplies, IsEmptyBetweenReplies) {
  RedisReplies replies(1 << 20);
  EXPECT_TRUE(replies.is_empty());
  ASSERT_TRUE(replies.feed(bytes_of(":7\r\n:8\r\n$5\r\nab")).ok());
  EXPECT_FALSE(replies.is_empty());
  ASSERT_NE(replies.next().value(), nullptr);
  EXPECT_FALSE(replies.is_empty()) << "another reply waits";
  ASSERT_NE(replies.next().value(), nullptr);
  ASSERT_EQ(replies.next().value(), nullptr);
  EXPECT_FALSE(replies.is_empty()) << "a reply has begun";
  ASSERT_TRUE(replies.feed(bytes_of("cde\r\n")).ok());
  ASSERT_NE(replies.next().value(), nullptr);
  EXPECT_TRUE(replies.is_empty());
}

TEST(RedisReplies, WhatIsNoReplyIsAnErrorAndAClaimAllocatesNothing) {
  for (const char* stream : {"hello\r\n", "$x\r\n", ":1x\r\n", "$-7\r\n", "*-7\r\n"}) {
    RedisReplies replies(1 << 20);
    ASSERT_TRUE(replies.feed(bytes_of(stream)).ok());
    EXPECT_FALSE(replies.next().ok()) << stream;
  }
  RedisReplies claims(1000);
  ASSERT_TRUE(claims.feed(bytes_of("*2000000000\r\n")).ok());
  ASSERT_TRUE(claims.next().ok()) << "nothing has come yet";
  const std::string rest(2000, 'x');
  ASSERT_TRUE(claims.feed(bytes_of("$9999999\r\n" + rest)).ok());
  EXPECT_FALSE(claims.next().ok()) << "larger than was allowed";
}

}  // namespace
}  // namespace kvx::tier
