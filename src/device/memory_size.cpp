// The host's side of memory_size.hpp.
#include "device/memory_size.hpp"

#include <unistd.h>

namespace kvx::device {

int64_t host_memory_bytes() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

}  // namespace kvx::device
