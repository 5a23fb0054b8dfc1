// A sequence enters another cache layer by layer while a step still computes it: the same bytes as
// those of the whole, or an error that says what is missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "tests/kv/stream.hpp"
#include "tests/support/waits_until.hpp"
#include "transfer/layer_import.hpp"
#include "transfer/open_component.hpp"
#include "transfer/sequence_export.hpp"
#include "transfer/sequence_import.hpp"

namespace kvx::transfer::layered_sequence_test {
namespace {

using kv::KvCache;
using kv::Stream;
using testing::HasSubstr;
using tests::waits_until;

constexpr int kNumTokens = 301;

std::vector<int32_t> some_tokens(int count = kNumTokens) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(7 * i % 1000);
  return tokens;
}

kv::KvCacheConfig config_with_prefixes(std::string_view recipe, std::string model = "m") {
  kv::KvCacheConfig config = kv::config_of(recipe, 16);
  config.prefix.is_on = true;
  config.prefix.model = std::move(model);
  return config;
}

std::unique_ptr<KvCache> a_cache(std::string_view recipe, std::string model = "m") {
  return kv::created(config_with_prefixes(recipe, std::move(model)));
}

std::unique_ptr<SequenceExport> offer(KvCache& cache, int sequence,
                                      std::string endpoint = "tcp://127.0.0.1:*",
                                      int num_tokens = kNumTokens) {
  auto made = SequenceExport::create_by_layer(cache, sequence, some_tokens(num_tokens),
                                              {std::move(endpoint)});
  if (!made.ok()) throw std::runtime_error(made.error().message);
  return std::move(made).value();
}

// K and V of a layer that is not beyond a window.
std::vector<float> rows_of(const KvCache& cache, int sequence, int64_t first = 0) {
  const int64_t count = cache.num_tokens(sequence) - first;
  const int heads = cache.config().geometry.num_kv_heads;
  const auto side = static_cast<size_t>(count * heads * kv::kHeadDim);
  std::vector<float> rows(2 * side * kv::kNumLayers);
  for (int layer = 0; layer < kv::kNumLayers; ++layer) {
    float* const to = rows.data() + 2 * side * static_cast<size_t>(layer);
    const Status done = kv::gather(cache, sequence, layer, first, count,
                                   dense_rows(to, DType::kF32, heads, kv::kHeadDim),
                                   dense_rows(to + side, DType::kF32, heads, kv::kHeadDim));
    EXPECT_TRUE(done.ok()) << done.error().message;
  }
  return rows;
}

// A step of all tokens from the sequence's end on, layer by layer.
class OpenStep {
 public:
  OpenStep(KvCache& cache, int sequence, const Stream& stream)
      : cache_(cache), step_(cache), stream_(stream), first_(cache.num_tokens(sequence)) {
    const kv::StepEntry entry{sequence, count()};
    const Status begun = step_.begin({&entry, 1});
    EXPECT_TRUE(begun.ok()) << begun.error().message;
    out_.resize(static_cast<size_t>(count()) * kv::kNumQHeads * kv::kHeadDim);
  }
  int count() const { return static_cast<int>(kNumTokens - first_); }
  void append(int layer) {
    const Status done =
        kv::append_and_attend(cache_, step_, count(), layer, kv::params(),
                              stream_.rows(stream_.q, kv::kNumQHeads, first_),
                              stream_.rows(stream_.k, kv::kNumKvHeads, first_),
                              stream_.rows(stream_.v, kv::kNumKvHeads, first_),
                              dense_rows(out_.data(), DType::kF32, kv::kNumQHeads, kv::kHeadDim));
    EXPECT_TRUE(done.ok()) << done.error().message;
  }
  kv::KvStep& step() { return step_; }

