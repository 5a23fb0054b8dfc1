// A trace: requests with the blocks of their prompts, in the format that Mooncake published.
//
// One JSON object a line: {"timestamp": 27482, "input_length": 6955, "output_length": 52,
// "hash_ids": [46, 47, ..., 2354]}. Times are milliseconds; an id stands for 512 tokens and all
// before them, so that equal ids mean an equal prefix. The last block may be shorter. A request may
// say in addition which conversation it belongs to, and that it is the last one:
// "session": "a name", "session_ends": true.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/result.hpp"

namespace kvx::tool {

inline constexpr int64_t kTraceBlockTokens = 512;

struct TraceRequest {
  int64_t timestamp = 0;
  int64_t input_length = 0;  // tokens
  int64_t output_length = 0;
  std::vector<int64_t> hash_ids;
  std::string session = {};  // empty: none
  bool session_ends = false;

  friend bool operator==(const TraceRequest&, const TraceRequest&) = default;
};

// INVALID_ARGUMENT names the line and the field.
Result<std::vector<TraceRequest>> parse_trace(std::string_view text);
std::string trace_text(const std::vector<TraceRequest>& trace);

// Chats of several turns, interleaved, that begin with one of a few system prompts; some are long
// documents that come once. The same for the same seed on every machine.
std::vector<TraceRequest> generate_trace(int64_t num_requests, uint64_t seed);

// Agents at work: sessions of 40 turns, interleaved, with a long prompt of tools that all sessions
// of an agent share. A turn adds what a tool said, so that 96 % of all prompt tokens have been seen
// before; now and then a turn forgets its middle, as when a history is compacted. Likewise.
std::vector<TraceRequest> generate_agents_trace(int64_t num_requests, uint64_t seed);

}  // namespace kvx::tool
