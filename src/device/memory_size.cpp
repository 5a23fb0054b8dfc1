// The host's side of memory_size.hpp.
#include "device/memory_size.hpp"

#include "core/os/os.hpp"

namespace kvx::device {

int64_t host_memory_bytes() {
  return os::main_memory_bytes();
}

}  // namespace kvx::device
