// Interrupts: ctrl-C as an event that a program reads, while an object of it exists.
#pragma once

namespace kvx::tool {

class Interrupts {
 public:
  // Catches SIGINT from now on. One object at a time.
  Interrupts();
  ~Interrupts();  // SIGINT has its old meaning again
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  // Whether ctrl-C came since the last take().
  bool is_pending() const;
  // The same, and forgets it.
  bool take();
  // Readable while an interrupt is pending, for poll().
  int descriptor() const;
};

}  // namespace kvx::tool
