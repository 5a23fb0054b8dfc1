// The chat's loop, its commands, and what happens when its context is full.
#include "tools/kvx/chat/chat.hpp"

#include <algorithm>
#include <cstdio>
#include <optional>

#include "tools/kvx/chat/line_reader.hpp"
#include "tools/kvx/nearest_word.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {
namespace {

constexpr const char* kHelp =
    "/help   print these lines\n"
    "/new    begin another chat\n"
    "/cache  print what the cache holds and what it costs\n"
    "Any other line is said to the model. Ctrl-C ends an answer; twice at the prompt it ends the\n"
    "chat, and so does ctrl-D.\n";

const std::vector<std::string> kCommands = {"/help", "/new", "/cache"};

// "/cahce" is a mistyped command, "/etc/passwd is what?" is not.
bool looks_like_command(std::string_view line) {
  return line.size() > 1 && line.front() == '/' &&
         std::all_of(line.begin() + 1, line.end(), [](char c) { return c >= 'a' && c <= 'z'; });
}

class Chat {
 public:
  Chat(Session& session, const runner::GenerateOptions& options, const BeginSequence& begin,
       ChatHistory history)
      : session_(session), options_(options), begin_(begin), history_(std::move(history)) {}

  // interrupts: null where nothing is interrupted.
  Status take_turn(const std::string& words, Interrupts* interrupts);
  // Prints what the line asks for, or that there is no such command.
  Status run_command(const std::string& line);

 private:
  void print_cache() const;
  Result<std::optional<std::vector<int>>> next_tokens(std::vector<int> turn);
  // Tokens to keep for an answer: as many as were asked for, a quarter of the context at most.
  int64_t answer_room() const {
    return std::min<int64_t>(options_.max_tokens, std::max<int64_t>(1, context() / 4));
  }
  int64_t context() const { return context_of(session_); }
  // The history is not what the cache holds: the next turn feeds all of it.
  void drop_turn() {
    history_.remove_last();
    is_fed_ = false;
  }

