// Lines from a pipe or file by getline, from a terminal by libedit.
#include "tools/kvx/chat/line_reader.hpp"

#include <histedit.h>
#include <langinfo.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdlib>
#include <cwchar>
#include <iostream>
#include <string_view>

namespace kvx::tool {
namespace {

class PlainLineReader final : public LineReader {
 public:
  LineEvent read(std::string& line) override {
    line.clear();
    return std::getline(std::cin, line) ? LineEvent::kLine : LineEvent::kEnd;
  }
};

// libedit reads characters in the locale's encoding: without a locale, text is UTF-8.
void set_encoding() {
  std::setlocale(LC_CTYPE, "");
  const std::string_view encoding = nl_langinfo(CODESET);
  if (encoding == "ANSI_X3.4-1968") std::setlocale(LC_CTYPE, "C.UTF-8");
}

class EditingLineReader final : public LineReader {
 public:
  explicit EditingLineReader(Interrupts& interrupts) : interrupts_(interrupts) {
    set_encoding();
    edit_ = el_init("kvx", stdin, stderr, stderr);
    history_ = history_init();
    if (!is_usable()) return;
    HistEvent event;
    history(history_, &event, H_SETSIZE, 1000);
    history(history_, &event, H_SETUNIQUE, 1);
    el_set(edit_, EL_CLIENTDATA, this);
    el_set(edit_, EL_HIST, history, history_);
    el_set(edit_, EL_EDITOR, "emacs");
    el_set(edit_, EL_SIGNAL, 0);  // Interrupts has ctrl-C
    el_set(edit_, EL_PROMPT, &EditingLineReader::prompt);
    el_set(edit_, EL_GETCFN, &EditingLineReader::read_character);
    el_set(edit_, EL_BIND, "^[[3~", "ed-delete-next-char", nullptr);
    // A ctrl-D typed before libedit has the terminal in raw mode is read as a zero.
    el_set(edit_, EL_BIND, "^@", "em-delete-or-list", nullptr);
  }
  ~EditingLineReader() override {
    if (edit_ != nullptr) el_end(edit_);
    if (history_ != nullptr) history_end(history_);
  }
  EditingLineReader(const EditingLineReader&) = delete;
  EditingLineReader& operator=(const EditingLineReader&) = delete;

  bool is_usable() const { return edit_ != nullptr && history_ != nullptr; }

  LineEvent read(std::string& line) override {
    line.clear();
    el_resize(edit_);  // the window may have another size now
    int num_bytes = 0;
    const char* text = el_gets(edit_, &num_bytes);
    if (interrupts_.take()) {
      el_reset(edit_);  // the line that was begun is forgotten
      return LineEvent::kInterrupt;
    }
    if (text == nullptr || num_bytes <= 0) return LineEvent::kEnd;
    line.assign(text, static_cast<size_t>(num_bytes));
    while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
    if (!line.empty()) {
      HistEvent event;
      history(history_, &event, H_ENTER, line.c_str());
    }
    return LineEvent::kLine;
  }

 private:
  static char* prompt(EditLine*) {
    static char text[] = "> ";
    return text;
  }

  // 1 with a character; 0 at the end; -1 after ctrl-C or an error.
  static int read_character(EditLine* edit, wchar_t* character) {
    EditingLineReader* self = nullptr;
    el_get(edit, EL_CLIENTDATA, &self);
    std::mbstate_t state = {};
    while (true) {
      pollfd sources[] = {{STDIN_FILENO, POLLIN, 0}, {self->interrupts_.descriptor(), POLLIN, 0}};
      const int num_ready = poll(sources, 2, -1);
      if (self->interrupts_.is_pending()) return -1;
      if (num_ready < 0 && errno != EINTR) return -1;
      if (num_ready <= 0) continue;
      char byte = 0;
      const ssize_t num_read = ::read(STDIN_FILENO, &byte, 1);
      if (num_read == 0) return 0;
      if (num_read < 0 && errno == EINTR) continue;
      if (num_read < 0) return -1;
      const size_t used = std::mbrtowc(character, &byte, 1, &state);
      if (used == static_cast<size_t>(-2)) continue;  // a character of several bytes
      if (used != static_cast<size_t>(-1)) return 1;
      state = {};  // no character: it is dropped
    }
  }

  Interrupts& interrupts_;
  EditLine* edit_ = nullptr;
  History* history_ = nullptr;
};

}  // namespace

std::unique_ptr<LineReader> plain_line_reader() {
  return std::make_unique<PlainLineReader>();
}

std::unique_ptr<LineReader> editing_line_reader(Interrupts& interrupts) {
  auto reader = std::make_unique<EditingLineReader>(interrupts);
  if (!reader->is_usable()) return nullptr;
  return reader;
}

}  // namespace kvx::tool
