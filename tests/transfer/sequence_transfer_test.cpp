// A sequence leaves one cache and enters another: the same bytes, or an error that names both.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/kv/stream.hpp"
#include "tests/support/waits_until.hpp"
#include "transfer/open_component.hpp"
#include "transfer/sequence_export.hpp"
#include "transfer/sequence_import.hpp"

namespace kvx::transfer::sequence_transfer_test {
namespace {

using kv::KvCache;
using kv::Stream;
using testing::HasSubstr;
using tests::waits_until;

constexpr int kNumTokens = 301;

std::unique_ptr<KvCache> a_cache(std::string_view recipe, int block_size = 16,
                                 std::string model = "m") {
  kv::KvCacheConfig config = kv::config_of(recipe, block_size);
  config.prefix.is_on = true;
  config.prefix.model = std::move(model);
  return kv::created(std::move(config));
}

int fill(KvCache& cache) {
  const Stream stream(kNumTokens);
  std::vector<int32_t> tokens;
  for (int i = 0; i < kNumTokens; ++i) tokens.push_back(i);
  const int sequence = cache.create_sequence().value();
  kv::feed(cache, sequence, stream, 0, kNumTokens, 1000);
  EXPECT_TRUE(cache.record_tokens(sequence, tokens).ok());
  return sequence;
}

std::vector<float> rows_of(const KvCache& cache, int sequence) {
  const size_t side = size_t{kNumTokens} * kv::kNumKvHeads * kv::kHeadDim;
  std::vector<float> rows(2 * side * kv::kNumLayers);
  for (int layer = 0; layer < kv::kNumLayers; ++layer) {
    float* const first = rows.data() + 2 * side * static_cast<size_t>(layer);
    EXPECT_TRUE(kv::gather(cache, sequence, layer, 0, kNumTokens,
                           dense_rows(first, DType::kF32, kv::kNumKvHeads, kv::kHeadDim),
                           dense_rows(first + side, DType::kF32, kv::kNumKvHeads, kv::kHeadDim))
                    .ok());
  }
  return rows;
}

std::unique_ptr<SequenceExport> offer(KvCache& cache, int sequence,
                                      std::string endpoint = "tcp://127.0.0.1:*") {
  auto made = SequenceExport::create(cache, sequence, {std::move(endpoint)});
  if (!made.ok()) throw std::runtime_error(made.error().message);
  return std::move(made).value();
}

TEST(SequenceTransfer, GivesTheSameBytesAndHardlyMore) {
  for (const char* recipe :
       {"bf16", "nvfp4:immediate", "int4:sink=16,recent=32,full_precision=f16", "int8/int4"}) {
    auto from = a_cache(recipe);
    auto to = a_cache(recipe);
    const int sequence = fill(*from);
    const auto exported = offer(*from, sequence);
    ImportReport report;
    const Result<int> imported = import_sequence(*to, {exported->endpoint()}, &report);
    ASSERT_TRUE(imported.ok()) << imported.error().message;
    EXPECT_EQ(rows_of(*to, imported.value()), rows_of(*from, sequence)) << recipe;
    EXPECT_TRUE(
        std::ranges::equal(to->recorded_tokens(imported.value()), from->recorded_tokens(sequence)));
    EXPECT_EQ(report.bytes, exported->state().bytes);
    if (report.num_asked_again == 0) {  // else some came twice
      EXPECT_EQ(exported->state().bytes_sent, report.bytes);
    }
    EXPECT_TRUE(exported->wait(60'000));
    // Tokens, the fingerprint and a checksum a block weigh more in so small a cache.
    EXPECT_LT(static_cast<double>(report.bytes),
              1.10 * static_cast<double>(from->sequence_bytes(kNumTokens).total()))
        << recipe;
  }
}

TEST(SequenceTransfer, OutlivesTheExportersSequenceAndCache) {
  auto to = a_cache("int8");
  std::unique_ptr<SequenceExport> exported;
  std::vector<float> rows;
  {
    auto from = a_cache("int8");
    const int sequence = fill(*from);
    rows = rows_of(*from, sequence);
    exported = offer(*from, sequence);
  }
  for (int i = 0; i < 2; ++i) {  // as often as it is wanted
    const Result<int> imported = import_sequence(*to, {exported->endpoint()});
    ASSERT_TRUE(imported.ok()) << imported.error().message;
    EXPECT_EQ(rows_of(*to, imported.value()), rows);
    ASSERT_TRUE(to->free_sequence(imported.value()).ok());
  }
  EXPECT_TRUE(waits_until([&] { return exported->state().num_taken == 2; }));
}

TEST(SequenceTransfer, SharesMemoryOnOneHost) {
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const int sequence = fill(*from);
  const auto exported =
      offer(*from, sequence, fmt::format("ipc:///tmp/kvx-transfer-test-{}", getpid()));
  ImportReport report;
  const Result<int> imported = import_sequence(*to, {exported->endpoint()}, &report);
  ASSERT_TRUE(imported.ok()) << imported.error().message;
  EXPECT_TRUE(report.was_shared);
  EXPECT_EQ(report.bytes, 0);
  EXPECT_EQ(rows_of(*to, imported.value()), rows_of(*from, sequence));
}

TEST(SequenceTransfer, ConvertsOnTheReceivingSideWhenItMay) {
  auto from = a_cache("bf16", 16);
  auto to = a_cache("int8", 32);
  const int sequence = fill(*from);
  const auto exported = offer(*from, sequence);
  ImportOptions options{exported->endpoint()};
  const Result<int> refused = import_sequence(*to, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message, HasSubstr("exporter's"));
  EXPECT_TRUE(waits_until([&] { return exported->state().num_refused == 1; }));
  EXPECT_EQ(exported->state().bytes_sent, 0) << "the handshake decides";
  EXPECT_EQ(to->snapshot().num_sequences, 0);
  options.may_transcode = true;
  const Result<int> imported = import_sequence(*to, options);
  ASSERT_TRUE(imported.ok()) << imported.error().message;
  EXPECT_LT(kv::relative_rms(rows_of(*to, imported.value()), rows_of(*from, sequence)), 0.02);
}

TEST(SequenceTransfer, RefusesAnotherModelOnBothSides) {
  auto from = a_cache("int8", 16, "one model");
  auto to = a_cache("int8", 16, "another");
  const auto exported = offer(*from, fill(*from));
  ImportOptions options{exported->endpoint()};
  options.may_transcode = true;
  const Result<int> imported = import_sequence(*to, options);
  ASSERT_FALSE(imported.ok());
  EXPECT_THAT(imported.error().message, HasSubstr("one model"));
  EXPECT_THAT(imported.error().message, HasSubstr("another"));
  EXPECT_TRUE(
      waits_until([&] { return exported->state().last_refusal == imported.error().message; }));
}

TEST(SequenceTransfer, RefusesCallsThatCannotBe) {
  auto cache = a_cache("int8");
  EXPECT_FALSE(SequenceExport::create(*cache, 0, {}).ok()) << "no such sequence";
  const int sequence = fill(*cache);
  EXPECT_THAT(SequenceExport::create(*cache, sequence, {"x"}).error().message,
              HasSubstr("'x' cannot be bound"));
  EXPECT_THAT(SequenceExport::create(*cache, sequence, {""}).error().message,
              HasSubstr("endpoint is ''"));
  EXPECT_THAT(import_sequence(*cache, {""}).error().message, HasSubstr("endpoint is ''"));
  EXPECT_THAT(import_sequence(*cache, {"x"}).error().message, HasSubstr("'x' is none of ZeroMQ's"));
  EXPECT_THAT(import_sequence(*cache, {"tcp://127.0.0.1:1", 0}).error().message,
              HasSubstr("timeout_ms is 0"));
  const Result<int> nobody = import_sequence(*cache, {"tcp://127.0.0.1:1", 50});
  ASSERT_FALSE(nobody.ok());
  EXPECT_EQ(nobody.error().code, ErrorCode::kUnsupported);
  auto without = kv::created(kv::config_of("int8"));
  EXPECT_EQ(import_sequence(*without, {"tcp://127.0.0.1:1"}).error().code, ErrorCode::kUnsupported);
}

// ---- exporters that lie, lose and fall silent

// Answers by a function, which may give none.
class OddExporter {
 public:
  using Body = std::function<std::optional<std::vector<uint8_t>>(const Request&)>;
  explicit OddExporter(Body body) : body_(std::move(body)), functions_(open_component().value()) {
    kvx_transfer_error error{};
    server_ = functions_->server_create("tcp://127.0.0.1:*", answer, this, &error);
  }
  ~OddExporter() { functions_->server_free(server_); }
  const char* endpoint() const { return functions_->server_endpoint(server_); }

 private:
  static void answer(void* user, const void* bytes, uint64_t count, kvx_transfer_reply reply,
                     void* to) {
    const Result<Request> request =
        parse_request({static_cast<const uint8_t*>(bytes), static_cast<size_t>(count)});
    ASSERT_TRUE(request.ok());
    const auto given = static_cast<OddExporter*>(user)->body_(request.value());
    if (given) reply(to, given->data(), given->size(), nullptr, 0);
  }

  Body body_;
  const kvx_transfer_functions_t* functions_;
  kvx_transfer_server* server_;
};

// An honest exporter of some bytes, for those below to spoil.
std::vector<uint8_t> honest(const Request& request, const std::vector<uint8_t>& bytes,
                            std::string_view fingerprint) {
  Answer answer;
  answer.kind = request.kind;
  answer.export_id = 7;
  if (request.kind == Kind::kHello) {
    answer.bytes = bytes.size();
    answer.text = fingerprint;
  }
  answer.offset = request.offset;
  std::vector<uint8_t> message = encode(answer);
  if (request.kind == Kind::kRead) {
    const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(request.offset);
    message.insert(message.end(), first, first + static_cast<std::ptrdiff_t>(request.bytes));
  }
  return message;
}

std::vector<uint8_t> saved_bytes(KvCache& cache, int sequence) {
  const SharedFile file = SharedFile::create().value();
  EXPECT_TRUE(cache.save_sequence(sequence, file.path()).ok());
  SharedFile opened = SharedFile::create().value();
  std::FILE* const stream = std::fopen(file.path().c_str(), "rb");
  std::vector<uint8_t> bytes;
  for (int c; (c = std::fgetc(stream)) != EOF;) bytes.push_back(static_cast<uint8_t>(c));
  std::fclose(stream);
  return bytes;
}

TEST(SequenceTransfer, AsksAgainForWhatIsLost) {
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const int sequence = fill(*from);
  const std::vector<uint8_t> bytes = saved_bytes(*from, sequence);
  int num_requests = 0;
  const OddExporter exporter([&](const Request& request) -> std::optional<std::vector<uint8_t>> {
    if (++num_requests % 2 == 1) return std::nullopt;
    return honest(request, bytes, from->fingerprint());
  });
  ImportReport report;
  const Result<int> imported = import_sequence(*to, {exporter.endpoint(), 20000}, &report);
  ASSERT_TRUE(imported.ok()) << imported.error().message;
  EXPECT_GE(report.num_asked_again, 2);
  EXPECT_EQ(rows_of(*to, imported.value()), rows_of(*from, sequence));
}

TEST(SequenceTransfer, TakesNothingThatIsDamaged) {
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const std::vector<uint8_t> bytes = saved_bytes(*from, fill(*from));
  for (const size_t at : {size_t{9}, size_t{70}, bytes.size() / 2, bytes.size() - 3}) {
    std::vector<uint8_t> damaged = bytes;
    damaged[at] ^= 1;
    const OddExporter exporter([&](const Request& request) {
      return std::optional(honest(request, damaged, from->fingerprint()));
    });
    EXPECT_FALSE(import_sequence(*to, {exporter.endpoint()}).ok()) << at;
    EXPECT_EQ(to->snapshot().num_sequences, 0);
    EXPECT_EQ(to->snapshot().classes[0].num_active, 0);
  }
}

TEST(SequenceTransfer, BelievesNoSizesAndNoLengths) {
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const std::vector<uint8_t> bytes = saved_bytes(*from, fill(*from));
  const auto message = [&](const OddExporter::Body& body, int64_t timeout_ms = 60'000) {
    const OddExporter exporter(body);
    const Result<int> imported = import_sequence(*to, {exporter.endpoint(), timeout_ms});
    return imported.ok() ? "" : imported.error().message;
  };
  EXPECT_THAT(message([&](const Request& request) {
                Answer hello;
                hello.bytes = uint64_t{1} << 60;
                hello.text = from->fingerprint();
                return request.kind == Kind::kHello ? std::optional(encode(hello))
                                                    : std::optional(honest(request, bytes, ""));
              }),
              HasSubstr("offers 1152921504606846976 bytes"));
  EXPECT_THAT(message([&](const Request& request) {
                std::vector<uint8_t> answer = honest(request, bytes, from->fingerprint());
                if (request.kind == Kind::kRead) answer.pop_back();
                return std::optional(answer);
              }),
              HasSubstr("were asked for"));
  EXPECT_THAT(message([&](const Request&) {
                return std::optional(std::vector<uint8_t>{1, 2});
              }),
              HasSubstr("none of a kvx transfer"));
  const auto gives_no_bytes = [&](const Request& request) -> std::optional<std::vector<uint8_t>> {
    if (request.kind == Kind::kRead) return std::nullopt;
    return honest(request, bytes, from->fingerprint());
  };
  EXPECT_THAT(message(gives_no_bytes, 1500), HasSubstr("has answered for"));
}

TEST(SequenceExport, AnswersGarbageAndGoesOn) {
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const auto exported = offer(*from, fill(*from));
  const kvx_transfer_functions_t* const functions = open_component().value();
  kvx_transfer_error error{};
  kvx_transfer_client* const client = functions->client_create(exported->endpoint(), &error);
  Request beyond;
  beyond.kind = Kind::kRead;
  beyond.bytes = UINT64_MAX;
  const std::vector<uint8_t> requests[] = {
      {}, {1, 2, 3}, encode(beyond), std::vector<uint8_t>(100000, 7)};
  for (const std::vector<uint8_t>& request : requests) {
    ASSERT_EQ(functions->client_send(client, request.data(), request.size(), &error), 0);
    std::vector<uint8_t> got;
    const auto take = [](void* to_bytes, const void* bytes, uint64_t count) {
      const auto* const first = static_cast<const uint8_t*>(bytes);
      static_cast<std::vector<uint8_t>*>(to_bytes)->assign(first, first + count);
    };
    ASSERT_EQ(functions->client_receive(client, 60'000, take, &got, &error), 1);
    EXPECT_EQ(parse_answer(got).value().kind, Kind::kRefused);
  }
  functions->client_free(client);
  EXPECT_TRUE(import_sequence(*to, {exported->endpoint()}).ok());
}

}  // namespace
}  // namespace kvx::transfer::sequence_transfer_test