  Session& session_;
  const runner::GenerateOptions& options_;
  const BeginSequence& begin_;
  ChatHistory history_;
  bool is_fed_ = false;  // the cache holds the whole history
  bool answer_was_cut_ = false;
  std::vector<int> all_;  // what a new sequence was begun with
};

// What the cache has still to be fed with; none where the turn is too long for the context. The
// template ends an answer with <|im_end|>, which one that was cut off lacks, and a line break.
Result<std::optional<std::vector<int>>> Chat::next_tokens(std::vector<int> turn) {
  history_.add_turn(turn);
  if (is_fed_) {
    KVX_ASSIGN_OR_RETURN(std::vector<int> next,
                         session_.loaded.tokenizer.encode(answer_was_cut_ ? "<|im_end|>\n" : "\n",
                                                          runner::SpecialTokens::kParse));
    next.insert(next.end(), turn.begin(), turn.end());
    const int64_t used = session_.attention->num_tokens() + std::ssize(next);
    if (used + answer_room() <= context()) return std::optional(std::move(next));
  }
  const std::optional<int> num_forgotten = history_.make_room(context(), answer_room());
  if (!num_forgotten) {
    fmt::print(stderr,
               "a turn of {} tokens does not fit the context of {} tokens: write a shorter one, or "
               "begin with a larger --ctx\n",
               turn.size(), context());
    history_.remove_last();
    return std::optional<std::vector<int>>();
  }
  if (*num_forgotten > 0) {
    fmt::print(stderr, "the context of {} tokens is full: {} of {} turns are forgotten\n",
               context(), *num_forgotten, *num_forgotten + history_.num_turns());
  }
  all_ = history_.tokens();
  is_fed_ = false;
  KVX_ASSIGN_OR_RETURN(const std::span<const int> rest, begin_(all_));
  return std::optional(std::vector<int>(rest.begin(), rest.end()));
}

Status Chat::take_turn(const std::string& words, Interrupts* interrupts) {
  Result<std::vector<int>> turn = turn_tokens(session_, words);
  if (!turn.ok()) {  // letters that the model has no token for
    fmt::print(stderr, "{}\n", turn.error().message);
    return {};
  }
  KVX_ASSIGN_OR_RETURN(const std::optional<std::vector<int>> next,
                       next_tokens(std::move(turn).value()));
  if (!next) return {};
  const auto is_interrupted = [interrupts] {
    return interrupts != nullptr && interrupts->is_pending();
  };
  const int64_t room = context() - session_.attention->num_tokens() - std::ssize(*next);
  const Result<runner::GenerateResult> written = write(session_, *next, options_, is_interrupted);
  const bool was_interrupted = interrupts != nullptr && interrupts->take();
  if (!written.ok()) {
    drop_turn();
    const bool is_full = written.error().code == ErrorCode::kOutOfRange;
    if (!was_interrupted && !is_full) return written.error();
    fmt::print(stderr, "{}\n",
               was_interrupted ? "interrupted; this turn is forgotten"
                               : written.error().message + "; /new begins another chat");
    return {};
  }
  const runner::GenerateResult& result = written.value();
  history_.set_answer(result.tokens);
  is_fed_ = true;
  answer_was_cut_ = !result.model_ended;
  fmt::print("\n");
  std::fflush(stdout);
  if (answer_was_cut_ && !was_interrupted && std::ssize(result.tokens) >= room) {
    fmt::print(stderr, "the context of {} tokens is full: the next turn keeps the last ones\n",
               context());
  }
  print_speed(session_, result);
  return {};
}

void Chat::print_cache() const {
  const kv::KvCache& cache = session_.attention->cache();
  const int64_t num_tokens = session_.attention->num_tokens();
  const cache::PoolAccount account = cache.account();
  fmt::print(stderr, "cache {}: {} of {} tokens in {} turns\n", cache.config().recipe.text,
             num_tokens, context(), is_fed_ ? history_.num_turns() : 0);
  fmt::print(stderr, "{} bytes for these tokens; {} bytes allocated, {} in use\n",
             cache.sequence_bytes(num_tokens).total(), account.allocated.total(),
             account.used.total());
  kv::KvCacheConfig exact = cache.config();
  const Result<kv::RecipeCost> cost = kv::cost_of(cache.config(), context());
  exact.recipe = kv::parse_recipe("bf16").value();
  exact.overrides.clear();
  exact.calibration.clear();
  const Result<kv::RecipeCost> exact_cost = kv::cost_of(exact, context());
  if (!cost.ok() || !exact_cost.ok()) return;
  fmt::print(stderr,
             "{:.2f} bits a value; a full context takes {:.0f} bytes a token, with bf16 {:.0f}\n",
             cost.value().bits_per_value, cost.value().bytes_per_token,
             exact_cost.value().bytes_per_token);
}

Status Chat::run_command(const std::string& line) {
  if (line == "/help") {
    fmt::print(stderr, "{}", kHelp);
  } else if (line == "/new") {
    history_.clear();
    is_fed_ = false;
    return session_.attention->reset();
  } else if (line == "/cache") {
    print_cache();
  } else {
    const std::optional<std::string> nearest = nearest_word(line, kCommands);
    fmt::print(stderr, "unknown command {}; {}\n", line,
               nearest ? fmt::format("did you mean {}?", *nearest) : "/help lists them all");
  }
  return {};
}

Result<Chat> make_chat(Session& session, const runner::GenerateOptions& options,
                       const BeginSequence& begin) {
  const runner::Tokenizer& tokenizer = session.loaded.tokenizer;
  KVX_RETURN_IF_ERROR(runner::check_chat_support(tokenizer));
  KVX_ASSIGN_OR_RETURN(std::vector<int> opening, opening_tokens(session));
  KVX_ASSIGN_OR_RETURN(std::vector<int> end,
                       tokenizer.encode("<|im_end|>\n", runner::SpecialTokens::kParse));
  return Chat(session, options, begin, ChatHistory(std::move(opening), std::move(end)));
}

}  // namespace

Status run_chat(Session& session, const runner::GenerateOptions& options,
                const BeginSequence& begin) {
  KVX_ASSIGN_OR_RETURN(Chat chat, make_chat(session, options, begin));
  const bool is_person = is_terminal(stdin);
  std::optional<Interrupts> interrupts;
  if (is_person) interrupts.emplace();
  Interrupts* const caught = interrupts ? &*interrupts : nullptr;
  std::unique_ptr<LineReader> reader = is_person ? editing_line_reader(*interrupts) : nullptr;
  if (!reader) reader = plain_line_reader();
  if (is_person) fmt::print(stderr, "A line is a turn; /help lists the commands, ctrl-D ends.\n");
  std::string line;
  int num_interrupts = 0;  // at the prompt, one after the other
  while (true) {
    const LineEvent event = reader->read(line);
    if (event == LineEvent::kEnd) break;
    if (event == LineEvent::kInterrupt) {
      if (++num_interrupts == 2) break;
      fmt::print(stderr, "\nctrl-C again ends the chat\n");
      continue;
    }
    num_interrupts = 0;
    if (line.empty()) continue;
    if (looks_like_command(line)) {
      KVX_RETURN_IF_ERROR(chat.run_command(line));
    } else {
      KVX_RETURN_IF_ERROR(chat.take_turn(line, caught));
    }
  }
  if (is_person) fmt::print(stderr, "\n");
  return {};
}

}  // namespace kvx::tool
