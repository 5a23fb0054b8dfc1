// Not inline: a library and the program that uses it must have one and the same.
#include "core/stop.hpp"

namespace kvx {
namespace {

thread_local StopWish* wish_of_thread = nullptr;

}  // namespace

StopWish* stop_wish() {
  return wish_of_thread;
}

void set_stop_wish(StopWish* wish) {
  wish_of_thread = wish;
}

}  // namespace kvx
