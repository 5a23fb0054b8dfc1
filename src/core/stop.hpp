// A wish that the verb which runs in this thread ends early, such as Ctrl-C in an interpreter. Work
// whose results nobody needs then asks between its parts: attention, files. All other work runs to
// its end, so that a cache never holds half of something.
#pragma once

namespace kvx {

class StopWish {
 public:
  virtual ~StopWish() = default;
  // Asked by all threads of a verb. Once true, it stays true.
  virtual bool is_there() = 0;
};

// Of the calling thread; null: nobody can wish it. Tasks of other threads are handed the pointer.
StopWish* stop_wish();
void set_stop_wish(StopWish* wish);

inline bool is_stop_wished(StopWish* wish) {
  return wish != nullptr && wish->is_there();
}

}  // namespace kvx
