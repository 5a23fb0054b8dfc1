// DeviceCounters: what kernels count.
#pragma once

namespace kvx::ops {

// What kernels found wrong, since the host cannot read its arguments: such tokens, ranges and
// blocks are skipped, nothing out of range is read or written. In device memory, zeroed by the
// caller, added to by every call.
struct DeviceCounters {
  unsigned long long out_of_range = 0;      // slots, block ids, lengths, positions
  unsigned long long nonfinite_inputs = 0;  // AppendReport
};

}  // namespace kvx::ops
