// Traces and their replay: the format, and hit rates that can be counted by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tools/kvx/embedded.hpp"
#include "tools/kvx/replay/simulation.hpp"

namespace kvx::tool {
namespace {

using cache::EvictionKind;
using testing::HasSubstr;

TEST(Trace, IsReadInMooncakesFormat) {
  const auto trace = parse_trace(
      "{\"timestamp\": 27482, \"input_length\": 1030, \"output_length\": 52, \"hash_ids\": [46, "
      "47, "
      "2354]}\n\n"
      "{\"timestamp\": 30535, \"input_length\": 400, \"output_length\": 26, \"hash_ids\": [46]}");
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  const std::vector<TraceRequest> expected = {{27482, 1030, 52, {46, 47, 2354}},
                                              {30535, 400, 26, {46}}};
  EXPECT_EQ(trace.value(), expected);
}

TEST(Trace, WhatIsWrittenIsReadBack) {
  const std::vector<TraceRequest> trace = generate_trace(500, 3);
  EXPECT_EQ(parse_trace(trace_text(trace)).value(), trace);
  EXPECT_EQ(generate_trace(500, 3), trace);
  EXPECT_NE(generate_trace(500, 4), trace);
}

TEST(Trace, ErrorsNameTheLineAndTheField) {
  const auto message = [](std::string_view text) {
    const auto trace = parse_trace(text);
    return trace.ok() ? "accepted" : trace.error().message;
  };
  EXPECT_EQ(message(""), "the trace has no requests");
  EXPECT_EQ(message("\n[1]"), "line 2 of the trace is no JSON object");
  EXPECT_THAT(message("{\"timestamp\": -1}"), HasSubstr("timestamp is -1"));
  EXPECT_THAT(message("{\"timestamp\": 1, \"input_length\": \"x\"}"), HasSubstr("input_length"));
  EXPECT_THAT(message("{\"timestamp\": 1, \"input_length\": 18446744073709551615}"),
              HasSubstr("input_length is 18446744073709551615; expected a whole number from 0 to"));
  EXPECT_THAT(message("{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1}"),
              HasSubstr("hash_ids"));
}

ReplayCounters counted(const std::vector<TraceRequest>& trace, const ReplayOptions& options) {
  const auto counters = replay(trace, options, [](double) {});
  EXPECT_TRUE(counters.ok());
  return counters.value();
}

TEST(Replay, CountsThePrefillThatIsSaved) {
  const std::vector<TraceRequest> trace = {{0, 1536, 1, {1, 2, 3}},
                                           {1, 1400, 1, {1, 2, 4}},  // two blocks are there
                                           {2, 700, 1, {1, 2}},      // all of it
                                           {3, 512, 1, {3}}};        // not where it was
  const ReplayCounters counters = counted(trace, {100, 0, EvictionKind::kLru});
  EXPECT_EQ(counters.input_tokens, 1536 + 1400 + 700 + 512);
  EXPECT_EQ(counters.hit_tokens, 1024 + 700);
  EXPECT_EQ(counters.most_blocks, 5);
  EXPECT_EQ(counters.num_evicted, 0);
}

TEST(Replay, EvictsTheOldestFirstUnderLru) {
  const std::vector<TraceRequest> trace = {
      {0, 512, 1, {1}}, {0, 512, 1, {2}}, {0, 512, 1, {3}}, {0, 512, 1, {1}}, {0, 512, 1, {3}}};
  const ReplayCounters counters = counted(trace, {2, 0, EvictionKind::kLru});
  EXPECT_EQ(counters.hit_tokens, 512);  // the last one alone
  EXPECT_EQ(counters.num_evicted, 2);
  // Host memory remembers what the first tier forgot.
  const ReplayCounters with_host = counted(trace, {2, 10, EvictionKind::kLru});
  EXPECT_EQ(with_host.hit_tokens, 1024);
  EXPECT_EQ(with_host.host_hit_tokens, 512);
}

TEST(Replay, ComputesWithoutTheCacheWhatDoesNotFitIt) {
  const ReplayCounters counters =
      counted({{0, 1536, 1, {1, 2, 3}}, {0, 1536, 1, {1, 2, 3}}}, {2, 0, EvictionKind::kLfu});
  EXPECT_EQ(counters.num_too_long, 2);
  EXPECT_EQ(counters.hit_tokens, 0);
}

TEST(Replay, SessionsAndTheirEndsDecideWhatAgentsEvict) {
  const auto request = [](std::vector<int64_t> ids, const char* session, bool ends) {
    const auto tokens = static_cast<int64_t>(ids.size()) * kTraceBlockTokens;
    return TraceRequest{0, tokens, 1, std::move(ids), session, ends};
  };
  // 1 is shared, 2 and 3 are private; 4 asks for room.
  const std::vector<TraceRequest> trace = {request({1, 2}, "a", false), request({1, 3}, "b", true),
                                           request({4}, "c", false), request({1, 2}, "a", false)};
  EXPECT_EQ(counted(trace, {3, 0, EvictionKind::kAgents}).hit_tokens, 3 * kTraceBlockTokens);
  EXPECT_EQ(counted(trace, {3, 0, EvictionKind::kLru}).hit_tokens, 2 * kTraceBlockTokens);
}

TEST(Trace, OfAgentsIsMostlySharedAndNamesItsSessions) {
  const std::vector<TraceRequest> trace = generate_agents_trace(5000, 1);
  EXPECT_EQ(parse_trace(trace_text(trace)).value(), trace);
  int num_ends = 0;
  for (const TraceRequest& request : trace) num_ends += request.session_ends;
  EXPECT_NEAR(num_ends, 5000 / 40, 30);
  const ReplayCounters most = counted(trace, {1'000'000, 0, EvictionKind::kLru});
  EXPECT_NEAR(most.hit_rate(), 0.96, 0.015);
  EXPECT_FALSE(parse_trace("{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, "
                           "\"hash_ids\": [], \"session\": 3}")
                   .ok());
}

TEST(Replay, AnUnboundedCacheHitsWhateverCameBefore) {
  const std::vector<TraceRequest> trace = generate_trace(2000, 1);
  int64_t expected = 0;
  std::set<int64_t> seen;  // an id stands for all before it, too
  for (const TraceRequest& request : trace) {
    int64_t num_hits = 0;
    for (int64_t id : request.hash_ids) num_hits += !seen.insert(id).second;
    expected += std::min(num_hits * kTraceBlockTokens, request.input_length);
  }
  for (EvictionKind kind : {EvictionKind::kLru, EvictionKind::kLfu, EvictionKind::k2Q}) {
    const ReplayCounters most = counted(trace, {1'000'000, 0, kind});
    EXPECT_EQ(most.hit_tokens, expected);
    EXPECT_LT(counted(trace, {300, 0, kind}).hit_tokens, expected);
  }
}

TEST(Replay, ItsPageHasEachSlotOnce) {
  for (std::string_view slot : {"{{CHART_JS}}", "{{REPORT_JSON}}"}) {
    const size_t at = replay_page().find(slot);
    ASSERT_NE(at, std::string_view::npos) << slot;
    EXPECT_EQ(replay_page().find(slot, at + 1), std::string_view::npos) << slot;
  }
}

}  // namespace
}  // namespace kvx::tool
