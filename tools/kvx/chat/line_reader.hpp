// LineReader: the user's lines; with editing and a history where stdin is a terminal.
#pragma once

#include <memory>
#include <string>

#include "tools/kvx/chat/interrupts.hpp"

namespace kvx::tool {

enum class LineEvent {
  kLine,
  kInterrupt,  // ctrl-C; on a terminal alone
  kEnd,        // ctrl-D, or the input has ended
};

class LineReader {
 public:
  virtual ~LineReader() = default;
  // The next line without its line break. line is empty unless the event is kLine.
  virtual LineEvent read(std::string& line) = 0;
};

// Lines of stdin as they are.
std::unique_ptr<LineReader> plain_line_reader();

// Prompts on stderr and edits with libedit: arrows, history, emacs's keys. The interrupts outlive
// it. Null where the terminal cannot be used, such as TERM=dumb's.
std::unique_ptr<LineReader> editing_line_reader(Interrupts& interrupts);

}  // namespace kvx::tool
