// Traces: read, written, and made up.
#include "tools/kvx/replay/trace.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

namespace kvx::tool {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostTime = int64_t{1} << 53;
constexpr int64_t kMostTokens = int64_t{1} << 31;  // of a request: their sum has room in 64 bits

Result<int64_t> number_of(const Json& object, const char* field, int64_t most, size_t line) {
  const auto found = object.find(field);
  if (found == object.end() || !found->is_number_integer() || found->get<double>() < 0 ||
      found->get<double>() > static_cast<double>(most)) {
    return invalid_argument("line {} of the trace: {} is {}; expected a whole number from 0 to {}",
                            line, field, found == object.end() ? "missing" : found->dump(), most);
  }
  return found->get<int64_t>();
}

Result<TraceRequest> parse_request(std::string_view text, size_t line) {
  const Json object = Json::parse(text, nullptr, false);
  if (!object.is_object()) {
    return invalid_argument("line {} of the trace is no JSON object", line);
  }
  TraceRequest request;
  KVX_ASSIGN_OR_RETURN(request.timestamp, number_of(object, "timestamp", kMostTime, line));
  KVX_ASSIGN_OR_RETURN(request.input_length, number_of(object, "input_length", kMostTokens, line));
  KVX_ASSIGN_OR_RETURN(request.output_length,
                       number_of(object, "output_length", kMostTokens, line));
  const auto ids = object.find("hash_ids");
  const bool are_numbers =
      ids != object.end() && ids->is_array() &&
      std::all_of(ids->begin(), ids->end(), [](const Json& id) { return id.is_number_integer(); });
  if (!are_numbers) {
    return invalid_argument("line {} of the trace: hash_ids is no list of whole numbers", line);
  }
  request.hash_ids = ids->get<std::vector<int64_t>>();
  if (const auto session = object.find("session"); session != object.end()) {
    if (!session->is_string()) {
      return invalid_argument("line {} of the trace: session is {}; expected a text", line,
                              session->dump());
    }
    request.session = session->get<std::string>();
  }
  if (const auto ends = object.find("session_ends"); ends != object.end()) {
    if (!ends->is_boolean()) {
      return invalid_argument("line {} of the trace: session_ends is {}; expected true or false",
                              line, ends->dump());
    }
    request.session_ends = ends->get<bool>();
  }
  return request;
}

// The standard's distributions differ from library to library; this does not.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace

Result<std::vector<TraceRequest>> parse_trace(std::string_view text) {
  std::vector<TraceRequest> trace;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view one = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (one.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    KVX_ASSIGN_OR_RETURN(TraceRequest request, parse_request(one, line));
    trace.push_back(std::move(request));
  }
  if (trace.empty()) return invalid_argument("the trace has no requests");
  return trace;
}

std::string trace_text(const std::vector<TraceRequest>& trace) {
  std::string text;
  for (const TraceRequest& request : trace) {
    Json object{{"timestamp", request.timestamp},
                {"input_length", request.input_length},
                {"output_length", request.output_length},
                {"hash_ids", request.hash_ids}};
    if (!request.session.empty()) object["session"] = request.session;
    if (request.session_ends) object["session_ends"] = true;
    text += object.dump() + "\n";
  }
  return text;
}

std::vector<TraceRequest> generate_trace(int64_t num_requests, uint64_t seed) {
  constexpr int kNumSystemPrompts = 8;
  constexpr int kNumChats = 40;  // at a time
  Dice dice(seed);
  int64_t next_id = 0;
  const auto new_ids = [&next_id](int64_t count, std::vector<int64_t>& ids) {
    while (count-- > 0) ids.push_back(next_id++);
  };
  std::vector<std::vector<int64_t>> system_prompts(kNumSystemPrompts);
  for (std::vector<int64_t>& prompt : system_prompts) new_ids(dice.between(1, 6), prompt);
  std::vector<std::vector<int64_t>> chats(kNumChats);

  std::vector<TraceRequest> trace;
  int64_t now = 0;
  while (static_cast<int64_t>(trace.size()) < num_requests) {
    now += dice.between(0, 200);
    TraceRequest request;
    request.timestamp = now;
    request.output_length = dice.between(20, 500);
    if (dice.between(0, 9) == 0) {  // a document, once
      new_ids(dice.between(10, 60), request.hash_ids);
    } else {
      std::vector<int64_t>& chat = chats[dice.between(0, kNumChats - 1)];
      if (chat.empty() || dice.between(0, 7) == 0) {  // popular prompts first: the smaller of two
        chat = system_prompts[std::min(dice.between(0, kNumSystemPrompts - 1),
                                       dice.between(0, kNumSystemPrompts - 1))];
      }
      new_ids(dice.between(1, 3), chat);
      request.hash_ids = chat;
    }
    // The last block is open.
    request.input_length = static_cast<int64_t>(request.hash_ids.size()) * kTraceBlockTokens -
                           dice.between(0, kTraceBlockTokens - 1);
    trace.push_back(std::move(request));
  }
  return trace;
}

std::vector<TraceRequest> generate_agents_trace(int64_t num_requests, uint64_t seed) {
  constexpr int kNumAgents = 6;     // each with tools of its own
  constexpr int kNumSessions = 24;  // at a time
  constexpr int kNumTurns = 40;
  struct Conversation {
    std::string name;
    std::vector<int64_t> ids;
    size_t num_tools = 0;  // of ids
    int num_turns = 0;
  };
  Dice dice(seed);
  int64_t next_id = 0;
  const auto new_ids = [&next_id](int64_t count, std::vector<int64_t>& ids) {
    while (count-- > 0) ids.push_back(next_id++);
  };
  std::vector<std::vector<int64_t>> tools(kNumAgents);
  for (std::vector<int64_t>& one : tools) new_ids(dice.between(12, 30), one);
  std::vector<Conversation> sessions(kNumSessions);
  for (Conversation& one : sessions)
    one.num_turns = static_cast<int>(dice.between(0, kNumTurns - 1));

  std::vector<TraceRequest> trace;
  int64_t now = 0;
  int64_t num_sessions = 0;
  while (static_cast<int64_t>(trace.size()) < num_requests) {
    now += dice.between(0, 200);
    Conversation& session = sessions[dice.between(0, kNumSessions - 1)];
    if (session.name.empty() || session.num_turns == kNumTurns) {
      const int num_turns = session.name.empty() ? session.num_turns : 0;
      const std::vector<int64_t>& own =
          tools[std::min(dice.between(0, kNumAgents - 1), dice.between(0, kNumAgents - 1))];
      session = {"agent " + std::to_string(num_sessions++), own, own.size(), num_turns};
    }
    // A history that is compacted keeps the tools, and begins anew behind them.
    if (session.num_turns > 0 && dice.between(0, 49) == 0) {
      session.ids.resize(session.num_tools);
      new_ids(3, session.ids);
    }
    new_ids(dice.between(1, 4), session.ids);
    ++session.num_turns;
    TraceRequest request;
    request.timestamp = now;
    request.output_length = dice.between(20, 500);
    request.hash_ids = session.ids;
    request.session = session.name;
    request.session_ends = session.num_turns == kNumTurns;
    request.input_length = static_cast<int64_t>(request.hash_ids.size()) * kTraceBlockTokens -
                           dice.between(0, kTraceBlockTokens - 1);
    trace.push_back(std::move(request));
  }
  return trace;
}

}  // namespace kvx::tool
