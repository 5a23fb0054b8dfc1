// CommandLine, Command and Option: as much of CLI11 as kvx's commands need. Its header costs every
// file that sees it five seconds, so command_line.cpp alone does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/result.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kvx::tool {

// An option of a command, which owns it.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  // What it accepts; a message names the value and what was expected.
  Option& whole_number(int64_t low, int64_t high);
  Option& number(double low, double high);
  Option& one_of(const std::vector<std::string>& words);

  Option& required();
  Option& capture_default_str();  // the help shows the value that the variable has now
  Option& delimiter(char between);
  Option& may_be_empty();  // of a text: else '' is refused, which a script's empty variable gives
  Option& repeatable();    // of a vector: each time with one value
  Option& needs(const Option& other);

  bool is_given() const;  // once the command line was parsed

 private:
  CLI::Option* option_;
};

// A command, or a group of a command's options; the command line owns it.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}

  Command add_subcommand(const std::string& name, const std::string& help) const;
  void require_subcommand() const;
  Command add_option_group(const std::string& name) const;
  void require_one_option() const;

  // T: std::string, int, int64_t, uint64_t, float, double, or a vector of one of the first three.
  template <class T>
  Option add_option(const std::string& name, T& value, const std::string& help) const;
  Option add_flag(const std::string& name, bool& value, const std::string& help) const;

  void footer(const std::string& text) const;
  void callback(std::function<void()> when_named) const;
  bool is_named() const;  // once the command line was parsed
  // Whether the user gave this option, as "--cache". Requires: the command has it.
  bool is_given(const std::string& option) const;

 private:
  CLI::App* app_;
};

class CommandLine {
 public:
  CommandLine(const std::string& description, const std::string& name, const std::string& version);
  ~CommandLine();

  Command root() { return Command(app_.get()); }

  // The exit code where nothing is left to do: help or the version was asked for and is printed.
  // INVALID_ARGUMENT says in one line what is wrong.
  Result<std::optional<int>> parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace kvx::tool
