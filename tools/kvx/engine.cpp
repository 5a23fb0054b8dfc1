// Starts the threads and picks the machine's kernels.
#include "tools/kvx/engine.hpp"

namespace kvx::tool {

Result<Engine> make_engine(int num_threads) {
  KVX_ASSIGN_OR_RETURN(const device::CpuLevel level, device::choose_cpu_level());
  Engine engine;
  engine.executor = make_thread_pool(num_threads);
  engine.context = {&ops::cpu::kernel_table(level), engine.executor.get()};
  return engine;
}

}  // namespace kvx::tool
