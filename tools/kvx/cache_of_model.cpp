// kvx cache save and load: a prompt's cache into a file, and going on from it.
#include <algorithm>
#include <cstdio>

#include "tools/kvx/command.hpp"
#include "tools/kvx/files.hpp"
#include "tools/kvx/session.hpp"
#include "tools/kvx/stored_recipe.hpp"
#include "tools/kvx/terminal.hpp"

namespace kvx::tool {
namespace {

// ---- save

struct SaveCommand {
  SessionOptions session;
  std::string prompt;
  std::string text;  // a file
  bool is_raw = false;
  std::string out;
  int zstd_level = 0;
};

Status save(const SaveCommand& options) {
  KVX_RETURN_IF_ERROR(check_can_replace("out", options.out));
  std::string prompt = options.prompt;
  if (!options.text.empty()) {
    KVX_ASSIGN_OR_RETURN(prompt, read_file("file", options.text));
  }
  KVX_ASSIGN_OR_RETURN(Session session, open_session(options.session, true));
  KVX_ASSIGN_OR_RETURN(const std::vector<int> tokens,
                       prompt_tokens(session, prompt, options.is_raw || !options.text.empty()));
  if (tokens.empty()) return invalid_argument("the prompt is empty; a token was expected");
  if (static_cast<int64_t>(tokens.size()) > context_of(session)) {
    return invalid_argument("prompt has {} tokens; the context is {} tokens", tokens.size(),
                            context_of(session));
  }
  runner::KvAttention& attention = *session.attention;
  {
    Progress progress(Progress::Where::kTerminalAlone);
    const std::string doing = fmt::format("reading {} tokens", tokens.size());
    progress.show(0, doing);
    const auto show = [&](int64_t num_fed) -> Status {
      progress.show(static_cast<double>(num_fed) / static_cast<double>(tokens.size()), doing);
      return {};
    };
    KVX_RETURN_IF_ERROR(session.loaded.model->forward(tokens, attention, nullptr, show));
  }
  KVX_RETURN_IF_ERROR(save_sequence(session, options.out, options.zstd_level));
  fmt::print("{} tokens in {}\n", tokens.size(), options.out);
  return {};
}

void add_save(Command parent, Action& action) {
  Command command = parent.add_subcommand("save", "Feed a prompt and save its cache");
  auto o = std::make_shared<SaveCommand>();
  add_session_options(command, o->session);
  Command input = command.add_option_group("input");
  input.add_option("-p,--prompt", o->prompt, "The user's words").may_be_empty();
  input.add_option("-f,--file", o->text, "A text, as it stands");
  input.require_one_option();
  command.add_flag("--raw", o->is_raw, "The prompt as it stands, without a chat template");
  command.add_option("-o,--out", o->out, "The file").required();
  command.add_option("--zstd", o->zstd_level, "Compress with this level; 0 is not at all")
      .whole_number(0, 22)
      .capture_default_str();
  command.callback([&action, o] { action = [o] { return save(*o); }; });
}

// ---- load

struct LoadCommand {
  SessionOptions session;
  std::string file;
  bool transcodes = false;
  bool has_recipe = false;      // --cache, --layers or --heads was given
  bool has_block_size = false;  // --block-size was given
  runner::GenerateOptions generate;
};

// The user's options, and the file's recipe and block size where they were not given.
Result<SessionOptions> session_options_for(const LoadCommand& options) {
  SessionOptions session = options.session;
  KVX_ASSIGN_OR_RETURN(const auto file, tier::CacheFileReader::open(options.file));
  if (!options.has_block_size) session.block_size = file.index().block_size;
  if (options.has_recipe) return session;
  const Result<StoredRecipe> stored = stored_recipe(file.index().fingerprint);
  if (!stored.ok()) {
    return Error{stored.error().code,
                 fmt::format("'{}': {}; --cache gives one", options.file, stored.error().message)};
  }
  session.cache = stored.value().cache;
  session.overrides = stored.value().overrides;
  return session;
}

// The last token is fed again, because its logits are not in the file.
Status load(const LoadCommand& options) {
  KVX_ASSIGN_OR_RETURN(const SessionOptions session_options, session_options_for(options));
  KVX_ASSIGN_OR_RETURN(Session session, open_session(session_options, true));
  runner::KvAttention& attention = *session.attention;
  using FileOf = runner::KvAttention::FileOf;
  KVX_RETURN_IF_ERROR(
      attention.load(options.file, options.transcodes ? FileOf::kAnyCache : FileOf::kThisCache));
  const int64_t num_tokens = attention.num_tokens();
  const int last = attention.cache().recorded_tokens(attention.sequence()).back();
  KVX_RETURN_IF_ERROR(attention.cache().truncate_sequence(attention.sequence(), num_tokens - 1));
  KVX_ASSIGN_OR_RETURN(const runner::GenerateResult result,
                       write(session, std::span(&last, 1), options.generate));
  fmt::print("\n");
  print_speed(session, result);
  return {};
}

void add_load(Command parent, Action& action) {
  Command command = parent.add_subcommand("load", "Go on writing from a saved cache");
  auto o = std::make_shared<LoadCommand>();
  add_session_options(command, o->session);
  command.footer(
      "The cache has the file's recipe and block size, unless --cache, --layers, --heads or\n"
      "--block-size are given; kvx cache inspect prints these options.\n\n"
      "Examples:\n"
      "  kvx cache load -m model.gguf book.kvx -n 50\n"
      "  kvx cache load -m model.gguf --cache int8 --transcode book.kvx\n");
  command.add_option("file", o->file, "The file").required();
  command.add_flag(
      "--transcode", o->transcodes,
      "Take a file of another format or block size, or with a longer window in 16 bits");
  command.add_option("-n,--tokens", o->generate.max_tokens, "Tokens to write at most")
      .whole_number(1, 1 << 24)
      .capture_default_str();
  command
      .add_option("--temperature", o->generate.sampling.temperature,
                  "0 always takes the likeliest token")
      .capture_default_str();
  command.add_option("--seed", o->generate.sampling.seed, "Of the draws")
      .whole_number(0, INT64_MAX)
      .capture_default_str();
  command.callback([&action, o, command] {
    o->has_recipe =
        command.is_given("--cache") || command.is_given("--layers") || command.is_given("--heads");
    o->has_block_size = command.is_given("--block-size");
    action = [o] { return load(*o); };
  });
}

}  // namespace

void add_cache_of_model(Command cache, Action& action) {
  add_save(cache, action);
  add_load(cache, action);
}

}  // namespace kvx::tool
