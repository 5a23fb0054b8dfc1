// process_rows on the host.
#include "ops/process_rows/process_rows.hpp"

namespace kvx::ops {

Status check_process_rows(const ProcessRows& args) {
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    if (args.slots[t] < 0 || args.has_position(t)) continue;
    return invalid_argument("positions[{}] is {}; cos_sin has 0 to {}", t, args.positions[t],
                            args.num_positions - 1);
  }
  return {};
}

void process_rows(const ProcessRows& args) {
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    if (args.slots[t] < 0) continue;
    for (int head = 0; head < args.num_heads; ++head) {
      for (int unit = 0; unit < args.num_units(); ++unit) process_unit(args, t, head, unit);
    }
  }
}

}  // namespace kvx::ops