 private:
  KvCache& cache_;
  kv::KvStep step_;
  const Stream& stream_;
  int64_t first_;
  std::vector<float> out_;
};

std::future<Result<int>> import_beside(KvCache& cache, ImportOptions options,
                                       ImportReport* report = nullptr) {
  return std::async(std::launch::async,
                    [&cache, options, report] { return import_sequence(cache, options, report); });
}

TEST(LayeredSequence, GivesTheBytesOfTheWhole) {
  for (const char* recipe : {"bf16", "nvfp4:immediate", "int4:sink=16,recent=32,full_precision=f16",
                             "int8/int4", "nvfp4:auto"}) {
    const Stream stream(kNumTokens);
    auto from = a_cache(recipe);
    auto to = a_cache(recipe);
    const int sequence = from->create_sequence().value();
    const auto exported = offer(*from, sequence);
    ImportReport report;
    auto importing = import_beside(*to, {exported->endpoint()}, &report);
    kv::feed(*from, sequence, stream, 0, kNumTokens, 1000);
    const Result<int> imported = importing.get();
    ASSERT_TRUE(imported.ok()) << recipe << ": " << imported.error().message;
    EXPECT_EQ(rows_of(*to, imported.value()), rows_of(*from, sequence)) << recipe;
    EXPECT_TRUE(std::ranges::equal(to->recorded_tokens(imported.value()), some_tokens()));
    EXPECT_TRUE(exported->wait(60'000));
    const ExportState state = exported->state();
    EXPECT_EQ(state.num_layers_there, kv::kNumLayers);
    if (report.num_asked_again == 0) {  // else some came twice
      EXPECT_EQ(state.bytes_sent, report.bytes);
    }
    EXPECT_EQ(state.bytes, from->sequence_bytes(kNumTokens).total()) << recipe;
  }
}

TEST(LayeredSequence, ALayerLeavesBeforeTheNextIsComputed) {
  const Stream stream(kNumTokens);
  auto from = a_cache("nvfp4:immediate");
  auto to = a_cache("nvfp4:immediate");
  const int sequence = from->create_sequence().value();
  const auto exported = offer(*from, sequence);
  ImportReport report;
  auto importing = import_beside(*to, {exported->endpoint()}, &report);
  EXPECT_EQ(exported->state().bytes, 0);
  OpenStep step(*from, sequence, stream);
  step.append(0);
  EXPECT_EQ(exported->state().num_layers_there, 1);
  const int64_t layer_bytes = exported->state().bytes / kv::kNumLayers;
  EXPECT_TRUE(waits_until([&] { return exported->state().bytes_sent >= layer_bytes; }));
  const int64_t bytes_sent = exported->state().bytes_sent;
  EXPECT_EQ(importing.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  step.append(1);
  const Result<int> imported = importing.get();  // before the step is over
  ASSERT_TRUE(imported.ok()) << imported.error().message;
  if (report.num_asked_again == 0) {  // else some came twice
    EXPECT_LT(bytes_sent, 2 * layer_bytes);
  }
  ASSERT_TRUE(step.step().end().ok());
  EXPECT_EQ(rows_of(*to, imported.value()), rows_of(*from, sequence));
}

TEST(LayeredSequence, ComesWithItsPrefixAndInSteps) {
  for (const char* recipe : {"int8", "int4:sink=16,recent=32,full_precision=f16"}) {
    const Stream stream(kNumTokens);
    auto from = a_cache(recipe);
    auto to = a_cache(recipe);
    const int first = from->create_sequence().value();
    kv::feed(*from, first, stream, 0, 160, 1000);
    ASSERT_TRUE(from->record_tokens(first, some_tokens(160)).ok());
    ASSERT_TRUE(from->free_sequence(first).ok());
    const int sequence = from->create_sequence_from({}, some_tokens()).value();
    EXPECT_EQ(from->num_tokens(sequence), 160) << recipe;
    const auto exported = offer(*from, sequence);
    kv::feed(*from, sequence, stream, 160, kNumTokens, 40);
    ASSERT_TRUE(from->free_sequence(sequence).ok()) << "it has left";
    kv::feed(*from, from->create_sequence().value(), Stream(200, 5), 0, 200, 200);
    const Result<int> imported = import_sequence(*to, {exported->endpoint()});
    ASSERT_TRUE(imported.ok()) << imported.error().message;

    auto again = a_cache(recipe);
    const int expected = again->create_sequence().value();
    kv::feed(*again, expected, stream, 0, 160, 1000);
    kv::feed(*again, expected, stream, 160, kNumTokens, 40);
    if (recipe == std::string_view("int8")) {
      EXPECT_EQ(rows_of(*to, imported.value()), rows_of(*again, expected));
    } else {  // what was found packed stays packed
      EXPECT_LT(kv::relative_rms(rows_of(*to, imported.value()), rows_of(*again, expected)), 0.2);
    }
  }
}

TEST(LayeredSequence, LeavesBehindWhatAWindowHasPassed) {
  kv::KvCacheConfig config = config_with_prefixes("int8");
  config.geometry.layer_windows = {0, 50};
  config.geometry.layer_sinks = {0, 4};
  const Stream stream(kNumTokens);
  auto from = kv::created(config);
  auto to = kv::created(config);
  const int sequence = from->create_sequence().value();
  const auto exported = offer(*from, sequence);
  kv::feed(*from, sequence, stream, 0, kNumTokens, 100);
  const Result<int> imported = import_sequence(*to, {exported->endpoint()});
  ASSERT_TRUE(imported.ok()) << imported.error().message;
  EXPECT_EQ(rows_of(*to, imported.value(), 256), rows_of(*from, sequence, 256));
  EXPECT_EQ(exported->state().bytes, from->sequence_bytes(kNumTokens).total());
}

TEST(LayeredSequence, GoesOverALocalSocketAndMoreThanOnce) {
  const Stream stream(kNumTokens);
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const int sequence = from->create_sequence().value();
  const auto exported =
      offer(*from, sequence, fmt::format("ipc:///tmp/kvx-layers-test-{}", getpid()));
  kv::feed(*from, sequence, stream, 0, kNumTokens, 1000);
  const std::vector<float> rows = rows_of(*from, sequence);
  from.reset();
  for (int i = 0; i < 2; ++i) {
    const Result<int> imported = import_sequence(*to, {exported->endpoint()});
    ASSERT_TRUE(imported.ok()) << imported.error().message;
    EXPECT_EQ(rows_of(*to, imported.value()), rows);
    ASSERT_TRUE(to->free_sequence(imported.value()).ok());
  }
  EXPECT_TRUE(waits_until([&] { return exported->state().num_taken == 2; }));
}

// ---- some heads

TEST(LayeredSequence, GivesEachRankItsHeads) {
  for (const char* recipe : {"nvfp4:immediate", "int4:sink=16,recent=32,full_precision=f16"}) {
    const Stream stream(kNumTokens);
    auto from = a_cache(recipe);
    const int sequence = from->create_sequence().value();
    const auto exported = offer(*from, sequence);
    kv::feed(*from, sequence, stream, 0, kNumTokens, 1000);
    const std::vector<float> all = rows_of(*from, sequence);
    for (int head = 0; head < kv::kNumKvHeads; ++head) {
      kv::KvCacheConfig config = config_with_prefixes(recipe);
      config.geometry.num_kv_heads = 1;
      auto to = kv::created(config);
      ImportOptions options{exported->endpoint()};
      options.heads = {head, head + 1, kv::kNumKvHeads};
      ImportReport report;
      const Result<int> imported = import_sequence(*to, options, &report);
      ASSERT_TRUE(imported.ok()) << imported.error().message;
      EXPECT_LT(report.bytes, 2 * exported->state().bytes / 3) << "no other heads travel";
      std::vector<float> own;
      for (size_t row = 0; row < all.size() / kv::kHeadDim; ++row) {
        if (static_cast<int>(row % kv::kNumKvHeads) != head) continue;
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(row * kv::kHeadDim);
        own.insert(own.end(), begin, begin + kv::kHeadDim);
      }
      EXPECT_EQ(rows_of(*to, imported.value()), own) << recipe;
    }
  }
}

TEST(LayeredSequence, RefusesHeadsThatAreNotTheCaches) {
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const auto exported = offer(*from, from->create_sequence().value());
  const auto refusal = [&](const kv::HeadCut& heads, const char* endpoint, bool transcode = false) {
    ImportOptions options{endpoint};
    options.heads = heads;
    options.may_transcode = transcode;
    return import_sequence(*to, options).error().message;
  };
  EXPECT_THAT(refusal({0, 1, 2}, exported->endpoint()), HasSubstr("num_kv_heads is 1; expected 2"));
  EXPECT_THAT(refusal({0, 2, 4}, exported->endpoint()), HasSubstr("the exporter has 2"));
  EXPECT_THAT(refusal({1, 1, 2}, exported->endpoint()), HasSubstr("heads are 1 to 1 of 2"));
  EXPECT_THAT(refusal({0, 1, 2}, exported->endpoint(), true), HasSubstr("one of the two"));
  EXPECT_TRUE(waits_until([&] { return exported->state().num_refused == 4; }));
  auto other = a_cache("int8");
  const int sequence = other->create_sequence().value();
  kv::feed(*other, sequence, Stream(20), 0, 20, 20);
  ASSERT_TRUE(other->record_tokens(sequence, some_tokens(20)).ok());
  const auto whole = SequenceExport::create(*other, sequence, {});
  ASSERT_TRUE(whole.ok());
  EXPECT_THAT(refusal({0, 1, 2}, whole.value()->endpoint()), HasSubstr("as a whole"));
}

TEST(LayeredSequence, HeadsOfACalibratedCacheAreRefused) {
  auto cache = a_cache("int8");
  std::string text(cache->fingerprint());
  const std::string none = "calibration none";
  ASSERT_TRUE(fingerprint_of_heads(text, {0, 1, 2}).ok());
  text.replace(text.find(none), none.size(), "calibration 0123456789abcdef0123456789abcdef");
  const auto refused = fingerprint_of_heads(text, {0, 1, 2});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(refused.error().message, HasSubstr("calibrated"));
}

// ---- what does not fit, and what does not come

TEST(LayeredSequence, ConvertsOnTheReceivingSideWhenItMay) {
  const Stream stream(kNumTokens);
  auto from = a_cache("bf16");
  auto to = a_cache("int8");
  const int sequence = from->create_sequence().value();
  const auto exported = offer(*from, sequence);
  kv::feed(*from, sequence, stream, 0, kNumTokens, 1000);
  ImportOptions options{exported->endpoint()};
  const Result<int> refused = import_sequence(*to, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(exported->state().bytes_sent, 0) << "the handshake decides";
  options.may_transcode = true;
  const Result<int> imported = import_sequence(*to, options);
  ASSERT_TRUE(imported.ok()) << imported.error().message;
  EXPECT_LT(kv::relative_rms(rows_of(*to, imported.value()), rows_of(*from, sequence)), 0.02);
}

TEST(LayeredSequence, SaysWhyItsRestWillNotCome) {
  const Stream stream(kNumTokens);
  const auto outcome = [&](const std::function<void(OpenStep&)>& spoil) {
    auto from = a_cache("int8");
    auto to = a_cache("int8");
    const int sequence = from->create_sequence().value();
    const auto exported = offer(*from, sequence);
    auto importing = import_beside(*to, {exported->endpoint()});
    {
      OpenStep step(*from, sequence, stream);
      step.append(0);
      spoil(step);
    }
    const Result<int> imported = importing.get();
    EXPECT_FALSE(imported.ok());
    EXPECT_EQ(to->snapshot().num_sequences, 0);
    EXPECT_EQ(to->snapshot().classes[0].num_active, 0);
    EXPECT_FALSE(exported->state().problem.empty());
    return imported.ok() ? "" : imported.error().message;
  };
  EXPECT_THAT(outcome([](OpenStep& step) { (void)step.step().cancel(); }),
              HasSubstr("the step that completes the sequence was cancelled"));
  EXPECT_THAT(outcome([](OpenStep& step) { step.append(0); }), HasSubstr("layer 0 has rows twice"));
  EXPECT_THAT(outcome([](OpenStep& step) { (void)step.step().end(); }),
              HasSubstr("layer 1 had no rows"));
}

// An importer that has every layer before the step's end keeps them: they are of the tokens that
// were offered, whichever of them the exporter keeps.
TEST(LayeredSequence, IsNotGivenOnceItsStepRefusedTokens) {
  const Stream stream(kNumTokens);
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const int sequence = from->create_sequence().value();
  const auto exported = offer(*from, sequence);
  OpenStep step(*from, sequence, stream);
  step.append(0);
  step.append(1);
  const int kept = 290;
  ASSERT_TRUE(step.step().end({&kept, 1}).ok());
  const Result<int> imported = import_sequence(*to, {exported->endpoint()});
  ASSERT_FALSE(imported.ok());
  EXPECT_THAT(imported.error().message, HasSubstr("were refused"));
  EXPECT_EQ(to->snapshot().num_sequences, 0);
}

TEST(LayeredSequence, EndsWithItsSequenceItsCacheAndItsOffer) {
  const Stream stream(kNumTokens);
  const auto problem_after = [&](const std::function<void(std::unique_ptr<KvCache>&, int)>& act) {
    auto cache = a_cache("int8");
    const int sequence = cache->create_sequence().value();
    kv::feed(*cache, sequence, stream, 0, 100, 1000);
    EXPECT_TRUE(cache->record_tokens(sequence, some_tokens(100)).ok());
    const auto exported = offer(*cache, sequence);
    act(cache, sequence);
    const std::string problem = exported->state().problem;
    EXPECT_THAT(import_sequence(*a_cache("int8"), {exported->endpoint()}).error().message,
                HasSubstr(problem));
    return problem;
  };
  EXPECT_THAT(problem_after([](auto& cache, int s) { (void)cache->free_sequence(s); }),
              HasSubstr("was freed"));
  EXPECT_THAT(problem_after([](auto& cache, int s) { (void)cache->truncate_sequence(s, 80); }),
              HasSubstr("was cut"));
  EXPECT_THAT(problem_after([](auto& cache, int) { cache.reset(); }), HasSubstr("cache is gone"));
  EXPECT_THAT(
      problem_after([&](auto& cache, int s) { kv::feed(*cache, s, Stream(400), 100, 330, 1000); }),
      HasSubstr("from 100 to 330 tokens; 301 are on offer"));
  auto cache = a_cache("int8");
  const int sequence = cache->create_sequence().value();
  offer(*cache, sequence).reset();
  const auto exported = offer(*cache, sequence);  // another one may follow
  kv::feed(*cache, sequence, stream, 0, kNumTokens, 1000);
  EXPECT_EQ(exported->state().num_layers_there, kv::kNumLayers);
}

TEST(LayeredSequence, WaitsForAStepNoLongerThanItMay) {
  auto from = a_cache("int8");
  auto to = a_cache("int8");
  const int sequence = from->create_sequence().value();
  const auto exported = offer(*from, sequence);
  const Result<int> none = import_sequence(*to, {exported->endpoint(), 3000});
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(none.error().message, HasSubstr("the sequence's head has not come"));
  const Stream stream(kNumTokens);
  OpenStep step(*from, sequence, stream);
  step.append(0);
  EXPECT_THAT(import_sequence(*to, {exported->endpoint(), 3000}).error().message,
              HasSubstr("layer 1 has not come"));
}

TEST(LayeredSequence, RefusesCallsThatCannotBe) {
  auto cache = a_cache("int8");
  const int sequence = cache->create_sequence().value();
  const auto refusal = [&](std::span<const int32_t> tokens) {
    const auto made = SequenceExport::create_by_layer(*cache, sequence, tokens, {});
    return made.ok() ? std::string() : made.error().message;
  };
  EXPECT_THAT(refusal({}), HasSubstr("num_tokens is 0; the sequence has 0"));
  EXPECT_THAT(refusal(some_tokens(401)), HasSubstr("max_tokens_per_sequence is 400"));
  kv::feed(*cache, sequence, Stream(20), 0, 20, 20);
  EXPECT_THAT(refusal(some_tokens()), HasSubstr("of which 0 are recorded"));
  ASSERT_TRUE(cache->record_tokens(sequence, some_tokens(20)).ok());
  std::vector<int32_t> others = some_tokens();
  others[3] = 5000;
  EXPECT_THAT(refusal(others), HasSubstr("tokens[3] is 5000; the sequence has 21 there"));
  EXPECT_THAT(refusal(some_tokens(20)), HasSubstr("exported as a whole"));
  const auto exported = offer(*cache, sequence);
  EXPECT_THAT(refusal(some_tokens()), HasSubstr("on its way already"));
  auto without = kv::created(kv::config_of("int8"));
  const int other = without->create_sequence().value();
  EXPECT_THAT(SequenceExport::create_by_layer(*without, other, some_tokens(), {}).error().message,
              HasSubstr("prefix caching is off"));
}

// ---- between exporter and importer

// Passes messages on, or what a function makes of them; none: the message is lost.
class Relay {
 public:
  using Change = std::function<bool(const Request&, std::vector<uint8_t>&)>;
  Relay(const char* endpoint, Change change)
      : change_(std::move(change)), functions_(open_component().value()) {
    kvx_transfer_error error{};
    client_ = functions_->client_create(endpoint, &error);
    server_ = functions_->server_create("tcp://127.0.0.1:*", answer, this, &error);
  }
  ~Relay() {
    functions_->server_free(server_);
    functions_->client_free(client_);
  }
  const char* endpoint() const { return functions_->server_endpoint(server_); }

 private:
  static void answer(void* user, const void* bytes, uint64_t count, kvx_transfer_reply reply,
                     void* to) {
    auto* const self = static_cast<Relay*>(user);
    const auto parsed = parse_request({static_cast<const uint8_t*>(bytes), count});
    kvx_transfer_error error{};
    (void)self->functions_->client_send(self->client_, bytes, count, &error);
    std::vector<uint8_t> given;
    const auto take = [](void* into, const void* data, uint64_t size) {
      const auto* const first = static_cast<const uint8_t*>(data);
      static_cast<std::vector<uint8_t>*>(into)->assign(first, first + size);
    };
    const int got = self->functions_->client_receive(self->client_, 60'000, take, &given, &error);
    if (got == 1 && self->change_(parsed.value(), given)) {
      reply(to, given.data(), given.size(), nullptr, 0);
    }
  }

  Change change_;
  const kvx_transfer_functions_t* functions_;
  kvx_transfer_client* client_;
  kvx_transfer_server* server_;
};

TEST(LayeredSequence, AsksAgainForWhatIsLostAndTakesNothingDamaged) {
  const Stream stream(kNumTokens);
  auto from = a_cache("int8");
  const int sequence = from->create_sequence().value();
  const auto exported = offer(*from, sequence);
  kv::feed(*from, sequence, stream, 0, kNumTokens, 1000);
  int num_messages = 0;
  const Relay lossy(exported->endpoint(),
                    [&](const Request&, std::vector<uint8_t>&) { return ++num_messages % 2 == 0; });
  auto to = a_cache("int8");
  ImportReport report;
  const Result<int> imported = import_sequence(*to, {lossy.endpoint(), 20000}, &report);
  ASSERT_TRUE(imported.ok()) << imported.error().message;
  EXPECT_GE(report.num_asked_again, 2);
  EXPECT_EQ(rows_of(*to, imported.value()), rows_of(*from, sequence));

  for (const Kind kind : {Kind::kRead, Kind::kPages}) {
    for (const size_t from_end : {size_t{1}, size_t{500}}) {
      const Relay damaging(exported->endpoint(),
                           [&](const Request& request, std::vector<uint8_t>& bytes) {
                             if (request.kind == kind) bytes[bytes.size() - from_end] ^= 1;
                             return true;
                           });
      auto other = a_cache("int8");
      const Result<int> refused = import_sequence(*other, {damaging.endpoint()});
      ASSERT_FALSE(refused.ok());
      EXPECT_THAT(refused.error().message, HasSubstr("is damaged"));
      EXPECT_EQ(other->snapshot().classes[0].num_active, 0);
    }
  }
}

TEST(LayeredSequence, BelievesNoSizesAndNoLengths) {
  const Stream stream(kNumTokens);
  auto from = a_cache("int8");
  const int sequence = from->create_sequence().value();
  const auto exported = offer(*from, sequence);
  kv::feed(*from, sequence, stream, 0, kNumTokens, 1000);
  for (const Kind kind : {Kind::kRead, Kind::kPages}) {
    for (const size_t length : {size_t{25}, size_t{40}, size_t{900}}) {
      const Relay cutting(exported->endpoint(),
                          [&](const Request& request, std::vector<uint8_t>& bytes) {
                            if (request.kind == kind) bytes.resize(std::min(bytes.size(), length));
                            return true;
                          });
      auto to = a_cache("int8");
      EXPECT_FALSE(import_sequence(*to, {cutting.endpoint(), 300}).ok());
      EXPECT_EQ(to->snapshot().num_sequences, 0);
    }
  }
}

}  // namespace
}  // namespace kvx::transfer::layered_sequence_test
