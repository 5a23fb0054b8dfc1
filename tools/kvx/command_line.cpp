// What CLI11 does for kvx, under the names of command_line.hpp.
#include "tools/kvx/command_line.hpp"

#include <CLI/CLI.hpp>
#include <charconv>

#include "tools/kvx/nearest_word.hpp"

namespace kvx::tool {
namespace {

// CLI11 may put advice on further lines; the first one says what is wrong.
std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

constexpr const char* kNotEmpty = "not empty";

// A check that a text is a number, all of it, in a range; not a number is in none.
template <class Number>
auto within(std::string_view kind, Number low, Number high) {
  return [=](std::string& text) -> std::string {
    Number value = 0;
    const char* const text_end = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), text_end, value);
    if (error == std::errc() && end == text_end && value >= low && value <= high) return {};
    return fmt::format("is '{}'; expected {} from {} to {}", text, kind, low, high);
  };
}

// The subcommand that was named last, or the program itself.
const CLI::App& last_named(const CLI::App& app) {
  const std::vector<CLI::App*> named = app.get_subcommands();
  return named.empty() ? app : last_named(*named.back());
}

// All ways to write the options of a command and of its groups, and the names of its subcommands.
struct KnownWords {
  std::vector<std::string> options;
  std::vector<std::string> commands;
};
void add_words(const CLI::App& app, KnownWords& words) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) words.options.push_back("--" + name);
    for (const std::string& name : option->get_snames()) words.options.push_back("-" + name);
  }
  const auto every = [](const CLI::App*) { return true; };
  for (const CLI::App* sub : app.get_subcommands(every)) {
    if (sub->get_name().empty()) {  // a group of options
      add_words(*sub, words);
    } else {
      words.commands.push_back(sub->get_name());
    }
  }
}

// "kvx cache save".
std::string path_of(const CLI::App& app) {
  const CLI::App* parent = app.get_parent();
  return parent == nullptr ? app.get_name() : path_of(*parent) + " " + app.get_name();
}

// What to say of the first word that no command takes; empty where every word was taken.
std::string unknown_word(const CLI::App& root) {
  const CLI::App& app = last_named(root);
  const std::vector<std::string> left = app.remaining();
  if (left.empty()) return {};
  KnownWords words;
  add_words(app, words);
  const auto dashed = std::find_if(left.begin(), left.end(),
                                   [](const std::string& word) { return word.starts_with('-'); });
  // Where a command was expected, what follows the unknown one belongs to it.
  const bool is_option = dashed == left.begin() || (words.commands.empty() && dashed != left.end());
  const std::string& whole = is_option ? *dashed : left.front();
  const std::string word = is_option ? whole.substr(0, whole.find('=')) : whole;
  const std::vector<std::string>& candidates = is_option ? words.options : words.commands;
  if (!is_option && candidates.empty()) return fmt::format("argument '{}' was not expected", word);
  const std::string said = fmt::format("unknown {} {}", is_option ? "option" : "command", word);
  const std::optional<std::string> nearest = nearest_word(word, candidates);
  if (nearest) return fmt::format("{}; did you mean {}?", said, *nearest);
  return fmt::format("{}; '{} --help' lists them all", said, path_of(app));
}

}  // namespace

Option& Option::whole_number(int64_t low, int64_t high) {
  option_->check(CLI::Validator(within("a whole number", low, high), "N"));
  return *this;
}

Option& Option::number(double low, double high) {
  option_->check(CLI::Validator(within("a number", low, high), "X"));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& words) {
  option_->check(CLI::IsMember(words));
  return *this;
}

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::capture_default_str() {
  option_->capture_default_str();
  return *this;
}

Option& Option::delimiter(char between) {
  option_->delimiter(between);
  return *this;
}

Option& Option::may_be_empty() {
  option_->get_validator(kNotEmpty)->active(false);
  return *this;
}

Option& Option::repeatable() {
  option_->allow_extra_args(false);
  return *this;
}

Option& Option::needs(const Option& other) {
  option_->needs(other.option_);
  return *this;
}

bool Option::is_given() const {
  return option_->count() > 0;
}

Command Command::add_subcommand(const std::string& name, const std::string& help) const {
  return Command(app_->add_subcommand(name, help));
}

void Command::require_subcommand() const {
  app_->require_subcommand(1);
}

Command Command::add_option_group(const std::string& name) const {
  return Command(app_->add_option_group(name));
}

void Command::require_one_option() const {
  app_->require_option(1);
}

template <class T>
Option Command::add_option(const std::string& name, T& value, const std::string& help) const {
  CLI::Option* option = app_->add_option(name, value, help);
  if constexpr (std::is_same_v<T, std::string>) {
    const auto check = [](const std::string& text) {
      return text.empty() ? "is ''; expected something" : "";
    };
    option->check(CLI::Validator(check, "", kNotEmpty));
  }
  return Option(option);
}
template Option Command::add_option(const std::string&, std::string&, const std::string&) const;
template Option Command::add_option(const std::string&, int&, const std::string&) const;
template Option Command::add_option(const std::string&, int64_t&, const std::string&) const;
template Option Command::add_option(const std::string&, uint64_t&, const std::string&) const;
template Option Command::add_option(const std::string&, float&, const std::string&) const;
template Option Command::add_option(const std::string&, double&, const std::string&) const;
template Option Command::add_option(const std::string&, std::vector<std::string>&,
                                    const std::string&) const;
template Option Command::add_option(const std::string&, std::vector<int>&,
                                    const std::string&) const;
template Option Command::add_option(const std::string&, std::vector<int64_t>&,
                                    const std::string&) const;

Option Command::add_flag(const std::string& name, bool& value, const std::string& help) const {
  return Option(app_->add_flag(name, value, help));
}

void Command::footer(const std::string& text) const {
  app_->footer(text);
}

void Command::callback(std::function<void()> when_named) const {
  app_->callback(std::move(when_named));
}

bool Command::is_named() const {
  return app_->parsed();
}

bool Command::is_given(const std::string& option) const {
  return app_->get_option(option)->count() > 0;
}

CommandLine::CommandLine(const std::string& description, const std::string& name,
                         const std::string& version)
    : app_(std::make_unique<CLI::App>(description, name)) {
  app_->set_version_flag("--version", version);
}

CommandLine::~CommandLine() = default;

Result<std::optional<int>> CommandLine::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return std::optional(app_->exit(help_or_version));
  } catch (const CLI::ParseError& error) {
    // A mistyped word may also be why something required is missing: it is reported first.
    const std::string unknown = unknown_word(*app_);
    if (!unknown.empty()) return invalid_argument("{}", unknown);
    return invalid_argument("{}", first_line(error.what()));
  }
  return std::optional<int>();
}

}  // namespace kvx::tool
